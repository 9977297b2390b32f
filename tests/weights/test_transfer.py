"""Several sources at once, in simulated time: who is asked, who is left, who is blamed, and what it costs."""

import random
from pathlib import Path

import pytest

from shoal.errors import PeerError
from shoal.weights.fetch import scheduler, transfer
from tests.weights.simulated import PART_BYTES, Link, Server, Version

KB = 1000
CHUNK = 16 << 10


@pytest.fixture
def version(tmp_path) -> Version:
    return Version(tmp_path / "v", 400, CHUNK)


def flipped(chunk: bytes) -> bytes:
    return bytes([chunk[0] ^ 1]) + chunk[1:]


def sent(sources: list[Server]) -> int:
    return sum(source.sent for source in sources)


def test_sources_of_one_rate_are_all_used_to_the_full(version):
    sources = [Server(name, version.held, Link(400 * KB)) for name in "abc"]
    assert version.fetch(sources).is_right and version.blamed == []
    assert version.took_s < 1.15 * version.size / (3 * 400 * KB)
    assert sent(sources) <= 1.02 * version.size


def test_a_faster_source_gives_more(version):
    fast, slow = Server("fast", version.held, Link(800 * KB)), Server("slow", version.held, Link(100 * KB))
    version.fetch([fast, slow])
    assert version.is_right and fast.sent > 4 * slow.sent
    assert version.took_s < 1.15 * version.size / (900 * KB)


def test_a_source_far_away_is_kept_busy(version):
    """Its first byte takes longer than a chunk, so it needs several requests at one time."""
    far = Server("far", version.held, Link(400 * KB), latency_s=0.1)
    assert version.fetch([far]).is_right and version.took_s < 1.25 * version.size / (400 * KB)


def test_a_lone_source_at_one_megabit_ends_with_the_largest_chunks(tmp_path):
    """8 MiB at 1 Mb/s take 67 s: no deadline of a chunk may leave the only source."""
    version = Version(tmp_path / "v", 3, 8 << 20)
    source = Server("only", version.held, Link(125 * KB))
    assert version.fetch([source]).is_right and version.blamed == []
    assert source.sent == version.size and version.took_s < 1.02 * version.size / (125 * KB)
    assert any("mb_per_s=0.12" in line and "left_s=" in line for line in version.told)


def test_a_client_at_one_megabit_keeps_all_honest_sources(tmp_path):
    """Its own line is the limit, so all sources look slow to it."""
    version, downlink = Version(tmp_path / "v", 24, 1 << 20), Link(125 * KB)
    sources = [Server(name, version.held, Link(10_000 * KB), downlink) for name in "abcd"]
    assert version.fetch(sources).is_right and version.blamed == []
    assert version.took_s < 1.05 * version.size / (125 * KB) and sent(sources) <= 1.02 * version.size


def test_a_lone_source_that_trickles_is_not_left(tmp_path):
    version = Version(tmp_path / "v", 4, CHUNK)
    source = Server("only", version.held, Link(PART_BYTES / 9))
    assert version.fetch([source]).is_right and version.blamed == [] and source.sent == version.size


def test_a_chunk_that_stalls_goes_on_elsewhere_from_its_next_byte(tmp_path):
    version = Version(tmp_path / "v", 8, 64 * CHUNK)
    stuck = Server("stuck", version.held, Link(400 * KB), stalls_at=lambda count: 500_000 if count == 2 else None)
    other = Server("other", version.held, Link(400 * KB))
    version.fetch([stuck, other])
    assert version.is_right and sent([stuck, other]) <= 1.01 * version.size
    assert any(start > 400_000 for _, _, start in other.asked)


def test_a_lone_source_that_stalls_is_asked_again(tmp_path):
    version = Version(tmp_path / "v", 8, CHUNK)
    source = Server("only", version.held, Link(400 * KB), stalls_at=lambda count: 5000 if count == 3 else None)
    assert version.fetch([source]).is_right and source.sent == version.size
    assert [reason.partition(":")[0] for _, reason in version.blamed] == ["sent nothing for 20 s"]


def test_a_source_that_cuts_every_answer_is_used_as_far_as_it_goes(tmp_path):
    version = Version(tmp_path / "v", 8, CHUNK)
    source = Server("only", version.held, Link(400 * KB), cuts_at=lambda count: 5000)
    assert version.fetch([source]).is_right and source.sent == version.size


