"""Transfers share links fairly, by numbers worked out by hand."""

import pytest

from shoal.plan.links import Network


def ends(capacities, *transfers):
    """When each of some transfers (start, bytes, links) ends."""
    network, found, ended = Network(capacities), {}, []
    waiting = sorted(enumerate(transfers), key=lambda item: item[1][0])
    now = 0.0
    while waiting or network.next_end() < float("inf"):
        begin = waiting[0][1][0] if waiting else float("inf")
        now = min(begin, network.next_end())
        if begin <= now:
            number, (_, size, links) = waiting.pop(0)
            network.start(now, size, links, lambda number=number: ended.append(number))
            continue
        for done in network.end_due(now):
            done()
        found |= dict.fromkeys(ended, now)
        ended.clear()
    return [found[number] for number in range(len(transfers))]


@pytest.mark.parametrize(
    ("capacities", "transfers", "expected"),
    [
        ({"up": 10.0, "down": 4.0}, [(1.0, 20.0, ("up", "down"))], [6.0]),
        ({"up": 10.0}, [(0.0, 10.0, ("up",)), (0.0, 20.0, ("up",))], [2.0, 3.0]),
        (
            {"up": 10.0, "slow": 1.0, "fast": 100.0},
            [(0.0, 10.0, ("up", "slow")), (0.0, 90.0, ("up", "fast"))],
            [10, 10],
        ),
        ({"up": 10.0}, [(0.0, 20.0, ("up",)), (1.0, 5.0, ("up",))], [2.5, 2.0]),
        ({"up": 0.0}, [(3.0, 1e12, ("up",))], [3.0]),
    ],
    ids=["the narrowest link", "two of one link", "what a slow one leaves", "one that begins later", "no limit"],
)
def test_transfers_share_their_links_fairly(capacities, transfers, expected):
    assert ends(capacities, *transfers) == pytest.approx(expected)


def test_rates_never_exceed_a_link_and_fill_it_if_somebody_waits():
    network = Network({"up": 100.0, **{f"d{i}": 3.0 * (i + 1) for i in range(20)}})
    for i in range(20):
        network.start(0.0, 1e6, ("up", f"d{i}"), lambda: None)
    rates = [flow.rate for flow in network._flows]
    assert sum(rates) == pytest.approx(100.0) and all(rate <= 3.0 * (i + 1) + 1e-9 for i, rate in enumerate(rates))
    assert max(rates) - min(rate for i, rate in enumerate(rates) if rate < 3.0 * (i + 1) - 1e-9) < 1e-9
