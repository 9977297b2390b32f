"""A run as a notebook reads it: tables, one rollout, and what the weights say of it."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import replace as replace_field

import shoal
from shoal.errors import ConfigError, NothingYet, ShoalError
from shoal.roles.auditor import token_scores
from shoal.views.notebook.rollout import Rollout

HOSTILE = '<script>alert("x")</script>\x1b[2J'


@pytest.fixture
def opened(copied):
    with shoal.open(copied) as run:
        yield run


@pytest.fixture
def rollout(opened):
    """The first rollout of the first group with signal."""
    group = next(row for row in opened.groups if row["status"] == "signal")
    return opened.rollout(f"{group['version']}/{group['slot']}/0")


def test_every_table_of_a_run_is_a_property(opened):
    tables = ("log", "metrics", "nodes", "versions", "groups", "rollouts", "evaluations", "verdicts", "refusals")
    assert all(len(getattr(opened, name)) for name in tables)
    assert opened.log.polars()["seq"].to_list() == list(range(len(opened.log)))
    assert {row["check"] for row in opened.refusals} and len(opened.metrics) == 2
    assert all(name in repr(opened) for name in tables)


def test_a_rollout_has_its_tokens_with_claims_and_advantages(opened, rollout):
    named = rollout.group.version, rollout.group.slot, 0
    signal = [row for row in opened.rollouts if row["status"] == "signal"]  # a refused group may have had the slot
    row = next(row for row in signal if (row["version"], row["slot"], row["rollout"]) == named)
    tokens = rollout.tokens
    assert len(tokens) == row["tokens"] and [token["position"] for token in tokens] == list(range(len(tokens)))
    own = [token for token in tokens if token["author"] == "policy"]
    assert len(own) == row["policy_tokens"] and all(token["logprob"] <= 0 for token in own)
    assert all(token["logprob"] is None for token in tokens if token["author"] == "environment")
    assert np.mean([token["advantage"] for token in own]) == pytest.approx(row["advantage"])


def test_replaying_with_the_weights_of_the_run_gives_what_was_claimed(rollout):
    again = asyncio.run(_in_a_cell(lambda: rollout.replay(logits=True)))
    assert again.agrees and again.limits is not None and again.largest_gap <= again.limits.gap
    assert again.largest_difference < 1e-4 and len(again.tokens) == rollout.facts.policy_tokens
    assert again.logits_PV.shape[0] == len(again.tokens)
    assert "tokens computed again: largest gap" in again._repr_html_()
    temperature = rollout.reading.state.sampling.temperature
    scaled_PV = again.logits_PV.astype(np.float64) / temperature
    logp_PV = scaled_PV - np.log(np.exp(scaled_PV).sum(-1, keepdims=True))
    found = logp_PV[range(len(logp_PV)), [token["token_id"] for token in again.tokens]]
    assert found == pytest.approx([token["recomputed"] for token in again.tokens], abs=1e-4)


async def _in_a_cell(work):
    return work()


def test_replaying_with_other_weights_shows_gaps(rollout, opened, testbed):
    final = testbed.folder.checkpoints / "final"
    other = rollout.replay(shoal.policy(final))
    assert not other.agrees and other.largest_difference > other.limits.logprob


def test_each_check_says_what_it_finds_in_an_honest_rollout_and_in_forged_ones(rollout):
    honest = rollout.checks()
    assert [row["check"] for row in honest] == [
        "shape", "lease", "prompt", "environment", "reward", "ending", "complete", "sampling", "logprobs", "activations",
    ]  # fmt: skip
    assert {row["result"] for row in honest} == {"passed"} and all(row["about"] for row in honest)
    claim = rollout.claim
    louder = replace_field(claim, logprobs=(claim.logprobs_P() - np.float32(1)).tobytes())
    failed = {row["check"]: row for row in rollout.checks(louder) if row["result"] == "failed"}
    assert list(failed) == ["logprobs"] and failed["logprobs"]["severity"] == "hard"
    assert failed["logprobs"]["rollout"] == 0 and failed["logprobs"]["figure"] > failed["logprobs"]["bound"]
    tokens_T = claim.tokens_T().copy()
    tokens_T[0] += 1
    results = [row["result"] for row in rollout.checks(replace_field(claim, token_ids=tokens_T.tobytes()))]
    assert results == ["passed", "passed", "failed", *["not run"] * 7]


def test_too_many_logits_are_refused(rollout, monkeypatch):
    monkeypatch.setattr(token_scores, "MAX_LOGITS", 3)
    with pytest.raises(ConfigError, match=r"logits=True would keep .* numbers, limit 3"):
        rollout.replay(logits=True)


def test_what_strangers_wrote_is_shown_as_text(rollout):
    facts = rollout.facts
    turns = tuple(replace(turn, pieces=tuple(HOSTILE for _ in turn.token_ids), text=HOSTILE) for turn in facts.turns)
    group = replace(rollout.group, env=HOSTILE, rollouts=(replace(facts, turns=turns, ending=HOSTILE),))
    hostile = Rollout(rollout.reading, rollout.place, group, 0)
    shown = hostile._repr_html_()
    assert "<script" not in shown and "&lt;script&gt;" in shown and "\x1b" not in shown + str(hostile)
    flawed = Rollout(rollout.reading, rollout.place, replace(group, rollouts=(replace(facts, flaw=HOSTILE),)), 0)
    assert "<script" not in flawed._repr_html_()


def test_a_name_of_no_rollout_is_refused(opened, rollout):
    with pytest.raises(ConfigError, match="'first' names no rollout"):
        opened.rollout("first")
    with pytest.raises(ConfigError, match=r"names no rollout: .*INDEX below"):
        opened.rollout(f"{rollout.group.version}/{rollout.group.slot}/999")
    with pytest.raises(NothingYet):
        opened.rollout("0/999999/0")


def test_missing_torch_is_reported_in_one_line(rollout, monkeypatch):
    monkeypatch.setattr(token_scores, "find_spec", lambda name: None)
    with pytest.raises(ShoalError, match="torch is not installed"):
        rollout.replay()
