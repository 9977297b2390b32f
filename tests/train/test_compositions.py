"""Steps with composed algorithms: the same gradient in any micro-batches, and averages over the whole batch."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from shoal.config import SamplingConfig, TrainConfig
from shoal.protocol import algorithm_config as c
from shoal.protocol.algorithm_config import narrowest_bound
from shoal.train.learner import Learner
from shoal.train.loss import TokenTerms, averaged, normalised, objective_of

CONFIG = TrainConfig(lr=1e-2, warmup_steps=2, microbatch_tokens=96)


def learner_of(model, algorithm, **train):
    config = msgspec.structs.replace(CONFIG, algorithm=algorithm, **train)
    return Learner(model, config, SamplingConfig(temperature=0.7, max_tokens=24), steps=10)


def gradients_of(learner, rows):
    """The gradient of the step's first update, and its metrics."""
    captured = {}

    def capture(lr, version):
        captured.update({name: p.grad.clone() for name, p in learner.model.named_parameters()})
        learner.model.zero_grad()
        return 0.0

    learner._update = capture
    return captured, learner.step(rows, 0)


@pytest.fixture
def grouped(make_rows):
    """Twelve rows of three groups of four rollouts of different lengths, sampled by a policy near the one that learns."""
    return [replace(row, id=(0, i // 4, i % 4)) for i, row in enumerate(make_rows(12))]


KINDS = [*c.NAMED, c.Composition]
CORRECTED = c.Ppo(
    loss=c.Gspo(0.2, 0.3), average="rollouts", corrections=(c.IcePop(0.2, 9.0), c.GeometricMask(0.5, 3.0)),
    entropy_bonus=0.01,
)  # fmt: skip


@pytest.mark.parametrize("algorithm", [*(kind() for kind in KINDS), CORRECTED], ids=lambda a: type(a).__name__)
def test_a_batch_has_the_same_gradient_in_any_micro_batches(make_model, grouped, algorithm):
    whole, metrics = gradients_of(learner_of(make_model(), algorithm, microbatch_tokens=4096), grouped)
    assert any(gradient.any() for gradient in whole.values())
    for train in ({"microbatch_tokens": 24}, {"microbatch_tokens": 64, "packing": "flat"}):
        cut, others = gradients_of(learner_of(make_model(), algorithm, **train), grouped)
        for name, gradient in whole.items():
            torch.testing.assert_close(cut[name], gradient, atol=2e-6, rtol=1e-3)
        assert others["loss"] == pytest.approx(metrics["loss"], abs=1e-5)
        assert others["clip_share"] == pytest.approx(metrics["clip_share"])


def test_weights_of_a_batch_are_those_of_its_average(grouped):
    tokens = np.array([len(row.positions_P) for row in grouped])
    assert averaged(grouped, c.Dapo(), 24) is grouped
    mean = averaged(grouped, c.GspoNamed(), 24)
    assert [row.weight_P[0] for row in mean] == pytest.approx((tokens.sum() / (12 * tokens)).tolist())
    constant = averaged(grouped, c.DrGrpo(), 24)
    assert [row.weight_P[0] for row in constant] == pytest.approx([tokens.sum() / (12 * 24)] * 12)
    given = averaged(grouped, c.DrGrpo(divisor_tokens=6.0), 24)
    assert given[0].weight_P[0] == pytest.approx(4 * constant[0].weight_P[0])


def test_rows_of_one_rollout_are_averaged_together(grouped):
    rows = [replace(row, id=(0, 0, i // 2)) for i, row in enumerate(grouped[:4])]
    weights = [row.weight_P[0] for row in averaged(rows, c.GspoNamed(), 24)]
    assert weights[0] == weights[1] and weights[2] == weights[3]
    first = len(rows[0].positions_P) + len(rows[1].positions_P)
    assert weights[0] == pytest.approx(sum(len(row.positions_P) for row in rows) / (2 * first))


def test_advantages_of_a_batch_have_a_deviation_of_one(grouped):
    assert normalised(grouped, c.Dapo()) is grouped
    found = [row.advantage_P[0] for row in normalised(grouped, c.ScaleRl())]
    assert np.std(found) == pytest.approx(1.0, abs=1e-5)
    assert np.sign(found).tolist() == np.sign([row.advantage_P[0] for row in grouped]).tolist()


def terms_of(old, mu):
    """Two rows of two tokens, where the policy that learns is where the step began."""
    old_N, mu_N, ones_N = torch.tensor(old), torch.tensor(mu), torch.ones(4)
    return TokenTerms(old_N.clone().requires_grad_(), ones_N, old_N, mu_N, ones_N, ones_N, torch.tensor([0, 0, 1, 1]))


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("algorithm", [kind() for kind in KINDS], ids=lambda a: type(a).__name__)
def test_no_claim_counts_more_than_five_times_unless_the_trainer_takes_none(algorithm, advantage):
    terms = replace(terms_of([-1.0] * 4, [-1e30, -1.0, -1.0, -1.0]), advantage_N=torch.full((4,), advantage))
    loss, _ = objective_of(algorithm)(terms, 1.0)
    loss.backward()
    assert narrowest_bound(algorithm) == 0 or terms.logp_N.grad.abs().max() < 5.1


def test_corrections_multiply_and_leave_the_regularisers_alone():
    algorithm = c.Ppo(corrections=(c.Truncate(2.0), c.GeometricMask(0.5, 2.0)), squared_ratio=0.5)
    # Ratios e and 1 in the first row, whose mean e^0.5 = 1.6 is kept; e^2 and 1 in the second, whose mean e is not.
    terms = terms_of([-1.0, -1.0, -1.0, -1.0], [-2.0, -1.0, -3.0, -1.0])
    loss, figures = objective_of(algorithm)(terms, 4.0)
    loss.backward()
    # Of the policy -w r A / 4 with w = 2, 1, 0, 0; of the square 0.5 * 2 log r / 4 with log r = 1, 0, 2, 0.
    assert terms.logp_N.grad.tolist() == pytest.approx([-0.5 + 0.25, -0.25, 0.5, 0.0])
    assert figures["truncated_share"].tolist() == [True, False, True, False]
    assert figures["masked_share"].tolist() == [False, False, True, True]


def test_the_ratio_is_to_the_policy_that_the_run_file_names():
    for ratio_to, clipped in (("behaviour", [True, False, True, False]), ("old", [False] * 4)):
        _, figures = objective_of(c.Composition(ratio_to=ratio_to))(terms_of([-1.0] * 4, [-2.0, -1.0, -3.0, -1.0]), 4.0)
        assert figures["clip_share"].tolist() == clipped


@pytest.mark.parametrize(("target", "share"), [(0.0, 1.0), (100.0, 1.0), (1.0, 0.0)])
def test_a_step_has_as_much_of_the_entropy_bonus_as_its_batch_lacks_entropy(make_model, grouped, target, share):
    """The rows were sampled at about 4.2 nats a token."""
    controlled, _ = gradients_of(learner_of(make_model(), c.Dapo(entropy_bonus=0.5, entropy_target=target)), grouped)
    expected, _ = gradients_of(learner_of(make_model(), c.Dapo(entropy_bonus=0.5 * share)), grouped)
    for name, gradient in expected.items():
        torch.testing.assert_close(controlled[name], gradient)
