"""The metrics of a training step, each declared once, and the file to which they are appended and from which they are read.

A failed write is counted and logged once; it never stops training. A line with a name that METRICS lacks is not written.

A new metric needs its row in `METRICS` (with a `form` it is in the terminal, with `headline=True` in plots, the report and
the first page), its figure in `train/learner.py`, `roles/trainer/batch_reader.py` or `Trainer._report`, and
`python -m tests.test_docs --write`.
"""

import logging
import math
import os
import sys
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice, takewhile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeGuard

import msgspec

log = logging.getLogger(__name__)


class Metric(NamedTuple):
    """A metric's unit, the sentence that explains it, and how it is shown."""

    unit: str
    sentence: str
    title: str = ""
    """What people call it; empty: its name."""
    form: str = ""
    """How the terminal writes it in the figures of a run; empty: it is not one of them."""
    headline: bool = False
    """Whether plots, reports and the first page of a run draw it without being asked."""


METRICS: dict[str, Metric] = {
    "step": Metric("steps", "Training step, counted from 0; it turns policy version v = step into v + 1."),
    "time_s": Metric("seconds", "When the step ended, since the epoch."),
    "reward_mean": Metric(
        "reward",
        "Mean reward of the batch's rollouts, without groups that have no signal. Rollouts from which nothing is learned "
        "because a token limit ended them count.",
        title="reward, groups with a signal",
    ),
    "reward_mean/LABEL": Metric(
        "reward",
        "The same for one environment, if a run has several; null if the batch has no rollouts of it.",
    ),
    "reward_part/NAME": Metric(
        "reward",
        "Mean of a named part of the reward, before its weight, over the rollouts that the host's own validators accepted, "
        "or its stage played, since the batch of the last step; LABEL/NAME if a run has several environments.",
        title="parts of the reward",
    ),
    "env_metric/NAME": Metric("any", "The same for a metric that the environment reports beside the reward."),
    "reward_all_mean": Metric(
        "reward",
        "Mean reward of all rollouts accepted since the batch of the last step, with or without signal.",
        "reward",
        ".3f",
        headline=True,
    ),
    "solve_rate": Metric(
        "share",
        "Share of the rollouts accepted since the batch of the last step that are solved: whose reward is at least "
        "envs.solved. Missing if some were accepted before a restart of the coordinator.",
        "solved",
        ".1%",
        headline=True,
    ),
    "solve_rate/LABEL": Metric(
        "share", "The same for one environment, if a run has several; null if no group of it was accepted."
    ),
    "draw_weight/LABEL": Metric(
        "weight", "Weight of an environment in the newest draw table, if a run has several: its share of new slots."
    ),
    "zero_signal_share": Metric(
        "share",
        "Share of groups accepted since the batch of the last step whose rewards were all equal.",
        "no signal",
        ".1%",
        headline=True,
    ),
    "fault_share": Metric(
        "share",
        "Share of the rollouts accepted since the batch of the last step on which the environment failed; missing if there "
        "are none. They count in nothing, and above 5 % of an environment's newest 200 rollouts the run pauses; or, with "
        '`on_fault = "lowest"`, they are learned from, and are as many as the host\'s own validators or its stage saw.',
    ),
    "fault_rollouts": Metric("rollouts", "Number of these rollouts; missing if there are none."),
    "loss": Metric(
        "loss",
        "Value of the objective that the step lowered, per policy token; mean over the step's updates. This and other "
        "figures of the policy's updates are missing in steps in which only a critic learns.",
        "loss",
    ),
    "entropy_nats": Metric(
        "nats",
        "Mean entropy of the distributions that the policy's tokens were drawn from; mean over the step's updates.",
        "entropy",
        ".3f",
        headline=True,
    ),
    "clip_share": Metric(
        "share",
        "Share of policy tokens whose gradient a bound on the importance ratio removed, delta included, or with cispo "
        "cut; mean over the step's updates.",
        "clipped",
        ".1%",
        headline=True,
    ),
    "truncated_share": Metric(
        "share",
        "Share of policy tokens whose importance weight was cut (train.algorithm.corrections); missing in runs without "
        "such weights.",
    ),
    "masked_share": Metric(
        "share", "Share of policy tokens that a correction dropped; missing in runs whose algorithm has none that does."
    ),
    "kl_nats": Metric(
        "nats",
        "Mean KL divergence from the run's first policy at the batch's tokens, by the estimator k3; missing in runs "
        "without a KL penalty.",
        "KL",
    ),
    "value_loss": Metric(
        "reward squared",
        "The critic's loss, half the squared error of a token's value with its clip; mean over the step's updates. This "
        "and the next four are missing in runs without a critic.",
    ),
    "value_mean": Metric(
        "reward", "Mean of what the critic expected before each policy token, before its first update."
    ),
    "value_explained_share": Metric(
        "share",
        "Share of the variance of the tokens' returns that these values explain: 0 for a constant, below 0 for worse; null "
        "if all returns are equal.",
    ),
    "value_clip_share": Metric(
        "share",
        "Share of policy tokens whose value had no gradient, because it left train.critic.clip; mean over updates.",
    ),
    "critic_grad_norm": Metric("norm", "Norm of the critic's gradient before clipping; mean over the step's updates."),
    "teacher_kl_nats": Metric(
        "nats",
        "Mean log-prob of the batch's tokens under the policy at the start of the step, minus that under train.teacher: "
        "the KL divergence from the teacher where this policy sampled them; missing in runs without a teacher.",
    ),
    "score_mean": Metric(
        "score", "Mean score of the batch's rollouts by train.reward_model; missing in runs without a reward model."
    ),
    "log_ratio_abs_mean_nats": Metric(
        "nats",
        "Mean |log-prob under the trained policy - under the one that sampled| of a token; mean over the step's updates.",
    ),
    "log_ratio_abs_max_nats": Metric(
        "nats",
        "Largest |log-prob under the trained policy - under the one that sampled| of a token, over the step's updates.",
        "max |log ratio|",
        ".3f",
    ),
    "staleness_rollouts": Metric(
        "rollouts", "Rollouts of the batch by how many versions old their policy was.", "staleness", headline=True
    ),
    "stale_rollouts": Metric("rollouts", "Rollouts left out because their policy was older than max_staleness."),
    "overlong_share": Metric("share", "Share of the batch's rollouts that a token limit ended, learned from or not."),
    "overlong_rollouts": Metric(
        "rollouts",
        "Rollouts not learned from because a token limit ended them; missing in runs whose algorithm learns from them.",
    ),
    "groups_without_signal": Metric("groups", "Groups of the batch left out because their rewards were all equal."),
    "groups_unlearnable": Metric("groups", "Groups of the batch that a validator accepted but the trainer refused."),
    "grad_norm": Metric("norm", "Norm of the gradient before clipping; mean over the step's updates.", "gradient norm"),
    "updates": Metric(
        "updates",
        "Optimiser steps that the step took on its batch: train.updates_per_batch times minibatches, or fewer.",
    ),
    "update_skipped": Metric(
        "0 or 1", "1 if a gradient was not finite: that update and the rest of the step left the weights as they were."
    ),
    "lr": Metric("learning rate", "Learning rate of the step.", "learning rate"),
    "repetition_share": Metric(
        "share",
        "Share of a rollout's 4-grams of policy tokens that occur earlier in it; mean over the batch's rollouts.",
    ),
    "reward_length_correlation": Metric(
        "correlation",
        "Rank correlation of reward and policy tokens within a group, mean over groups in which both differ; null if there "
        "is none. Near 1, the environment pays for length.",
    ),
    "rollouts": Metric("rollouts", "Rollouts that the step learned from."),
    "tokens": Metric("tokens", "Tokens of those rollouts, including prompts and the environment's."),
    "policy_tokens": Metric("tokens", "Tokens of those rollouts that the policy wrote."),
    "train_s": Metric("seconds", "Time of forward, backward and optimiser."),
    "denominators_s": Metric(
        "seconds", "Time to compute the ratio's denominators; missing in runs that take those of the workers."
    ),
    "reference_s": Metric(
        "seconds", "Time to compute log-probs under the run's first policy; missing in runs without a KL penalty."
    ),
    "judge_s": Metric("seconds", "Time of the teacher or the reward model; missing in runs without one."),
    "train_tokens_per_s": Metric(
        "tokens/s", "Tokens divided by the time of forward, backward and optimiser.", "training speed"
    ),
    "save_s": Metric(
        "seconds", "Time to write the trainer's own state; to copy it, if storage.state_every is above 1."
    ),
    "publish_s": Metric("seconds", "Time to write, sign and announce the version before, beside the step."),
    "publish_wait_s": Metric("seconds", "Time that the step waited for that."),
    "step_s": Metric(
        "seconds", "Time from the end of the previous step to the end of this one.", "time of a step", headline=True
    ),
    "waiting_share": Metric("share", "Share of step_s in which the trainer waited.", "trainer waits", ".1%"),
    "waiting_for": Metric("name", "What the trainer waited for longest."),
    "selfcheck_gap_nats": Metric("nats", "Largest log-prob difference when one completion was replayed at start-up."),
}
"""Metrics by name. The name holds the unit, unless the unit is a plain count, share or rate. What follows a slash is the
label of an environment, or what its author calls it."""

