"""Metrics for Prometheus: their declarations, the figures of requests, and the collector."""

import collections
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import pstdev
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client import exposition as plain
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal import __version__
from shoal.evaluation_files import BEFORE, Evaluation, evaluations_in, interval_of, read_evaluation
from shoal.ledger.members import ASKED_BY_HOST
from shoal.ledger.state_records import NodeRecord
from shoal.ledger.status import batch_of
from shoal.protocol.audit_and_pay import CHECKS
from shoal.protocol.messages import StandingAlarm, Status
from shoal.protocol.reward_rules import without_faults
from shoal.roles.coordinator.coordinator import Coordinator
from shoal.roles.coordinator.status import StatusCache
from shoal.run_folder import free_below
from shoal.step_metrics import METRICS, NEWEST_STEPS, MetricsFollower, mean_of_counts, pace_of
from shoal.terminal import printable

# --- declarations ---
#
# Names follow Prometheus: base units, `_total` for counters, `_info` for facts. A label has few values, and none is the key
# of a node, so that no stranger makes series.


PREFIX = "shoal_"


class MetricSpec(NamedTuple):
    """A metric's type, the sentence that explains it, its labels, and its unit if it has one."""

    kind: Literal["gauge", "counter", "histogram", "info"]
    sentence: str
    labels: tuple[str, ...] = ()
    unit: str = ""


REQUEST_SECONDS = (0.002, 0.01, 0.05, 0.25, 1.0, 5.0, 30.0)
"""Limits of the buckets of latencies. Long polls take up to 20 s."""

REQUEST_BYTES = (1e3, 1e5, 1e6, 1e7, 1e8)
"""Limits of the buckets of sizes."""

LAG_SECONDS = (0.002, 0.01, 0.05, 0.25, 1.0, 5.0)
"""Limits of the buckets of the event loop's lag."""