def test_a_source_that_dies_and_comes_back_is_found_again(version):
    source = Server("only", version.held, Link(400 * KB), is_up=lambda time: not 3 < time < 33)
    assert version.fetch([source]).is_right
    assert version.took_s < 33 + 30 + version.size / (400 * KB) and sent([source]) == version.size


def test_a_source_that_is_gone_ends_the_fetch_after_patience(version):
    source = Server("gone", version.held, Link(400 * KB), is_up=lambda time: time < 3)
    with pytest.raises(PeerError, match=r"chunks not fetched: gone: connection refused"):
        version.fetch([source])
    assert 3 + transfer.PATIENCE_S <= version.took_s < 3 + transfer.PATIENCE_S + 31
    assert len([time for time, _, _ in source.asked if time > 3]) < 12


def test_a_source_that_got_better_is_found_again(tmp_path):
    version = Version(tmp_path / "v", 2000, CHUNK)
    first = Server("first", version.held, Link(400 * KB))
    late = Server("late", version.held, Link(lambda time: 2 * KB if time < 20 else 2000 * KB))
    version.fetch([first, late])
    assert version.is_right and late.sent > 0.5 * version.size


def test_fast_sources_are_found_among_many_slow_ones(version):
    slow = [Server(f"slow-{i}", version.held, Link(KB / 2)) for i in range(12)]
    fast = [Server(f"fast-{i}", version.held, Link(400 * KB)) for i in range(2)]
    version.fetch([*slow, *fast])
    assert version.is_right and version.took_s < 60 and sent(fast) > 0.9 * version.size


def test_the_last_chunk_of_a_slow_source_is_asked_of_another(tmp_path):
    """The source sends at a tenth of its rate from the middle on, so its last chunks are late by its own measure."""
    version = Version(tmp_path / "v", 40, 64 * CHUNK)
    fades = Server("fades", version.held, Link(lambda time: 800 * KB if time < 20 else 20 * KB))
    steady = Server("steady", version.held, Link(800 * KB))
    version.fetch([fades, steady])
    assert version.is_right and sent([fades, steady]) <= 1.02 * version.size
    assert version.took_s < 1.2 * (20 + (version.size - 2 * 20 * 800 * KB) / (820 * KB))


@pytest.mark.parametrize("share", [transfer.DUPLICATE_SHARE, 0.0])
def test_sources_that_begin_well_and_then_trickle_hold_nothing_up(share, version, monkeypatch):
    """They never fall silent, and each holds several chunks. Also when no more bytes may come twice."""
    monkeypatch.setattr(transfer, "DUPLICATE_SHARE", share)
    bait = [Server(f"bait-{i}", version.held, Link(lambda time: 400 * KB if time < 2 else 200)) for i in range(4)]
    honest = Server("honest", version.held, Link(200 * KB))
    version.fetch([*bait, honest])
    rest_s = (version.size - sum(source.sent for source in bait)) / (200 * KB)
    assert version.is_right and version.took_s < 1.2 * rest_s + 5
    assert sent([*bait, honest]) <= (1 + share) * version.size + len(bait) * PART_BYTES


def test_bytes_that_come_twice_are_few_even_when_the_first_source_recovers(tmp_path):
    for seed in range(20):
        version = Version(tmp_path / f"v{seed}", 6, 16 * CHUNK, seed)
        rng = random.Random(seed)
        rates = [rng.choice([20, 100, 400]) * KB for _ in range(200)]
        fickle = Server("fickle", version.held, Link(lambda time, rates=rates: rates[int(time) % 200]))
        steady = Server("steady", version.held, Link(150 * KB))
        version.fetch([fickle, steady], seed)
        assert version.is_right
        assert sent([fickle, steady]) <= 1.02 * version.size + 2 * PART_BYTES


def test_bad_bytes_that_another_source_completed_are_charged_to_their_sender(version):
    """The attack: send wrong bytes, stop, and let the source that goes on be blamed for the chunk."""
    framer = Server(
        "framer", version.held, Link(400 * KB), spoil=lambda chunk, count: flipped(chunk), cuts_at=lambda count: 8000
    )
    honest = [Server(name, version.held, Link(400 * KB)) for name in "ab"]
    version.fetch([framer, *honest])
    assert version.is_right and {name for name, _ in version.blamed} == {"framer"}
    assert any("wrong bytes" in reason for _, reason in version.blamed)


