"""A node's memory for somebody else's run: what does not fit is refused before it is tried, and the lease goes back."""

import asyncio
import subprocess
import sys
from dataclasses import replace

import msgspec
import psutil
import pytest

from shoal.envs.builtin.arithmetic import Arithmetic
from shoal.errors import Overreach
from shoal.roles.auditor.rejudge_groups import GroupChoice, audit_rollouts
from shoal.roles.node import lifecycle
from shoal.roles.node.session import Session
from shoal.runs.log_source import FolderRun
from shoal.weights import memory_limit
from shoal.weights.memory_limit import Memory, share_of_free_mb, taken_mb
from tests.roles.testbed import RunTestbed, stranger, tiny_run


def stopped_by(testbed, *roles):
    with pytest.raises(ExceptionGroup) as stopped:
        asyncio.run(testbed.live(*roles, limit_s=40.0))
    (fault,) = stopped.value.exceptions[0].exceptions
    assert isinstance(fault, Overreach) and "\n" not in str(fault)
    return str(fault)


def huge(lease):
    """As a host that asks for 64,000 rollouts of a million tokens in 362 bytes."""
    sampling = msgspec.structs.replace(lease.sampling, max_tokens=1 << 20)
    blocks = tuple(msgspec.structs.replace(block, slots=block.slots * 4000) for block in lease.blocks)
    return msgspec.structs.replace(lease, sampling=sampling, blocks=blocks)


def test_a_lease_that_does_not_fit_is_refused_before_it_is_played_and_goes_back(tmp_path, monkeypatch):
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    worker = stranger(testbed.worker("worker"), max_memory_mb=1000)
    monkeypatch.setattr(memory_limit, "taken_mb", lambda: 300)
    monkeypatch.setattr(lifecycle, "GOODBYE_S", 60.0)  # this machine may be busy
    wire_lease = testbed.coordinator.wire_lease
    testbed.coordinator.wire_lease = lambda record: huge(wire_lease(record))
    monkeypatch.setattr(worker, "_play", lambda lease: pytest.fail("it was played"))
    fault = stopped_by(testbed, testbed.trainer(), worker)
    assert "a lease of 64000 rollouts of up to 1048576 tokens needs about " in fault
    assert (
        "limit 1000 (--max-memory, by default half of what is free): allow " in fault and "or leave this run" in fault
    )
    state = testbed.coordinator.state
    assert state.leases and not state.open_leases and not state.submissions and state.members[worker.key].refused == 0


@pytest.mark.parametrize("role", ["worker", "validator"])
def test_a_policy_that_does_not_fit_is_refused_before_it_is_loaded(tmp_path, monkeypatch, role):
    testbed = RunTestbed(
        tmp_path / "run", tiny_run(policy={"tiny": {"width": 256, "layers": 8, "mlp_width": 2048, "heads": 4}})
    )
    nodes = {"worker": testbed.worker("worker"), "validator": testbed.validator()}
    monkeypatch.setattr(memory_limit, "taken_mb", lambda: 300)
    stranger(nodes[role], max_memory_mb=500)
    fault = stopped_by(testbed, testbed.trainer(), *nodes.values())
    assert "loading version 0 needs about " in fault and " MB of memory, limit 500 " in fault
    assert nodes[role].session.engine.version == -1


def test_a_submission_that_does_not_fit_is_not_judged_and_blames_nobody(tmp_path, monkeypatch):
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    worker, validator = testbed.worker("worker"), stranger(testbed.validator())
    demand = Session.demand_judge
    monkeypatch.setattr(
        Session,
        "demand_judge",
        lambda seat, check, size_bytes, parents_bytes: demand(seat, check, 1 << 45, parents_bytes),
    )
    assert "a submission of " in stopped_by(testbed, testbed.trainer(), worker, validator)
    assert testbed.coordinator.state.submissions and testbed.coordinator.state.members[worker.key].refused == 0
    assert not any(submission.verdicts for submission in testbed.coordinator.state.submissions.values())


def test_an_audit_stops_at_a_policy_that_does_not_fit_and_finds_nothing_wrong(tmp_path):
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1))
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("worker")))
    run = FolderRun(testbed.folder.root)
    with pytest.raises(Overreach, match="loading version 0 needs about"):
        asyncio.run(audit_rollouts(run, GroupChoice(), threads=1, own_files=False, max_memory_mb=1))
    assert asyncio.run(audit_rollouts(run, GroupChoice(), threads=1, own_files=False)).agrees


def test_without_memory_no_slot_is_void_and_no_rollout_fails(tmp_path, monkeypatch):
    """Else a machine that is short of memory would send, or refuse, empty groups."""

    def short(env, state_or_task, *action):
        raise MemoryError

    for name in ("task", "reset", "step", "score"):
        with monkeypatch.context() as patch:
            testbed = RunTestbed(tmp_path / name, tiny_run())
            patch.setattr(Arithmetic, name, short)
            fault = stopped_by(testbed, testbed.trainer(), stranger(testbed.worker("worker")))
        assert "took more memory than the " in fault and not testbed.coordinator.state.submissions


