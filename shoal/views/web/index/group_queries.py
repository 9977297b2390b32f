"""Questions to an index about groups: lists by filter and by text, one group, the same task in other versions.

What the log says of a group is public; its environment, task, texts and endings are shown once its body is public, or to
the host (`private`). The tokens of a group are not in the index: `RunReader.group` decodes them.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from shoal.errors import ConfigError
from shoal.runs.csv_tables import Row
from shoal.views.web.index.queries import PAGE, SCANNED, IndexQueries, before, limited, page_of
from shoal.views.web.index.schema import LARGEST, MOST_ROLLOUTS, query_of, run_word

EXCERPT_WORDS = 24


class GroupFilter(NamedTuple):
    """Which groups; what is left out filters nothing."""

    env: str = ""
    worker: str = ""
    """Key."""
    version: int | None = None
    status: str = ""
    step: int | None = None
    """Of the batch that took it."""
    task: int | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    """Of the group's mean reward, both included."""
    text: str = ""
    """Words that one rollout of the group has, all of them; WORD* is the beginning of one."""
    by: str = ""
    """`best` or `worst` mean reward first; otherwise, and where words are searched, newest first."""


def groups(
    look: IndexQueries,
    run: int,
    only: GroupFilter = GroupFilter(),
    after: int | None = None,
    limit: int = PAGE,
    private: bool = False,
) -> Row:
    """A page of groups, newest first. With a text, each has an `excerpt` of a rollout that matches. In order of reward, a
    page's `next` is the number of groups up to its end."""
    limit = limited(limit)
    where, values = _where(run, only, private)
    if not only.text and only.by in _ORDERS:
        query = f"SELECT * FROM groups WHERE {where} ORDER BY {_ORDERS[only.by]} LIMIT ? OFFSET ?"
        rows = [_shown(row, private) for row in look.rows(query, *values, limit + 1, after or 0)]
        return {"rows": rows[:limit], "next": (after or 0) + limit if len(rows) > limit else None}
    if not only.text:
        query = f"SELECT * FROM groups WHERE {where} AND id < ? ORDER BY id DESC LIMIT ?"
        return page_of(
            [_shown(row, private) for row in look.rows(query, *values, before(after), limit + 1)], "id", limit
        )
    found: list[Row] = []
    last = None
    asked = query_of(only.text, run_word(run))
    for rowid in _matches(look, asked, after):
        if rowid is None:  # enough was looked at
            return {"rows": found, "next": last}
        number = rowid // MOST_ROLLOUTS
        row = look.rows(f"SELECT * FROM groups WHERE {where} AND id = ?", *values, number)
        if row and len(found) == limit:
            return {"rows": found, "next": found[-1]["id"]}
        last = number
        if row:
            excerpt = look.db.execute(_EXCERPT, (asked, rowid)).fetchone()[0]
            found.append({**_shown(row[0], private), "rollout": rowid % MOST_ROLLOUTS, "excerpt": excerpt})
    return {"rows": found, "next": None}


OF_A_BATCH = "run = ? AND step = ? AND +status = 'signal'"
"""That a group is of a step's batch of a run. A copy of it is not. The plus keeps SQLite from looking at all groups with
signal."""

_ORDERS = {"best": "reward DESC, id DESC", "worst": "reward IS NULL, reward, id DESC"}
"""SQLite takes NULL, a group without rewards, for the lowest value; it comes last in both."""

_EXCERPT = f"SELECT snippet(texts, 1, '', '', ' ... ', {EXCERPT_WORDS}) FROM texts WHERE texts MATCH ? AND rowid = ?"


