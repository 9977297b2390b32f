"""A run as tables: rows of plain values, with the unit and meaning of each column, and CSV of each.

A number that the log decides is in a row with `seq`, the number of its event; one of metrics has its `step`. Texts are
strangers', as they are; CSV escapes what a spreadsheet would run.
"""

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from shoal.errors import ConfigError, NothingYet, Overreach, StateError
from shoal.evaluation_files import Evaluation
from shoal.ledger.event import Body, Entry
from shoal.ledger.leases import LeaseLapsed
from shoal.ledger.run_events import RulesChanged
from shoal.ledger.state import State
from shoal.ledger.state_records import NodeRecord
from shoal.ledger.verdicts import VerdictGiven
from shoal.protocol.constants import MAX_NODES
from shoal.protocol.reward_rules import without_faults
from shoal.runs.event_text import sentence_of
from shoal.runs.run_reader import RunReader, slot_of, standing_of
from shoal.step_metrics import METRICS

Row = dict[str, Any]


class Column(NamedTuple):
    unit: str
    """Empty of names and texts."""
    sentence: str


class Table(NamedTuple):
    sentence: str
    columns: dict[str, Column]
    """What rows may have. Metrics may have more, in the families of `metrics.METRICS`."""
    rows: Callable[[RunReader], Iterator[Row]]
    """The rows of a run, as far as it was read (`RunReader.catch_up`)."""


def rows_of(run: RunReader, table: str) -> list[Row]:
    """The rows of a table by its name. Raises `ConfigError` for an unknown one, `ShoalError` as `RunReader` does."""
    if table not in TABLES:
        raise ConfigError(f"there is no table {table!r}: {', '.join(TABLES)}")
    return list(TABLES[table].rows(run))


def as_csv(rows: Iterable[Row], columns: Sequence[str] = ()) -> str:
    """Rows as CSV. `columns` go first; others follow in the order in which they come."""
    whole = list(rows)
    names = list(dict.fromkeys([*columns, *(name for row in whole for name in row)]))
    return csv_line(names) + "".join(csv_line(row.get(name) for name in names) for row in whole)


def csv_line(cells: Iterable[Any]) -> str:
    """One row of a CSV, with its end. Cells that break lines are quoted, so none of their parts begins a row."""
    out = io.StringIO()
    # The writer quotes the characters of its own line's end only: a lone \r would begin a row for spreadsheets.
    csv.writer(out, lineterminator="\r\n").writerow(map(_cell, cells))  # guard: csv-rows-end-once
    return out.getvalue().removesuffix("\r\n") + "\n"


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        text = value.replace("\0", "")  # first: what follows a leading NUL becomes the cell's first character
        if text[:1] in ("=", "+", "-", "@", "\t", "\r", "\n"):  # guard: csv-runs-no-formula
            return "'" + text
        return text
    return json.dumps(value, sort_keys=True) if isinstance(value, dict | list | tuple) else value


# --- the tables ---


def _events(run: RunReader) -> Iterator[Row]:
    return (event_row(entry, run.state) for entry in run.events())


def _verdicts(run: RunReader) -> Iterator[Row]:
    for entry in run.events():
        if isinstance(entry.body, VerdictGiven):
            yield verdict_row(entry, entry.body, run.state)


def _refusals(run: RunReader) -> Iterator[Row]:
    for entry in run.events():
        if isinstance(entry.body, VerdictGiven):
            for row in refusal_rows(entry, entry.body, run.state):
                yield {**row, "status": standing_of(run.state, run.marks, row["submission"], row["index"])[0]}


def _metrics(run: RunReader) -> Iterator[Row]:
    yield from run.metrics()


def _nodes(run: RunReader) -> Iterator[Row]:
    for node in run.nodes():
        facts = {name: getattr(node, name) for name in _NODE_COLUMNS if hasattr(node, name)}
        yield {"seq": run.state.seq, **facts}


def _versions(run: RunReader) -> Iterator[Row]:
    state = run.state
    for version in run.versions():
        record = state.main.versions[version.version]
        made = {state.leases[block.lease].worker for block in record.blocks.values() if block.status == "done"}
        slots = [slot.status for slot in record.slots.values()]
        yield {
            "version": version.version, "seq": version.seq, "time_s": version.time, "root": version.root,
            "manifest": version.manifest, "is_retired": version.is_retired, "workers": len(made),
            **{status: slots.count(status) for status in ("signal", "flat", "continued", "void")},
            "batch_seq": run.marks.batches.get(version.version),
        }  # fmt: skip


