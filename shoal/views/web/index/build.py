"""Builds the index of a run from a reading, step by step.

Each step is one transaction that also moves the place up to which the log is indexed. So a process that is killed at any
point goes on where it stopped, and the index holds the same as if it had never been. What is written follows from the log,
the metrics and the bodies alone.
"""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec import structs

from shoal.errors import StateError
from shoal.evaluation_files import Evaluation, why_not_comparable
from shoal.ledger.batches import BatchFormed, GroupAccepted, SlotVoid
from shoal.ledger.event import Entry
from shoal.ledger.group_advantages import advantages
from shoal.ledger.lease_sizing import is_slow, usual_pace_s
from shoal.ledger.leases import LeaseGranted
from shoal.ledger.run_events import RulesChanged, RunEnded
from shoal.ledger.status import status_of
from shoal.ledger.submissions import SubmissionReceived
from shoal.ledger.verdicts import Decision, VerdictGiven
from shoal.ledger.versions import CheckpointPublished, LinkRevealed
from shoal.protocol.algorithm_config import judged_by_trainer, step_credit_of, vine_of
from shoal.protocol.reward_rules import without_faults
from shoal.runs.csv_tables import event_row, judged, mean, node_note, refusal_rows, spread, verdict_row
from shoal.runs.run_reader import RunReader, slot_of, standing_of
from shoal.step_metrics import MetricsLine, step_of
from shoal.views.web.index.insert_rows import MetricsIndex, Quota, decode_bodies, note_alarms
from shoal.views.web.index.schema import (
    MOST_ROLLOUTS,
    begun,
    fit_for_search,
    forget,
    open_to_write,
    plain,
    run_word,
    told_as_errors,
)

PAGE = 1000
"""Events of one transaction, when they are read again."""

BODIES = 8
"""Submissions that one step decodes, at most."""

MOST_ACTS = 100
"""Keep the evidence of at most this many requests of the host that alarms led to, the newest."""


def numbered(path: Path, places: Sequence[str]) -> list[int]:
    """The numbers of runs in an index, which is made if it is not there. New runs get theirs in this order.

    Raises `StateError`.
    """
    with closing(open_to_write(path)) as db, told_as_errors(", ".join(places)):
        return [begun(db, place)[0] for place in places]


