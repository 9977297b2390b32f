"""Inputs of monitors: the metrics and the log's digest of the steps so far, as a value; what monitors find; and robust
statistics of both."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from shoal.alarms import Severity
from shoal.config.alarm_limits import LIMITS
from shoal.monitors.step_statistics import NodeStep, StepDigest
from shoal.protocol.field_types import fact
from shoal.protocol.messages import Measured
from shoal.step_metrics import series_of

FIRST_LINES = 32
"""First steps of a run, which monitors compare with however long it is."""
KEPT_LINES = 256
"""Newest steps of metrics that a monitor may look back on."""
START_STEPS = 5
"""Steps whose median is what a run began with."""
LEAST_STEPS = 12
"""A monitor that compares with the start says nothing before this many steps."""
MAX_NAME_CHARS = 40
"""Of a node's name, in a sentence about it."""
NO_PARENTHESES = str.maketrans("()", "??")


@dataclass(frozen=True)
class HeldoutResult:
    """The policy on held-out tasks, with its 95 % confidence interval."""

    version: int
    mean: float
    low95: float
    high95: float
    judge: "HeldoutResult | None" = None
    """The same episodes by the run's held-out judge, if it has one."""


@dataclass(frozen=True)
class Machine:
    """The host's machine now, and for a while before. Times are seconds since the epoch."""

    now: float
    disk: Sequence[tuple[float, float]] = ()
    """(time, bytes free) of the disk with the run's folder, oldest first."""
    quota_share: float = 0.0
    """Of storage.quota_mb that is used."""
    log_time: float = 0.0
    """Of the newest event."""
    step_began: float = 0.0
    """When the newest step ended; 0 before the first."""
    flat_groups: int = 0
    """Groups accepted in a row without signal."""
    flat_reward: float = 0.0
    """Their mean reward."""
    unbegun_groups: int = 0
    """Of them, those whose tasks can never begin, and why the last cannot."""
    unbegun_cause: str = ""
    why_flat: str = ""
    """What ended most of their rollouts, unsolved, and what to do, as a sentence without its stop; empty if nothing did."""
    waiting_for: str = ""
    """What the run waits for, as its status says it; see `longest`."""
    remedy: str = ""
    """What its host may do about that."""
    longest: str = ""
    """What it has waited for longest since the newest step, as its status said it; empty: what it waits for now."""
    longest_remedy: str = ""
    longest_s: float = 0.0
    notice: str = ""
    """Why the host's machine itself holds up the run, if it does."""
    in_flight: int = 0
    """Groups leased or not yet judged."""
    running: bool = True


@dataclass(frozen=True)
class MonitorInputs:
    """What is known at the end of one training step."""

    lines: Sequence[Mapping[str, Any]] = ()
    """Metrics of this step and of those before it, oldest first. In a long run those between its first and its newest steps
    are left out."""
    steps: Sequence[StepDigest] = ()
    """What the log says of the same steps, as far as it is kept."""
    names: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """(role, name) of each node, by key."""
    heldout: Sequence[HeldoutResult] = ()
    """Oldest first."""
    at_best: Sequence[Mapping[str, Any]] = ()
    """Metrics of the steps around the best of these but the newest."""
    judged: Sequence[HeldoutResult] = ()
    """What the held-out judge says of the same, oldest first."""
    at_best_judged: Sequence[Mapping[str, Any]] = ()
    """Metrics of the steps around the best of these but the newest."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Those that differ from the usual ones."""
    dtype: str = "float32"
    """In which workers sample."""
    moving_tasks: bool = False
    """Whether the run draws harder tasks as the policy improves, so that its reward may fall without a fault."""
    max_flat_groups: int = 0
    announced: frozenset[str] = frozenset()
    """Keys of workers that the run file itself starts to cheat: what they do raises no alarm."""
    machine: Machine | None = None
    """Only of looks between steps."""
    leased: Sequence[tuple[str, float]] = ()
    """Keys of the workers whose open leases are the oldest, and when they got them. As `machine`."""

    def limit(self, name: str) -> float:
        """A limit by its name."""
        return self.limits.get(name, LIMITS[name].value)

    @property
    def step(self) -> int:
        """The newest step."""
        return int(self.lines[-1]["step"]) if self.lines else 0

    def series(self, name: str) -> list[float]:
        """All values of a metric, oldest first; steps without a number are left out."""
        return series_of(self.lines, name)

    def name_of(self, key: str) -> str:
        """What people call a node. Its name is a stranger's, so only the key is in parentheses."""
        name = self.names.get(key, ("", ""))[1][:MAX_NAME_CHARS].translate(NO_PARENTHESES)  # guard: key-is-not-a-name
        return fact(f"{name or 'node'} ({key[:12]})")

    def nodes_of(self, last: int) -> dict[str, list[NodeStep]]:
        """What each node did in the last steps."""
        found: dict[str, list[NodeStep]] = {}
        for step in self.steps[-last:]:
            for key, node in step.nodes.items():
                found.setdefault(key, []).append(node)
        return found


@dataclass(frozen=True)
class LimitExceeded:
    """A limit exceeded at one step. Only several of these raise an alarm."""

    severity: Severity
    summary: str
    remedy: str
    measured: tuple[Measured, ...] = ()
    node: str = ""


def in_view(lines: Sequence[Mapping[str, Any]], count: int) -> Sequence[Mapping[str, Any]]:
    """Of the first `count` lines of a run, those that monitors look at."""
    if count <= FIRST_LINES + KEPT_LINES:
        return lines[:count]
    return [*lines[:FIRST_LINES], *lines[count - KEPT_LINES : count]]


def around_best(lines: Sequence[Mapping[str, Any]], heldout: Sequence[HeldoutResult]) -> Sequence[Mapping[str, Any]]:
    """Lines of the steps around the best evaluation but the newest."""
    if len(heldout) < 2:
        return ()
    best = max(heldout[:-1], key=lambda one: one.mean)
    end = bisect_left(lines, best.version + START_STEPS, key=lambda line: int(line["step"]))
    return lines[max(0, end - 2 * START_STEPS) : end]


def measured(name: str, value: float, limit: float) -> Measured:
    """A figure with its limit, as it may go into the log: finite and bounded."""
    return Measured(fact(name), _bounded(value), _bounded(limit))


def start_of(values: Sequence[float]) -> float:
    """What a series began with."""
    return median(values[:START_STEPS])


def now_of(values: Sequence[float]) -> float:
    """What a series is now."""
    return median(values[-START_STEPS:])


def smoothed(values: Sequence[float]) -> list[float]:
    """Medians of the values up to each place from the fifth on, so that one odd step moves nothing."""
    return [median(values[i - START_STEPS : i]) for i in range(START_STEPS, len(values) + 1)]


def noise_of(values: Sequence[float]) -> float:
    """Robust standard deviation of one step: from the median of |differences| of neighbours, so that a trend is no noise.

    The factor is that of a normal distribution: 1.4826 for the median, and a difference has two steps' noise.
    """
    steps = [abs(b - a) for a, b in pairwise(values)]
    return 1.4826 * median(steps) / math.sqrt(2) if steps else 0.0


def _bounded(value: float) -> float:
    return max(-1e12, min(1e12, value)) if math.isfinite(value) else 1e12