HEADLINES = tuple(name for name, metric in METRICS.items() if metric.headline)
FIGURES = {name: metric for name, metric in METRICS.items() if metric.form}
"""Those that the terminal shows."""

_FAMILIES = {name.partition("/")[0]: metric for name, metric in METRICS.items() if "/" in name}


def declared(name: str) -> Metric | None:
    """What METRICS says of a metric: of its name, or of the family that it is one of, such as reward_part/NAME."""
    family, _, label = name.partition("/")
    return METRICS.get(name) or (_FAMILIES.get(family) if label else None)


def title_of(name: str) -> str:
    """What people call a metric, for a heading."""
    metric = METRICS.get(name) or _FAMILIES.get(name)
    return metric.title[:1].upper() + metric.title[1:] if metric and metric.title else name


def meaning_of(name: str) -> Metric | None:
    """The same for what is shown: also of a family as a whole, and of a number within a table (staleness_rollouts/3)."""
    family = name.partition("/")[0]
    return declared(name) or METRICS.get(family) or _FAMILIES.get(family)


def mean_of_counts(table: object) -> float | None:
    """The mean of the numbers in a table of how often each was counted, such as staleness_rollouts. None if it is no such
    table, counts nothing, or has numbers whose sum is not finite."""
    if not isinstance(table, dict):
        return None
    try:
        counted = [(float(number), float(count)) for number, count in table.items()]
        many = math.fsum(count for _, count in counted)
        mean = math.fsum(number * count for number, count in counted) / many if many > 0 else math.nan
    except (TypeError, ValueError, OverflowError):
        return None
    return mean if math.isfinite(mean) else None