def test_what_does_not_fit_on_the_gpu_is_refused_in_one_line():
    node = Memory(limit_mb=100_000, base_mb=0, free_gpu=lambda: 24_000_000_000)
    node.demand("loading version 3", 1, 24_000_000_000)
    node.demand("loading version 3", 1)
    with pytest.raises(Overreach) as told:
        node.demand("loading version 3", 1, 24_000_000_001)
    said = str(told.value)
    assert "loading version 3 needs about 24001 MB of the GPU's memory, and 24000 are free: close what else" in said
    assert "--device cpu" in said and "\n" not in said
    Memory(limit_mb=100_000, base_mb=0).demand("a node without a GPU", 1, 1 << 60)
    assert Memory.of(700, device="cpu").free_gpu is None
    assert Memory.of(700, device="cuda").free_gpu is memory_limit.free_on_gpu


@pytest.mark.parametrize(
    ("role", "what"),
    [("worker", "loading version 0 needs"), ("worker", "a lease of "), ("validator", "a submission of ")],
)
def test_each_work_of_a_node_is_compared_with_what_its_gpu_has(tmp_path, monkeypatch, role, what):
    """The node computes on the CPU here, and is told that it has a GPU of so many bytes."""
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    nodes = {"worker": testbed.worker("worker"), "validator": testbed.validator()}
    asked: list[str] = []
    demand = Memory.demand

    def watched(limit, sentence, need_bytes, gpu_bytes=0):
        asked.append(sentence)
        assert gpu_bytes > 0
        # The GPU has a byte too little for the work that this case is about.
        short = gpu_bytes - 1 if sentence.startswith(what.removesuffix(" needs")) else gpu_bytes
        demand(replace(limit, free_gpu=lambda: short), sentence, need_bytes, gpu_bytes)

    monkeypatch.setattr(Memory, "demand", watched)
    stranger(nodes[role], max_memory_mb=100_000)
    fault = stopped_by(testbed, testbed.trainer(), *nodes.values())
    assert fault.startswith(what) and "of the GPU's memory" in fault and asked


def test_the_default_is_half_of_what_is_free_here_or_in_this_container(tmp_path, monkeypatch):
    ours = taken_mb()
    free = psutil.virtual_memory()._replace(available=4_000_000_000)
    monkeypatch.setattr(memory_limit.psutil, "virtual_memory", lambda: free)
    assert 2000 <= share_of_free_mb() <= 2000 + ours
    (tmp_path / "memory.max").write_text("1500000000\n")
    (tmp_path / "memory.current").write_text("500000000\n")
    monkeypatch.setattr(memory_limit, "CONTAINER", tmp_path)
    assert 500 <= share_of_free_mb() <= 500 + ours
    (tmp_path / "memory.stat").write_text("anon 100\nfile 450000000\ninactive_file 400000000\nactive_file 50000000\n")
    assert 700 <= share_of_free_mb() <= 700 + ours
    (tmp_path / "memory.max").write_text("max\n")
    assert share_of_free_mb() >= 2000
    assert Memory.of(0).limit_mb >= 2000 and Memory.of(700).limit_mb == 700


ALLOCATES = """
import sys, torch
from shoal.errors import Overreach
from shoal.weights.memory_limit import Memory, taken_mb
memory = Memory(taken_mb() + 300, taken_mb())
memory.enforce(1)
kept = torch.zeros(150_000_000, dtype=torch.uint8)
for allocate in (lambda: torch.ones(100_000_000), lambda: bytearray(400_000_000), lambda: [0] * 50_000_000):
    try:
        with memory.told("it"):
            allocate()
        sys.exit("nothing stopped it")
    except Overreach as reason:
        print(reason)
memory.demand_within()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="no other system limits private memory alone")
def test_the_system_lets_no_allocation_pass_the_limit():
    run = subprocess.run([sys.executable, "-c", ALLOCATES], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("it took more memory than the ") == 3


HASHES = """
import os, numpy as np
from shoal.weights.memory_limit import Memory
from shoal.weights.delta.tensor_codes import coded, cores, root_of
os.sched_getaffinity = lambda process: range(100)
weights = {str(i): coded("F32", (1 << 18,), np.zeros(1 << 18, "<f4")) for i in range(100)}
Memory(limit_mb=4, base_mb=0).enforce(1)
print(root_of(weights, threads=cores()), cores())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="no other system limits private memory alone")
def test_a_version_is_hashed_within_the_limit_on_a_machine_of_many_cores():
    """Each thread has a stack of 8 MB: a hundred of them would not start, or would need a limit that is no limit."""
    run = subprocess.run([sys.executable, "-c", HASHES], capture_output=True, text=True)
    assert run.stdout.split()[1:] == ["8"], run.stderr