def _groups(run: RunReader) -> Iterator[Row]:
    state = run.state
    for place in run.places():
        name, index = place.submission, place.index
        booked = state.submissions[name]
        lease = state.lease_of(booked)
        slot = slot_of(state, lease, index)
        status, seq = standing_of(state, run.marks, name, index)
        record = state.main.versions[lease.version].slots.get(slot)
        final = record if record is not None and record.digest == booked.groups[index] else None
        rewards = without_faults(final.rewards, final.faults or ()) if final else ()
        yield {
            "version": lease.version, "slot": slot, "submission": name, "index": index, "digest": booked.groups[index],
            "worker": lease.worker, "received_seq": booked.seq, "received_s": booked.time, "seq": seq, "status": status,
            "is_public": run.is_public(name), "step": final.step if final else -1,
            "tokens": final.tokens if final else None,
            "reward_mean": mean(rewards), "reward_std": spread(rewards),
        }  # fmt: skip


def _rollouts(run: RunReader) -> Iterator[Row]:
    """Those whose bodies can be read now."""
    for place in run.places():
        try:
            group = run.group(place)
        except Overreach:  # it says nothing about the group
            raise
        except (NothingYet, StateError):
            continue
        for rollout in group.rollouts:
            logprobs = [logprob for turn in rollout.turns for logprob in turn.logprobs]
            yield {
                "version": group.version, "slot": group.slot, "rollout": rollout.index, "submission": group.submission,
                "index": group.index, "worker": group.worker, "env": group.env, "task": group.task, "status": group.status,
                "step": group.step, "seq": group.seq, "reward": rollout.reward, "advantage": rollout.advantage,
                "ending": rollout.ending, "tokens": rollout.tokens, "policy_tokens": rollout.policy_tokens,
                "logprob_mean": mean(logprobs), "turns": len(rollout.turns), "flaw": rollout.flaw, "text": rollout.text(),
            }  # fmt: skip


def _evaluations(run: RunReader) -> Iterator[Row]:
    for one in run.evaluations():
        yield _heldout(one, one, "")
        yield from (_heldout(one, part, label) for label, part in one.envs.items())


def _heldout(whole: Evaluation, one: Evaluation, label: str) -> Row:
    return {
        "name": whole.name, "version": whole.version, "env": label, "mean": one.mean, "low95": one.low95,
        "high95": one.high95, "episodes": one.episodes, "faults": one.faults, "measure": one.measure, "tasks": one.tasks,
        **dict(zip(("judge", "judge_low95", "judge_high95"), judged(one), strict=True)),
        "parts": one.parts, "metrics": one.metrics,
    }  # fmt: skip


def judged(one: Evaluation | None) -> tuple[float | None, float | None, float | None]:
    """The mean and the interval that a held-out judge gives an evaluation; three times None without one."""
    judge = one and one.judge
    return (judge.mean, judge.low95, judge.high95) if judge is not None else (None, None, None)


def mean(values: Sequence[float]) -> float | None:
    """None of no values, and of values that are not finite."""
    if not values or not all(map(math.isfinite, values)):
        return None
    return math.fsum(values) / len(values)


def spread(values: Sequence[float]) -> float | None:
    """The standard deviation (population)."""
    middle = mean(values)
    return None if middle is None else math.sqrt(math.fsum((value - middle) ** 2 for value in values) / len(values))


_SEQ = Column("event", "Number of the event that says so.")
_TIME = Column("s since the epoch", "Time of the event, by the host's clock.")
_WORKER = Column("", "Key of the worker.")
_VERSION = Column("version", "Policy version.")
_SLOT = Column("slot", "Slot within the version.")
_SUBMISSION = Column("", "SHA-256 of the submission's body.")
_INDEX = Column("groups", "Place of the group in its submission, counted from 0.")
_STATUS = Column("", "What became of the group: pending, signal, flat, continued, void, refused, disputed or copied.")
_STEP = Column("step", "Newest batch that took the group; -1 if none did.")

_NODE_COLUMNS = {
    "key": Column("", "Public key: the node's identity."),
    "name": Column("", "What the node calls itself."),
    "role": Column("", "worker, validator or trainer."),
    "standing": Column("", "new, good, quarantined, suspended or kicked."),
    "credits": Column("tokens", "Policy tokens accepted, and not slashed or forfeited."),
    "vested": Column("tokens", "The part of the credits that a slash can no longer take."),
    "accepted": Column("groups", "Accepted groups."),
    "refused": Column("groups", "Refused groups."),
    "reasons": Column("groups", "Refused groups by check."),
    "last_reason": Column("", "The latest reason in full."),
    "influence": Column(
        "advantage x tokens", "Sum over groups that batches took: mean size of the advantages times policy tokens."
    ),
    "leases": Column("leases", "Leases ever granted."),
    "lapsed": Column("leases", "Leases that it dropped or filled too late."),
    "stale": Column(
        "leases", "Leases closed at no cost: their version became too old, or the host's environment hung."
    ),
    "given": Column("blocks", "Blocks ever leased to it."),
    "unfilled": Column("blocks", "Of these, blocks that it dropped, or that another worker made because it was late."),
    "left": Column("", "Whether it left and has not joined again."),
}

