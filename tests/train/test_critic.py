"""A critic beside the policy: its credit, its own updates, and that a killed run comes back to the same bits."""

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from shoal.algos.advantages import gae
from shoal.config import CriticConfig, SamplingConfig, TrainConfig
from shoal.models.value_head import HEAD, TransformerWithValueHead
from shoal.protocol import algorithm_config as c
from shoal.protocol.algorithm_config import Grpo
from shoal.train.checkpoint import load_state, save_state
from shoal.train.critic import Critic, credited, critic_of, explained_share
from shoal.train.learner import LARGEST, Learner
from shoal.train.loss import normalised
from shoal.train.microbatches import plan
from shoal.train.rows import bytes_of, row_of

CONFIG = TrainConfig(
    lr=1e-2, warmup_steps=0, microbatch_tokens=96, algorithm=c.Ppo(advantage="gae"), updates_per_batch=2, minibatches=2,
    critic=CriticConfig(lr=1e-2, lam=0.9, clip=0.5),
)  # fmt: skip


def learner_of(make_model, of_torch=torch.float32, **changes):
    config = msgspec.structs.replace(CONFIG, **changes)

    def begin():
        model = TransformerWithValueHead(make_model().spec, of_torch)
        model.load_state_dict(make_model().state_dict(), strict=False)
        with torch.no_grad():
            model.score.weight.zero_()
        return model

    critic = critic_of(config, begin)
    return Learner(make_model().to(of_torch), config, SamplingConfig(), steps=6, critic=critic)


