"""The trainer's own denominators follow from tokens and published bytes, never from claims; and the check at start-up."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from shoal.config import BOUNDS, SamplingConfig, TrainConfig
from shoal.errors import StateError
from shoal.models.checkpoint import save_policy
from shoal.models.lora import begin_adapter
from shoal.models.lora_config import AdapterSpec
from shoal.protocol.tolerances import claims_bend_ratios
from shoal.train import logprobs
from shoal.train.learner import Learner
from shoal.train.logprobs import (
    largest_gap_nats,
    loaded_anew,
    over_the_base,
    row_to_check,
    with_own_denominators,
)
from shoal.train.rows import counted_only
from shoal.weights.base_model import link_from


@pytest.fixture
def own(make_model, tmp_path):
    """Of rows, with versions 0 and 1 published in a dtype."""

    def compute(rows, dtype="bfloat16", sampled="bfloat16"):
        published = {version: tmp_path / f"{dtype}-{version}" for version in (0, 1)}
        for version, directory in published.items():
            save_policy(make_model(seed=version), directory, dtype)
        return with_own_denominators(rows, published, loaded_anew(sampled, 0.7, 96, torch.float32))

    return compute


def logps(rows):
    return [row.behaviour_logp_P for row in rows]


def test_no_claim_moves_a_denominator(make_rows, own):
    rows = [*make_rows(6, seed=1), *make_rows(6, seed=2, version=1)]
    lies = [replace(row, behaviour_logp_P=row.behaviour_logp_P - 0.4) for row in rows]
    for honest, lied in zip(logps(own(rows)), logps(own(lies)), strict=True):
        np.testing.assert_array_equal(honest, lied)


def test_each_row_is_computed_with_its_own_version(make_model, make_rows, own):
    rows = [row for pair in zip(make_rows(4), make_rows(4, version=1), strict=True) for row in pair]
    found = logps(own(rows, "float32"))
    for version in (0, 1):
        learner = Learner(
            make_model(seed=version), TrainConfig(microbatch_tokens=96), SamplingConfig(temperature=0.7), steps=1
        )
        mine = [place for place, row in enumerate(rows) if row.version == version]
        expected = learner.logprobs([rows[place] for place in mine])
        for place, expected_P in zip(mine, expected, strict=True):
            np.testing.assert_array_equal(found[place], expected_P)


def test_at_the_published_weights_every_ratio_is_exactly_1(make_model, make_rows, own):
    rows = own(make_rows(8), "float32")
    learner = Learner(make_model(seed=0), TrainConfig(microbatch_tokens=96), SamplingConfig(temperature=0.7), steps=1)
    assert learner.step(rows, 0)["log_ratio_abs_max_nats"] == 0.0


def test_the_bytes_that_were_published_count_and_not_the_finer_weights_of_the_trainer(make_rows, own):
    rows = make_rows(4)
    coarse, fine = np.concatenate(logps(own(rows))), np.concatenate(logps(own(rows, "float32")))
    assert 1e-5 < np.abs(coarse - fine).max() < 0.1


def test_rows_sampled_in_int8_have_the_denominators_of_the_rounded_policy(make_rows, own):
    rows = make_rows(4)
    rounded, exact = logps(own(rows, "float32", "int8")), logps(own(rows, "float32"))
    assert np.abs(np.concatenate(rounded) - np.concatenate(exact)).max() > 1e-4


@pytest.mark.parametrize(
    ("dtype", "epsilon", "bend"),
    [("float32", 0.2, False), ("int8", 0.2, False), ("bfloat16", 0.2, True), ("float32", 0.05, True)],
)
def test_claims_are_taken_where_bounds_are_a_tenth_of_the_clip_range_or_less(dtype, epsilon, bend):
    assert claims_bend_ratios(BOUNDS, dtype, epsilon) is bend


def test_one_loose_pair_is_enough_for_a_validator_that_uses_it():
    loose = {**BOUNDS, "float32/bfloat16": BOUNDS["bfloat16/bfloat16"]}
    assert claims_bend_ratios(loose, "float32", 0.2)


def test_bounds_that_grow_with_the_logits_are_loose():
    growing = {"float32/float32": msgspec.structs.replace(BOUNDS["float32/float32"], largest_logit=8.0)}
    assert claims_bend_ratios(growing, "float32", 0.2)


@pytest.fixture
def adapted(make_model, tmp_path):
    """Makes a model with a random adapter, and its directory with the base beside it."""
    save_policy(make_model(), tmp_path / "base", "bfloat16")

    def make(seed, rank=2):
        model = make_model().to(torch.bfloat16)
        begin_adapter(model, AdapterSpec(rank, 8.0), seed)
        with torch.no_grad():
            for one in model.trainable().values():
                one.add_(torch.randn(one.shape, generator=torch.Generator().manual_seed(seed)), alpha=0.1)
        directory = tmp_path / f"{seed}-{rank}"
        save_policy(model, directory, "bfloat16")
        link_from(tmp_path / "base", directory)
        return model, directory

    return make


def test_over_the_base_in_memory_the_bits_are_those_of_the_versions_loaded_anew(adapted, make_rows, monkeypatch):
    model, _ = adapted(7)
    own = {name: one.clone() for name, one in model.trainable().items()}
    rows = [*make_rows(4), *make_rows(4, version=1)]
    published = {version: adapted(version)[1] for version in (0, 1)}
    anew = logps(with_own_denominators(rows, published, loaded_anew("bfloat16", 0.7, 96, torch.bfloat16)))
    monkeypatch.setattr(logprobs, "open_policy", None)  # a second base is never loaded
    found = logps(with_own_denominators(rows, published, over_the_base(model, 0.7, 96)))
    for one, other in zip(anew, found, strict=True):
        np.testing.assert_array_equal(one, other)
    assert all(one.equal(own[name]) for name, one in model.trainable().items())


def test_an_adapter_of_another_rank_is_not_put_over_the_base(adapted, make_rows):
    (model, _), (_, other) = adapted(7), adapted(8, rank=4)
    with pytest.raises(StateError, match="another rank"):
        over_the_base(model, 0.7, 96)(other, make_rows(4))


# --- the self-check at start-up ---


def test_the_gap_is_the_largest_difference_of_any_token_and_grows_with_another_temperature(make_model, make_rows):
    row = make_rows(1)[0]
    own_P, other_P = (
        Learner(make_model(), TrainConfig(), SamplingConfig(temperature=temperature), steps=1).logprobs([row])[0]
        for temperature in (1.0, 0.8)
    )
    off_P = own_P.copy()
    off_P[0] -= 0.125
    off_P[-1] += 0.5
    gaps = [largest_gap_nats(own_P, replace(row, behaviour_logp_P=one_P)) for one_P in (own_P, off_P, other_P)]
    assert gaps[:2] == [0.0, pytest.approx(0.5, abs=1e-6)] and gaps[2] > 0.1


def test_the_longest_row_of_the_current_version_is_checked(make_rows):
    rows = make_rows(12)
    in_order = sorted(rows, key=lambda row: len(row.tokens_T))
    assert row_to_check(rows, 0) is next(row for row in rows if len(row.tokens_T) == len(in_order[-1].tokens_T))
    older = [replace(row, version=1) for row in rows]
    masked = counted_only(replace(in_order[-1], version=0))
    assert row_to_check([*older, masked, replace(in_order[0], version=0)], 0).tokens_T is in_order[0].tokens_T
    assert row_to_check(older, 0) is None