def is_number(value: object) -> TypeGuard[float]:
    """Whether a metric has a value: numbers that are not finite are null in the file."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def series_of(lines: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """All values of a metric in the order of the lines; those without a number are left out."""
    return [float(line[name]) for line in lines if is_number(line.get(name))]


class MetricsLog:
    """Appends JSON objects to a file, one per line. Failed writes are counted in `failures`; only the first is logged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failures = 0

    def write(self, values: dict[str, Any]) -> None:
        """Append a line. Numbers that are not finite become null. Faults of the disk or of a value are never raised."""
        try:
            unknown = {name for name in values if declared(name) is None}
            if unknown:
                raise ValueError(f"not declared in shoal/step_metrics.py: {', '.join(sorted(unknown))}")
            line = msgspec.json.encode(values) + b"\n"
            with self.path.open("ab+") as file:
                # A killed writer may have left half a line: start the next one on its own line.
                file.seek(max(0, file.tell() - 1))
                file.write(b"\n" * (file.read(1) not in (b"", b"\n")) + line)
        except (OSError, TypeError, ValueError, OverflowError) as error:
            self.failures += 1
            if self.failures == 1:
                log.warning("metrics are not being written, training continues file=%s cause=%s", self.path, error)


NEWEST_STEPS = 20
"""Steps that a pace is made from: enough to even out slow ones, few enough to follow workers that come and go."""

