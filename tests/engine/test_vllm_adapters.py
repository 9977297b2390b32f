"""Adapters in vLLM: our engine replays what it wrote with each, the base stays in memory, and others are refused.

Skipped without vLLM, as test_vllm.py.
"""

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from shoal.config import TinyPolicy
from shoal.engine.vllm.engine import VllmEngine
from shoal.errors import StateError
from shoal.models.random_model import make_tiny
from tests.engine.test_adapted import version
from tests.engine.test_vllm import _agree, _ours, _requests

TINY = TinyPolicy(width=128, layers=2, heads=4, kv_heads=2, mlp_width=128, max_positions=128)


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two adapters of one base."""
    folder = tmp_path_factory.mktemp("adapted")
    make_tiny(TINY, folder / "base", 3, "float32")
    return [version(folder / "base", folder / f"v{seed}", seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def engine(versions: list[Path]) -> VllmEngine:
    made = VllmEngine(threads=1)
    made.load(versions[0], 0)
    return made


def test_our_engine_replays_what_vllm_wrote_with_each_adapter(engine: VllmEngine, versions: list[Path]) -> None:
    requests, written = _requests(), []
    for number in (0, 1, 0):
        engine.load(versions[number], number)
        turns = engine.extend(requests, 0.9)
        _agree(_ours(versions[number]), requests, turns, 0.9)
        written.append([turn.token_ids for turn in turns])
    assert written[0] == written[2] != written[1]


def test_a_policy_that_vllm_has_no_room_for_is_refused(
    engine: VllmEngine, versions: list[Path], tmp_path: Path
) -> None:
    make_tiny(TINY, tmp_path / "other", 4, "float32")
    for other in (tmp_path / "other", version(tmp_path / "other", tmp_path / "adapted", 1)):
        with pytest.raises(StateError, match="another shape, or over another base"):
            engine.load(other, 5)
    engine.load(versions[0], 0)


def test_adapters_are_computed_in_float32_only(versions: list[Path]) -> None:
    with pytest.raises(StateError, match="vLLM computes in float32 only here, not in bfloat16"):
        VllmEngine(threads=1, dtype="bfloat16").load(versions[0], 0)
