"""The run's figures for a Prometheus server: `GET /metrics`.

Called by `shown`. It fills what `watched` declares, from the state, the run's folder and the meter. A page is made at most
once a second, and more seldom if that takes long, so nobody can keep the coordinator busy by asking for it.
"""

import collections
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import pstdev

from prometheus_client import ProcessCollector
from prometheus_client import exposition as plain
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from shoal import __version__
from shoal.folder import free_below
from shoal.heldout import BEFORE, Heldout, evaluations_in, interval_of, read_heldout
from shoal.ledger.rules.members import ASKED_BY_HOST
from shoal.ledger.state_records import Member
from shoal.metrics import NEWEST_STEPS, newest_lines, newest_metrics, pace_of
from shoal.protocol.audits import CHECKS
from shoal.protocol.env_faults import without_faults
from shoal.protocol.types import StandingAlarm, Status
from shoal.roles.coordinator.board import Board, batch_of
from shoal.roles.coordinator.desk import Desk
from shoal.roles.coordinator.meter import Meter
from shoal.roles.coordinator.watched import PREFIX, WATCHED, OfStep, Watched, of_steps
from shoal.terminal import printable

PHASES = ("running", "paused", "draining", "ended")

SEVERITIES = ("notice", "warning", "critical")

WAITED_FOR = {
    "nothing": "nothing", "the host": "host", "the trainer": "trainer", "validators": "validators", "workers": "workers",
    "other workers": "workers",
}  # fmt: skip
"""By the first words of what `board` says that the run waits for."""

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


class Exposed(Collector):
    """The pages of one coordinator."""

    def __init__(
        self, desk: Desk, board: Board, meter: Meter, alarms: Callable[[], Sequence[StandingAlarm]] = tuple,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        """`alarms` gives those that are raised now."""
        self._desk, self._board, self._registry = desk, board, meter.registry
        self._alarms, self._clock = alarms, clock
        meter.registry.register(self)
        ProcessCollector(registry=meter.registry)
        self._of_steps = of_steps()
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
        state, status, blobs = self._desk.state, self._board.status(), self._desk.blobs
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
        waits = WAITED_FOR.get(status.waiting_for.partition(":")[0], "nothing")
        yield (
            "waiting_seconds",
            [((on,), status.waiting_s * (on == waits)) for on in dict.fromkeys(WAITED_FOR.values())],
        )
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
        yield "blob_quota_bytes", _one(self._desk.quota_bytes)
        yield "disk_free_bytes", _one(free_below(blobs.folder))
        yield "events_total", _one(state.seq + 1)
        yield "event_time_seconds", _one(state.time)
        yield "clock_behind_seconds", _one(max(0.0, state.time - self._desk.clock()))
        ranked = sorted(self._alarms(), key=lambda alarm: SEVERITIES.index(alarm.severity))
        severities = {alarm.cause: alarm.severity for alarm in ranked}  # of several with one cause, the most serious
        yield "alarm", [((shown, severities[cause]), 1.0) for shown, cause in _bounded(severities).items()]

    def _of_pace(self, status: Status) -> Iterator[tuple[str, Values]]:
        """What the newest steps and the newest batch say. Absent figures are no series."""
        lines = newest_lines(self._desk.metrics_file, NEWEST_STEPS)
        left_s = pace_of(lines, status.steps - status.version).left_s if status.phase == "running" else None
        yield "time_left_seconds", _one(left_s) if left_s is not None else []
        ages = lines[-1].get("staleness_rollouts") if lines else None
        counts = {int(age): count for age, count in ages.items()} if isinstance(ages, dict) else {}
        total = sum(counts.values())
        yield "staleness_mean_versions", _one(sum(age * n for age, n in counts.items()) / total) if total else []
        state = self._desk.state
        newest = next(reversed(state.main.batches), None)
        batch = batch_of(state, newest) if newest is not None else None
        rewards = (
            [one for group in batch.groups for one in without_faults(group.rewards, group.faults)]
            if batch is not None
            else []
        )
        yield "reward_spread", _one(pstdev(rewards)) if rewards else []

    def _of_heldout(self) -> Iterator[tuple[str, Values]]:
        names = evaluations_in(self._desk.evaluations)
        found = {"first": read_heldout(self._desk.evaluations / f"{BEFORE}.json")}
        newest = (read_heldout(self._desk.evaluations / f"{name}.json") for name in reversed(names[1:]))
        found["newest"] = next((one for one in newest if one is not None), None)
        measured: list[tuple[tuple[str, str], Heldout]] = []
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

    def _of_newest_step(self) -> Iterator[tuple[OfStep, Values]]:
        line = newest_metrics(self._desk.metrics_file) or {}
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


def _cause(node: Member) -> str:
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


def _family(name: str, watched: Watched, values: Values) -> Metric:
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