WATCHED: dict[str, MetricSpec] = {
    "run_info": MetricSpec("info", "The run's id, its name, and the version of shoal.", ("run", "name", "shoal")),
    "phase": MetricSpec("gauge", "1 for the phase that the run is in, 0 for the others.", ("phase",)),
    "version": MetricSpec("gauge", "Newest published version of the policy; -1 before the first."),
    "steps": MetricSpec("gauge", "Training steps of the whole run."),
    "time_left_seconds": MetricSpec(
        "gauge", "Until the last step, at the pace of the newest 20; absent before the first, and of a run that is paused.",
        unit="seconds",
    ),
    "reward_spread": MetricSpec(
        "gauge", "Standard deviation of the rewards of all rollouts of the newest batch; absent before the first."
    ),
    "staleness_mean_versions": MetricSpec(
        "gauge", "Mean age of the rollouts of the newest step, in versions of the policy; absent before the first.",
    ),
    "groups_accepted_total": MetricSpec("counter", "Accepted groups."),
    "groups_refused_total": MetricSpec("counter", "Refused groups, by the check that refused them.", ("check",)),
    "groups_in_flight": MetricSpec("gauge", "Groups that are leased, submitted or accepted, for batches that are to come."),
    "groups_flat": MetricSpec("gauge", "Groups in a row whose rewards were all equal: they teach nothing, but are paid."),
    "submissions_pending": MetricSpec("gauge", "Submissions that wait for validators, those of second looks included."),
    "waiting_seconds": MetricSpec(
        "gauge",
        "Seconds since what the run waits for has changed, a count in it included, for whom it waits; 0 for the others.",
        ("on",),
        "seconds",
    ),
    "nodes": MetricSpec("gauge", "Nodes by role and standing; `left` is the standing of those that left.",
                     ("role", "standing")),
    "nodes_quarantined": MetricSpec(
        "gauge",
        "Workers in quarantine now, by what led to it: a check, `noise` (over time), `forged` (two validators found it), "
        "`host` (asked for it) or `other`.", ("cause",),
    ),
    "validators_differed": MetricSpec(
        "gauge", "Validators that were found at fault: the others outvoted them, or they judged without doing the work."
    ),
    "validator_faults_total": MetricSpec("counter", "How often that was found, of all validators."),
    "influence_largest_ratio": MetricSpec(
        "gauge", "Share of the influence on all batches that the worker with the most of it has.", unit="ratio"
    ),
    "leases_open": MetricSpec("gauge", "Leases that are neither filled nor lapsed."),
    "blocks_leased_total": MetricSpec("counter", "Blocks that were ever leased."),
    "blocks_unfilled_total": MetricSpec(
        "counter", "Leased blocks that workers dropped, or that another filled because they were late."
    ),
    "credits_issued_total": MetricSpec("counter", "Credits ever issued, policy tokens."),
    "credits_burned_total": MetricSpec("counter", "Credits slashed and forfeited, policy tokens."),
    "blob_bytes": MetricSpec("gauge", "Disk space that blobs take.", unit="bytes"),
    "blob_quota_bytes": MetricSpec("gauge", "Disk space that they may take: storage.quota_mb.", unit="bytes"),
    "disk_free_bytes": MetricSpec("gauge", "Free space on the disk of the run's folder.", unit="bytes"),
    "events_total": MetricSpec("counter", "Events in the log."),
    "event_time_seconds": MetricSpec("gauge", "Time of the newest event, since the epoch.", unit="seconds"),
    "clock_behind_seconds": MetricSpec(
        "gauge", "How far the host's clock is behind the log, if it was set back: no lease is granted then.", unit="seconds"
    ),
    "alarm": MetricSpec("gauge", "1 for each alarm that is raised, by its cause and severity.", ("cause", "severity")),
    "heldout_mean": MetricSpec(
        "gauge",
        "Share of wins, or mean reward, on held-out tasks, in the evaluation of the first version and in the newest; `env` "
        "is empty for all environments together.",
        ("of", "env"),
    ),
    "heldout_low95": MetricSpec("gauge", "Lower bound of its 95 % confidence interval.", ("of", "env")),
    "heldout_high95": MetricSpec("gauge", "Upper bound of its 95 % confidence interval.", ("of", "env")),
    "heldout_episodes": MetricSpec("gauge", "Episodes of that evaluation.", ("of", "env")),
    "heldout_faults": MetricSpec(
        "gauge", "Of these episodes, on which the environment failed; they have no part in the mean.", ("of", "env")
    ),
    "heldout_judge_mean": MetricSpec(
        "gauge", "What the held-out judge, eval.judge, says of the same episodes; absent without one.", ("of",)
    ),
    "heldout_judge_low95": MetricSpec("gauge", "Lower bound of its 95 % confidence interval.", ("of",)),
    "heldout_judge_high95": MetricSpec("gauge", "Upper bound of its 95 % confidence interval.", ("of",)),
    "requests_total": MetricSpec(
        "counter", "Answered requests, by call and first digit of the status.", ("call", "status"),
    ),
    "request_seconds": MetricSpec(
        "histogram", "From a request's headers to the end of its answer; long polls wait for up to 20 s.", ("call",),
        "seconds",
    ),
    "request_bytes": MetricSpec("histogram", "Declared sizes of the bodies of requests.", ("call",), "bytes"),
    "answer_bytes": MetricSpec("histogram", "Sizes of the bodies of answers.", ("call",), "bytes"),
    "event_loop_lag_seconds": MetricSpec(
        "histogram", "How much later than it was due the coordinator's event loop did something.", unit="seconds"
    ),
}  # fmt: skip
"""Metrics by name, without PREFIX."""

_ENDINGS = (("_per_s", "_per_second", ""), ("_s", "_seconds", "seconds"), ("_share", "_ratio", "ratio"))
"""How names of `shoal/step_metrics.py` end, how Prometheus has them end, and the unit."""

_NO_NUMBER = "waiting_for"

_BY_AGE = "staleness_rollouts"
"""Its value is a table: rollouts by how many versions old their policy was."""

_LABELS = {"": (), "LABEL": ("env",), "NAME": ("name",)}
"""By what follows the slash in a name of `shoal/step_metrics.py`."""


class StepMetric(NamedTuple):
    """A figure of the newest training step, as Prometheus is told it."""

    name: str
    watched: MetricSpec