def _matches(look: IndexQueries, asked: str, after: int | None) -> Iterator[int | None]:
    """A rollout of each group that has one with the words, newest first; None if there may be more."""
    end, known, scanned = before(None) if after is None else min(after, LARGEST // MOST_ROLLOUTS) * MOST_ROLLOUTS, -1, 0
    query = "SELECT rowid FROM texts WHERE texts MATCH ? AND rowid < ? ORDER BY rowid DESC LIMIT ?"
    for (rowid,) in look.db.execute(query, (asked, end, SCANNED)):
        scanned += 1
        if rowid // MOST_ROLLOUTS != known:
            known = rowid // MOST_ROLLOUTS
            yield rowid
    if scanned == SCANNED:
        yield None


def _where(run: int, only: GroupFilter, private: bool) -> tuple[str, list[Any]]:
    where, values = ["run = ?"], list[Any]([run])
    if only.step is not None:
        where, values = [OF_A_BATCH], [run, only.step]
    equal = {"env": only.env, "worker": only.worker, "status": only.status}
    numbers = {"version": only.version, "task": only.task}
    for name, value in equal.items():
        if value:
            where, values = [*where, f"{name} = ?"], [*values, value]
    for name, number in numbers.items():
        if number is not None:
            where, values = [*where, f"{name} = ?"], [*values, number]
    if only.reward_from is not None:
        where, values = [*where, "reward >= ?"], [*values, only.reward_from]
    if only.reward_to is not None:
        where, values = [*where, "reward <= ?"], [*values, only.reward_to]
    if not private and (only.env or only.task is not None or only.text):  # guard: search-finds-what-is-public
        where.append("public = 1")
    return " AND ".join(where), values


def _shown(row: Row, private: bool) -> Row:
    if row["public"] or private:  # guard: task-of-a-private-group
        return row
    return {**row, "env": None, "task": None}


def group(look: IndexQueries, run: int, number: int, private: bool = False) -> Row | None:
    """One group by its number in the index, with its rollouts, the verdicts on its submission and the findings on it."""
    found = look.rows("SELECT * FROM groups WHERE run = ? AND id = ?", run, number)
    if not found:
        return None
    row = _shown(found[0], private)
    first = number * MOST_ROLLOUTS
    rollouts = look.rows("SELECT * FROM rollouts WHERE id >= ? AND id < ? ORDER BY id", first, first + MOST_ROLLOUTS)
    if not (row["public"] or private):
        rollouts = [
            {name: rollout[name] for name in ("id", "run", "reward", "advantage", "failed")} for rollout in rollouts
        ]
    submission = row["submission"]
    body = look.rows("SELECT state, why FROM bodies WHERE run = ? AND submission = ?", run, submission)
    return {
        **row, "rollouts": [{**rollout, "rollout": rollout["id"] - first} for rollout in rollouts],
        "body": body[0] if body else None,
        "verdicts": look.rows("SELECT * FROM verdicts WHERE run = ? AND submission = ? ORDER BY seq", run, submission),
        "findings": look.rows(
            "SELECT * FROM refusals WHERE run = ? AND worker = ? AND submission = ? AND slot = ? ORDER BY seq, place",
            run, row["worker"], submission, row["slot"],
        ),
        "siblings": look.rows(
            "SELECT id, submission, status, seq FROM groups WHERE run = ? AND version = ? AND slot = ? AND id != ? "
            "ORDER BY id",
            run, row["version"], row["slot"], number,
        ),
    }  # fmt: skip


def number_of(look: IndexQueries, run: int, version: int, slot: int) -> int:
    """The number of the group that filled a slot. Raises `ConfigError`."""
    found = look.rows(
        "SELECT id FROM groups WHERE run = ? AND version = ? AND slot = ? ORDER BY status IN ('signal', 'flat', "
        "'continued') DESC, id LIMIT 1", run, version, slot,
    )  # fmt: skip
    if not found:
        raise ConfigError(f"the index has no such group: version {version}, slot {slot}")
    return int(found[0]["id"])


def same_task(look: IndexQueries, run: int, env: str, task: int, limit: int = 100) -> list[Row]:
    """Groups of one task, by version: how the policy came to solve it, or not. Only those whose bodies are public."""
    return look.rows(
        "SELECT * FROM groups WHERE run = ? AND env = ? AND task = ? AND public = 1 ORDER BY version DESC, id DESC LIMIT ?",
        run, env, task, limited(limit),
    )  # fmt: skip


def filters(look: IndexQueries, run: int) -> Row:
    """What a page offers to filter by: environments, statuses and their numbers of groups."""
    envs = look.rows(
        "SELECT env, count(*) AS groups FROM groups WHERE run = ? AND env IS NOT NULL AND public = 1 GROUP BY env", run
    )
    statuses = look.rows("SELECT status, count(*) AS groups FROM groups WHERE run = ? GROUP BY status", run)
    return {"envs": envs, "statuses": statuses}
