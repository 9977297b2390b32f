"""What `GET /metrics` tells a Prometheus server: each metric of the coordinator, declared once.

Filled by `exposed`, but for what `meter` counts. Names follow Prometheus: base units, `_total` for counters, `_info` for
facts. A label has few values, and none is the key of a node, so that no stranger makes series.
"""

from typing import Literal, NamedTuple

from shoal.metrics import METRICS

PREFIX = "shoal_"


class Watched(NamedTuple):
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

WATCHED: dict[str, Watched] = {
    "run_info": Watched("info", "The run's id, its name, and the version of shoal.", ("run", "name", "shoal")),
    "phase": Watched("gauge", "1 for the phase that the run is in, 0 for the others.", ("phase",)),
    "version": Watched("gauge", "Newest published version of the policy; -1 before the first."),
    "steps": Watched("gauge", "Training steps of the whole run."),
    "time_left_seconds": Watched(
        "gauge", "Until the last step, at the pace of the newest 20; absent before the first, and of a run that is paused.",
        unit="seconds",
    ),
    "reward_spread": Watched(
        "gauge", "Standard deviation of the rewards of all rollouts of the newest batch; absent before the first."
    ),
    "staleness_mean_versions": Watched(
        "gauge", "Mean age of the rollouts of the newest step, in versions of the policy; absent before the first.",
    ),
    "groups_accepted_total": Watched("counter", "Accepted groups."),
    "groups_refused_total": Watched("counter", "Refused groups, by the check that refused them.", ("check",)),
    "groups_in_flight": Watched("gauge", "Groups that are leased, submitted or accepted, for batches that are to come."),
    "groups_flat": Watched("gauge", "Groups in a row whose rewards were all equal: they teach nothing, but are paid."),
    "submissions_pending": Watched("gauge", "Submissions that wait for validators, those of second looks included."),
    "waiting_seconds": Watched(
        "gauge",
        "Seconds since what the run waits for has changed, a count in it included, for whom it waits; 0 for the others.",
        ("on",),
        "seconds",
    ),
    "nodes": Watched("gauge", "Nodes by role and standing; `left` is the standing of those that left.",
                     ("role", "standing")),
    "nodes_quarantined": Watched(
        "gauge",
        "Workers in quarantine now, by what led to it: a check, `noise` (over time), `forged` (two validators found it), "
        "`host` (asked for it) or `other`.", ("cause",),
    ),
    "validators_differed": Watched(
        "gauge", "Validators that were found at fault: the others outvoted them, or they judged without doing the work."
    ),
    "validator_faults_total": Watched("counter", "How often that was found, of all validators."),
    "influence_largest_ratio": Watched(
        "gauge", "Share of the influence on all batches that the worker with the most of it has.", unit="ratio"
    ),
    "leases_open": Watched("gauge", "Leases that are neither filled nor lapsed."),
    "blocks_leased_total": Watched("counter", "Blocks that were ever leased."),
    "blocks_unfilled_total": Watched(
        "counter", "Leased blocks that workers dropped, or that another filled because they were late."
    ),
    "credits_issued_total": Watched("counter", "Credits ever issued, policy tokens."),
    "credits_burned_total": Watched("counter", "Credits slashed and forfeited, policy tokens."),
    "blob_bytes": Watched("gauge", "Disk space that blobs take.", unit="bytes"),
    "blob_quota_bytes": Watched("gauge", "Disk space that they may take: storage.quota_mb.", unit="bytes"),
    "disk_free_bytes": Watched("gauge", "Free space on the disk of the run's folder.", unit="bytes"),
    "events_total": Watched("counter", "Events in the log."),
    "event_time_seconds": Watched("gauge", "Time of the newest event, since the epoch.", unit="seconds"),
    "clock_behind_seconds": Watched(
        "gauge", "How far the host's clock is behind the log, if it was set back: no lease is granted then.", unit="seconds"
    ),
    "alarm": Watched("gauge", "1 for each alarm that is raised, by its cause and severity.", ("cause", "severity")),
    "heldout_mean": Watched(
        "gauge",
        "Share of wins, or mean reward, on held-out tasks, in the evaluation of the first version and in the newest; `env` "
        "is empty for all environments together.",
        ("of", "env"),
    ),
    "heldout_low95": Watched("gauge", "Lower bound of its 95 % confidence interval.", ("of", "env")),
    "heldout_high95": Watched("gauge", "Upper bound of its 95 % confidence interval.", ("of", "env")),
    "heldout_episodes": Watched("gauge", "Episodes of that evaluation.", ("of", "env")),
    "heldout_faults": Watched(
        "gauge", "Of these episodes, on which the environment failed; they have no part in the mean.", ("of", "env")
    ),
    "heldout_judge_mean": Watched(
        "gauge", "What the held-out judge, eval.judge, says of the same episodes; absent without one.", ("of",)
    ),
    "heldout_judge_low95": Watched("gauge", "Lower bound of its 95 % confidence interval.", ("of",)),
    "heldout_judge_high95": Watched("gauge", "Upper bound of its 95 % confidence interval.", ("of",)),
    "requests_total": Watched("counter", "Answered requests, by call and first digit of the status.", ("call", "status")),
    "request_seconds": Watched(
        "histogram", "From a request's headers to the end of its answer; long polls wait for up to 20 s.", ("call",),
        "seconds",
    ),
    "request_bytes": Watched("histogram", "Declared sizes of the bodies of requests.", ("call",), "bytes"),
    "answer_bytes": Watched("histogram", "Sizes of the bodies of answers.", ("call",), "bytes"),
    "event_loop_lag_seconds": Watched(
        "histogram", "How much later than it was due the coordinator's event loop did something.", unit="seconds"
    ),
}  # fmt: skip
"""Metrics by name, without PREFIX."""

_ENDINGS = (("_per_s", "_per_second", ""), ("_s", "_seconds", "seconds"), ("_share", "_ratio", "ratio"))
"""How names of `shoal/metrics.py` end, how Prometheus has them end, and the unit."""

_NO_NUMBER = "waiting_for"

_BY_AGE = "staleness_rollouts"
"""Its value is a table: rollouts by how many versions old their policy was."""

_LABELS = {"": (), "LABEL": ("env",), "NAME": ("name",)}
"""By what follows the slash in a name of `shoal/metrics.py`."""


class OfStep(NamedTuple):
    """A figure of the newest training step, as Prometheus is told it."""

    name: str
    watched: Watched


def of_steps() -> dict[str, OfStep]:
    """The metrics of training steps, by the name that they have in `metrics.jsonl` before a slash. A metric that
    `shoal/metrics.py` declares is told without being named here."""
    found: dict[str, OfStep] = {}
    for declared, metric in METRICS.items():
        name, _, after = declared.partition("/")
        if name == _NO_NUMBER:
            continue
        told, unit = _told(name)
        sentence = found[name].watched.sentence if name in found else f"Of the newest training step: {metric.sentence}"
        labels = ("versions",) if name == _BY_AGE else _LABELS[after]
        found[name] = OfStep(told, Watched("gauge", sentence, labels, unit))
    return found


def _told(name: str) -> tuple[str, str]:
    ending, base, unit = next((row for row in _ENDINGS if name.endswith(row[0])), ("", "", ""))
    told = name.removesuffix(ending) + base
    return told if name == "step" else f"step_{told.removeprefix('step_')}", unit
