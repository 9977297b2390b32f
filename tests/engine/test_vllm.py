"""The engine with vLLM: its tokens are those of the run's noise, our engine replays them, and new weights take effect.

Skipped without vLLM, which `make vllm` installs into a virtual environment of its own, with a build for CPUs.
"""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from shoal.config import TinyPolicy
from shoal.engine.interface import Continuation, EngineRequest
from shoal.engine.native import LocalEngine
from shoal.engine.vllm.engine import VllmEngine, makes_noise_of
from shoal.errors import StateError
from shoal.models.random_model import make_tiny
from shoal.protocol.constants import VLLM
from shoal.protocol.noise import NOISES, PHILOX
from shoal.protocol.seed_chain import sample_seed
from shoal.protocol.tolerances import engine_kind
from tests.engine.claims import claims_of

STOPS = frozenset({0, 1})
TINY = TinyPolicy(width=128, layers=2, heads=4, kv_heads=2, mlp_width=128, max_positions=128)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two versions of one policy."""
    made = [tmp_path_factory.mktemp("policies") / f"v{seed}" for seed in (0, 1)]
    for seed, directory in enumerate(made):
        make_tiny(TINY, directory, seed, "float32")
    return made


@pytest.fixture(scope="module")
def engine(policies: list[Path]) -> VllmEngine:
    made = VllmEngine(threads=1)
    made.load(policies[0], 0)
    return made


def _ours(directory: Path, family: str = PHILOX) -> LocalEngine:
    engine = LocalEngine(threads=1, noise=family)
    engine.load(directory, 0)
    return engine


def _requests(count: int = 24, max_new: int = 40) -> list[EngineRequest]:
    """Groups of four with one opening, of several lengths."""
    openings = [[2 + (7 * i + j) % 50 for j in range(5 + 3 * (i % 7))] for i in range(count // 4)]
    return [EngineRequest(f"r{i}", openings[i // 4], sample_seed(b"vllm", i), max_new, STOPS) for i in range(count)]


def _agree(
    ours: LocalEngine, requests: Sequence[EngineRequest], turns: Sequence[Continuation], temperature: float
) -> None:
    scores = ours.score(claims_of(requests, turns), temperature)
    for turn, score in zip(turns, scores, strict=True):
        assert score.gaps_P.max() < 1e-3
        assert np.abs(np.array(turn.logprobs) - score.logprobs_P).max() < 1e-3


@pytest.mark.parametrize("family", NOISES)
def test_our_engine_replays_what_vllm_wrote(engine: VllmEngine, policies: list[Path], family: str) -> None:
    requests = _requests()
    engine._noise, kept = family, engine._noise
    try:
        turns = engine.extend(requests, 0.8)
    finally:
        engine._noise = kept
    ours = _ours(policies[0], family)
    _agree(ours, requests, turns, 0.8)
    assert sum(len(turn.token_ids) for turn in turns) > 300
    assert [turn.token_ids for turn in turns] == [turn.token_ids for turn in ours.extend(requests, 0.8)]


def test_a_turn_ends_with_its_stop_token_or_at_its_limit(engine: VllmEngine) -> None:
    requests = _requests(max_new=100)
    ends = [turn.token_ids for turn in engine.extend(requests, 1.5)]
    assert any(ids[-1] in STOPS for ids in ends)
    assert all(not STOPS.intersection(ids[:-1]) and (ids[-1] in STOPS or len(ids) == 100) for ids in ends)


def test_another_turn_goes_on_from_the_first(engine: VllmEngine, policies: list[Path]) -> None:
    requests = _requests(8, max_new=6)
    turns = engine.extend(requests, 1.0)
    longer = [
        request._replace(token_ids=[*request.token_ids, *turn.token_ids, 9, 8, 7], max_new=12)
        for request, turn in zip(requests, turns, strict=True)
    ]
    _agree(_ours(policies[0]), longer, engine.extend(longer, 1.0), 1.0)


def test_new_weights_take_the_place_of_the_old_ones_with_nothing_left_of_them(
    engine: VllmEngine, policies: list[Path]
) -> None:
    requests = _requests()
    before = engine.extend(requests, 1.0)
    engine.load(policies[1], 1)
    after = engine.extend(requests, 1.0)
    assert engine.version == 1 and before != after
    _agree(_ours(policies[1]), requests, after, 1.0)
    engine.load(policies[0], 2)
    assert [turn.token_ids for turn in engine.extend(requests, 1.0)] == [turn.token_ids for turn in before]


LOUD = {
    "architectures": ["NoSuchModel"], "speculators_config": {"algorithm": "eagle"}, "compression_config": {"a": 1},
    "text_config": {"architectures": ["NoSuchModel"]}, "auto_map": {"AutoConfig": "a.B"}, "dtype": "float64",
    "sliding_window": 1, "logits_scaling": 9.0, "is_causal": False,
}  # fmt: skip
"""What a host may write into a config: the first keys choose code of vLLM, the others change what it computes."""


def test_a_host_tells_vllm_nothing_but_the_shape_and_the_weights(
    policies: list[Path], engine: VllmEngine, tmp_path: Path
) -> None:
    for path in policies[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(json.loads((tmp_path / "config.json").read_text()) | LOUD))
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    (tmp_path / "params.json").write_text("{}")
    make_tiny(TINY, tmp_path / "other", 5, "float32")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "z.safetensors")  # of a seed of its own
    opened = VllmEngine(threads=1)
    for hostile in (opened, engine):  # opens it, and loads it in place
        hostile.load(tmp_path, 1)
        _agree(_ours(policies[0]), _requests(8), hostile.extend(_requests(8), 1.0), 1.0)
    engine.load(policies[0], 2)


def test_a_policy_of_another_shape_is_refused(engine: VllmEngine, policies: list[Path], tmp_path: Path) -> None:
    make_tiny(TinyPolicy(width=64, layers=1, heads=2, kv_heads=1, mlp_width=64), tmp_path / "other", 0, "float32")
    with pytest.raises(StateError, match="another shape"):
        engine.load(tmp_path / "other", 3)
    engine.load(policies[0], 0)


def test_a_policy_that_vllm_cannot_serve_is_refused_in_one_line(
    policies: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "99999")
    with pytest.raises(StateError, match=r"vLLM cannot serve this policy .*: join without --engine vllm") as refused:
        VllmEngine(threads=1).load(policies[0], 0)
    assert "\n" not in str(refused.value)


def test_the_engine_says_what_it_is_and_refuses_what_it_cannot(engine: VllmEngine) -> None:
    assert re.fullmatch(r"shoal-vllm/[0-9][^/]*-processor", engine.facts.implementation)
    assert engine_kind(engine.facts.implementation) == VLLM
    assert not any(makes_noise_of(family, "cpu") for family in NOISES)
    with pytest.raises(StateError, match="may grow by 200"):
        engine.extend([EngineRequest("r", [3], b"s" * 32, 200, STOPS)], 1.0)
    with pytest.raises(StateError, match="replays nothing"):
        engine.score([], 1.0)
    with pytest.raises(StateError, match="computes on cpu, not on cuda: choose --device cpu"):
        VllmEngine(device="cuda")
    with pytest.raises(StateError, match="unknown noise family 'dice'"):
        VllmEngine(noise="dice")
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_torch_keeps_its_way_to_set_threads(engine: VllmEngine) -> None:
    """Calibration recomputes with several numbers of them after vLLM has played."""
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    assert torch.get_num_threads() == before + 1
    torch.set_num_threads(before)
