"""Status of a run at one moment, as a value: from its folder and its coordinator, with time left and reward trend."""

import contextlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from shoal.alarms import Alarm
from shoal.errors import StateError
from shoal.evaluation_files import Evaluation
from shoal.ledger.remedies import IS_STOPPED
from shoal.net.key_files import load_key
from shoal.protocol.messages import NodeState, Status
from shoal.run_folder import RunFolder
from shoal.step_metrics import is_number, pace_of, series_of
from shoal.terminal import brief

TREND_STEPS = 20
"""The newest of so many steps are compared with those before."""

LEAST_STEPS = 4


def trend_of(rewards: Sequence[float]) -> str:
    """How the reward has changed; empty if there are too few steps to say. It is level within two standard errors.

    A stranger's host may report any number: if the means or their noise are not finite, the sentence is empty, too.
    """
    if len(rewards) < LEAST_STEPS:
        return ""
    size = min(TREND_STEPS, len(rewards) // 2)
    (before, spread), (newest, newest_spread) = _moments(rewards[-2 * size : -size]), _moments(rewards[-size:])
    places = ".3f" if max(abs(before), abs(newest)) < 1e6 else ".6g"
    told = format(before, places), format(newest, places)
    change = float(told[1]) - float(told[0])  # as they are shown
    noise = math.sqrt((spread + newest_spread) / size)  # the standard error of the difference
    if not math.isfinite(change + noise):
        return ""
    word = "level" if abs(change) <= 2 * noise else "up" if change > 0 else "down"
    return f"reward {word} in the last {2 * size} steps: {told[0]} to {told[1]}, means of {size} each"


def _moments(rewards: Sequence[float]) -> tuple[float, float]:
    """Mean and sample variance of two rewards or more. They overflow to inf or nan, where `statistics` would raise."""
    mean = sum(rewards) / len(rewards)
    return mean, sum((reward - mean) * (reward - mean) for reward in rewards) / (len(rewards) - 1)


MOST_SHOWN = 4096
"""More characters than a name has, also once those that do not print are escaped."""

STARTING = "starting"
"""The phase of a run whose coordinator has not answered yet."""

NO_STATUS = Status("", STARTING, -1, 0, 0, {}, 0, 0, "", 0.0)
"""Before the coordinator has answered."""


@dataclass(frozen=True)
class SampleConversation:
    """A conversation of the policy, to look at."""

    title: str
    """Which rollout it is, and its reward."""
    turns: tuple[tuple[str, str], ...]
    """Who said what."""


@dataclass(frozen=True)
class RunStatus:
    """All that the view shows."""

    name: str
    out: str
    steps: int
    """Training steps of the whole run."""
    status: Status = NO_STATUS
    url: str = ""
    elapsed_s: float = 0.0
    times_steps: bool = False
    """Whether `elapsed_s` is only what the steps so far took: who sees a run from outside does not know when it began."""
    metrics: tuple[dict[str, Any], ...] = ()
    """One table for each training step so far."""
    nodes: tuple[NodeState, ...] = ()
    cheaters: frozenset[str] = frozenset()
    """Keys of the workers that were started to cheat."""
    heldout: tuple[tuple[str, Evaluation], ...] = ()
    """Evaluations so far, oldest first, each with its policy version."""
    restarts: dict[str, int] = field(default_factory=dict)
    """By role; roles that were never restarted are left out."""
    notice: str = ""
    """What the launcher itself is doing, if it does more than watch."""
    notice_remedy: str = ""
    """What the host may do about that."""
    evaluation_s: float = 0.0
    """What the evaluation after the last step takes; 0 if there is none or nobody knows."""
    sample: SampleConversation | None = None
    """A conversation of late."""
    hint: str = ""
    """The line below the picture; empty: how the run's host stops it."""
    alarms: Sequence[Alarm] = ()
    """Those that stand."""
    has_counts: bool = True
    """Whether it is known what was accepted, and who joined; not before a log is read, nor if it cannot be."""

    @property
    def step(self) -> int:
        """Training steps done: the metrics hold a step once it is done, and count from 0."""
        return int(self.metrics[-1]["step"]) + 1 if self.metrics else max(0, self.status.version)

    @property
    def remedy(self) -> str:
        """What the host may do about what is shown as the wait."""
        return self.notice_remedy if self.notice else self.status.remedy

    @property
    def notice_in_words(self) -> str:
        """The notice, and what the host may do."""
        return f"{self.notice}. {self.notice_remedy}" if self.notice_remedy else self.notice

    def latest(self, name: str) -> float | None:
        """A metric's value in the newest step; None if that step lacks it."""
        value = self.metrics[-1].get(name) if self.metrics else None
        return float(value) if is_number(value) else None

    def series(self, name: str) -> list[float]:
        """All values of a metric, oldest first; steps without it are left out."""
        return series_of(self.metrics, name)

    def by_env(self, name: str) -> dict[str, float]:
        """The newest value of a metric for each environment, by label: a batch may have none of one. Empty where a run
        has one environment, or the newest step lacks the metric."""
        start = f"{name}/"
        if not self.metrics or not any(key.startswith(start) for key in self.metrics[-1]):
            return {}
        keys = dict.fromkeys(key for line in self.metrics for key in line if key.startswith(start))
        return {key.removeprefix(start): values[-1] for key in keys if (values := self.series(key))}

    def tokens_per_s(self) -> float | None:
        """Policy tokens that were learned from, per second of the newest steps' wall time."""
        return pace_of(self.metrics, 0).tokens_per_s


def own_keys(folder: RunFolder, names: Iterable[str]) -> dict[str, str]:
    """Public keys of those of the host's nodes that have one, by the names under which the host starts them. What a node
    calls itself could be a stranger's."""
    found = dict[str, str]()
    for name in names:
        for path in (folder.nodes / name / "node.key", folder.keys / f"{name}.key"):
            with contextlib.suppress(StateError):
                found[name] = load_key(path).public
    return found


def names_apart(nodes: Iterable[NodeState], most: int = 0) -> dict[str, str]:
    """What each of these nodes is called, by key: its name, with the start of its key if another one could be meant. No two
    look the same. `most`: characters that there is room for; 0: the whole name."""
    most = most or MOST_SHOWN

    def ways(node: NodeState) -> tuple[str, str, str]:
        short, long = (brief(node.name, room) for room in (max(4, most - 15), most))
        return long, f"{short} ({node.key[:12]})", node.key

    named = {node.key: ways(node) for node in nodes}
    times = Counter(name for names in named.values() for name in {*names})
    # guard: name-means-one-node
    return {key: next((name for name in names if times[name] == 1), key) for key, names in named.items()}


# --- How long a run still takes, by the wall time of its newest steps, as on the page ---

STILL_S, STILL_STEPS = 10.0, 2.0
"""Nobody can say how long a run takes that has waited for one thing for longer than this, and than so many steps take."""


def seconds_left(snapshot: RunStatus) -> float | None:
    """Seconds until the last step, and the evaluation after it where that is known; None if nobody can say."""
    steps = snapshot.steps - snapshot.step
    if steps <= 0 or len(snapshot.series("step_s")) < 2 or snapshot.status.phase != "running":
        return None
    pace = pace_of(snapshot.metrics, steps)
    if snapshot.status.waiting_s > max(STILL_S, STILL_STEPS * (pace.step_s or 0.0)) or pace.left_s is None:
        return None
    return pace.left_s + snapshot.evaluation_s


def left_label(snapshot: RunStatus) -> str:
    """Name of the time left in a line: whether it is that of the steps alone."""
    return "left" if snapshot.evaluation_s else "left_for_steps"


USAGE = "usage.json"
"""The file in the run's folder."""


def wall_s_before(path: Path) -> float:
    """Seconds that a run was live, as its launcher last wrote them; 0 if it did not."""
    try:
        return float(json.loads(path.read_bytes())["wall_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def suspended_process(pid: int | None) -> str:
    """That a process was stopped by a signal, and how it goes on; empty if it was not."""
    with contextlib.suppress(psutil.Error):
        if pid and psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return f"its process {pid} {IS_STOPPED}: `kill -CONT {pid}`"
    return ""
