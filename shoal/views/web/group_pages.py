"""The views of groups: lists by filter and text, one group with its rollouts side by side, a task in all versions.

What is not public is shown to the host alone: the index and the served runs are told who asks. Texts are strangers'.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from shoal.errors import ConfigError, NothingYet, ShoalError
from shoal.runs.rollouts import ReadGroup, ReadRollout, ReadTurn
from shoal.runs.run_reader import GroupRef
from shoal.views.web.chart_data import of_task
from shoal.views.web.index.group_queries import GroupFilter, filters, group, groups, number_of, same_task
from shoal.views.web.index.schema import MOST_ROLLOUTS
from shoal.views.web.page_request import LARGEST, NotHere, PageRequest, View
from shoal.views.web.replay_gap_requests import Gaps
from shoal.views.web.template_filters import query

TOKENS = 3000
"""Tokens of a view that are coloured: more would make it slow to load."""

LEVELS = 6
"""Of colours, from the least to the most."""

COLOURS = ("logprob", "advantage", "gap", "none")
"""Gaps are computed, so only for those who may have this machine do so."""

ORDERS: dict[str, Callable[[ReadRollout], float]] = {
    "": lambda r: r.index, "reward": lambda r: -(r.reward or 0.0), "worst": lambda r: r.reward or 0.0,
    "length": lambda r: -r.policy_tokens,
}  # fmt: skip

LOGPROB_LEVELS = (-0.05, -0.3, -1.0, -2.5, -5.0)
"""Above the first a token is of level 0, as the policy expected it; below the last of level 5."""


def listing(asked: PageRequest) -> tuple[str, Mapping[str, Any]]:
    """Groups, newest first unless another order is asked for."""
    page = groups(asked.look, asked.run, only_of(asked), asked.whole("after"), private=asked.is_host)
    typed = {name: asked.word(name) for name in
             ("q", "env", "worker", "version", "status", "step", "task", "from", "to", "by")}  # fmt: skip
    choices = {"envs": [], "statuses": []} if asked.is_poll() else filters(asked.look, asked.run)
    return "groups.html", {"title": "Groups", **page, "typed": typed, "choices": choices}


def only_of(asked: PageRequest) -> GroupFilter:
    """The filter in an address."""
    return GroupFilter(
        asked.word("env"), asked.word("worker"), asked.whole("version"), asked.word("status"), asked.whole("step"),
        asked.whole("task"), asked.real("from"), asked.real("to"), asked.word("q"), asked.word("by"),
    )  # fmt: skip


def one(asked: PageRequest) -> tuple[str, Mapping[str, Any]]:
    """A group, with the rollouts of one prompt side by side."""
    number = asked.path["group"]
    found = group(asked.look, asked.run, number, asked.is_host) if number < LARGEST else None
    if found is None:
        raise NotHere(f"the run has no group {number}")
    colours = [word for word in COLOURS if word != "gap" or asked.may_compute]  # guard: gaps-only-on-request
    colour = asked.word("colour") if asked.word("colour") in colours else colours[0]
    parts = bool(asked.word("parts")) and asked.may_compute  # guard: parts-only-on-request
    place = GroupRef(found["submission"], found["place"])
    read, why, failed, gaps = _read(asked, place, parts, colour == "gap")
    answer, no_answer = _answer(asked, place)
    chosen, start = asked.whole("rollout"), asked.whole("at", 0) or 0
    by = asked.word("by") if asked.word("by") in ORDERS else ""
    shown = [] if read is None else [r for r in read.rollouts if chosen is None or r.index == chosen]
    shown.sort(key=ORDERS[by])
    budget = TOKENS // max(1, len(shown))
    name = f"{found['version']}/{found['slot']}" + (f"/{chosen}" if chosen is not None else "")
    own_files = ["--own-files"] if read is not None and read.needs_files else []
    return "group.html", {
        "title": f"Group {found['version']}/{found['slot']}", "place": "Groups", "group": found, "read": read, "why": why,
        "failed": failed or no_answer, "colour": colour, "answer": answer,
        "colours": colours, "by": by, "parts": parts, "chosen": chosen, "limit": gaps.limit if gaps else None,
        "columns": [RolloutColumn.of(r, colour, start, budget, gaps) for r in shown],
        "prompt": _prompt(shown) if chosen is None else "", "levels": LOGPROB_LEVELS,
        "command": shlex.join(["shoal", "audit", asked.one()["place"], "--rollout", name, *own_files]),
        "around": _around(asked, number), "has_parts": any(r.parts or r.metrics for r in shown),
    }  # fmt: skip


def _read(
    asked: PageRequest, place: GroupRef, parts: bool, with_gaps: bool
) -> tuple[ReadGroup | None, str, str, Gaps | None]:
    """A group, why it cannot be read, what of it could not be computed, and its gaps if they were asked for."""
    failed, gaps = "", None
    try:
        read = asked.served_runs.group(asked.run, place, asked.is_host)
    except (NothingYet, ShoalError) as error:
        return None, asked.excuse(error), "", None
    try:
        if parts:
            read = asked.served_runs.group(asked.run, place, asked.is_host, parts=True)
        if with_gaps:
            gaps = asked.served_runs.gaps(asked.run, place)
    except (NothingYet, ShoalError) as error:
        failed = asked.excuse(error)
    return read, "", failed, gaps


def _answer(asked: PageRequest, place: GroupRef) -> tuple[tuple[str, ...] | None, str]:
    """What solves the task, if its host asks for it, and why it is not known; None if nobody asks."""
    if not (asked.word("answer") and asked.is_host):  # guard: answers-for-the-host-on-request
        return None, ""
    try:
        return asked.served_runs.answer(asked.run, place), ""
    except (NothingYet, ShoalError) as error:
        return None, asked.excuse(error)


def at_slot(asked: PageRequest) -> tuple[str, Mapping[str, Any]]:
    """The group that filled a slot: an address that is known without the index."""
    version, slot = asked.path["version"], asked.path["slot"]
    try:
        number = number_of(asked.look, asked.run, min(version, LARGEST), min(slot, LARGEST))
    except ConfigError as error:
        raise NotHere(str(error)) from None
    path = {**asked.path, "group": number}
    return one(replace(asked, path=path))


def task(asked: PageRequest) -> tuple[str, Mapping[str, Any]]:
    """Groups of one task in all versions."""
    env, number = asked.word("env"), asked.whole("task", 0) or 0
    rows = same_task(asked.look, asked.run, env, number)
    if not rows:
        raise NotHere("no group of this task is public yet")
    firsts = {row["id"]: _first_text(asked, row["id"]) for row in rows}
    return "task.html", {
        "title": f"Task {number}", "place": "Groups", "env": env, "task": number, "rows": rows, "firsts": firsts,
        "chart": of_task(asked.look, asked.run, env, number), "csv_query": query({"env": env, "task": number}),
    }  # fmt: skip


GROUP_VIEWS: dict[str, View] = {
    "/groups": listing, "/groups/{group:int}": one, "/versions/{version:int}/slots/{slot:int}": at_slot, "/task": task,
}  # fmt: skip


# --- tokens ---


class Token(NamedTuple):
    piece: str
    level: int
    sign: str
    """p or n of an advantage; empty of a log-prob."""
    told: str
    """The figure in words."""


class RolloutPart(NamedTuple):
    author: str
    learned: bool
    text: str
    tokens: list[Token]
    """Empty where nothing is coloured: then the text is shown."""
    cut: int
    """Tokens of it that are not shown."""


class RolloutColumn(NamedTuple):
    """A rollout as it is shown."""

    rollout: ReadRollout
    parts: list[RolloutPart]
    left: int
    """Tokens after those that are shown."""
    next: int

    @classmethod
    def of(
        cls, rollout: ReadRollout, colour: str, start: int, budget: int, gaps: Gaps | None = None
    ) -> "RolloutColumn":
        """The parts of a rollout within so many tokens from a place."""
        parts, end, written = list[RolloutPart](), start + budget, 0
        of_gaps = gaps.by_rollout[rollout.index] if gaps and rollout.index < len(gaps.by_rollout) else ()
        largest = max((abs(a) for turn in rollout.turns for a in turn.advantages), default=0.0)
        for turn in rollout.turns:
            length, before = len(turn.token_ids), written
            written += length if turn.author == "policy" else 0
            low, high = max(0, start - turn.start), min(length, end - turn.start)
            if low >= high:
                continue
            if colour == "gap":
                tokens = list(_with_gaps(turn, of_gaps[before : before + length], gaps, low, high))
            else:
                tokens = list(_tokens(turn, colour, largest, low, high))
            parts.append(
                RolloutPart(turn.author, turn.learned, turn.text, tokens, length - (high - low) if tokens else 0)
            )
        return cls(rollout, parts, max(0, rollout.tokens - end), end)


def _tokens(turn: ReadTurn, colour: str, largest: float, low: int, high: int) -> Iterator[Token]:
    if turn.author != "policy" or colour == "none" or len(turn.pieces) != len(turn.token_ids):
        return
    for index in range(low, high):
        piece = turn.pieces[index]
        if colour == "logprob":
            value = turn.logprobs[index] if index < len(turn.logprobs) else None
            level = sum(value < bound for bound in LOGPROB_LEVELS) if value is not None else 0
            yield Token(piece, level, "", f"{value:.3f} nats" if value is not None else "")
        else:
            value = turn.advantages[index] if index < len(turn.advantages) else None
            share = abs(value) / largest if value is not None and largest else 0.0
            level = min(LEVELS - 1, round(share * (LEVELS - 1)))
            sign = "" if not value else "p" if value > 0 else "n"
            yield Token(piece, level, sign, f"advantage {value:+.3f}" if value is not None else "")


def _with_gaps(
    turn: ReadTurn, gaps: Sequence[float | None], found: Gaps | None, low: int, high: int
) -> Iterator[Token]:
    if turn.author != "policy" or found is None or len(turn.pieces) != len(turn.token_ids) != 0:
        return
    bound = found.limit or 0.02  # half of it, and ten times it, are where the sampling check changes what it says
    for index in range(low, high):
        gap = gaps[index] if index < len(gaps) else None
        level = 5 if gap is None else sum(gap > edge for edge in (0, 0.1 * bound, 0.5 * bound, bound, 10 * bound))
        yield Token(turn.pieces[index], level, "", f"gap {gap:.4g} nats" if gap is not None else "gap not finite")


def _prompt(rollouts: Sequence[ReadRollout]) -> str:
    """What all rollouts begin with, so that it is shown once."""
    firsts = {r.turns[0].text if r.turns and r.turns[0].author == "environment" else "" for r in rollouts}
    return firsts.pop() if len(firsts) == 1 else ""


def _around(asked: PageRequest, number: int) -> dict[str, int | None]:
    """The groups before and after one."""
    look, run = asked.look, asked.run
    older = look.rows("SELECT max(id) AS id FROM groups WHERE run = ? AND id < ?", run, number)
    newer = look.rows("SELECT min(id) AS id FROM groups WHERE run = ? AND id > ?", run, number)
    return {"older": older[0]["id"], "newer": newer[0]["id"]}


def _first_text(asked: PageRequest, number: int) -> str:
    """The end of a group's first rollout, which tells how the policy answers now."""
    row = asked.look.rows("SELECT text FROM texts WHERE rowid = ?", number * MOST_ROLLOUTS)
    return str(row[0]["text"])[-400:] if row else ""
