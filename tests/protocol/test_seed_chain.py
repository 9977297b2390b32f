"""The run's randomness: the chain of secrets, and the seeds of slots and samples."""

import numpy as np

from shoal.protocol.seed_chain import SecretChain, link_follows, sample_seed, slot_seed, uniform

ROOT, LINK = "ab" * 32, b"\x07" * 32
SEED = bytes(range(32))


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
