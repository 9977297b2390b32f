"""The engine that a run file names for the workers of `shoal run`: refused in one line, before anything starts, where they
cannot have it. tests/engine/test_vllm_runs.py runs such workers."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.cli import main
from shoal.config import load_run
from shoal.errors import ConfigError
from shoal.launch.preflight import demand_engine_of_workers

RECIPE = Path(__file__).parents[2] / "recipes" / "arithmetic.toml"
VLLM = "workers.engine=vllm"
BOUNDS = [f'verify.bounds.vllm:{pair}={{gap=0.3,mean_gap=0.0002,logprob=0.02,flipped=0.02}}' for pair in (
    "float32/float32", "bfloat16/bfloat16", "int8/int8",
)]  # fmt: skip


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ([], "no calibrated bounds in float32.*shoal calibrate RUN_FILE --engine vllm --write"),
        (["sampling.dtype=bfloat16", *BOUNDS[:1]], "no calibrated bounds in bfloat16"),
        ([*BOUNDS, "sampling.dtype=int8", "policy.dtype=bfloat16"], "sampling.dtype is int8"),
        ([*BOUNDS, "verify.proofs=toploc"], "no proofs of activations"),
        ([*BOUNDS, "policy.adapter.rank=8", "sampling.dtype=bfloat16"], "computes adapters in float32 only"),
    ],
)
def test_an_engine_that_the_run_cannot_take_is_refused(changes: list[str], says: str, installed: None) -> None:
    with pytest.raises(ConfigError, match=f'workers.engine = "vllm".*{says}') as refused:
        demand_engine_of_workers(load_run(RECIPE, [VLLM, *changes]))
    assert "\n" not in str(refused.value)


def test_an_engine_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs vLLM, which is not installed.*leave workers\.engine out"):
        demand_engine_of_workers(load_run(RECIPE, [VLLM, *BOUNDS]))


def test_workers_with_bounds_or_without_an_engine_of_their_own_pass(installed: None) -> None:
    for changes in ([], [VLLM, *BOUNDS], [VLLM, "workers.count=0"], [VLLM, "sampling.dtype=bfloat16", *BOUNDS]):
        config = load_run(RECIPE, changes)
        demand_engine_of_workers(config)
        assert config.workers.engine == ("vllm" if VLLM in changes else "")


def test_shoal_run_says_so_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["run", str(RECIPE), "--out", str(tmp_path / "run"), "--set", VLLM]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "no calibrated bounds in float32" in said
    assert not (tmp_path / "run").exists()
