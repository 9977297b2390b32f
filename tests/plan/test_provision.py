"""ECHO-2's rule by numbers worked out by hand, and beside the simulation."""

import pytest

from shoal.plan.forecast import Link, Sources, fetch_s, workers_needed


def test_a_fetch_is_bounded_by_the_own_link_or_by_what_all_share():
    assert fetch_s(100.0, Link(10.0, 2.0), Sources(0.0), 50) == 12.0
    assert fetch_s(100.0, Link(10.0, 2.0), Sources(100.0), 50) == 52.0
    assert fetch_s(100.0, Link(0.0, 2.0), Sources(0.0), 50) == 2.0
    assert fetch_s(100.0, Link(10.0, 2.0), Sources(100.0, filled_s=70.0), 50) == 72.0, "relays must have it first"


def test_the_rule_of_the_paper():
    # mu >= R / (T - B): 120 / (20 - 8) = 10 rollouts a second, of 3 each
    assert workers_needed(120.0, 20.0, 3.0, 80.0, Link(10.0, 0.0), Sources(0.0)) == 4
    assert workers_needed(108.0, 20.0, 3.0, 80.0, Link(10.0, 0.0), Sources(0.0)) == 3


def test_no_number_is_enough_if_a_version_takes_longer_than_a_step_or_shares_too_narrow_an_uplink():
    assert workers_needed(1.0, 20.0, 3.0, 300.0, Link(10.0, 0.0), Sources(0.0)) is None
    # n workers lose n seconds each: n (20 - n) is 100 at most
    assert workers_needed(301.0, 20.0, 3.0, 10.0, Link(0.0, 0.0), Sources(10.0)) is None
    assert workers_needed(300.0, 20.0, 3.0, 10.0, Link(0.0, 0.0), Sources(10.0)) == 10


@pytest.mark.parametrize("rollouts", [1, 17, 250, 3000])
def test_what_it_names_is_enough(rollouts):
    link, sources = Link(10.0, 1.0), Sources(5000.0)
    count = workers_needed(rollouts, 60.0, 0.5, 100.0, link, sources)
    assert count is not None
    assert count * 0.5 * (60.0 - fetch_s(100.0, link, sources, count)) >= rollouts
