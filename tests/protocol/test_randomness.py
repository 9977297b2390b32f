"""The run's randomness: the chain of secrets, seeds of slots and samples, and Philox against its published vectors."""

import numpy as np
import pytest

from shoal.protocol.randomness import (
    SecretChain,
    gumbel,
    link_follows,
    noise_words,
    philox,
    sample_seed,
    slot_seed,
    uniform,
)

ROOT, LINK = "ab" * 32, b"\x07" * 32
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


def test_each_link_hashes_to_the_one_before_and_the_end_is_published() -> None:
    chain = SecretChain(SEED, "weights", length=20)
    links = chain.links()
    assert len(links) == 21 and links[0] == chain.end()
    assert all(link_follows("weights", links[v + 1], links[v]) for v in range(20))
    assert link_follows("weights", links[20], links[0], steps=20)


def test_a_link_of_another_purpose_seed_or_place_does_not_follow() -> None:
    links = SecretChain(SEED, "weights", length=5).links()
    assert not link_follows("audit", links[1], links[0])
    assert not link_follows("weights", links[2], links[0])
    assert not link_follows("weights", SecretChain(SEED[::-1], "weights", length=5).links()[1], links[0])
    assert SecretChain(SEED, "audit", length=5).end() != links[0]


def test_slot_seed_changes_with_each_of_its_parts() -> None:
    seeds = {
        slot_seed("run", 3, ROOT, LINK, 5),
        slot_seed("other", 3, ROOT, LINK, 5),
        slot_seed("run", 4, ROOT, LINK, 5),
        slot_seed("run", 3, "cd" * 32, LINK, 5),
        slot_seed("run", 3, ROOT, b"\x08" * 32, 5),
        slot_seed("run", 3, ROOT, LINK, 6),
    }
    assert len(seeds) == 6 and all(len(seed) == 32 for seed in seeds)


def test_each_sample_of_a_group_has_its_own_seed() -> None:
    assert len({sample_seed(SEED, index) for index in range(1000)}) == 1000


def test_uniform_is_in_range_and_depends_on_purpose_and_parts() -> None:
    draws = [uniform("audit", bytes([i])) for i in range(200)]
    assert all(0 <= draw < 1 for draw in draws) and 0.4 < float(np.mean(draws)) < 0.6
    assert uniform("audit", b"x") != uniform("recheck", b"x")
    assert uniform("audit", b"x", b"y") != uniform("audit", b"xy")


def test_noise_is_philox_laid_out_as_documented() -> None:
    k0, k1, c2, c3 = noise_words(SEED)
    assert [k0, k1] == [0x03020100, 0x07060504]
    words = philox(np.array([2, 77, c2, c3], np.uint64), np.array([k0, k1], np.uint64))
    expected = -np.log(-np.log((words.astype(np.float64) + 0.5) * 2.0**-32))
    assert gumbel([SEED], np.array([77]), 12)[0, 8:].tolist() == expected.astype(np.float32).tolist()


def test_noise_is_finite_and_has_the_mean_and_variance_of_gumbel() -> None:
    noise = gumbel([sample_seed(SEED, i) for i in range(100)], np.arange(100), 4001)
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - 0.5772) < 0.01 and abs(noise.var() - np.pi**2 / 6) < 0.02


def test_noise_of_a_token_does_not_depend_on_the_size_of_the_vocabulary_or_its_neighbours() -> None:
    seeds = [sample_seed(SEED, i) for i in range(3)]
    together = gumbel(seeds, np.array([5, 6, 7]), 50)
    assert (gumbel(seeds[1:2], np.array([6]), 17)[0] == together[1, :17]).all()
