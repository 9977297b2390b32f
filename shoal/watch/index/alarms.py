"""Rows of alarms: each is named by its cause, the node that it is about, and the step at which it was raised.

A folder has the whole history of its alarms. A coordinator tells strangers only what stands, by cause: what it does not
tell any more was cleared, and the sentence about it is ours.
"""

import json
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import structs

from shoal.alarms import AlarmLine
from shoal.config.alarm_limits import said_of
from shoal.protocol import messages as t
from shoal.watch.index.sqlite_values import plain

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
        connection.executemany(PUT, [{"run": run, **_told_row(one, now)} for one in standing])


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
            "words": f"{alarm.summary.rstrip('.')}. {alarm.remedy}", "last_s": line.time_s,
            "is_open": line.change == "raised",
            "evidence": json.dumps({"step": alarm.step, "measured": [structs.asdict(one) for one in alarm.measured]}),
        }  # fmt: skip
    return list(found.values())


def _told_row(alarm: t.StandingAlarm, now: float) -> dict[str, Any]:
    return {
        "cause": alarm.cause, "node": "", "since_step": plain(alarm.since), "level": alarm.severity,
        "words": said_of(alarm.cause), "first_s": now, "last_s": now, "is_open": True,
        "evidence": json.dumps({"step": alarm.since, "measured": []}),
    }  # fmt: skip