def step_metrics() -> dict[str, StepMetric]:
    """The metrics of training steps, by the name that they have in `metrics.jsonl` before a slash. A metric that
    `shoal/step_metrics.py` declares is told without being named here."""
    found: dict[str, StepMetric] = {}
    for declared, metric in METRICS.items():
        name, _, after = declared.partition("/")
        if name == _NO_NUMBER:
            continue
        told, unit = _told(name)
        sentence = found[name].watched.sentence if name in found else f"Of the newest training step: {metric.sentence}"
        labels = ("versions",) if name == _BY_AGE else _LABELS[after]
        found[name] = StepMetric(told, MetricSpec("gauge", sentence, labels, unit))
    return found


def _told(name: str) -> tuple[str, str]:
    ending, base, unit = next((row for row in _ENDINGS if name.endswith(row[0])), ("", "", ""))
    told = name.removesuffix(ending) + base
    return told if name == "step" else f"step_{told.removeprefix('step_')}", unit


# --- what requests cost, and how late the event loop is ---


MAX_LENGTH_DIGITS = 12
"""Of a declared length; a longer one is refused before anything is read, and counts as 0."""


class Meter:
    """The counts of one coordinator, in a registry of its own: tests have several in one process."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.registry = CollectorRegistry(auto_describe=False)
        disable_created_metrics()  # a series more for each that there is, and nobody asks when it began
        self._requests = Counter(PREFIX + "requests", *_declared("requests_total"), registry=self.registry)
        self._seconds = self._histogram("request_seconds", REQUEST_SECONDS)
        self._in, self._out = (self._histogram(name, REQUEST_BYTES) for name in ("request_bytes", "answer_bytes"))
        self._lag = self._histogram("event_loop_lag_seconds", LAG_SECONDS)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            PREFIX + name, *_declared(name), unit=WATCHED[name].unit, buckets=buckets, registry=self.registry
        )

    def answered(self, call: str, status: int, took_s: float, in_bytes: int, out_bytes: int) -> None:
        """Count a request."""
        self._requests.labels(call, f"{status // 100}xx").inc()
        self._seconds.labels(call).observe(took_s)
        if in_bytes:
            self._in.labels(call).observe(in_bytes)
        self._out.labels(call).observe(out_bytes)

    def late(self, lag_s: float) -> None:
        """Note how much later than it was due the event loop did something."""
        self._lag.observe(max(0.0, lag_s))


def _declared(name: str) -> tuple[str, tuple[str, ...]]:
    return WATCHED[name].sentence, WATCHED[name].labels


class Metered:
    """The handler of one call, with its requests counted."""

    def __init__(self, app: ASGIApp, meter: Meter, call: str) -> None:
        self._app, self._meter, self._call = app, meter, call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, sent_bytes = self._meter.clock(), 0
        status = 500  # what `net/server` answers if the handler fails

        async def send_counted(message: Message) -> None:
            nonlocal status, sent_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                sent_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, send_counted)
        finally:
            took_s = self._meter.clock() - began
            self._meter.answered(self._call, status, took_s, _declared_bytes(scope), sent_bytes)


def _declared_bytes(scope: Scope) -> int:
    length = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    return int(length) if length.isdigit() and len(length) <= MAX_LENGTH_DIGITS else 0


# --- the figures of the run ---
#
# A page is made at most once a second, and more seldom if that takes long: nobody keeps the coordinator busy by asking.


PHASES = ("running", "paused", "draining", "ended")

SEVERITIES = ("notice", "warning", "critical")

WAITED_FOR = ("nothing", "host", "trainer", "validators", "workers")

QUARANTINE_CAUSES = (*CHECKS, "noise", "forged", "host", "other")

PAGE_S = 1.0
"""Smallest age at which a page is made anew."""

PAGES_SHARE = 0.01
"""Largest fraction of time spent making pages."""

MAX_VALUES = 64
"""Values of a label that somebody else chose, such as names of an environment's metrics: further ones are left out."""

MAX_VALUE_CHARS = 64

Values = Iterable[tuple[tuple[str, ...], float]]
"""Of a metric, by the values of its labels."""


