"""Whole runs with a worker that samples with vLLM: validators of other engines accept its work, within measured bounds.

Skipped without vLLM, as test_vllm.py.
"""

import asyncio
import json
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from shoal.cli import main
from shoal.config import RunConfig, load_run
from shoal.engine.dishonest import cheating
from shoal.engine.hf import TransformersEngine
from shoal.engine.interface import Engine
from shoal.engine.vllm.engine import VllmEngine
from shoal.roles.worker.worker import Worker
from shoal.typed_toml import to_tree
from tests.launch.test_join import SHOAL, begin, said
from tests.roles.test_calibrate import TINY
from tests.roles.testbed import RunTestbed, tiny_run

PAIR = "vllm:float32/float32"
POLICY = {"tiny": {"width": 64, "layers": 2, "heads": 2, "kv_heads": 1, "mlp_width": 64, "max_positions": 64}}
"""With heads as wide as vLLM takes them on a CPU."""


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file with the bounds that calibration found for vLLM."""
    path = tmp_path_factory.mktemp("calibrated") / "tiny.toml"
    path.write_text(TINY.replace("DTYPE", "float32").replace("width = 32", "width = 64", 1))
    assert main.main(["calibrate", str(path), "--engine", "vllm", "--episodes", "96", "--write"]) == 0
    return path


def _run(run_file: Path, **changes: object) -> RunConfig:
    found = load_run(run_file).verify
    opening = {"lease_s": 60.0}  # a lease waits until vLLM is loaded
    return tiny_run(policy=POLICY, verify={"bounds": to_tree(found.bounds)}, rollouts=opening, **changes)


def _worker(testbed: RunTestbed, name: str, cheat: str = "") -> Worker:
    worker = testbed.worker(name, own_files=False)

    def make_engine(dtype: str, **named: str) -> Engine:
        engine = VllmEngine(1, dtype, **named)
        return cheating(cheat, engine) if cheat else engine

    worker.node.make_engine = make_engine
    return worker


def test_calibration_writes_bounds_for_the_pair(run_file: Path) -> None:
    bounds = load_run(run_file).verify.bounds
    assert PAIR in bounds and "float32/float32" in bounds
    assert bounds[PAIR].gap <= bounds["float32/float32"].gap


@pytest.mark.parametrize("replays_with", ["shoal's own engine", "transformers"])
def test_validators_of_other_engines_accept_what_vllm_samples(
    tmp_path: Path, run_file: Path, replays_with: str
) -> None:
    testbed = RunTestbed(tmp_path / "run", _run(run_file, steps=2))
    worker, validator = _worker(testbed, "vllm"), testbed.validator()
    if replays_with == "transformers":
        validator.node.make_engine = partial(TransformersEngine, 1)
    asyncio.run(testbed.live(testbed.trainer(), validator, worker))
    member = testbed.coordinator.state.members[worker.key]
    assert member.credits > 0 == member.refused
    assert testbed.audit().findings == []
    assert len(testbed.coordinator.state.main.versions) == 3  # it has loaded two of them in place of the first


def test_versions_that_are_adapters_are_loaded_over_one_base(tmp_path: Path, run_file: Path) -> None:
    config = _run(run_file, steps=2)
    adapted = tiny_run(
        steps=2, policy=POLICY | {"adapter": {"rank": 4}}, verify={"bounds": to_tree(config.verify.bounds)},
        rollouts={"lease_s": 60.0},
    )  # fmt: skip
    testbed = RunTestbed(tmp_path / "run", adapted)
    worker = _worker(testbed, "vllm")
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), worker))
    member = testbed.coordinator.state.members[worker.key]
    assert member.credits > 0 == member.refused and len(testbed.coordinator.state.main.versions) == 3


@pytest.mark.parametrize("cheat", ["other-seed", "low-temperature"])
def test_a_worker_with_vllm_that_cheats_is_refused(tmp_path: Path, run_file: Path, cheat: str) -> None:
    testbed = RunTestbed(tmp_path / "run", _run(run_file, steps=1))
    cheater, honest = _worker(testbed, "cheater", cheat), testbed.worker("honest")
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), cheater, honest))
    members = testbed.coordinator.state.members
    assert members[honest.key].credits > 0 == members[honest.key].refused
    assert members[cheater.key].refused > 0 == members[cheater.key].credits


def test_a_stranger_joins_with_vllm_by_the_command_that_people_type(tmp_path: Path, run_file: Path) -> None:
    """And is refused in one line by a run without bounds for it."""
    (tmp_path / "measured.toml").write_text(run_file.read_text())
    (tmp_path / "unmeasured.toml").write_text(run_file.read_text().partition("[verify.bounds")[0])
    values = ("steps=4000", "eval.episodes=0", "workers.cheating=0", "workers.count=1")
    settings = [word for value in values for word in ("--set", value)]
    running = []
    try:
        for name in ("unmeasured", "measured"):
            running.append(begin(tmp_path, name, "host", f"{name}.toml", "--out", f"runs/{name}", *settings))
            url = said(tmp_path, name, r"shoal join (http://127\.0\.0\.1:\d+)\n")
            join = ("join", url, "--threads", "1", "--name", "stranger", "--engine", "vllm")
            if name == "unmeasured":
                refused = subprocess.run(
                    [*SHOAL, *join, "--home", str(tmp_path / "refused")], capture_output=True, text=True
                )
                assert refused.returncode == 2 and "no calibrated bounds for work of vllm" in refused.stderr
                assert "shoal calibrate RUN_FILE --engine vllm --write" in refused.stderr
                running[0].send_signal(signal.SIGINT)
                assert running[0].wait(timeout=60) == 130
                continue
            running.append(begin(tmp_path, "worker", *join))
            said(tmp_path, "worker", r"(?s)accepted groups=\d+ credits=\+\d+.*accepted groups=\d+ credits=\+\d+", 240)
            running[-1].send_signal(signal.SIGINT)
            assert running[-1].wait(timeout=60) == 0, said(tmp_path, "worker", "(?s).*")
            said(tmp_path, "worker", r"left credits=[1-9]\d* accepted=[1-9]\d* refused=0")
    finally:
        for process in running:
            process.kill()
            process.wait()


def test_a_host_starts_workers_of_its_own_with_vllm(tmp_path: Path, run_file: Path) -> None:
    values = ("steps=1", "eval.episodes=0", "workers.cheating=0", "workers.count=1", "workers.engine=vllm")
    settings = [word for value in values for word in ("--set", value)]
    ended = subprocess.run(
        [*SHOAL, "run", str(run_file), "--out", str(tmp_path / "run"), *settings], capture_output=True, text=True,
        timeout=280,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "engine=vllm" in (tmp_path / "run" / "logs" / "worker-0.log").read_text()
    (paid,) = json.loads((tmp_path / "run" / "summary.json").read_bytes())["credits"].values()
    assert paid["credits"] > 0