def test_a_framer_that_is_asked_to_the_end_is_left_for_good(version):
    framer = Server(
        "framer", version.held, Link(4000 * KB), spoil=lambda chunk, count: flipped(chunk), cuts_at=lambda count: 8000
    )
    honest = Server("honest", version.held, Link(20 * KB))
    version.fetch([framer, honest])
    assert version.is_right and {name for name, _ in version.blamed} == {"framer"}
    assert version.blamed[-1][1].endswith("not asked again") and len(framer.asked) <= 6


def test_a_doubted_chunk_is_taken_from_one_source_alone(tmp_path):
    """Else two that both begin chunks with wrong bytes could spoil it again and again for the one that is honest."""
    for seed in range(20):
        version = Version(tmp_path / str(seed), 1, CHUNK)
        framers = [
            Server(f"f{i}", version.held, Link(4000 * KB), spoil=lambda c, n: flipped(c), cuts_at=lambda count: 8000)
            for i in range(6)
        ]
        honest = Server("honest", version.held, Link(4000 * KB))
        version.fetch([*framers, honest], seed)
        assert version.is_right and len([start for _, _, start in honest.asked if start]) <= 1


def test_more_bytes_than_a_chunk_has_are_not_kept(version):
    endless = Server("endless", version.held, Link(4000 * KB), spoil=lambda chunk, count: chunk + bytes(10 << 20))
    honest = Server("honest", version.held, Link(400 * KB))
    version.fetch([endless, honest])
    assert version.is_right and {name for name, _ in version.blamed} == {"endless"}
    assert endless.sent <= 2 * (CHUNK + PART_BYTES)


def test_all_sources_bad_but_one(version):
    bad = [
        Server("corrupt", version.held, Link(400 * KB), spoil=lambda chunk, count: flipped(chunk)),
        Server("short", version.held, Link(400 * KB), spoil=lambda chunk, count: chunk[:-1]),
        Server("endless", version.held, Link(400 * KB), spoil=lambda chunk, count: chunk * 2),
        Server("stuck", version.held, Link(400 * KB), stalls_at=lambda count: 0),
        Server("cut", version.held, Link(400 * KB), cuts_at=lambda count: 0),
        Server("down", version.held, Link(400 * KB), is_up=lambda time: False),
        Server("sometimes", version.held, Link(400 * KB), spoil=lambda c, n: flipped(c) if n % 7 == 3 else c),
    ]
    good = Server("good", version.held, Link(100 * KB))
    version.fetch([*bad, good])
    assert version.is_right and "good" not in {name for name, _ in version.blamed}
    assert version.took_s < 1.3 * version.size / (100 * KB)


def test_the_same_seed_asks_the_same_sources_for_the_same_chunks(tmp_path):
    def asked(folder: str, seed: int) -> list[list[tuple[float, str, int]]]:
        version = Version(tmp_path / folder, 50, CHUNK)
        sources = [Server(name, version.held, Link(rate * KB)) for name, rate in (("a", 100), ("b", 300), ("c", 200))]
        version.fetch(sources, seed)
        return [source.asked for source in sources]

    assert asked("one", 5) == asked("two", 5) != asked("three", 6)


def test_what_a_source_sent_before_it_failed_is_not_fetched_again(tmp_path):
    """Also within a chunk, and by another process."""
    version = Version(tmp_path / "v", 4, 64 * CHUNK)
    dying = Server("dying", version.held, Link(400 * KB), is_up=lambda time: time < 5)
    with pytest.raises(PeerError):
        version.fetch([dying])
    assert dying.sent > 1_500_000
    left = [path.stat().st_size for path in Path(version.folder).glob(".part-*")]
    other = Server("other", version.held, Link(400 * KB))
    version.fetch([other])
    assert version.is_right and left and sent([dying, other]) == sent([other]) + dying.sent
    assert other.sent == version.size - dying.sent


def a_bad_source(name: str, version: Version, size: int, downlink: Link, rng: random.Random) -> Server:
    """A source with one of eight faults, or a mere slow one."""
    rate, cut, every = rng.choice([0.2, 5, 100, 2000]) * KB, rng.randrange(size), rng.randrange(1, 6)
    begin, end = rng.uniform(0, 50), rng.uniform(50, 100)
    faults: list[dict] = [
        {"spoil": lambda chunk, count: chunk if count % every else flipped(chunk)},
        {"spoil": lambda chunk, count: chunk[:-1]},
        {"spoil": lambda chunk, count: chunk + chunk},
        {"spoil": lambda chunk, count: flipped(chunk), "cuts_at": lambda count: cut},
        {"stalls_at": lambda count: None if count % every else cut},
        {"cuts_at": lambda count: cut},
        {"is_up": lambda time: not begin < time < end},
        {"uplink": Link(lambda time: rate if time < begin / 10 else 100)},
        {},
    ]
    usual = {"uplink": Link(rate), "downlink": downlink, "latency_s": rng.choice([0.001, 0.3])}
    return Server(name, version.held, **(usual | rng.choice(faults)))