MOST_MEDIANS = 5.0
"""A step counts as at most this many times the median, so that a night without workers does not last for ever."""


class Pace(NamedTuple):
    """How fast a run's newest steps were; None where their lines do not say."""

    step_s: float | None
    tokens_per_s: float | None
    """Policy tokens that were learned from, per second of wall time."""
    left_s: float | None
    """Seconds that this many more steps take."""


def pace_of(lines: Sequence[Mapping[str, Any]], steps_left: int) -> Pace:
    """The pace by the newest of these lines, which are in order of step. It does not know what strangers will do: a run
    whose workers leave takes longer."""
    timed = [line for line in lines[-NEWEST_STEPS:] if is_number(took_s := line.get("step_s")) and took_s > 0]
    if not timed:
        return Pace(None, None, None)
    took_s = [float(line["step_s"]) for line in timed]
    most_s = MOST_MEDIANS * median(took_s)
    step_s = sum(min(s, most_s) for s in took_s) / len(took_s)
    counted = [line for line in timed if is_number(tokens := line.get("policy_tokens")) and tokens > 0]
    spent_s = sum(float(line["step_s"]) for line in counted)
    tokens_per_s = sum(line["policy_tokens"] for line in counted) / spent_s if counted else None
    return Pace(step_s, tokens_per_s, max(0, steps_left) * step_s)


# --- A line of metrics that a stranger may have written ---

Value = int | float | str | None | dict[str, int | float]
MetricsLine = dict[str, Value]

MAX_STEP = 1 << 31
MAX_NUMBER = 10**15
MAX_NAMES, MAX_NAME_CHARS, MAX_TEXT_CHARS = 2000, 150, 200
"""Of a line. Names of this run's author are shorter: a family, a label of 64 characters and a name of 64."""
MAX_AGES = 32


def clean_metrics(line: Mapping[str, Any]) -> MetricsLine | None:
    """A line without what is not declared, not finite or too long; None if it names no step."""
    step = line.get("step")
    if type(step) is not int or not 0 <= step < MAX_STEP:
        return None
    kept: MetricsLine = {"step": step}
    for name, value in islice(line.items(), MAX_NAMES):
        if isinstance(value, dict) and name == "staleness_rollouts":
            kept[name] = {
                age: n for age, n in islice(value.items(), MAX_AGES) if _is_age(age) and is_figure(n) and n >= 0
            }
        elif _is_sound(name, value):  # guard: metrics-of-strangers
            kept[name] = value
    return kept


def step_of(line: MetricsLine) -> int:
    """The step of a line that has one."""
    step = line["step"]
    assert isinstance(step, int), "a line without a step is left out"
    return step


def is_figure(value: object) -> TypeGuard[int | float]:
    """Whether it is a number that can be drawn and summed."""
    # A whole number may be larger than any float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def _is_sound(name: str, value: object) -> bool:
    metric = declared(name)
    if metric is None or len(name) > MAX_NAME_CHARS or not name.isprintable():
        return False
    if isinstance(value, str):
        return metric.unit == "name" and len(value) <= MAX_TEXT_CHARS
    return value is None or is_figure(value)  # guard: finite-figures


