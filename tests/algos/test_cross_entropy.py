"""Cross entropy against a number worked by hand."""

import math

import pytest
import torch

from shoal.algos.losses import sft_loss


def test_loss_equals_the_number_worked_by_hand():
    # p = 1/2 with weight 1 and 1/4 with weight 3, of a batch of 14 tokens: (ln 2 + 3 ln 4) / 14 = ln 2 / 2
    logp_N = torch.tensor([0.5, 0.25]).log()
    assert sft_loss(logp_N, torch.tensor([1.0, 3.0]), num_tokens=14).item() == pytest.approx(math.log(2) / 2)
