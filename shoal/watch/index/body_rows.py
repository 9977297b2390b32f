"""Decodes submissions into the index: their rollouts, and their texts for search.

It takes those that the log has made public, oldest first, each in a transaction of its own. A `Reading` verifies them.
"""

import sqlite3
from collections.abc import Iterator

from shoal.errors import NothingYet, StateError
from shoal.watch.index.schema import MOST_ROLLOUTS, run_word
from shoal.watch.index.sqlite_values import fit_for_search, plain
from shoal.watch.reading.replay import GroupRef, RunReader
from shoal.watch.reading.rollouts import ReadGroup
from shoal.watch.tables import mean


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
