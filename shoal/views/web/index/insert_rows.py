"""Rows of the index beside the log's: alarms, decoded rollouts, metrics, and disk usage.

An alarm is named by its cause, its node, and the step at which it was raised. A folder has the whole history of its alarms.
A coordinator tells strangers only what stands, by cause: what it does not tell any more was cleared.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import structs

from shoal.alarms import AlarmLine
from shoal.errors import NothingYet, StateError
from shoal.protocol import messages as t
from shoal.run_folder import held_below
from shoal.runs.csv_tables import mean
from shoal.runs.redact import alarm_of
from shoal.runs.rollouts import ReadGroup
from shoal.runs.run_reader import GroupRef, RunReader
from shoal.step_metrics import MetricsLine, meaning_of, step_of
from shoal.views.web.index.schema import METRIC, MOST_ROLLOUTS, fit_for_search, numbers_of, plain, query_of, run_word

PUT = (
    "INSERT INTO alarms VALUES (:run, :cause, :node, :since_step, :level, :words, :first_s, :last_s, :is_open, :evidence) "
    "ON CONFLICT DO UPDATE SET level = excluded.level, is_open = excluded.is_open"
)


def note_alarms(
    connection: sqlite3.Connection, run: int, lines: Iterable[AlarmLine] | None,
    standing: Sequence[t.StandingAlarm] | None, now: float,
) -> None:  # fmt: skip
    """Write the alarms of a run as they are now: from the lines of its file, or from what a coordinator says stands. If
    neither is there, what was known holds. Call within a transaction."""
    if lines is not None:
        connection.execute("DELETE FROM alarms WHERE run = ?", (run,))
        connection.executemany(PUT, [{"run": run, **row} for row in alarm_rows(lines)])
    elif standing is not None:
        told = {(one.cause, plain(one.since)) for one in standing}
        known = connection.execute("SELECT cause, since_step FROM alarms WHERE run = ? AND is_open", (run,)).fetchall()
        for cause, since in set(map(tuple, known)) - told:
            connection.execute(
                "UPDATE alarms SET is_open = 0, last_s = ? WHERE run = ? AND cause = ? AND since_step = ?",
                (now, run, cause, since),
            )
        connection.executemany(
            PUT,
            [{"run": run, **row} for one in standing for row in alarm_rows([AlarmLine(now, "raised", alarm_of(one))])],
        )


def alarm_rows(lines: Iterable[AlarmLine]) -> list[dict[str, Any]]:
    """Alarms from the lines of an alarms file: when each was raised first, and what was last said of it."""
    found, newest = dict[tuple[str, str, int], dict[str, Any]](), dict[tuple[str, str], dict[str, Any]]()
    for line in lines:
        alarm = line.alarm
        before = newest.get(alarm.subject)
        if before is not None and before["is_open"]:  # a restart may raise it again at a later step: one of them stands
            before |= {"is_open": False, "last_s": line.time_s}
        row = newest[alarm.subject] = found.setdefault((alarm.cause, alarm.node, alarm.since), {"first_s": line.time_s})
        row |= {
            "cause": alarm.cause, "node": alarm.node, "since_step": plain(alarm.since), "level": alarm.severity,
            "words": f"{alarm.summary.rstrip('.')}. {alarm.remedy}" if alarm.remedy else alarm.summary,
            "last_s": line.time_s, "is_open": line.change == "raised",
            "evidence": json.dumps({"step": alarm.step, "measured": [structs.asdict(one) for one in alarm.measured]}),
        }  # fmt: skip
    return list(found.values())


# --- Decodes submissions into the index ---


def decode_bodies(db: sqlite3.Connection, run: int, reading: RunReader, most: int) -> bool:
    """Decode at most so many submissions; returns whether there were any. Raises `PeerError`."""
    wanted = "SELECT submission FROM bodies WHERE run = ? AND state = 'wanted' ORDER BY seq LIMIT ?"
    names = [name for (name,) in db.execute(wanted, (run, most)) if name in reading.state.submissions]
    try:
        if names:
            reading.renderer()
    except NothingYet:
        return False
    for name in names:
        _decode(db, run, reading, name)
    return bool(names)


def _decode(db: sqlite3.Connection, run: int, reading: RunReader, name: str) -> None:
    asked = "SELECT id, place FROM groups WHERE run = ? AND submission = ? ORDER BY place"
    places = db.execute(asked, (run, name)).fetchall()
    why, found = [], []
    for number, place in places:
        try:
            found.append((number, reading.group(GroupRef(name, place))))
        except NothingYet as error:
            why.append(str(error))
            break
        except StateError as error:  # also an `Overreach`: what does not fit now would not fit after all was read again
            why.append(str(error))
    with db:
        db.execute("BEGIN IMMEDIATE")
        for number, group in found:
            db.execute(
                "UPDATE groups SET env = ?, task = ? WHERE id = ?", (plain(group.env), plain(group.task), number)
            )
            for row, text in _rows(run, number, group):
                db.execute(
                    "INSERT INTO rollouts (id, run, ending, tokens, policy_tokens, logprob, turns, flaw) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET ending = excluded.ending, "
                    "tokens = excluded.tokens, policy_tokens = excluded.policy_tokens, logprob = excluded.logprob, "
                    "turns = excluded.turns, flaw = excluded.flaw",
                    row,
                )
                db.execute("INSERT INTO texts (rowid, run, text) VALUES (?, ?, ?)", (row[0], run_word(run), text))
        state = "UPDATE bodies SET state = ?, why = ? WHERE run = ? AND submission = ?"
        db.execute(state, ("done" if found else "gone", plain("; ".join(why)[:1000]), run, name))


def _rows(run: int, number: int, group: ReadGroup) -> Iterator[tuple[tuple[object, ...], str]]:
    """Row and text of each rollout."""
    for rollout in group.rollouts[:MOST_ROLLOUTS]:
        logprobs = [logprob for turn in rollout.turns for logprob in turn.logprobs]
        row = (
            number * MOST_ROLLOUTS + rollout.index, run, rollout.ending, rollout.tokens, rollout.policy_tokens,
            mean(logprobs), len(rollout.turns), plain(rollout.flaw),
        )  # fmt: skip
        yield row, fit_for_search(rollout.text())


# --- Lines of metrics in the index ---


class MetricsIndex:
    """The metrics of one run in the index."""

    def __init__(self, db: sqlite3.Connection, run: int) -> None:
        self._db, self._run = db, run
        self._named = set[str]()
        """Metrics that full text knows; empty until it was asked."""

    def take(self, lines: Sequence[MetricsLine]) -> None:
        """Write lines, in one transaction. A line takes the place of another of the same step."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            for line in lines:
                step, told = plain(step_of(line)), plain(json.dumps(line))
                asked = self._db.execute("SELECT line FROM metrics WHERE run = ? AND step = ?", (self._run, step))
                known = asked.fetchone()
                if known == (told,):
                    continue  # it was indexed before a restart
                for name, _ in numbers_of(json.loads(known[0]) if known else {}):
                    delete = "DELETE FROM series WHERE run = ? AND name = ? AND step = ?"
                    self._db.execute(delete, (self._run, plain(name), step))
                self._db.execute("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?)", (self._run, step, told))
                for name, value in numbers_of(line):
                    row = (self._run, plain(name), step, plain(value))
                    self._db.execute("INSERT OR REPLACE INTO series VALUES (?, ?, ?, ?)", row)
                    self._name(name)

    def _name(self, name: str) -> None:
        """Let full text find a metric by its name and meaning."""
        word = run_word(self._run)
        if not self._named:
            known = self._db.execute("SELECT ref FROM words WHERE words MATCH ?", (query_of("", METRIC, word),))
            self._named = {ref for (ref,) in known}
        if name not in self._named:
            self._named.add(name)
            told = meaning_of(name)
            text = fit_for_search(f"{name} {told.sentence if told else ''}")
            insert = "INSERT INTO words (run, text, what, ref) VALUES (?, ?, 'metric', ?)"
            self._db.execute(insert, (f"{word} {METRIC}", text, plain(name)))


# --- How much of its quota the blobs of a run take, as the coordinator's `GET /metrics` has it ---


EVERY_S = 60.0
"""How often a folder with blobs is measured: there may be 100,000 files."""


class Quota:
    """The figures as they were measured last."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}
        self._at = -EVERY_S

    def of(self, reading: RunReader, now: float) -> dict[str, int]:
        """`blob_bytes` and, if the log names the quota, `quota_bytes`; nothing of a URL."""
        if reading.folder and (not self._told.get("blob_bytes") or abs(now - self._at) >= EVERY_S):
            self._at = now
            storage = reading.state.config.get("storage", {})
            quota_mb = storage.get("quota_mb", 0) if isinstance(storage, dict) else 0
            quota = {"quota_bytes": quota_mb * 1_000_000} if isinstance(quota_mb, int) and quota_mb > 0 else {}
            self._told = {"blob_bytes": held_below(reading.folder.blobs), **quota}
        return self._told
