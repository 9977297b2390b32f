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


def test_one_transfer_takes_its_bytes_over_the_narrowest_link():
    assert ends({"up": 10.0, "down": 4.0}, (1.0, 20.0, ("up", "down"))) == pytest.approx([6.0])


def test_equal_transfers_share_a_link_and_the_rest_goes_faster_once_one_has_ended():
    assert ends({"up": 10.0}, (0.0, 10.0, ("up",)), (0.0, 20.0, ("up",))) == pytest.approx([2.0, 3.0])


def test_what_a_slow_client_cannot_take_goes_to_the_others():
    capacities = {"up": 10.0, "slow": 1.0, "fast": 100.0}
    transfers = (0.0, 10.0, ("up", "slow")), (0.0, 90.0, ("up", "fast"))
    assert ends(capacities, *transfers) == pytest.approx([10.0, 10.0])


def test_a_transfer_that_begins_later_slows_the_first():
    assert ends({"up": 10.0}, (0.0, 20.0, ("up",)), (1.0, 5.0, ("up",))) == pytest.approx([2.5, 2.0])


def test_no_limit_takes_no_time():
    assert ends({"up": 0.0}, (3.0, 1e12, ("up",))) == [3.0]


def test_rates_never_exceed_a_link_and_fill_it_if_somebody_waits():
    network = Network({"up": 100.0, **{f"d{i}": 3.0 * (i + 1) for i in range(20)}})
    for i in range(20):
        network.start(0.0, 1e6, ("up", f"d{i}"), lambda: None)
    rates = [flow.rate for flow in network._flows]
    assert sum(rates) == pytest.approx(100.0) and all(rate <= 3.0 * (i + 1) + 1e-9 for i, rate in enumerate(rates))
    assert max(rates) - min(rate for i, rate in enumerate(rates) if rate < 3.0 * (i + 1) - 1e-9) < 1e-9