class PrometheusCollector(Collector):
    """The pages of one coordinator."""

    def __init__(
        self, coordinator: Coordinator, status_cache: StatusCache, meter: Meter,
        alarms: Callable[[], Sequence[StandingAlarm]] = tuple,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        """`alarms` gives those that are raised now."""
        self._coordinator, self._status_cache, self._registry = coordinator, status_cache, meter.registry
        self._alarms, self._clock = alarms, clock
        meter.registry.register(self)
        ProcessCollector(registry=meter.registry)
        self._of_steps, self._metrics = step_metrics(), MetricsFollower(coordinator.metrics_file)
        self._pages: dict[str, bytes] = {}
        self._again_at = -1e9

    def page(self, accept: str) -> tuple[bytes, str]:
        """The metrics and their media type, for a client that accepts these types."""
        if self._clock() >= self._again_at:  # guard: pages-are-kept
            self._pages.clear()
        kind = openmetrics if "application/openmetrics-text" in accept else plain
        media_type = openmetrics.CONTENT_TYPE_LATEST if kind is openmetrics else plain.CONTENT_TYPE_PLAIN_0_0_4
        if media_type not in self._pages:
            began = self._clock()
            self._pages[media_type] = kind.generate_latest(self._registry)
            took_s = self._clock() - began
            self._again_at = began + max(PAGE_S, took_s / PAGES_SHARE)
        return self._pages[media_type], media_type

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client while it makes a page."""
        for name, values in self._of_run():
            yield _family(name, WATCHED[name], values)
        for name, values in self._of_heldout():
            yield _family(name, WATCHED[name], values)
        for figure, values in self._of_newest_step():
            yield _family(figure.name, figure.watched, values)

    def _of_run(self) -> Iterator[tuple[str, Values]]:
        state, status, blobs = self._coordinator.state, self._status_cache.status(), self._coordinator.blobs
        members = state.members.values()
        yield "run_info", [((state.run, state.name, __version__), 1.0)]
        yield "phase", [((phase,), float(phase == status.phase)) for phase in PHASES]
        yield "version", _one(status.version)
        yield "steps", _one(status.steps)
        yield from self._of_pace(status)
        yield "groups_accepted_total", _one(status.accepted)
        refused = dict.fromkeys(CHECKS, 0) | status.refused  # from 0 on, so that the first refusal is a rise
        yield "groups_refused_total", [((check,), float(groups)) for check, groups in refused.items()]
        yield "groups_in_flight", _one(status.in_flight)
        yield "groups_flat", _one(status.flat_groups)
        yield "submissions_pending", _one(status.pending)
        yield "waiting_seconds", [((on,), status.waiting_s * (on == status.waiting_on)) for on in WAITED_FOR]
        standings = collections.Counter((node.role, "left" if node.left else node.standing) for node in members)
        yield "nodes", [(labels, float(count)) for labels, count in standings.items()]
        held = collections.Counter(_cause(node) for node in members if node.standing == "quarantined")
        yield "nodes_quarantined", [((cause,), float(held[cause])) for cause in QUARANTINE_CAUSES]
        faults = [node.failures for node in members if node.role == "validator"]
        yield "validators_differed", _one(sum(each > 0 for each in faults))
        yield "validator_faults_total", _one(sum(faults))
        largest = max((node.influence for node in members if node.role == "worker"), default=0.0)
        yield "influence_largest_ratio", _one(largest / state.influence if state.influence > 0 else 0.0)
        yield "leases_open", _one(len(state.open_leases))
        yield "blocks_leased_total", _one(sum(node.given for node in members))
        yield "blocks_unfilled_total", _one(sum(node.unfilled for node in members))
        yield "credits_issued_total", _one(state.issued)
        yield "credits_burned_total", _one(state.burned)
        yield "blob_bytes", _one(blobs.size_bytes)
        yield "blob_quota_bytes", _one(self._coordinator.quota_bytes)
        yield "disk_free_bytes", _one(free_below(blobs.folder))
        yield "events_total", _one(state.seq + 1)
        yield "event_time_seconds", _one(state.time)
        yield "clock_behind_seconds", _one(max(0.0, state.time - self._coordinator.clock()))
        ranked = sorted(self._alarms(), key=lambda alarm: SEVERITIES.index(alarm.severity))
        severities = {alarm.cause: alarm.severity for alarm in ranked}  # of several with one cause, the most serious
        yield "alarm", [((shown, severities[cause]), 1.0) for shown, cause in _bounded(severities).items()]

    def _of_pace(self, status: Status) -> Iterator[tuple[str, Values]]:
        """What the newest steps and the newest batch say. Absent figures are no series."""
        lines = self._metrics.newest(NEWEST_STEPS)
        left_s = pace_of(lines, status.steps - status.version).left_s if status.phase == "running" else None
        yield "time_left_seconds", _one(left_s) if left_s is not None else []
        mean = mean_of_counts(lines[-1].get("staleness_rollouts")) if lines else None
        yield "staleness_mean_versions", _one(mean) if mean is not None else []
        state = self._coordinator.state
        newest = next(reversed(state.main.batches), None)
        batch = batch_of(state, newest) if newest is not None else None
        rewards = (
            [one for group in batch.groups for one in without_faults(group.rewards, group.faults)]
            if batch is not None
            else []
        )
        yield "reward_spread", _one(pstdev(rewards)) if rewards else []

    def _of_heldout(self) -> Iterator[tuple[str, Values]]:
        names = evaluations_in(self._coordinator.evaluations)
        found = {"first": read_evaluation(self._coordinator.evaluations / f"{BEFORE}.json")}
        newest = (read_evaluation(self._coordinator.evaluations / f"{name}.json") for name in reversed(names[1:]))
        found["newest"] = next((one for one in newest if one is not None), None)
        measured: list[tuple[tuple[str, str], Evaluation]] = []
        for of, heldout in found.items():
            if heldout is not None:
                measured.append(((of, ""), heldout))
                measured += [((of, shown), heldout.envs[env]) for shown, env in _bounded(heldout.envs).items()]
        for field in ("mean", "low95", "high95", "episodes", "faults"):
            told = ((labels, getattr(one, field)) for labels, one in measured)
            yield f"heldout_{field}", [(labels, float(value)) for labels, value in told if value is not None]
        judged = [(of, figures) for of, one in found.items() if one and (figures := interval_of(one.judge))]
        for at, field in enumerate(("mean", "low95", "high95")):
            yield f"heldout_judge_{field}", [((of,), figures[at]) for of, figures in judged]

    def _of_newest_step(self) -> Iterator[tuple[StepMetric, Values]]:
        line = next(iter(self._metrics.newest(1)), {})
        values: dict[str, dict[str, float]] = {}
        for key, value in line.items():
            name, _, label = key.partition("/")
            if isinstance(value, int | float):
                values.setdefault(name, {})[label] = float(value)
            elif isinstance(value, dict):
                values[name] = {str(age): float(count) for age, count in value.items()}
        for name, by_label in values.items():
            if (figure := self._of_steps.get(name)) is None:
                continue
            if figure.watched.labels:
                yield figure, [((shown,), by_label[label]) for shown, label in _bounded(by_label).items()]
            elif "" in by_label:
                yield figure, _one(by_label[""])


def _cause(node: NodeRecord) -> str:
    """Which of `QUARANTINE_CAUSES` led to a quarantine, by the words that the log has."""
    first = node.last_reason.partition(":")[0]
    known = {"sampling or logprobs": "noise", ASKED_BY_HOST: "host"} | {check: check for check in CHECKS}
    return "forged" if node.last_reason.startswith("forged") else known.get(first, "other")


def _one(value: float) -> Values:
    return [((), float(value))]


def _bounded(chosen: Iterable[str]) -> dict[str, str]:
    """Values of a label that somebody else chose, by how they are shown: few, short, and safe to print."""
    shown: dict[str, str] = {}
    for value in chosen:
        if len(shown) < MAX_VALUES:  # guard: few-values-of-a-label
            shown.setdefault(printable(value)[:MAX_VALUE_CHARS], value)
    return shown


def _family(name: str, watched: MetricSpec, values: Values) -> Metric:
    """A metric as prometheus_client has it, which adds the ending `_total` or `_info` itself."""
    kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
    if watched.kind == "info":
        info = InfoMetricFamily(PREFIX + name.removesuffix("_info"), watched.sentence)
        for labels, _ in values:
            info.add_metric((), dict(zip(watched.labels, labels, strict=True)))
        return info
    family = kinds[watched.kind](
        PREFIX + name.removesuffix("_total"), watched.sentence, labels=watched.labels, unit=watched.unit
    )
    for labels, value in values:
        family.add_metric(labels, value)
    return family
