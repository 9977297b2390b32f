"""Policies whose rotation depends on the length of a text: each token is that of the text before it, in every batch."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.config import SamplingConfig, TrainConfig
from shoal.engine.hf import TransformersEngine
from shoal.engine.interface import EngineRequest, ScoreRequest
from shoal.engine.vllm.checkpoint import config_for_vllm
from shoal.errors import StateError
from shoal.models.hf_model import HFModel, load_any
from shoal.models.open_model import kind_of, spec_of
from shoal.protocol.noise import NOISES, PHILOX
from shoal.protocol.seed_chain import sample_seed
from shoal.train.learner import Learner
from shoal.train.rows import TrainingRow
from tests.engine.architectures import ARCHITECTURES, DYNAMIC, ROTATIONS, SHORT, write_config
from tests.engine.claims import claims_of

every_rotation = pytest.mark.parametrize("name", ROTATIONS)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("rotation")
    return {name: write_config(make(), root / name, sharpen=2.0) for name, make in ROTATIONS.items()}


def _engine(directory: Path, dtype: str = "float32") -> TransformersEngine:
    engine = TransformersEngine(threads=1, dtype=dtype)
    engine.load(directory, 0)
    return engine


def _requests(*lengths: int, max_new: int = 12, stops: frozenset[int] = frozenset({5})) -> list[EngineRequest]:
    rng = random.Random(1)
    return [
        EngineRequest(f"r{i}", [rng.randrange(6, 64) for _ in range(length)], sample_seed(b"rope", i), max_new, stops)
        for i, length in enumerate(lengths)
    ]


ACROSS = (4, SHORT - 8, SHORT - 1, SHORT, SHORT + 1, 30, SHORT - 8)
"""Prompts that stay short, that pass the length in the turn, that begin on either side of it, and that are long."""


@every_rotation
def test_each_token_is_that_of_transformers_for_the_text_before_it(name: str, models: dict[str, Path]) -> None:
    import transformers

    requests, engine = _requests(*ACROSS), _engine(models[name])
    peer = transformers.AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32)
    for request, turn in zip(requests, engine.extend(requests, 1.0), strict=True):
        ids = [*request.token_ids, *turn.token_ids]
        for t in range(len(request.token_ids), len(ids)):
            with torch.no_grad():
                logits_V = peer(torch.tensor([ids[:t]])).logits[0, -1]
            noise_V = torch.from_numpy(NOISES[PHILOX]([request.seed], np.array([t]), 64))[0]
            assert int((logits_V + noise_V).argmax()) == ids[t]
            logprob = turn.logprobs[t - len(request.token_ids)]
            assert logprob == pytest.approx(float(logits_V.log_softmax(-1)[ids[t]]), abs=1e-4)


@every_rotation
def test_neighbours_change_nothing_in_sampling_scoring_and_training(name: str, models: dict[str, Path]) -> None:
    requests, engine = _requests(*ACROSS), _engine(models[name])
    turns = engine.extend(requests, 1.0)
    alone = [engine.extend([request], 1.0)[0] for request in requests]
    assert [turn.token_ids for turn in turns] == [turn.token_ids for turn in alone]
    claims = claims_of(requests, turns)
    for part in (claims, claims[:1], claims[1:3], claims[5:]):
        assert max(float(score.gaps_P.max()) for score in engine.score(part, 1.0)) < 1e-4
    rows = [
        TrainingRow(
            np.array(claim.token_ids), np.array(claim.policy_positions), np.array(turn.logprobs, np.float32),
            np.ones(len(turn.logprobs), np.float32), np.ones(len(turn.logprobs), np.float32), 1.0, 0,
        )
        for claim, turn in zip(claims, turns, strict=True)
    ]  # fmt: skip
    learner = Learner(load_any(models[name]), TrainConfig(microbatch_tokens=4096), SamplingConfig(), steps=1)
    for row, logp_P in zip(rows, learner.logprobs(rows), strict=True):
        assert np.abs(row.behaviour_logp_P - logp_P).max() < 1e-4
    assert learner.step(rows, 0)["log_ratio_abs_max_nats"] < 1e-4


@every_rotation
def test_a_change_of_the_rotation_shows_in_these_models(name: str, models: dict[str, Path]) -> None:
    """A row read at once has other log-probs before the change than the text up to there."""
    model = load_any(models[name])
    assert model.short_rotation == SHORT
    tokens_1T = torch.tensor([_requests(40)[0].token_ids])
    with torch.no_grad():
        apart = (model._hidden(tokens_1T) - model.hidden(tokens_1T))[0].abs().amax(-1)
    assert apart[:SHORT].max() > 1e-2 and apart[SHORT:].max() < 1e-6


def test_a_prompt_of_50_with_40_tokens_beside_a_short_one_is_replayed(tmp_path: Path) -> None:
    config = ROTATIONS["phi3"]()
    config.original_max_position_embeddings = config.rope_parameters["original_max_position_embeddings"] = 64
    engine = _engine(write_config(config, tmp_path, sharpen=2.0))
    requests = _requests(50, 6, max_new=40, stops=frozenset())
    claims = claims_of(requests, engine.extend(requests, 1.0))
    assert [len(claim.token_ids) for claim in claims] == [90, 46]
    assert max(float(score.gaps_P.max()) for score in engine.score(claims, 1.0)) < 1e-4


def test_a_turn_ends_at_a_stop_token_beside_the_change(models: dict[str, Path]) -> None:
    """Also if it is the last token that is written before the change, or the first behind it."""
    engine, (request,) = _engine(models["phi3"]), _requests(SHORT - 3, stops=frozenset())
    whole = engine.extend([request], 1.0)[0].token_ids
    for length in range(2, 7):
        if whole[length - 1] not in whole[: length - 1]:
            stopped = request._replace(stop_ids=frozenset({whole[length - 1]}))
            assert engine.extend([stopped], 1.0)[0].token_ids == whole[:length]
        limited = request._replace(max_new=length)
        assert engine.extend([limited], 1.0)[0].token_ids == whole[:length]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@every_rotation
def test_loading_replays_a_turn_across_the_change(
    name: str, dtype: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _engine(models[name], dtype)
    # An engine that read a batch at once, as transformers does, is refused before it writes anything.
    monkeypatch.setattr(HFModel, "hidden", lambda self, tokens_BT, families=None: self._hidden(tokens_BT))
    if dtype == "float32":
        with pytest.raises(StateError, match=r"where its rotation changes, a replay differs by .* nats"):
            _engine(models[name], dtype)


def test_dynamic_scaling_begins_where_a_text_may_not_go(tmp_path: Path) -> None:
    """Up to the last position it is the plain rotation, whatever was read before."""
    dynamic = write_config(DYNAMIC(), tmp_path / "dynamic", sharpen=2.0)
    assert kind_of(dynamic) == "any" and load_any(dynamic).short_rotation == 0
    config = json.loads((dynamic / "config.json").read_text())
    plain = write_config(DYNAMIC(), tmp_path / "plain", sharpen=2.0)
    (plain / "config.json").write_text(
        json.dumps(config | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
    )
    requests = _requests(6, 36, 20)
    engine = _engine(dynamic)
    first = claims_of(requests, engine.extend(requests, 1.0))
    assert first == claims_of(requests, _engine(plain).extend(requests, 1.0))
    for claims in (first, first[1:], first[:1]):
        assert max(float(score.gaps_P.max()) for score in engine.score(claims, 1.0)) < 1e-4
    with pytest.raises(StateError):
        engine.extend(_requests(40), 1.0)
    with pytest.raises(StateError):
        engine.score([ScoreRequest([7] * 49, (48,), bytes(32))], 1.0)


@pytest.mark.parametrize("name", ["dynamic", "gpt2"])
def test_a_row_that_ends_at_the_last_position_changes_nothing_for_the_others(name: str, tmp_path: Path) -> None:
    directory = write_config(DYNAMIC() if name == "dynamic" else ARCHITECTURES[name](), tmp_path, sharpen=2.0)
    engine = _engine(directory)
    limit = spec_of(directory).max_positions
    full, *others = _requests(limit - 2, 6, 9, 7, max_new=20, stops=frozenset())
    requests = [full._replace(max_new=2), *others]
    alone = [engine.extend([request], 1.0)[0].token_ids for request in requests]
    assert [turn.token_ids for turn in engine.extend(requests, 1.0)] == alone


def test_vllm_is_not_given_a_rotation_that_it_decides_otherwise(models: dict[str, Path], tmp_path: Path) -> None:
    dynamic = write_config(DYNAMIC(), tmp_path)
    for directory in (models["phi3"], models["llama"], dynamic):
        with pytest.raises(StateError, match="its rotation depends on the length of a text"):
            config_for_vllm(directory, spec_of(directory))


def test_layers_that_change_at_different_lengths_are_refused(models: dict[str, Path]) -> None:
    config: Any = load_any(models["llama"]).whole.config
    each = {kind: config.rope_parameters | {"original_max_position_embeddings": n} for kind, n in (("a", 4), ("b", 8))}
    config.rope_parameters = each
    model = load_any(models["llama"])
    model.whole.config.rope_parameters = each
    with pytest.raises(StateError, match=r"change at different lengths, \[4, 8\]"):
        HFModel(model.whole, model.spec, {})
