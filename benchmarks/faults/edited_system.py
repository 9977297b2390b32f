"""Faults that are seen between steps, put into a run that was recorded: its log and metrics stay as they are, and the
clock, the disk or the quota is another one. Alarms are written into its folder: look at the honest run first.

The looks are those of the launcher, `AlarmWatch` of `launch/alarm_actions`, with a clock of ours. Only for the disk's free
space the monitors are asked directly, because it cannot be filled for an hour here.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shoal.config import RunConfig, load_run
from shoal.launch.alarm_actions import AlarmWatch, setting_of
from shoal.monitors.alarms import RunMonitors
from shoal.monitors.monitor_inputs import Machine
from shoal.protocol.messages import Status
from shoal.run_folder import RunFolder
from shoal.runs.run_status import RunStatus

ROOT = Path(__file__).resolve().parents[2]
Lines = Sequence[dict[str, Any]]
RUNNING = Status("", "running", 1, 9, 0, {}, 0, 0, "workers", 0.0)
LOOKS, EVERY_S = 12, 10.0
"""Looks between steps, and how far apart they are."""
MINUTE_S, GB = 60.0, 1e9


def full_quota(folder: RunFolder, config: RunConfig, lines: Lines) -> set[str]:
    """The run file allows far less than is there."""
    small = load_run(ROOT / "recipes/arithmetic.toml", ["storage.quota_mb=1"])
    return _looks(folder, small, (), float(lines[-1]["time_s"]) + EVERY_S, 3)


def clock_set_back(folder: RunFolder, config: RunConfig, lines: Lines) -> set[str]:
    """A minute after the newest step, the host's clock is set back by five."""
    return _looks(folder, config, lines, float(lines[-1]["time_s"]) - 4 * MINUTE_S, 3)


def no_step_ends(folder: RunFolder, config: RunConfig, lines: Lines) -> set[str]:
    """All workers are gone since the newest step: two minutes pass, and no other ends."""
    return _looks(folder, config, lines, float(lines[-1]["time_s"]), LOOKS)


def disk_fills(folder: RunFolder, config: RunConfig, lines: Lines) -> set[str]:
    """Another program writes a gigabyte in ten minutes; 20 are free at first. Checkpoints come and go."""
    return _disk(config, lambda age_s: 20 * GB - GB * age_s / (10 * MINUTE_S) - 0.1 * GB * (age_s // MINUTE_S % 3))


def disk_is_full(folder: RunFolder, config: RunConfig, lines: Lines) -> set[str]:
    """A third of a gigabyte is free, and nothing fills it."""
    return _disk(config, lambda age_s: GB / 3)


def disk_is_used(folder: RunFolder, config: RunConfig, lines: Lines) -> set[str]:
    """No fault: checkpoints come and go, and one large file is written."""
    return _disk(config, lambda age_s: 20 * GB - 0.1 * GB * (age_s // MINUTE_S % 3) - 5 * GB * (age_s > 20 * MINUTE_S))


EDITS: dict[str, tuple[Callable[[RunFolder, RunConfig, Lines], set[str]], str, str]] = {
    "full quota": (full_quota, "quota", "disk"),
    "clock set back": (clock_set_back, "clock", "clock"),
    "no step ends": (no_step_ends, "clock", "starved"),
    "disk fills": (disk_fills, "free space", "disk"),
    "disk is full": (disk_is_full, "free space", "disk"),
}
"""By fault: its looks, what is edited for them, and the alarm that names it."""


def _looks(folder: RunFolder, config: RunConfig, lines: Lines, began: float, count: int) -> set[str]:
    """Alarms that stand after the launcher has looked so often at a run that says that it goes on."""
    now = [began]
    watch = AlarmWatch(folder, config, clock=lambda: now[0])
    for _ in range(count):
        watch.look(RunStatus("", "", config.steps, RUNNING, metrics=tuple(lines)))
        now[0] += EVERY_S
    return {alarm.cause for alarm in watch.standing}


def _disk(config: RunConfig, free: Callable[[float], float]) -> set[str]:
    """Alarms in an hour of looks, one a minute, at a disk whose free space follows its age."""
    follower, seen, raised = RunMonitors(setting_of(config)), list[tuple[float, float]](), set[str]()
    for i in range(60):
        seen.append((i * MINUTE_S, free(i * MINUTE_S)))
        changes = follower.look_between(Machine(now=i * MINUTE_S, disk=tuple(seen)), ())
        raised |= {one.alarm.cause for one in changes if one.change == "raised"}
    return raised