def grouped(rows):
    """As rows of groups of four rollouts."""
    return [replace(row, id=(0, i // 4, i % 4)) for i, row in enumerate(rows)]


def same(left, right):
    return (left.updates, left.critic_updates) == (right.updates, right.critic_updates) and all(
        one.equal(right.tensors[name]) for name, one in left.tensors.items()
    )


def test_credit_is_that_of_gae_over_the_rows_of_each_rollout_in_order(make_rows):
    rows = [replace(row, id=(0, 0, i // 2)) for i, row in enumerate(make_rows(4))]  # two rollouts of two rows
    rng = np.random.default_rng(1)
    values = [rng.normal(size=len(row.positions_P)).astype(np.float32) for row in rows]
    found, figures = credited(rows, values, CriticConfig(gamma=0.9, lam=0.8))
    for first in (0, 2):
        V_T = np.concatenate(values[first : first + 2])
        r_T = np.zeros(len(V_T))
        r_T[-1] = rows[first + 1].reward
        expected = gae(V_T, r_T, gamma=0.9, lam=0.8)
        pair = found[first : first + 2]
        assert np.concatenate([row.advantage_P for row in pair]).tolist() == pytest.approx(expected.A_T, abs=1e-6)
        assert np.concatenate([row.target_P for row in pair]).tolist() == pytest.approx(expected.R_T, abs=1e-6)
        assert all((row.value_P == values[first + i]).all() for i, row in enumerate(pair))
    assert figures["value_mean"] == pytest.approx(np.concatenate(values).mean(), abs=1e-6)


def test_the_share_that_values_explain():
    returns = np.array([0.0, 1.0, 2.0, 5.0])
    assert explained_share(returns.astype(np.float32), returns) == 1
    assert explained_share(np.full(4, 9.0, np.float32), returns) == 0
    assert explained_share(-returns.astype(np.float32), returns) == -3
    assert math.isnan(explained_share(returns.astype(np.float32), np.ones(4)))


def test_a_critic_that_knows_nothing_credits_every_token_with_the_discounted_reward(make_model, make_rows):
    learner, rows = (
        learner_of(make_model, critic=CriticConfig(lam=0.5), updates_per_batch=1, minibatches=1),
        make_rows(6),
    )
    seen = []
    learner._learn = lambda part, *rest: seen.append(part.rows) or {"grad_norm": 1.0, LARGEST: 0.0}
    metrics = learner.step(rows, 0)
    for row, given in zip(seen[0], rows, strict=True):
        P = len(given.positions_P)
        assert row.advantage_P.tolist() == pytest.approx(given.reward * 0.5 ** np.arange(P)[::-1], abs=1e-6)
    assert metrics["value_mean"] == 0 and metrics["value_explained_share"] == 0


def test_the_critic_learns_what_rollouts_earn(make_model, make_rows):
    """Its loss falls, and its values explain the returns of a batch that it sees again and again."""
    critic = CriticConfig(lr=1e-2, lam=1.0, clip=0.0)
    learner, rows = learner_of(make_model, lr=0.0, critic=critic, minibatches=1), make_rows(8)
    metrics = [learner.step(rows, version) for version in range(12)]
    assert metrics[-1]["value_loss"] < 0.1 * metrics[0]["value_loss"]
    assert metrics[0]["value_explained_share"] == 0 and metrics[-1]["value_explained_share"] > 0.8
    assert all(math.isfinite(one["critic_grad_norm"]) for one in metrics)


def test_the_gradient_of_the_critic_matches_finite_differences(make_model, make_rows):
    learner, rows = learner_of(make_model), make_rows(3)
    critic = learner._critic
    critic.model.double()
    with torch.no_grad():
        critic.model.score.weight.normal_(generator=torch.Generator().manual_seed(2))
    judged, _ = credited(rows, critic.values(rows, plan(rows, 96, "padded")), CONFIG.critic)
    moved = [replace(row, value_P=row.value_P + np.float32(0.1)) for row in judged]
    for name in (HEAD, "model.norm.weight"):
        weight = dict(critic.model.named_parameters())[name]
        loss = critic.gradients(moved, plan(moved, 96, "padded"))["value_loss"]
        slope, far = weight.grad.reshape(-1)[3].item(), []
        for step in (1e-4, -1e-4):
            weight.data.view(-1)[3] += step
            far.append(critic.gradients(moved, plan(moved, 96, "padded"))["value_loss"])
            weight.data.view(-1)[3] -= step
        critic.drop()
        assert loss > 0 and (far[0] - far[1]) / 2e-4 == pytest.approx(slope, rel=1e-3)


def test_the_sum_of_micro_batches_is_the_gradient_of_all(make_model, make_rows):
    norms = []
    for budget, packing in ((32, "padded"), (4096, "padded"), (64, "flat"), (4096, "flat")):
        learner = learner_of(make_model, microbatch_tokens=budget, packing=packing, updates_per_batch=1, minibatches=1)
        norms.append(learner.step(grouped(make_rows(8)), 0)["critic_grad_norm"])
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-5)


@pytest.mark.parametrize(
    ("dtype", "moments", "warmup"), [("", "float32", 0), ("bfloat16", "8bit", 0), ("", "offloaded", 4)]
)
def test_a_resumed_run_is_bit_identical_to_an_unbroken_one(make_model, make_rows, tmp_path, dtype, moments, warmup):
    of_torch = torch.bfloat16 if dtype else torch.float32

    def learner():
        critic = msgspec.structs.replace(CONFIG.critic, warmup_steps=warmup)
        return learner_of(make_model, of_torch, dtype=dtype, moments=moments, critic=critic)

    def train(learner, versions):
        for version in versions:
            learner.step(grouped(make_rows(8, seed=version)), version)

    unbroken, first, second = learner(), learner(), learner()
    train(unbroken, range(6))
    train(first, range(3))
    save_state(tmp_path, first.state(3))
    state = load_state(tmp_path)
    second.restore(state)
    assert state.critic_updates == 12 and state.updates == (0 if warmup else 12)
    train(second, range(3, 6))
    assert same(unbroken.state(6), second.state(6))
    assert any(name.startswith("critic/adam") for name in state.tensors)


def test_a_step_that_is_repeated_from_its_rows_as_bytes_and_its_budgets_has_the_same_bits(
    make_model, make_rows, monkeypatch
):
    rows = grouped(make_rows(24))
    learner = learner_of(make_model, microbatch_tokens=384)
    values, tried = TransformerWithValueHead.values, []

    def scarce(model, hidden_xD):
        tried.append(len(hidden_xD))
        if len(tried) > 3 and len(hidden_xD) > 40:
            raise MemoryError("no room")
        return values(model, hidden_xD)

    monkeypatch.setattr(TransformerWithValueHead, "values", scarce)
    learner.step(rows, 0)
    monkeypatch.undo()
    assert len(set(learner.budgets)) > 1, "memory ran out between two passes"
    again = learner_of(make_model, microbatch_tokens=384)
    again.step([row_of(bytes_of(row)) for row in rows], 0, learner.budgets)
    assert again.budgets == learner.budgets and same(learner.state(1), again.state(1))


def test_memory_that_runs_out_in_the_critics_pass_leaves_no_half_of_its_gradient(make_model, make_rows, monkeypatch):
    rows = grouped(make_rows(24))
    learner = learner_of(make_model, microbatch_tokens=384, updates_per_batch=1, minibatches=1)
    gradients, failed = Critic.gradients, []

    def once(critic, rows, packed):
        if len(packed) > 1 and not failed:
            gradients(critic, rows, packed[:1])
            failed.append(True)
            raise MemoryError("no room")
        return gradients(critic, rows, packed)

    monkeypatch.setattr(Critic, "gradients", once)
    learner.step(rows, 0)
    assert failed
    monkeypatch.undo()
    again = learner_of(make_model, microbatch_tokens=384, updates_per_batch=1, minibatches=1)
    again.step(rows, 0, learner.budgets)
    assert same(learner.state(1), again.state(1))


def test_in_its_warm_up_only_the_critic_learns(make_model, make_rows):
    learner = learner_of(make_model, critic=CriticConfig(lr=1e-2, warmup_steps=2))
    before = {name: one.clone() for name, one in learner.state(0).tensors.items()}
    moved = []
    for version in range(3):
        metrics = learner.step(grouped(make_rows(8)), version)
        state = learner.state(version + 1)
        moved.append(any(not one.equal(before[name]) for name, one in state.tensors.items() if "critic" not in name))
        assert ("loss" in metrics) is moved[-1] and metrics["value_loss"] > 0 and not metrics["update_skipped"]
    assert moved == [False, False, True] and learner.updates == 4 and state.critic_updates == 12


def test_a_gradient_of_the_critic_that_is_not_finite_ends_the_step_and_is_said(make_model, make_rows, caplog):
    learner, rows = learner_of(make_model), grouped(make_rows(8))
    rows[0] = replace(rows[0], reward=1e30)
    metrics = learner.step(rows, 0)
    assert metrics["update_skipped"] == 1 and learner.state(1).critic_updates == 0
    assert "the critic's update skipped" in caplog.text


def test_parked_it_comes_back_with_the_same_bits(make_model, make_rows):
    learner, plain, rows = learner_of(make_model), learner_of(make_model), grouped(make_rows(8))
    learner.park()
    assert all(one.untyped_storage().nbytes() == 0 for one in learner.state(0).tensors.values() if one.numel())
    learner.come_back()
    for each in (learner, plain):
        each.step(rows, 0)
    assert same(learner.state(1), plain.state(1))


@pytest.mark.parametrize("algorithm", [c.Ppo(advantage="gae", batch_std=True), c.ScaleRl(credit=c.Vine())])
def test_advantages_of_tokens_are_divided_by_the_deviation_of_all_tokens(make_rows, algorithm):
    rows = [replace(row, advantage_P=np.arange(len(row.positions_P), dtype=np.float32)) for row in make_rows(5)]
    A_I = np.concatenate([row.advantage_P for row in rows])
    found = np.concatenate([row.advantage_P for row in normalised(rows, algorithm)])
    assert found == pytest.approx(A_I / A_I.std(), rel=1e-5)


def test_runs_without_a_critic_load_none():
    def never():
        raise AssertionError("no critic is needed")

    for algorithm in (Grpo(), c.Ppo()):
        assert critic_of(msgspec.structs.replace(CONFIG, algorithm=algorithm), never) is None
