"""The noise of seeded sampling: Philox against its published vectors, and each family against its own description."""

import numpy as np
import pytest

from shoal.protocol.noise import (
    MURMUR53_DOMAIN,
    NOISES,
    gumbel,
    keyed_gumbel_32,
    keyed_gumbel_64,
    murmur3,
    murmur_gumbel_32,
    murmur_gumbel_53,
    noise_words,
    philox,
)
from shoal.protocol.seed_chain import sample_seed

SEED = bytes(range(32))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter: list[int], key: list[int], expected: list[int]) -> None:
    assert philox(np.array(counter, np.uint64), np.array(key, np.uint64)).tolist() == expected


def test_noise_is_philox_laid_out_as_documented() -> None:
    k0, k1, c2, c3 = noise_words(SEED)
    assert [k0, k1] == [0x03020100, 0x07060504]
    words = philox(np.array([2, 77, c2, c3], np.uint64), np.array([k0, k1], np.uint64))
    expected = -np.log(-np.log((words.astype(np.float64) + 0.5) * 2.0**-32))
    assert gumbel([SEED], np.array([77]), 12)[0, 8:].tolist() == expected.astype(np.float32).tolist()


@pytest.mark.parametrize("name", NOISES)
def test_noise_of_a_token_does_not_depend_on_the_size_of_the_vocabulary_or_its_neighbours(name: str) -> None:
    seeds = [sample_seed(SEED, i) for i in range(3)]
    together = NOISES[name](seeds, np.array([5, 6, 7]), 50)
    assert (NOISES[name](seeds[1:2], np.array([6]), 17)[0] == together[1, :17]).all()


# Triton 3.9's rand (at least its factor), and the first two words of its randint4x, for seeds with these first 8 bytes at
# offsets of position - 1.
TRITON = {
    (0, 1, 0): (0.008173244073987007, 17551910, 449001812),
    (1, 2, 1): (0.7803512215614319, 2619175682, 1085846823),
    (-1, 1000, 63): (0.44058260321617126, 3348823263, 126637791),
    (81985529216486895, 40960, 4095): (0.905262291431427, 2350931198, 2051685566),
    (-9223372036854775808, 131072, 1234): (0.3501603305339813, 751963643, 2282833992),
}


@pytest.mark.parametrize(("seed", "position", "entry"), TRITON)
def test_keyed_noise_has_the_words_of_triton(seed: int, position: int, entry: int) -> None:
    uniform_32, low, high = TRITON[seed, position, entry]
    seeds, positions = [seed.to_bytes(8, "little", signed=True) + bytes(24)], np.array([position])
    of_32 = keyed_gumbel_32(seeds, positions, entry + 1)[0, entry]
    of_64 = keyed_gumbel_64(seeds, positions, entry + 1)[0, entry]
    assert of_32 == np.float32(-np.log(-np.log1p(-float(np.float32(uniform_32)))))
    assert of_64 == np.float32(-np.log(-np.log(((high << 32) + low) * 2.0**-64)))


# vLLM 0.32's hashes of seeds, positions - 1 and entries, and what its sampler makes of them: noise in float32 and float64.
# `tests/engine/test_vllm_sampler.py` asks that vLLM again.
HASHED = {
    (0, 1, 0): (2167721464, 3532314978, 0.3529449701309204, 1.6322435774974817),
    (1, 2, 1): (2322861649, 2843433602, 0.25058919191360474, 0.8856848952226959),
    (-1, 1000, 63): (1044610890, 1611448887, 1.2776951789855957, 0.019886189348364978),
    (81985529216486895, 40960, 4095): (703741460, 3058342727, 1.7206470966339111, 1.08007291732085),
    (-9223372036854775808, 131072, 1234): (457261231, 459058198, 2.184187650680542, -0.804698494720534),
    (9223372036854775807, 1048577, 151935): (2614395603, 3820065398, 0.06367499381303787, 2.144074800571959),
}


@pytest.mark.parametrize(("seed", "position", "entry"), HASHED)
def test_hashed_noise_has_the_words_of_vllm(seed: int, position: int, entry: int) -> None:
    low, high, in_32, in_64 = HASHED[seed, position, entry]
    words = [np.array(word, np.uint64) for word in (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, position - 1, entry)]
    assert [int(murmur3(words, domain)) for domain in (0, MURMUR53_DOMAIN)] == [low, high]
    seeds, positions = [seed.to_bytes(8, "little", signed=True) + bytes(24)], np.array([position])
    of_32 = murmur_gumbel_32(seeds, positions, entry + 1)[0, entry]
    of_53 = murmur_gumbel_53(seeds, positions, entry + 1)[0, entry]
    assert of_32 == np.float32(-np.log(-np.log1p(-float(np.float32((low + 0.5) / 2**32)))))
    assert of_53 == np.float32(-np.log(-np.log((((high << 32 | low) >> 11) + 0.5) / 2**53)))
    assert abs(of_32 - in_32) < 3e-6 and abs(of_53 - in_64) < 1e-6


def test_murmur3_gives_its_known_answers() -> None:
    """Of the bytes `test`, of 0x87654321, and of nothing, with the seeds that others publish."""
    words = [np.array(int.from_bytes(b"test", "little"), np.uint64)]
    assert [int(murmur3(words, seed)) for seed in (0, 0x9747B28C)] == [0xBA6BD213, 0x704B81DC]
    assert int(murmur3([np.array(0x87654321, np.uint64)], 0)) == 0xF55B516B
