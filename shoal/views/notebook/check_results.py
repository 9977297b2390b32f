"""What each check of the validators says about a group, as it was sent or with a claim that the caller made up.

The checks are those of `verification`, with the auditor's tools. Unlike a verdict, which names the first failure, this
tells of every check that can run.
"""

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from shoal.errors import StateError
from shoal.protocol.encoding import WireError, from_msgpack
from shoal.protocol.messages import Group, GroupRecord, Record, Rollout
from shoal.roles.auditor.recompute import load_envs
from shoal.roles.auditor.rescore import Rebuilt, in_a_thread, rebuilt
from shoal.runs.event_rows import Row
from shoal.runs.replay import GroupRef, RunReader
from shoal.runs.rollouts import decoded
from shoal.runs.tables import Column
from shoal.verification.audit_checks import AUDIT
from shoal.verification.context import CheckFailure, Context, GroupCheck, by_group
from shoal.verification.model_free import MODEL_FREE

CHECK_COLUMNS = {
    "check": Column("", "Name, in the order in which validators run them."),
    "severity": Column("", "What a failure means. hard: no honest worker sends this. soft: the group is not paid."),
    "result": Column("", "passed, failed, or not run: a check runs only if those without a model before it passed."),
    "detail": Column("", "What it found wrong."),
    "rollout": Column("rollouts", "Index in the group; empty for all of it."),
    "position": Column("tokens", "Index in the rollout; empty for all of it."),
    "figure": Column("", "What was measured; empty if it is no number."),
    "bound": Column("", "The limit of that."),
    "about": Column("", "What the check demands."),
}


def judge(reading: RunReader, place: GroupRef, index: int, claim: Rollout | None, own_files: bool) -> list[Row]:
    """A row for each check, with `claim` in the place of the rollout `index` if it is given. Raises `ShoalError`."""
    return in_a_thread(lambda: _judge(reading, place, index, claim, own_files))


def claim_of(reading: RunReader, place: GroupRef, index: int) -> Rollout:
    """A rollout as its worker sent it. Raises `NothingYet` for what is private."""
    return decoded(reading.bytes_of(place)).rollouts[index]


async def _judge(reading: RunReader, place: GroupRef, index: int, claim: Rollout | None, own_files: bool) -> list[Row]:
    reading.bytes_of(place)  # raises for what is private
    async with rebuilt(reading.name, place, load_envs(reading.state.envs, own_files)) as work:
        engine = await work.bench.take_weights(work.lease.version)
        group = work.group
        if claim is not None:
            rollouts = list(group.rollouts)
            rollouts[index] = claim
            group = replace(group, rollouts=tuple(rollouts))
        ctx = Context(
            work.bench.tools(engine), work.lease, work.slot, work.submission,
            proof=work.submission.proofs[place.index] if work.submission.proofs else b"",
            record=await _record(work, place.index),
        )  # fmt: skip
        return await asyncio.to_thread(_told, group, ctx)


async def _record(work: Rebuilt, index: int) -> GroupRecord | None:
    """What the host's stage says of the group, in a run whose host plays. Raises `ShoalError`."""
    if not work.booked.record:
        return None
    try:
        return from_msgpack(await work.bench.run.blob(work.booked.record), Record).groups[index]
    except (WireError, IndexError):
        raise StateError("the host's record of the group cannot be read: run shoal audit") from None


def _told(group: Group, ctx: Context) -> list[Row]:
    """Each check's row. Those with the model need tokens that all others accept."""
    if why := ctx.unplayable():
        raise StateError(f"{why}, so no check can say anything")
    rows: list[Row] = []
    failed = _tell(MODEL_FREE, group, ctx, rows)
    if not failed:
        ctx.scores = by_group([group], ctx.tools.score(ctx.requests(group)))[0]
        for check in AUDIT:
            _tell([check], group, ctx, rows)
    return rows + [_row(check, "not run", None) for check in (*MODEL_FREE, *AUDIT)[len(rows) :]]


def _tell(checks: Sequence[GroupCheck], group: Group, ctx: Context, rows: list[Row]) -> bool:
    """Run checks until one fails, and add their rows. Returns whether one did."""
    for check in checks:
        failure = check.run(group, ctx)
        rows.append(_row(check, "passed" if failure is None else "failed", failure))
        if failure is not None:
            return True
    return False


def _row(check: GroupCheck, result: str, failure: CheckFailure | None) -> Row:
    about = " ".join((check.run.__doc__ or "").partition("\n\n")[0].split())
    row: Row = {"check": check.name, "severity": check.severity, "result": result, "about": about}
    if failure is None:
        return row
    severity = "soft" if failure.mild else check.severity
    measured = {"figure": failure.figure, "bound": failure.bound} if failure.figure or failure.bound else {}
    place = {"rollout": failure.rollout, "position": failure.position}
    known = {name: value for name, value in place.items() if value >= 0}
    return {**row, "severity": severity, "detail": failure.detail, **known, **measured}