def _is_age(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 7


# --- The file of a run, as it grows ---

MAX_LINE_BYTES = 1 << 18
"""A longer line of a metrics file is skipped. An answer with metrics has at most so many bytes, too."""


class MetricsFollower:
    """Follows a metrics file that grows: each line is read once. Of a step that was repeated, the last line counts.

    Of a line without its end, it waits for the end. A file that was replaced or cut is read anew. Raises OSError.
    """

    def __init__(self, path: Path, clean: Callable[[MetricsLine], MetricsLine | None] = lambda line: line) -> None:
        """`clean` is for a file that may be a stranger's: see `clean_metrics`."""
        self._path, self._clean = path, clean
        self._file_number, self._read_bytes = 0, 0
        self._places: dict[int, tuple[int, int]] = {}
        """Offset and size of each step's newest line."""
        self._steps: list[int] = []
        """Ascending."""
        self._lines: dict[int, MetricsLine | None] = {}
        """Those of `lines`, by step."""
        self._in_order: tuple[MetricsLine, ...] = ()
        self.unread = 0
        """Lines so far that cannot be read, or have no step."""

    def read(self, most: int = 1000) -> list[MetricsLine]:
        """New lines in the order of the file, at most so many. A step that was repeated comes again."""
        return [line for text in self._new_lines(most) if (line := self._decoded(text)) is not None]

    def lines(self) -> tuple[MetricsLine, ...]:
        """One line for each step so far, in order of step."""
        self._catch_up()
        missing = [step for step in self._steps if step not in self._lines]
        if missing or not self._steps:
            self._lines |= zip(missing, map(self._decoded, self._texts(missing)), strict=True)
            self._in_order = tuple(line for step in self._steps if (line := self._lines[step]) is not None)
        return self._in_order

    def newest(self, most: int) -> list[MetricsLine]:
        """The lines of the newest steps, at most so many, in order of step."""
        self._catch_up()
        return [line for text in self._texts(self._steps[-most:]) if (line := self._decoded(text)) is not None]

    def after(self, step: int, most_bytes: int) -> bytes:
        """The newest line of each step above this one, in order of step: as many as have at most so many bytes."""
        self._catch_up()
        first = bisect_right(self._steps, step)
        sizes = accumulate(self._places[each][1] for each in islice(self._steps, first, None))
        fitting = sum(1 for _ in takewhile(lambda size: size <= most_bytes, sizes))
        return b"".join(self._texts(self._steps[first : first + fitting]))

    def _decoded(self, text: bytes) -> MetricsLine | None:
        return self._clean(msgspec.json.decode(text, type=dict[str, Any]))

    def _texts(self, steps: Sequence[int]) -> Iterator[bytes]:
        """The newest lines of these steps, which are known."""
        if steps:
            with self._path.open("rb") as file:
                for offset, size in (self._places[step] for step in steps):
                    file.seek(offset)
                    yield file.read(size)

    def _catch_up(self) -> None:
        for _ in self._new_lines():
            pass

    def _new_lines(self, most: int = sys.maxsize) -> Iterator[bytes]:
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            self._begin_again(0)
            return
        with file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._file_number or found.st_size < self._read_bytes:
                self._begin_again(found.st_ino)
            file.seek(self._read_bytes)
            while most > 0 and (line := file.readline(MAX_LINE_BYTES)):
                if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
                    return  # its end is still to come
                offset, self._read_bytes = self._read_bytes, self._read_bytes + len(line)
                if (step := _step_in(line)) is not None:
                    if step not in self._places:
                        insort(self._steps, step)
                    self._places[step] = (offset, len(line))
                    self._lines.pop(step, None)
                    most -= 1
                    yield line
                else:
                    self.unread += line.endswith(b"\n")  # of a line that is too long, the last part counts

    def _begin_again(self, file_number: int) -> None:
        self._file_number, self._read_bytes, self.unread = file_number, 0, 0
        self._places, self._steps, self._lines, self._in_order = {}, [], {}, ()


def read_metrics(path: Path) -> list[MetricsLine]:
    """The lines of a metrics file in order of step."""
    return list(MetricsFollower(path).lines())


def _step_in(line: bytes) -> int | None:
    """The step of a line; None for half a line, or for one without a step."""
    try:
        step = msgspec.json.decode(line, type=dict[str, Any]).get("step")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return step if type(step) is int else None
