"""Steps with rollouts that are only counted: truncated ones that an algorithm masks, against TRL's formulas.

`trl_loss` is written from TRL's GRPOTrainer, over padded rows and a mask; it shares nothing with `train/loss`.

Axes: B rows, T tokens.
"""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from shoal.config import SamplingConfig, TrainConfig
from shoal.models.value_head import TransformerWithValueHead
from shoal.protocol import algorithm_config as c
from shoal.protocol.messages import BatchGroup
from shoal.train.batch_filter import select
from shoal.train.frozen_models import KLReference, RewardModel, Teacher
from shoal.train.learner import Learner
from shoal.train.loss import TokenTerms, averaged, normalised, objective_of
from shoal.train.microbatches import join, places_of
from shoal.train.rows import bytes_of, counted_only, learned, mean_rewards, row_of

LONGEST = 24
LOSSES = {"clip": c.Clip(), "gspo": c.Gspo(0.05, 0.08), "cispo": c.Cispo(most=1.5)}
AVERAGES = ("rollouts", "constant", "tokens")
"""In TRL's words: grpo, dr_grpo, dapo."""


@pytest.fixture
def rollouts(make_rows):
    """Two groups of eight rollouts, of which a token limit ended two and one."""
    rows = [replace(row, id=(0, i // 8, i % 8), overlong=i in (1, 6, 11)) for i, row in enumerate(make_rows(16))]
    return [replace(row, advantage_P=row.advantage_P - np.float32(0.1)) for row in rows]


def chosen(rows, algorithm):
    members = [BatchGroup(0, slot, "", 0, "", (1.0, *[0.0] * 7)) for slot in sorted({row.id[1] for row in rows})]
    groups = [[row for row in rows if row.id[1] == member.slot] for member in members]
    return select(members, groups, algorithm=algorithm, version=0, max_staleness=0).rows


def trl_loss(rows, logp, loss, average):
    """TRL's loss if it masks truncated completions, from the log-probs of each row's tokens."""
    shape = len(rows), max(map(len, logp))
    logp_BT, old_BT, mask_BT = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape)
    for b, (row, logp_P) in enumerate(zip(rows, logp, strict=True)):
        logp_BT[b, : len(logp_P)] = logp_P
        old_BT[b, : len(logp_P)] = torch.from_numpy(row.behaviour_logp_P)
        mask_BT[b, : len(logp_P)] = float(not row.overlong)
    A_B1 = torch.tensor([[float(row.advantage_P[0])] for row in rows])
    log_BT = logp_BT - old_BT
    if loss == "gspo":
        log_BT = ((log_BT * mask_BT).sum(-1) / mask_BT.sum(-1).clamp(min=1.0))[:, None]
    ratio_BT = log_BT.exp()
    if loss == "cispo":
        term_BT = -ratio_BT.clamp(max=1.5).detach() * A_B1 * logp_BT
    else:
        low, high = (0.2, 0.2) if loss == "clip" else (0.05, 0.08)
        term_BT = -torch.min(ratio_BT * A_B1, ratio_BT.clamp(1 - low, 1 + high) * A_B1)
    if average == "rollouts":
        return ((term_BT * mask_BT).sum(-1) / mask_BT.sum(-1).clamp(min=1.0)).mean()
    if average == "constant":
        return (term_BT * mask_BT).sum() / (len(rows) * LONGEST)
    return (term_BT * mask_BT).sum() / mask_BT.sum().clamp(min=1.0)


def our_gradients(rows, logp, algorithm):
    """The gradient of our loss by the log-probs of the rows' tokens, by rollout."""
    kept = averaged(chosen(rows, algorithm), algorithm, LONGEST)
    logp_N = torch.cat([logp[rows.index(next(r for r in rows if r.id == row.id))] for row in kept])
    logp_N = logp_N.detach().requires_grad_()
    mu_N = join([row.behaviour_logp_P for row in kept])
    terms = TokenTerms(
        logp_N, torch.ones_like(logp_N), mu_N, mu_N, join([row.advantage_P for row in kept]),
        join([row.weight_P for row in kept]), places_of(kept),
    )  # fmt: skip
    loss, _ = objective_of(algorithm)(terms, float(len(logp_N)))
    loss.backward()
    counts = [len(row.positions_P) for row in kept]
    return loss.item(), dict(zip([row.id for row in kept], logp_N.grad.split(counts), strict=True))


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_with_truncated_rollouts_has_the_gradient_of_trl(rollouts, loss, average):
    generator = torch.Generator().manual_seed(1)
    logp = [
        (torch.from_numpy(row.behaviour_logp_P) + 0.3 * torch.randn(len(row.positions_P), generator=generator))
        .clamp(max=-1e-3)
        .requires_grad_()
        for row in rollouts
    ]
    theirs = trl_loss(rollouts, logp, loss, average)
    theirs.backward()
    algorithm = c.Composition(loss=LOSSES[loss], average=average, mask_overlong=True)
    loss_here, ours = our_gradients(rollouts, logp, algorithm)
    assert loss_here == pytest.approx(theirs.item(), abs=1e-6)
    assert len(ours) == 13
    for row, logp_P in zip(rollouts, logp, strict=True):
        expected_P = torch.zeros_like(logp_P) if row.overlong else logp_P.grad
        torch.testing.assert_close(ours.get(row.id, torch.zeros_like(logp_P)), expected_P, atol=1e-7, rtol=1e-5)


def test_two_truncated_of_eight_stay_in_the_divisor(make_rows):
    """Eight rollouts of 3 tokens. Each token's share of the loss is 1/24, not 1/18; by the constant 24 it is 1/192."""
    rows = [replace(row, id=(0, 0, i), overlong=i < 2) for i, row in enumerate([make_rows(1)[0]] * 8)]
    tokens = len(rows[0].positions_P)
    for algorithm, share in (
        (c.Composition(average="rollouts", mask_overlong=True), 1 / (8 * tokens)),
        (c.DrGrpo(mask_overlong=True), 1 / (8 * 24)),
        (c.Composition(average="prompts", mask_overlong=True), 1 / (6 * tokens)),
        (c.Dapo(mask_overlong=True), 1 / (6 * tokens)),
    ):
        kept = averaged(chosen(rows, algorithm), algorithm, LONGEST)
        assert [row.id[2] for row in kept] == [2, 3, 4, 5, 6, 7]
        assert [row.weight_P[0] / (6 * tokens) for row in kept] == pytest.approx([share] * 6)


def test_a_task_of_truncated_rollouts_alone_is_one_of_the_tasks_that_are_averaged(make_rows):
    rows = [replace(row, id=(0, i // 2, i % 2), overlong=i > 1) for i, row in enumerate([make_rows(1)[0]] * 4)]
    algorithm = c.Composition(average="prompts", mask_overlong=True)
    kept = averaged(chosen(rows, algorithm), algorithm, LONGEST)
    assert [row.weight_P[0] for row in kept] == pytest.approx([0.5, 0.5])


def test_the_deviation_of_a_batch_has_truncated_rollouts_and_none_without_an_advantage(rollouts):
    algorithm = c.ScaleRl(mask_overlong=True)
    expected = np.std([row.advantage_P[0] for row in rollouts])
    found = normalised(chosen(rollouts, algorithm), algorithm)
    assert found[0].advantage_P[0] == pytest.approx(rollouts[0].advantage_P[0] / expected, rel=1e-4)
    faulted = [counted_only(rollouts[0], faulted=True), *rollouts[1:]]
    expected = np.std([row.advantage_P[0] for row in rollouts[1:]])
    assert normalised(faulted, algorithm)[1].advantage_P[0] == pytest.approx(
        rollouts[1].advantage_P[0] / expected, rel=1e-4
    )


def learner_of(model, algorithm, **train):
    config = msgspec.structs.replace(TrainConfig(lr=1e-2, warmup_steps=2), algorithm=algorithm, **train)
    return Learner(model, config, SamplingConfig(temperature=0.7, max_tokens=LONGEST), steps=10)


def weights_after(model, algorithm, rows, **train):
    learner = learner_of(model, algorithm, **train)
    metrics = learner.step(rows, 0)
    return {name: tensor.clone() for name, tensor in learner.state(1).tensors.items()}, metrics


@pytest.mark.parametrize("algorithm", [c.DrGrpo(), c.GspoNamed(), c.ScaleRl()], ids=lambda a: type(a).__name__)
def test_a_batch_without_truncated_rollouts_keeps_its_bytes(make_model, rollouts, algorithm):
    rows = [replace(row, overlong=False) for row in rollouts]
    plain, _ = weights_after(make_model(), algorithm, rows)
    masking = msgspec.structs.replace(algorithm, mask_overlong=True)
    found, _ = weights_after(make_model(), masking, chosen(rows, masking))
    assert all(torch.equal(found[name], tensor) for name, tensor in plain.items())


def test_the_mean_reward_has_truncated_rollouts_and_none_whose_environment_failed(make_model, rollouts):
    """As that of TRL with mask_truncated_completions."""
    rows = [replace(row, reward=float(i), env="one") for i, row in enumerate(rollouts)]
    masking = c.ScaleRl(mask_overlong=True)
    for fails in (False, True):
        first = counted_only(rows[0], faulted=True) if fails else rows[0]
        of_batch = chosen([first, *rows[1:]], masking)
        expected = np.mean([row.reward for row in rows[fails:]])
        _, metrics = weights_after(make_model(), masking, of_batch)
        assert metrics["reward_mean"] == mean_rewards(of_batch, ["one"])["one"] == pytest.approx(expected)
        assert metrics["rollouts"] == 13 - fails
        _, again = weights_after(make_model(), masking, [row_of(bytes_of(row)) for row in of_batch])
        assert again["reward_mean"] == metrics["reward_mean"]


def test_a_step_counts_and_computes_only_the_rows_that_it_learns_from(make_model, rollouts):
    algorithm = c.DrGrpo(mask_overlong=True)
    rows = chosen(rollouts, algorithm)
    found, metrics = weights_after(make_model(), algorithm, rows, minibatches=2)
    assert metrics["rollouts"] == 13 and metrics["updates"] == 2
    assert metrics["policy_tokens"] == sum(len(row.positions_P) for row in rows)
    assert metrics["reward_mean"] == pytest.approx(np.mean([row.reward for row in rows]))
    # What the journal keeps of the rows gives the same step again.
    again, _ = weights_after(make_model(), algorithm, [row_of(bytes_of(row)) for row in rows], minibatches=2)
    assert all(torch.equal(again[name], tensor) for name, tensor in found.items())
    alone, _ = weights_after(make_model(), algorithm, learned(rows), minibatches=2)
    assert not all(torch.equal(alone[name], tensor) for name, tensor in found.items())


def test_a_part_or_a_step_without_a_row_to_learn_from_changes_nothing(make_model, rollouts):
    algorithm = c.DrGrpo()
    rows = [counted_only(row) if row.id[1] else row for row in rollouts]
    _, metrics = weights_after(make_model(), algorithm, rows, minibatches=2)
    assert metrics["updates"] == 1
    _, metrics = weights_after(make_model(), algorithm, [counted_only(row) for row in rows])
    assert metrics["update_skipped"] == 1 and metrics["updates"] == 0


def test_no_model_reads_a_row_that_is_only_counted_but_a_reward_model_scores_truncated_ones(make_model, rollouts):
    model = make_model()
    rows = chosen(rollouts, c.DrGrpo(mask_overlong=True))
    absent = [i for i, row in enumerate(rows) if row.counts_only]
    referred = KLReference(model, None, 0.7, 256)(rows)
    assert [i for i, row in enumerate(referred) if row.reference_logp_P is None] == absent == [1, 6, 11]
    taught, _ = Teacher(model, 0.7, 256)(rows, lambda asked: [np.zeros(len(row.positions_P)) for row in asked])
    assert [i for i, row in enumerate(taught) if row is rows[i]] == absent
    valued = TransformerWithValueHead(model.spec)
    with torch.no_grad():
        for parameter in valued.parameters():
            parameter.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(0))
    judged, _ = RewardModel(valued, 256)([*rows[:7], counted_only(rows[7], faulted=True)], lambda _: [])
    A_I = [row.advantage_P[0] for row in judged[:7]]
    assert sum(A_I) == pytest.approx(0.0, abs=1e-5) and len(set(A_I)) == 7
    assert not len(judged[7].advantage_P)
