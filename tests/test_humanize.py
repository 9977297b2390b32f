"""Numbers, sizes and times for people."""

import math

import pytest

from shoal.humanize import UNKNOWN, count, data_size, duration, figure, moment, percent


def test_times_have_two_units_at_most_and_no_space():
    seconds = (0, 0.0005, 0.35, 7.5, 9.99, 42.9, 59.9, 123, 3720, 47 * 3600, 3 * 86400 + 4 * 3600, 1e6)
    texts = ["0s", "0.5ms", "350ms", "7.5s", "10s", "42s", "59s", "2m03s", "1h02m", "47h00m", "3d04h", "11d13h"]
    assert [duration(s) for s in seconds] == texts
    assert {duration(s) for s in (None, math.nan, math.inf)} == {UNKNOWN} and duration(-1.0) == "0s"


def test_sizes_and_counts_are_in_the_largest_unit_of_which_there_is_one():
    assert [data_size(x) for x in (12, 1500, 999.96e6, 14e9, 2.1e12, 3e17)] == [
        "12 bytes", "1.5 kB", "1 GB", "14 GB", "2.1 TB", "300,000 TB",
    ]  # fmt: skip
    assert [count(x) for x in (7e9, 796_032, 123, 0.25, 7e12)] == ["7B", "796,032", "123", "0.25", "7T"]


def test_figures_have_their_significant_digits():
    values = (0, 12, 1234, 0.123456, 3.0, 123456.7, 1e7)
    assert [figure(x) for x in values] == ["0", "12", "1,234", "0.1235", "3", "123,457", "10,000,000"]
    assert figure(0.123456, 2) == "0.12" and {figure(x) for x in (None, math.nan, -math.inf)} == {UNKNOWN}
    assert percent(0.12345) == "12.3%" and {percent(x) for x in (None, math.inf)} == {UNKNOWN}


@pytest.mark.parametrize("impossible", [None, math.nan, math.inf, 1e300, -1e15])
def test_times_of_day_are_in_utc_and_impossible_ones_unknown(impossible):
    assert moment(0.0) == "1970-01-01 00:00:00" and moment(impossible) == UNKNOWN
