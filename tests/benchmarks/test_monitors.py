"""`benchmarks/monitors.py`: what counts as naming a fault, and that each change of metrics is named over honest noise."""

import pytest

from benchmarks.monitored.changed import CHANGES, heldout_falls, reward_rises
from benchmarks.monitors import EXPECTED, Expected, judged
from benchmarks.pages.monitors import tables
from shoal.config.monitors import CAUSES
from tests.monitors.series import honest_digests, honest_lines
from tests.monitors.test_monitors import causes


def test_a_fault_is_named_only_by_its_own_alarm_and_its_own_worker():
    poisoned = Expected("poisoning:bad", ("drift",))
    assert judged("x", poisoned, {"poisoning:bad", "drift"})["named"]
    assert not judged("x", poisoned, {"poisoning:bad", "poisoning:worker-0"})["named"]
    assert not judged("x", poisoned, {"poisoning:worker-0"})["named"]
    assert not judged("x", poisoned, {"poisoning:bad", "clock"})["named"]
    assert not judged("x", poisoned, set())["named"]
    assert judged("x", Expected("collapse|drift"), {"drift"})["named"]
    assert not judged("x", Expected("clock"), {"poisoning:bad"})["named"]


def test_each_expected_alarm_exists():
    named = [one for expected in EXPECTED.values() for one in (*expected.alarm.split("|"), *expected.follows)]
    assert {one.partition(":")[0] for one in named} | {alarm for _, alarm in CHANGES.values()} <= CAUSES.keys()


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_of_metrics_is_named_over_honest_noise(name):
    change, alarm = CHANGES[name]
    assert causes(change(honest_lines(2)), honest_digests(2)) == {alarm}


def test_evaluations_that_fall_are_named():
    lines = honest_lines(2)
    assert causes(reward_rises(lines), heldout=heldout_falls(lines)) == {"hacking"}


def test_the_table_has_a_row_for_each_fault():
    row = {"made": "a real run", "expected": "clock", "raised": [], "named": False}
    assert "| clocks | a real run | clock | none | no |" in tables({"clocks": row})["injected"]