def test_a_fetch_ends_as_long_as_one_good_source_lives(tmp_path):
    """Up to eight bad sources, and one good one that is never blamed for what others did, in 40 random settings."""
    for seed in range(40):
        rng, size = random.Random(seed), 4 * PART_BYTES << seed % 5
        version = Version(tmp_path / str(seed), rng.choice([1, 2, 5, 30]), size, seed)
        line, rate = rng.choice([20, 200, 5000]) * KB, rng.choice([10, 100, 1000]) * KB
        downlink = Link(line)
        sources = [a_bad_source(f"bad-{i}", version, size, downlink, rng) for i in range(rng.randrange(9))]
        good = Server("good", version.held, Link(rate), downlink, latency_s=rng.choice([0.001, 0.2]))
        sources.insert(rng.randrange(len(sources) + 1), good)
        version.fetch(sources, seed)
        assert version.is_right, seed
        assert not [reason for name, reason in version.blamed if name == "good" and "wrong" in reason], seed
        bound_s = version.size / min(line, rate) + len(version.missing) * good.latency_s / 2
        assert version.took_s < 5 * bound_s + 60, seed


# --- sources that are spared ---


def test_a_spared_source_sends_nothing_while_others_serve(version):
    relays = [Server(name, version.held, Link(400 * KB)) for name in "ab"]
    origin = Server("origin", version.held, Link(2000 * KB), rank=1)
    assert version.fetch([*relays, origin]).is_right and version.blamed == []
    assert origin.sent == 0 and version.took_s < 1.15 * version.size / (800 * KB)


def test_a_spared_source_serves_when_the_others_end(version):
    bound_s = version.size / (400 * KB)
    relay = Server("relay", version.held, Link(400 * KB), is_up=lambda time: time < bound_s / 2)
    origin = Server("origin", version.held, Link(400 * KB), rank=1)
    assert version.fetch([relay, origin]).is_right and version.took_s < 1.25 * bound_s
    assert relay.sent > 0.4 * version.size


def test_a_spared_source_serves_when_the_others_say_nothing(version):
    """Such as the coordinator, when a firewall drops what is sent to the origin's port."""
    mute = Server("mute", version.held, Link(400 * KB), stalls_at=lambda count: 0)
    spared = Server("spared", version.held, Link(400 * KB), rank=1)
    assert version.fetch([mute, spared]).is_right and mute.sent == 0
    assert version.took_s < 1.15 * version.size / (400 * KB) + 2 * scheduler.SPARE_AFTER_S


def test_sources_that_trickle_do_not_keep_a_fetch_from_a_spared_one(version):
    """Otherwise a person who runs relays could hold up all workers of a run."""
    relays = [Server(f"trickling-{i}", version.held, Link(PART_BYTES)) for i in range(20)]
    origin = Server("origin", version.held, Link(1000 * KB), rank=1)
    assert version.fetch([*relays, origin]).is_right
    assert version.took_s < 3 * version.size / (1000 * KB) + 20


def test_the_last_source_sends_nothing_while_the_one_before_it_answers(version):
    """However slow relays and origin are: the coordinator has better things to do."""
    relays = [Server(f"relay-{i}", version.held, Link(40 * KB)) for i in range(3)]
    origin = Server("origin", version.held, Link(100 * KB), rank=1)
    coordinator = Server("coordinator", version.held, Link(10_000 * KB), rank=scheduler.LAST)
    assert version.fetch([*relays, origin, coordinator]).is_right and coordinator.sent == 0 < origin.sent


def test_the_last_source_serves_when_the_one_before_it_is_gone_or_mute(tmp_path):
    for number, broken in enumerate(({"is_up": lambda time: False}, {"stalls_at": lambda count: 0})):
        version = Version(tmp_path / str(number), 400, CHUNK)
        origin = Server("origin", version.held, Link(100 * KB), rank=1, **broken)
        coordinator = Server("coordinator", version.held, Link(1000 * KB), rank=scheduler.LAST)
        assert version.fetch([origin, coordinator]).is_right
        assert version.took_s < version.size / (1000 * KB) + 2 * scheduler.SPARE_AFTER_S