TABLES: dict[str, Table] = {
    "events": Table("The log, one event a row.", {
        "seq": _SEQ, "time_s": _TIME, "kind": Column("", "Kind of event."),
        "node": Column("", "Key of the node it is about."),
        "version": _VERSION, "words": Column("", "What it says, in one sentence."), "hash": Column("", "Its hash."),
    }, _events),
    "metrics": Table("The trainer's metrics, one step a row; the host's word.", {
        name: Column(metric.unit, metric.sentence) for name, metric in METRICS.items()
    }, _metrics),
    "nodes": Table("Nodes, as of the newest event.", {"seq": _SEQ, **_NODE_COLUMNS}, _nodes),
    "versions": Table("Policy versions, and what was made with each.", {
        "version": _VERSION, "seq": _SEQ, "time_s": _TIME, "root": Column("", "Weights root."),
        "manifest": Column("", "SHA-256 of the signed manifest."),
        "is_retired": Column("", "Whether nothing of it can be submitted any more."),
        "workers": Column("workers", "Workers whose blocks of it were accepted."),
        "signal": Column("slots", "Slots whose group has signal."), "flat": Column("slots", "Slots without signal."),
        "continued": Column("slots", "Slots of continuations."), "void": Column("slots", "Slots without a group."),
        "batch_seq": Column("event", "Number of the event that formed the batch of its step."),
    }, _versions),
    "groups": Table("Submitted groups, as the log has them.", {
        "version": _VERSION, "slot": _SLOT, "submission": _SUBMISSION, "index": _INDEX,
        "digest": Column("", "SHA-256 of the group."), "worker": _WORKER,
        "received_seq": Column("event", "Number of the event by which the submission came."), "received_s": _TIME,
        "seq": _SEQ, "status": _STATUS, "is_public": Column("", "Whether anyone may read its body."), "step": _STEP,
        "tokens": Column("tokens", "Policy tokens; empty unless accepted."),
        "reward_mean": Column("reward", "Mean reward of its rollouts; empty unless accepted."),
        "reward_std": Column("reward", "Their standard deviation (population)."),
    }, _groups),
    "rollouts": Table("Rollouts whose bodies can be read.", {
        "version": _VERSION, "slot": _SLOT, "rollout": Column("rollouts", "Index in the group."), "submission": _SUBMISSION,
        "index": _INDEX, "worker": _WORKER, "env": Column("", "Label of the environment."),
        "task": Column("task", "Index of the task."), "status": _STATUS, "step": _STEP, "seq": _SEQ,
        "reward": Column("reward", "As the validators recomputed it; empty unless accepted."),
        "advantage": Column("reward", "By the algorithm, mean over learned tokens; empty if the trainer alone knows."),
        "ending": Column("", "environment, length, error or stop."), "tokens": Column("tokens", "All of its tokens."),
        "policy_tokens": Column("tokens", "Those that the policy wrote."),
        "logprob_mean": Column("nats", "Mean log-prob of these, as the worker claims."),
        "turns": Column("turns", "Stretches of one author."), "flaw": Column("", "Why it cannot be read; usually empty."),
        "text": Column("", "What was said, by author."),
    }, _rollouts),
    "evaluations": Table("Evaluations on held-out tasks; the host's word.", {
        "name": Column("", "before, after, or the version."), "version": _VERSION,
        "env": Column("", "Label of the environment; empty for all together."),
        "mean": Column("share or reward", "Mean over the episodes that have a score; empty if none has."),
        "low95": Column("share or reward", "95 % interval: low."),
        "high95": Column("share or reward", "95 % interval, high."), "episodes": Column("episodes", "Episodes played."),
        "faults": Column("episodes", "Of these, on which the environment failed; they have no score."),
        "measure": Column("", "success or reward."), "tasks": Column("", "heldout or training."),
        "judge": Column("share or reward", "Mean by the held-out judge; empty without one."),
        "judge_low95": Column("share or reward", "Its 95 % interval, low."),
        "judge_high95": Column("share or reward", "Its 95 % interval, high."),
        "parts": Column("reward", "Mean of each named part of the reward."),
        "metrics": Column("any", "Mean of each metric that the environment reports."),
    }, _evaluations),
    "verdicts": Table("Verdicts of validators.", {
        "seq": _SEQ, "time_s": _TIME, "validator": Column("", "Its key."), "submission": _SUBMISSION, "worker": _WORKER,
        "version": _VERSION, "groups": Column("groups", "Groups of the submission."),
        "audited": Column("groups", "Groups that it recomputed with the model."),
        "accept": Column("groups", "Groups that it accepts."), "void": Column("groups", "Groups whose environment fails."),
        "soft": Column("groups", "Groups that it refuses softly."),
        "hard": Column("groups", "Groups that it calls forged."),
        "differs_from": Column("", "Keys of validators whose activations differ from its own."),
    }, _verdicts),
    "refusals": Table("Groups that a validator refuses, with the reason.", {
        "seq": _SEQ, "time_s": _TIME, "validator": Column("", "Its key."), "submission": _SUBMISSION, "index": _INDEX,
        "worker": _WORKER, "version": _VERSION, "slot": _SLOT, "outcome": Column("", "soft or hard."),
        "check": Column("", "The check that fails."), "reason": Column("", "What it says."),
        "rollout": Column("rollouts", "Index in the group; -1 if it is none in particular."),
        "position": Column("tokens", "Index of the token; -1 if it is none in particular."),
        "figure": Column("any", "What was measured."), "bound": Column("any", "Its limit; 0 if there is none."),
        "status": _STATUS,
    }, _refusals),
}  # fmt: skip
"""By name."""


