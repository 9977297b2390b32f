"""Weights and masks between the policy that learns and the one that sampled, against numbers worked by hand."""

import math

import pytest
import torch

from shoal.algos.corrections import icepop_weights, row_mask, truncated_row_weights, truncated_weights

# Three rows: ratios 2 and 1/2 (product 1), 1.1 and 1.1 (product 1.21), 4 and 2 (product 8).
K, ROW = [2.0, 0.5, 1.1, 1.1, 4.0, 2.0], torch.tensor([0, 0, 1, 1, 2, 2])
OLD = torch.tensor(K, dtype=torch.float64).log() - 3.0
MU = torch.full((6,), -3.0, dtype=torch.float64)


def test_icepop_drops_tokens_outside_the_band_and_weighs_the_others():
    w_N, cut_N = icepop_weights(OLD, MU, least=0.6, most=3.0)
    assert w_N.tolist() == pytest.approx([2.0, 0.0, 1.1, 1.1, 0.0, 2.0])
    assert cut_N.tolist() == [False, True, False, False, True, False]


def test_a_sequence_mask_drops_rows_by_their_product():
    w_N, cut_N = row_mask(OLD, MU, ROW, least=0.0, most=3.0, geometric=False)
    assert w_N.tolist() == [1, 1, 1, 1, 0, 0] and cut_N.tolist() == [False] * 4 + [True] * 2
    # The product of 1 is within a narrow band from below, too; that of 1.21 is not.
    assert row_mask(OLD, MU, ROW, least=0.9, most=1.2, geometric=False).w_N.tolist() == [1, 1, 0, 0, 0, 0]


def test_a_geometric_mask_drops_rows_by_their_mean():
    # Means 1, 1.1, sqrt(8) = 2.83.
    assert row_mask(OLD, MU, ROW, least=0.99, most=1.2, geometric=True).w_N.tolist() == [1, 1, 1, 1, 0, 0]
    assert row_mask(OLD, MU, ROW, least=0.99, most=1.01, geometric=True).w_N.tolist() == [1, 1, 0, 0, 0, 0]
    assert row_mask(MU, OLD, ROW, least=0.5, most=1.2, geometric=True).w_N.tolist() == [1, 1, 1, 1, 0, 0]


def test_a_row_has_one_truncated_weight():
    w_N, cut_N = truncated_row_weights(OLD, MU, ROW, C=2.0)
    assert w_N.tolist() == pytest.approx([1, 1, 1.21, 1.21, 2, 2]) and cut_N.tolist() == [False] * 4 + [True] * 2


@pytest.mark.parametrize("gap", [1e30, -1e30, 500.0, math.log(2)])
def test_no_claim_makes_a_weight_infinite(gap):
    mu_logp_N = OLD - gap
    for w_N, _ in (
        icepop_weights(OLD, mu_logp_N, least=0.5, most=5.0),
        row_mask(OLD, mu_logp_N, ROW, least=0.0, most=3.0, geometric=False),
        row_mask(OLD, mu_logp_N, ROW, least=0.99, most=1.01, geometric=True),
        truncated_row_weights(OLD, mu_logp_N, ROW, C=2.0),
        truncated_weights(OLD, mu_logp_N, C=2.0),
    ):
        assert torch.isfinite(w_N).all() and (w_N >= 0).all() and (w_N <= 5.0).all()


def test_no_gradient_flows_through_weights():
    old_logp_N = OLD.clone().requires_grad_()
    assert not icepop_weights(old_logp_N, MU, least=0.5, most=5.0).w_N.requires_grad
    assert not truncated_row_weights(old_logp_N, MU, ROW, C=2.0).w_N.requires_grad
    assert not truncated_weights(old_logp_N, MU, C=2.0).w_N.requires_grad


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def test_weights_are_ratios_up_to_the_largest():
    # pi_old / mu: 0.2 / 0.4 = 0.5;  0.3 / 0.3 = 1;  0.6 / 0.4 = 1.5;  0.8 / 0.2 = 4, cut to 2.
    w_N, cut_N = truncated_weights(logs(0.2, 0.3, 0.6, 0.8), logs(0.4, 0.3, 0.4, 0.2), C=2.0)
    assert w_N.tolist() == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert cut_N.tolist() == [False, False, False, True]
