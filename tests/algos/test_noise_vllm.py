"""The torch noise of vLLM's families equals the numpy reference bit for bit, however many calls it takes."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.algos.noise.philox import seed_words
from shoal.algos.noise.vllm import keyed_gumbel_32, keyed_gumbel_64, murmur_gumbel_32, murmur_gumbel_53
from shoal.protocol import noise
from shoal.protocol.seed_chain import sample_seed

PAIRS = [
    (keyed_gumbel_32, noise.keyed_gumbel_32), (keyed_gumbel_64, noise.keyed_gumbel_64),
    (murmur_gumbel_32, noise.murmur_gumbel_32), (murmur_gumbel_53, noise.murmur_gumbel_53),
]  # fmt: skip
SEEDS = [sample_seed(b"test", index) for index in range(200)]


@pytest.mark.parametrize(("fast", "reference"), PAIRS)
def test_a_million_values_equal_the_reference_bit_for_bit(
    fast: Callable[[Tensor, Tensor, int], Tensor], reference: noise.Noise
) -> None:
    positions_N = np.arange(1, 201) * 2099
    expected_NV = reference(SEEDS, positions_N, 6001)
    noise_NV = fast(seed_words(SEEDS), torch.from_numpy(positions_N), 6001)
    assert noise_NV.dtype == torch.float32 and expected_NV.size > 1_000_000
    assert (noise_NV.numpy().view(np.uint32) == expected_NV.view(np.uint32)).all()


@pytest.mark.parametrize(("fast", "reference"), PAIRS)
def test_one_call_for_many_positions_equals_one_call_for_each(
    fast: Callable[[Tensor, Tensor, int], Tensor], reference: noise.Noise
) -> None:
    words_N4 = seed_words(SEEDS[:4])
    ahead = fast(words_N4.repeat(3, 1), torch.arange(3).repeat_interleave(4) + 10, 64).view(3, 4, 64)
    for step in range(3):
        assert torch.equal(ahead[step], fast(words_N4, torch.full((4,), 10 + step), 64))
