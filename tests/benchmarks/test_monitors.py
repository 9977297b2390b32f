"""`benchmarks/monitors.py`: what counts as naming a fault, and that each change of metrics is named over honest noise."""

from dataclasses import replace

import pytest

from benchmarks.faults.edited_metrics import CHANGES, heldout_falls, reward_rises
from benchmarks.faults.edited_system import EDITS, disk_fills, disk_is_full, disk_is_used
from benchmarks.faults.runs import ROOT, SMALL, SUMS, Faults, evaluated, honest, with_metrics
from benchmarks.monitors import EXPECTED, Expected, judged
from shoal.config import load_run
from shoal.config.alarm_limits import CAUSES
from shoal.step_metrics import read_metrics
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
    edited = [row[-1] for row in (*CHANGES.values(), *EDITS.values())]
    assert {one.partition(":")[0] for one in named} | {*edited} <= CAUSES.keys()


def test_a_disk_that_fills_or_is_full_is_named_and_one_that_is_used_is_not():
    config = load_run(ROOT / "recipes/arithmetic.toml", [])
    looks = [one(None, config, ()) for one in (disk_fills, disk_is_full, disk_is_used)]
    assert looks == [{"disk"}, {"disk"}, set()]


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_of_metrics_is_named_over_honest_noise(name):
    change, alarm = CHANGES[name]
    assert causes(change(honest_lines(2)), honest_digests(2)) == {alarm}


def test_evaluations_that_fall_are_named():
    lines = honest_lines(2)
    assert causes(reward_rises(lines), heldout=heldout_falls(lines)) == {"hacking"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hack_of_the_reward_is_named_only_because_a_judge_sees_it(tmp_path):
    """A real run (a minute of CPU). The environment's own held-out results rise all the way."""
    folder, config = Faults(tmp_path, 43).pays_for_a_digit()
    lines, seen = read_metrics(folder.metrics), evaluated(folder, config)
    assert "hacking" in with_metrics(folder, config, lines, seen)
    assert "hacking" not in with_metrics(folder, config, lines, [replace(one, judge=None) for one in seen])
    assert seen[-1].low95 > seen[0].high95 and seen[-1].judge.high95 < seen[0].judge.low95, (
        "it could add, and now cannot"
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_judge_that_agrees_raises_nothing(tmp_path):
    """The same run with the honest reward: both learn to like the answers more."""
    judge = f'eval.judge={{name="{ROOT}/benchmarks/envs/exact_sums.py", args={{{SUMS}}}}}'
    changes = ("train.lr=5e-4", "eval.episodes=128", "storage.checkpoint_every=8", judge)
    folder, config, _ = honest("arithmetic", 43, 24, tmp_path, *SMALL, *changes)
    seen = evaluated(folder, config)
    assert seen[-1].judge.low95 > seen[0].judge.high95
    assert with_metrics(folder, config, read_metrics(folder.metrics), seen) == set()