class Builder:
    """The index of one run, while it is built. Several builders may write to one index, one transaction after another."""

    def __init__(self, path: Path, run: RunReader, clock: Callable[[], float] = time.time) -> None:
        """Open or make the index. Raises `StateError`."""
        assert run.state.seq < 0, "a builder has a reading of its own, and reads it from the beginning"
        self.reading, self._clock = run, clock
        self._db = open_to_write(path)
        try:
            with told_as_errors(run.name):
                self.number, self._id, self._seq, self._head = begun(self._db, run.name)
                """The run's number in the index; and its id, and the newest event that is indexed."""
        except StateError:
            self._db.close()
            raise
        self._nodes: dict[str, tuple[Any, ...]] = {}
        """Rows as they were written last, by key."""
        self._metrics = MetricsIndex(self._db, self.number)
        self._later_metrics: list[MetricsLine] = []
        """Lines of metrics that are further than the log was read."""
        self._by_version: dict[int, list[str]] = {}
        """Submissions."""
        self._withheld: dict[int, set[str]] = {}
        """By version: submissions that are decided and not public. Any decision on the same blocks may make them so."""
        self._quota = Quota()
        self._acts = list[dict[str, Any]]()
        """What alarms led to: the number of each event, and its evidence."""
        self._unbegun = ""
        """Why the newest task that can never begin cannot."""

    def close(self) -> None:
        """Close the index, not the reading."""
        self._db.close()

    def advance(self) -> bool:
        """Index the next page of the log, of metrics, and some bodies. Returns whether there was anything to do.

        Raises `ShoalError` as `RunReader` does; what was indexed before stays. After `PeerError`, call it again later.
        After any other error, open the run again with another builder: this one may have forgotten what it was to write.
        """
        with told_as_errors(self.reading.name):
            return self._advance()

    def _advance(self) -> bool:
        entries = self.reading.refresh()
        known = [entry for entry in entries if entry.seq <= self._seq]
        for entry in known:
            self._remember(entry)
        was_cut = not entries and self.reading.state.seq < self._seq
        if was_cut or any(self._is_other(entry) for entry in known):  # guard: index-of-another-log
            self._begin_again()
        elif self._seq + len(entries) - len(known) == self.reading.state.seq:
            self._index(entries[len(known) :])
        else:  # an error had stopped it, or somebody else has read on
            self._index_again()
        lines = self._new_metrics()
        if lines:
            self._metrics.take(lines)
        decoded = decode_bodies(self._db, self.number, self.reading, BODIES)
        return bool(entries or lines or decoded)

    def _new_metrics(self) -> list[MetricsLine]:
        """New lines of metrics; while the log is read, those of versions that were read."""
        lines, version = self._later_metrics + self.reading.new_metrics(), self.reading.state.main.version
        is_whole = self.reading.is_at_end
        self._later_metrics = [] if is_whole else [line for line in lines if step_of(line) >= version]
        return lines if is_whole else [line for line in lines if step_of(line) < version]

    def build(self) -> None:
        """Index all that there is."""
        while self.advance():
            pass
        self.note_condition()

    def note_condition(self) -> None:
        """Note how the run does now, its evaluations and alarms. Raises as `advance`."""
        with told_as_errors(self.reading.name):
            self._note_condition()

    def _note_condition(self) -> None:
        condition, now = self.reading.condition(), self._clock()
        status, lines = condition.status, self.reading.alarms()
        said = {name: value for name, value in structs.asdict(status).items() if name != "alarms"}
        told = json.dumps({**said, "is_stopped": condition.is_stopped, **self._quota.of(self.reading, now)})
        standing = status.alarms if condition.is_live else None
        since_s = now - status.waiting_s
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute(
                "INSERT OR REPLACE INTO conditions VALUES (?, ?, ?, ?, ?)",
                (self.number, told, condition.is_live, now, since_s),
            )
            note_alarms(self._db, self.number, lines, standing, now)
            self._db.execute("DELETE FROM heldout WHERE run = ?", (self.number,))
            for one in self._evaluations():
                for label, part in {"": one, **one.envs}.items():
                    judge = judged(None if part.judge and why_not_comparable(part.judge) else part)
                    self._put("heldout", (
                        self.number, one.name, label, one.version, part.mean, part.low95, part.high95, part.episodes,
                        part.faults, part.measure, part.tasks, *judge,
                    ))  # fmt: skip

    def _evaluations(self) -> list[Evaluation]:
        """Evaluations; while the log is read, those of versions that were read."""
        found = self.reading.evaluations()
        newest = self._db.execute("SELECT max(version) FROM versions WHERE run = ?", (self.number,)).fetchone()[0] or 0
        return found if self.reading.is_at_end else [one for one in found if one.version <= newest]

    # --- the log ---

    def _remember(self, entry: Entry) -> None:
        """Note what is needed of an event that is indexed."""
        state = self.reading.state
        if isinstance(entry.body, SubmissionReceived):
            version = state.leases[entry.body.lease].version
            self._by_version.setdefault(version, []).append(entry.body.digest)
        elif isinstance(entry.body, Decision) and not self.reading.is_public(entry.body.submission):
            version = state.lease_of(state.submissions[entry.body.submission]).version
            self._withheld.setdefault(version, set()).add(entry.body.submission)
        elif isinstance(entry.body, RulesChanged) and entry.body.evidence:
            act = {"seq": entry.seq, **structs.asdict(entry.body.evidence)}
            self._acts = [*self._acts[1 - MOST_ACTS :], act]
        elif isinstance(entry.body, SlotVoid):
            self._unbegun = entry.body.unbegun() or self._unbegun

    def _is_other(self, entry: Entry) -> bool:
        """Whether an event shows that what is indexed was another log."""
        return (entry.seq == 0 and self.reading.run != self._id) or (
            entry.seq == self._seq and entry.hash != self._head
        )

    def _begin_again(self) -> None:
        """Forget the log that was indexed, and index this one as far as it was read."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            forget(self._db, self.number)
        self._id, self._seq, self._head, self._nodes = "", -1, "", {}
        self._by_version, self._withheld, self._acts, self._unbegun = {}, {}, [], ""
        self._index_again()
        self._metrics = MetricsIndex(self._db, self.number)
        self._later_metrics = self.reading.metrics()

    def _index_again(self) -> None:
        """Index events that were read before."""
        entries = self.reading.events(self._seq)
        while page := list(islice(entries, PAGE)):
            self._index(page)

    def _index(self, entries: Sequence[Entry]) -> None:
        if not entries:
            return
        state = self.reading.state
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            touched = dict[str, None]()
            for entry in entries:
                self._remember(entry)
                self._take(entry)
                touched |= dict.fromkeys(self._touched(entry))
            for name in touched:
                self._put_groups(name)
            self._put_nodes()
            last = entries[-1]
            self._put_versions({version for entry in entries for version in _versions_in(entry)})
            self._db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?, ?)", (self.number, last.seq, self._facts()))
            self._db.execute(
                "UPDATE runs SET id = ?, name = ?, seq = ?, head = ? WHERE run = ?",
                (state.run, state.name, last.seq, last.hash, self.number),
            )
        self._id, self._seq, self._head = state.run, last.seq, last.hash

    def _take(self, entry: Entry) -> None:
        state, run = self.reading.state, self.number
        row = event_row(entry, state)
        self._put("events", (run, *row.values()))
        self._db.execute(
            "INSERT INTO words (run, text, what, ref) VALUES (?, ?, 'event', ?)",
            (run_word(run), fit_for_search(row["words"]), entry.seq),
        )
        match entry.body:
            case VerdictGiven():
                verdict = verdict_row(entry, entry.body, state)
                outcomes = "".join(group.outcome[0] for group in entry.body.groups)
                first = self._db.execute(
                    "SELECT min(seq) FROM verdicts WHERE run = ? AND submission = ?", (run, entry.body.submission)
                ).fetchone()[0]
                self._put("verdicts", (run, *verdict.values(), outcomes, first))
                for place, refusal in enumerate(refusal_rows(entry, entry.body, state)):
                    named = {name: value for name, value in refusal.items() if name not in ("seq", "index")}
                    self._put("refusals", (run, entry.seq, place, *named.values()))
            case LeaseGranted(worker=worker, version=version, blocks=blocks):
                self._db.execute(
                    "INSERT INTO spread VALUES (?, ?, ?, ?, ?, 1, ?) ON CONFLICT DO UPDATE SET leases = leases + 1, "
                    "blocks = blocks + excluded.blocks",
                    (run, version, worker, entry.seq, entry.time, len(blocks)),
                )
            case SubmissionReceived():
                self._begin_groups(entry, entry.body)
            case BatchFormed(step=step, groups=groups):
                self._db.execute(
                    "INSERT INTO versions (run, version, batch_seq, batch_s, batch_groups) VALUES (?, ?, ?, ?, ?) "
                    "ON CONFLICT DO UPDATE SET batch_seq = excluded.batch_seq, batch_s = excluded.batch_s, "
                    "batch_groups = excluded.batch_groups",
                    (run, step, entry.seq, entry.time, len(groups)),
                )
            case _:
                pass

    def _begin_groups(self, entry: Entry, body: SubmissionReceived) -> None:
        state = self.reading.state
        lease = state.leases[body.lease]
        self._put("bodies", (self.number, body.digest, entry.seq, "private", ""))
        for place, digest in enumerate(body.groups):
            self._db.execute(
                "INSERT INTO groups (run, submission, place, version, slot, digest, worker, received_seq, received_s, seq, "
                "status, public, step) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, -1, 'pending', 0, -1)",
                (self.number, body.digest, place, lease.version, plain(slot_of(state, lease, place)), digest, lease.worker,
                 entry.seq, entry.time),
            )  # fmt: skip

    def _touched(self, entry: Entry) -> Iterable[str]:
        """Submissions whose groups an event changes."""
        state = self.reading.state
        match entry.body:
            case Decision(submission=name):
                version = state.lease_of(state.submissions[name]).version
                return [name, *sorted(self._withheld.get(version, ()))]
            case GroupAccepted(submission=name):
                return [name]
            case SlotVoid(version=version):
                return self._by_version.get(version, [])
            case BatchFormed(groups=groups):
                versions = state.main.versions
                return [versions[version].slots[slot].submission for version, slot in groups]
            case LinkRevealed(version=version):
                return self._by_version.get(version, [])
            case RunEnded():
                return [name for names in self._by_version.values() for name in names]
            case _:
                return []

    def _put_groups(self, name: str) -> None:
        """Write what the log says of a submission's groups now."""
        state, reading = self.reading.state, self.reading
        booked = state.submissions[name]
        lease, public = state.lease_of(booked), reading.is_public(name)
        rows = self._db.execute(
            "SELECT id, place FROM groups WHERE run = ? AND submission = ?", (self.number, name)
        ).fetchall()
        for number, place in rows:
            slot = slot_of(state, lease, place)
            status, seq = standing_of(state, reading.marks, name, place)
            record = state.main.versions[lease.version].slots.get(slot)
            final = record if record is not None and record.digest == booked.groups[place] else None
            rewards, faults = (final.rewards, final.faults or ()) if final is not None else ((), ())
            left = without_faults(rewards, faults)
            self._db.execute(
                "UPDATE groups SET seq = ?, status = ?, public = ?, step = ?, tokens = ?, reward = ?, spread = ?, "
                "faults = ? WHERE id = ?",
                (seq, status, public, final.step if final else -1, plain(final.tokens) if final else None, mean(left),
                 spread(left), len(faults), number),
            )  # fmt: skip
            self._put_rewards(number, rewards if status in ("signal", "flat") else (), faults)
        if public:
            self._withheld.get(lease.version, set()).discard(name)
        if booked.decided and (public or reading.shows_private()):
            self._db.execute(
                "UPDATE bodies SET state = 'wanted' WHERE run = ? AND submission = ? AND state = 'private'",
                (self.number, name),
            )

    def _put_rewards(self, group: int, rewards: Sequence[float], faults: Sequence[int]) -> None:
        algorithm = self.reading.state.rules.algorithm
        by_token = vine_of(algorithm) is not None or step_credit_of(algorithm) is not None
        known = not judged_by_trainer(algorithm) and not by_token
        worth = advantages(rewards, algorithm, faults).tolist() if known and rewards else [None] * len(rewards)
        for index, (reward, advantage) in enumerate(zip(rewards[:MOST_ROLLOUTS], worth, strict=False)):
            self._db.execute(
                "INSERT INTO rollouts (id, run, reward, advantage, failed) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE "
                "SET reward = excluded.reward, advantage = excluded.advantage, failed = excluded.failed",
                (group * MOST_ROLLOUTS + index, self.number, reward, advantage, index in faults),
            )

    def _put_nodes(self) -> None:
        """Write the nodes that changed."""
        state = self.reading.state
        for place, node in enumerate(state.members.values()):
            row = (
                self.number, node.key, place, node.name, node.role, node.standing, node.credits, node.vested, node.accepted,
                node.refused, node.lapsed, node.leases, node.stale, node.given, node.unfilled, node.influence, node.left,
                json.dumps(node.reasons), node.last_reason, node.implementation, node.dtype, node.device,
                node.pace_s or None, is_slow(state, node), node_note(node, state),
            )  # fmt: skip
            if self._nodes.get(node.key) != row:
                self._nodes[node.key] = row
                self._put("nodes", row)

    def _put_versions(self, numbers: set[int]) -> None:
        versions, marks = self.reading.state.main.versions, self.reading.marks
        for number in sorted(numbers & versions.keys()):
            record, (seq, time_s) = versions[number], marks.versions[number]
            statuses = [slot.status for slot in record.slots.values()]
            counts = [statuses.count(status) for status in ("signal", "flat", "continued", "void")]
            self._db.execute(
                "INSERT INTO versions (run, version, seq, time_s, root, manifest, retired, signal, flat, continued, void) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET seq = excluded.seq, "
                "time_s = excluded.time_s, root = excluded.root, manifest = excluded.manifest, retired = excluded.retired, "
                "signal = excluded.signal, flat = excluded.flat, continued = excluded.continued, void = excluded.void",
                (self.number, number, seq, time_s, record.root, record.manifest, record.revealed, *counts),
            )

    def _facts(self) -> str:
        """What an overview shows of the state, as JSON."""
        state = self.reading.state
        return json.dumps({
            **structs.asdict(status_of(state, state.time)), "run": state.run, "issued": state.issued,
            "burned": state.burned, "time_s": state.time, "envs": [env.label for env in state.envs],
            "group_size": state.rules.group_size, "batch_groups": state.rules.batch_groups,
            "max_staleness": state.rules.max_staleness, "acts": self._acts, "usual_pace_s": usual_pace_s(state),
            "unbegun": self._unbegun,
        }, default=structs.asdict)  # fmt: skip

    def _put(self, table: str, values: Sequence[Any]) -> None:
        marks = ", ".join("?" * len(values))
        self._db.execute(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", [plain(value) for value in values])


def _versions_in(entry: Entry) -> list[int]:
    """Versions whose row an event changes."""
    match entry.body:
        case GroupAccepted(version=version) | SlotVoid(version=version) | LinkRevealed(version=version):
            return [version]
        case CheckpointPublished(version=version):
            return [version]
        case _:
            return []
