"""Steps that learn from their batch in parts: which rows each part has, and what stays the same before the first update."""

from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from shoal.config import SamplingConfig, TrainConfig
from shoal.protocol import algorithm_config as c
from shoal.protocol.algorithm_config import Grpo
from shoal.train import learner as module
from shoal.train.learner import Learner
from shoal.train.microbatches import minibatches

CONFIG = TrainConfig(lr=1e-2, warmup_steps=0, microbatch_tokens=96)


@pytest.fixture
def grouped(make_rows):
    """Twelve rows of six groups of two."""
    return [replace(row, id=(0, i // 2, i % 2)) for i, row in enumerate(make_rows(12))]


def learner_of(model, **train):
    return Learner(
        model, msgspec.structs.replace(CONFIG, **train), SamplingConfig(temperature=0.7, max_tokens=24), steps=20
    )


def test_parts_are_whole_groups_dealt_out_in_turn(grouped):
    parts = minibatches(grouped, 4)
    assert [[row.id[1] for row in part] for part in parts] == [[0, 0, 4, 4], [1, 1, 5, 5], [2, 2], [3, 3]]
    assert sorted(row.id for part in parts for row in part) == [row.id for row in grouped]


def test_one_part_is_the_batch_itself_and_no_part_is_empty(grouped):
    assert minibatches(grouped, 1)[0] is grouped
    assert len(minibatches(grouped[:4], 8)) == 2
    assert len(minibatches([replace(row, id=None) for row in grouped], 8)) == 8


def test_each_part_has_a_step_each_time(make_model, grouped):
    learner = learner_of(make_model(), minibatches=3, updates_per_batch=2, algorithm=c.Ppo())
    metrics = learner.step(grouped, 0)
    assert metrics["updates"] == learner.updates == 6
    assert metrics["policy_tokens"] == sum(len(row.positions_P) for row in grouped)
    learned = metrics["train_tokens_per_s"] * metrics["train_s"]
    assert learned == pytest.approx(2 * sum(len(row.tokens_T) for row in grouped))


@pytest.mark.parametrize("algorithm", [c.Ppo(), c.DecoupledPpo(), Grpo()], ids=lambda a: type(a).__name__)
def test_updates_are_those_of_steps_taken_by_hand(make_model, grouped, algorithm):
    """Three updates of a part each, where old log-probs are those of the policy before the first."""
    by_parts = learner_of(make_model(), minibatches=3, algorithm=algorithm)
    by_parts.step(grouped, 0)
    by_hand = learner_of(make_model(), algorithm=algorithm)
    before = {row.id: p for row, p in zip(grouped, by_hand.logprobs(grouped), strict=True)}
    old = []
    for part in minibatches(grouped, 3):
        rows = part
        if isinstance(algorithm, c.Ppo):  # against log-probs that are given, "behaviour" is the same loss
            by_hand = by_hand if old else learner_of(make_model(), algorithm=c.Composition())
            rows = [replace(row, behaviour_logp_P=before[row.id]) for row in part]
        elif isinstance(algorithm, c.DecoupledPpo):  # weights of before, too
            by_hand = by_hand if old else learner_of(make_model(), algorithm=c.Composition())
            rows = [
                replace(
                    row,
                    weight_P=np.minimum(np.exp(before[row.id] - row.behaviour_logp_P), 5.0),
                    behaviour_logp_P=before[row.id],
                )
                for row in part
            ]
        old.append(by_hand.step(rows, 0))
    for name, tensor in by_parts.state(1).tensors.items():
        torch.testing.assert_close(tensor, by_hand.state(1).tensors[name], atol=2e-5, rtol=1e-3)


def test_old_log_probs_are_computed_only_where_the_loss_needs_them(make_model, grouped, monkeypatch):
    seen = Counter()

    def counted(model, batch, temperature):
        seen[torch.is_grad_enabled()] += 1
        return predict(model, batch, temperature)

    predict = module.predict
    monkeypatch.setattr(module, "predict", counted)
    for algorithm, without_gradient in ((c.Dapo(), False), (c.Ppo(), True)):
        seen.clear()
        learner_of(make_model(), minibatches=2, algorithm=algorithm).step(grouped, 0)
        assert seen[True] > 0 and (seen[False] > 0) is without_gradient


def test_a_step_is_repeated_with_the_budgets_that_it_had(make_model, grouped):
    def taken(budgets=(), tokens=96):
        learner = learner_of(make_model(), minibatches=3, algorithm=c.Ppo(), microbatch_tokens=tokens)
        learner.step(grouped, 0, budgets)
        return learner

    first = taken(budgets=(48, 48, 24))
    assert first.budgets == [48, 48, 24, 24, 24]
    again = taken(budgets=first.budgets, tokens=2048)
    assert again.budgets == first.budgets
    for name, tensor in first.state(1).tensors.items():
        assert tensor.equal(again.state(1).tensors[name])
