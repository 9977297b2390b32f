"""The torch noise equals the numpy reference bit for bit, however many calls it takes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.algos.noise.philox import _philox_numpy, _philox_torch, gumbel, seed_words
from shoal.algos.noise.vllm import keyed_gumbel_32, keyed_gumbel_64, murmur_gumbel_32, murmur_gumbel_53
from shoal.protocol import noise
from shoal.protocol.seed_chain import sample_seed


def _seeds(count: int) -> list[bytes]:
    return [sample_seed(b"test", index) for index in range(count)]


@pytest.mark.parametrize(
    ("fast", "reference"),
    [
        (gumbel, noise.gumbel),
        (keyed_gumbel_32, noise.keyed_gumbel_32),
        (keyed_gumbel_64, noise.keyed_gumbel_64),
        (murmur_gumbel_32, noise.murmur_gumbel_32),
        (murmur_gumbel_53, noise.murmur_gumbel_53),
    ],
)
def test_a_million_values_equal_the_reference_bit_for_bit(fast, reference) -> None:
    seeds, positions_N = _seeds(200), np.arange(1, 201) * 2099
    expected_NV = reference(seeds, positions_N, 6001)
    noise_NV = fast(seed_words(seeds), torch.from_numpy(positions_N), 6001)
    assert noise_NV.dtype == torch.float32 and expected_NV.size > 1_000_000
    assert (noise_NV.numpy().view(np.uint32) == expected_NV.view(np.uint32)).all()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=4),
    st.integers(0, 2**32 - 1),
    st.integers(1, 70),
)
def test_any_seed_position_and_vocabulary_gives_the_bits_of_the_reference(
    seeds: list[bytes], position: int, vocabulary: int
) -> None:
    positions_N = np.full(len(seeds), position, dtype=np.int64)
    expected_NV = noise.gumbel(seeds, positions_N, vocabulary)
    assert (gumbel(seed_words(seeds), torch.from_numpy(positions_N), vocabulary).numpy() == expected_NV).all()


def test_philox_in_torch_gives_the_words_of_philox_in_numpy() -> None:
    words_N4, positions_N = seed_words(_seeds(64)), torch.arange(64) * 2099
    for quads in (1, 2, 1501):
        arguments = words_N4, positions_N, quads
        assert torch.equal(_philox_torch(*arguments), _philox_numpy(*arguments))


def test_the_extreme_words_give_finite_noise() -> None:
    for word in (0, 2**32 - 1):
        u = (np.float64(word) + 0.5) * 2.0**-32
        assert np.isfinite(np.float32(-np.log(-np.log(u))))