# --- Rows of what single events say ---


_NODE = ("worker", "node", "validator", "key")
"""Fields of events that name a node, the first one that an event has."""


def event_row(entry: Entry, state: State) -> Row:
    """An event in the timeline."""
    return {
        "seq": entry.seq,
        "time_s": entry.time,
        "kind": entry.kind,
        "node": node_of(entry.body, state),
        "version": version_of(entry.body, state),
        "words": sentence_of(entry.body),
        "hash": entry.hash,
    }


def node_of(body: Body, state: State) -> str:
    """Key of the node that an event is about; empty if it is about none."""
    for name in _NODE:
        key = getattr(body, name, "")
        if key:
            return str(key)
    if isinstance(body, LeaseLapsed):
        return state.leases[body.lease].worker
    if isinstance(body, RulesChanged):
        return body.quarantined or body.kicked or body.admitted_validator
    submission = getattr(body, "submission", "")
    return state.lease_of(state.submissions[submission]).worker if submission in state.submissions else ""


def node_note(node: NodeRecord, state: State) -> str:
    """What a worker's standing does not say: whether the host announced it as a cheater, and that it was quarantined."""
    workers = state.config.get("workers")
    cheating = workers.get("cheating") if isinstance(workers, dict) else 0
    cheaters = {f"cheater-{i}" for i in range(min(cheating, MAX_NODES))} if isinstance(cheating, int) else set()
    notes = ["cheats"] if node.role == "worker" and node.name in cheaters else []
    if node.standing != "quarantined" and node.role == "worker" and node.until:
        notes.append("was quarantined")
    return ", ".join(notes)


def version_of(body: Body, state: State) -> int | None:
    """The policy version that an event is about, if it is about one."""
    version = getattr(body, "version", None)
    if isinstance(version, int):
        return version
    lease = getattr(body, "lease", "")
    submission = state.submissions.get(getattr(body, "submission", ""))
    name = lease or (submission.lease if submission is not None else "")
    return state.leases[name].version if name in state.leases else None


def verdict_row(entry: Entry, body: VerdictGiven, state: State) -> Row:
    """A validator's verdict on a submission."""
    lease = state.lease_of(state.submissions[body.submission])
    outcomes = [group.outcome for group in body.groups]
    return {
        "seq": entry.seq,
        "time_s": entry.time,
        "validator": body.validator,
        "submission": body.submission,
        "worker": lease.worker,
        "version": lease.version,
        "groups": len(outcomes),
        "audited": sum(group.audited for group in body.groups),
        **{outcome: outcomes.count(outcome) for outcome in ("accept", "void", "soft", "hard")},
        "differs_from": " ".join(body.differs_from),
    }


def refusal_rows(entry: Entry, body: VerdictGiven, state: State) -> Iterator[Row]:
    """The groups that a verdict refuses."""
    submission = state.submissions[body.submission]
    lease = state.lease_of(submission)
    for index, group in enumerate(body.groups):
        if group.outcome in ("soft", "hard"):
            yield {
                "seq": entry.seq,
                "time_s": entry.time,
                "validator": body.validator,
                "submission": body.submission,
                "index": index,
                "worker": lease.worker,
                "version": lease.version,
                "slot": group.slot,
                "outcome": group.outcome,
                "check": group.check,
                "reason": group.detail,
                "rollout": group.rollout,
                "position": group.position,
                "figure": group.figure,
                "bound": group.bound,
            }
