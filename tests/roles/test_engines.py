"""Engines that a worker chooses: a run takes them where their bounds were measured, and else refuses them in one line."""

import asyncio
import importlib.util
from pathlib import Path

import msgspec
import pytest

from shoal.cli import main
from shoal.config import BOUNDS
from shoal.engine.interface import Engine
from shoal.engine.native import LocalEngine
from shoal.engine.open import EngineSpec, open_engine
from shoal.errors import PeerError, StateError
from shoal.net.client import PeerRefused
from shoal.protocol.messages import EngineFacts
from shoal.protocol.tolerances import ADAPTERS
from shoal.roles.coordinator import routes
from shoal.roles.coordinator.status import StatusCache
from shoal.roles.node import lifecycle
from shoal.roles.worker.worker import Worker
from shoal.typed_toml import to_tree
from shoal.weights.engine_loader import demand_engine_fits
from tests.roles.testbed import RunTestbed, tiny_run

PAIR, VLLM = "vllm:float32/float32", "shoal-vllm/0.32.0-processor"


def _chosen(testbed: RunTestbed) -> Worker:
    """A worker whose engine says that it is vLLM."""
    worker = testbed.worker("chosen", own_files=False)

    def make_engine(dtype: str, **named: str) -> Engine:
        engine = LocalEngine(1, dtype, **named)
        engine.facts = EngineFacts(VLLM, dtype, "cpu")
        return engine

    worker.node.make_engine = make_engine
    return worker


def _run(worker: Worker) -> None:
    """Run a worker that ends at once; one that joins the run after all would wait for its trainer."""
    asyncio.run(asyncio.wait_for(worker.run(), 20))


def _bounds(*pairs: str) -> dict[str, object]:
    own = to_tree(BOUNDS["float32/float32"])
    return {"bounds": dict.fromkeys(("float32/float32", *pairs), own)}


UNMEASURED = "no calibrated bounds for work of vllm in float32: join without --engine, or ask the host to measure them"


def test_a_worker_does_not_join_a_run_without_bounds_for_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1))
    monkeypatch.setattr(routes, "unmeasured", lambda rules, implementation: "")  # a host that looks at nothing
    worker = _chosen(testbed)
    with pytest.raises(PeerError, match=UNMEASURED):
        _run(worker)
    assert worker.key not in testbed.coordinator.state.members


def test_an_engine_that_a_run_does_not_take_is_not_opened(tmp_path: Path) -> None:
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1))
    worker = _chosen(testbed)

    def make_engine(dtype: str, **named: str) -> Engine:
        raise AssertionError("opened")

    worker.node.options = msgspec.structs.replace(worker.node.options, engine="vllm")
    worker.node.make_engine = make_engine
    with pytest.raises(PeerError, match=UNMEASURED):
        _run(worker)


def test_a_run_without_bounds_for_an_engine_refuses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1))
    monkeypatch.setattr(lifecycle, "demand_engine_fits", lambda run, implementation: None)  # a worker that does not ask
    worker = _chosen(testbed)
    with pytest.raises(PeerRefused, match=UNMEASURED) as refused:
        _run(worker)
    assert refused.value.code == "no_bounds" and worker.key not in testbed.coordinator.state.members


def test_a_run_with_bounds_for_the_engine_takes_its_work(tmp_path: Path) -> None:
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1, verify=_bounds(PAIR)))
    worker = _chosen(testbed)
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), worker))
    member = testbed.coordinator.state.members[worker.key]
    assert member.credits > 0 == member.refused and member.implementation == VLLM


def test_an_engine_that_cannot_prove_activations_does_not_join_a_run_with_proofs(tmp_path: Path) -> None:
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1, verify=_bounds(PAIR) | {"proofs": "toploc"}))
    with pytest.raises(PeerError, match="asks for proofs of activations, which vllm cannot give"):
        _run(_chosen(testbed))


def test_vllm_does_not_join_a_run_of_adapters_in_bfloat16(tmp_path: Path) -> None:
    """It would round them, and they would still be refused when the first version is there."""
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1, verify=_bounds(PAIR)))
    run = StatusCache(testbed.coordinator).info()
    adapters = msgspec.structs.replace(run, needs=(*run.needs, ADAPTERS))
    bounds = run.rules.bounds | {"vllm:bfloat16/bfloat16": run.rules.bounds[PAIR]}
    rounded = msgspec.structs.replace(run.rules, dtype="bfloat16", bounds=bounds)
    demand_engine_fits(adapters, VLLM)
    demand_engine_fits(msgspec.structs.replace(run, rules=rounded), VLLM)
    with pytest.raises(PeerError, match="adapters in bfloat16, which vllm computes in float32 only"):
        demand_engine_fits(msgspec.structs.replace(adapters, rules=rounded), VLLM)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_one_line_says_what_to_install(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StateError, match="not installed: pip install vllm"):
        open_engine(EngineSpec(kind="vllm"))
    assert main.main(["join", "http://127.0.0.1:1", "--engine", "vllm", "--home", str(tmp_path)]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and "--engine vllm needs vLLM, which is not installed" in said[0]


def test_vllm_has_no_int8() -> None:
    with pytest.raises(StateError, match="not in int8"):
        open_engine(EngineSpec(kind="vllm", dtype="int8"))
