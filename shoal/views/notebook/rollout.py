"""One rollout in a notebook: its turns and tokens, what the weights say of each token, and each check of its group.

What is shown is strangers' text, and is escaped.

Axes: P tokens that the policy wrote, V vocabulary.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from shoal.errors import StateError
from shoal.protocol.encoding import WireError, from_msgpack
from shoal.protocol.messages import Group, GroupRecord, Record
from shoal.protocol.messages import Rollout as ClaimedRollout
from shoal.roles.auditor.rejudge_groups import load_envs
from shoal.roles.auditor.token_scores import Rebuilt, Scores, TokenTolerances, in_a_thread, rebuilt, score
from shoal.runs.csv_tables import Column, Row
from shoal.runs.rollouts import ReadGroup, ReadRollout, ReadTurn, decoded
from shoal.runs.run_reader import GroupRef, RunReader
from shoal.terminal import printable
from shoal.verification.check_context import CheckFailure, Context, GroupCheck, by_group
from shoal.verification.checks_with_model import AUDIT
from shoal.verification.checks_without_model import MODEL_FREE
from shoal.views.notebook.data_frame import Frame, escaped

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TOKEN_COLUMNS = {
    "position": Column("tokens", "Index in the rollout."),
    "turn": Column("turns", "Which stretch of one author."),
    "author": Column("", "environment or policy."),
    "token_id": Column("", "Id in the vocabulary."),
    "text": Column("", "The token's text."),
    "logprob": Column("nats", "Log-prob under the policy that sampled it, as the worker claims."),
    "advantage": Column("reward", "By the algorithm; empty where nothing is learned."),
}
SCORE_COLUMNS = {
    "recomputed": Column("nats", "Log-prob as it was computed here from the weights."),
    "difference": Column("nats", "Claimed minus recomputed."),
    "gap": Column(
        "nats",
        "Largest logit / temperature + noise, minus that of the token: 0 for an honest one."
        " In proportion less where logits are larger than the run's bounds are for.",
    ),
    "largest": Column("nats", "Largest |logit / temperature|, to which rounding errors are in proportion."),
}


class Checkpoint(Protocol):
    """As `shoal.policy` gives it."""

    @property
    def path(self) -> Path: ...


@dataclass(frozen=True)
class Replay:
    """The policy's tokens of a rollout, computed again."""

    tokens: Frame
    """A row for each token of the policy: what was claimed, and what was found."""
    largest_gap: float
    """Nats."""
    largest_difference: float
    """Of log-probs, nats."""
    limits: "TokenTolerances | None"
    """What honest arithmetic may differ by in this run; None if the run has no such limits for this machine's engine."""
    logits_PV: "NDArray[np.float32] | None" = field(repr=False, default=None)
    """Logits at each of these tokens, before the temperature; if they were asked for."""

    @property
    def agrees(self) -> bool:
        """Whether gaps and differences of single tokens are within the limits, or there are none to compare with. The
        validators' checks look at more: `shoal.audit` runs them all."""
        found = self.limits
        return found is None or (self.largest_gap <= found.gap and self.largest_difference <= found.logprob)

    def __str__(self) -> str:
        known = self.limits
        gap = f", limit {known.gap:.2g}" if known else ""
        off = f", limit {known.logprob:.2g}" if known else ""
        return (
            f"{len(self.tokens)} tokens computed again: largest gap {self.largest_gap:.2g} nats{gap}; "
            f"largest difference of log-probs {self.largest_difference:.2g} nats{off}"
        )

    def _repr_html_(self) -> str:
        return f"<p>{escaped(str(self))}</p>{self.tokens._repr_html_()}"


@dataclass(frozen=True)
class Rollout:
    """One attempt at a task. A notebook shows it with each token coloured by its advantage."""

    reading: RunReader = field(repr=False)
    place: GroupRef = field(repr=False)
    group: ReadGroup = field(repr=False)
    """The group that it belongs to, with what the log says of it."""
    index: int

    @property
    def name(self) -> str:
        """VERSION/SLOT/INDEX, as `shoal audit --rollout` takes it."""
        return f"{self.group.version}/{self.group.slot}/{self.index}"

    @property
    def facts(self) -> ReadRollout:
        """Reward, advantage, ending, counts of tokens."""
        return self.group.rollouts[self.index]

    @property
    def turns(self) -> tuple[ReadTurn, ...]:
        return self.facts.turns

    @property
    def tokens(self) -> Frame:
        """A row for each token."""
        rows = [row for number, turn in enumerate(self.turns) for row in _token_rows(number, turn)]
        return Frame("tokens", f"Tokens of rollout {self.name}.", TOKEN_COLUMNS, rows)

    def replay(self, policy: "Checkpoint | str | PathLike[str] | None" = None, *, logits: bool = False) -> Replay:
        """Compute the policy's log-probs and replay gaps again, with the auditor's code.

        `policy` is a checkpoint; without it, the weights that the rollout was sampled with are taken from the run and
        verified. `logits` also keeps the logits. Raises `NothingYet` while the version's seeds are secret or if its weights
        are not kept any more, else `ShoalError`.
        """
        path = None if policy is None else Path(fspath(policy) if isinstance(policy, str | PathLike) else policy.path)
        found = score(self.reading, self.place, self.index, path, logits)
        own = [row for row in self.tokens if row["author"] == "policy"]
        rows = [row | figures for row, figures in zip(own, _figures(own, found), strict=True)]
        columns = TOKEN_COLUMNS | SCORE_COLUMNS
        sentence = f"Tokens of the policy in rollout {self.name}, computed again."
        return Replay(
            Frame("replay", sentence, columns, rows),
            max((row["gap"] for row in rows), default=0.0),
            max((abs(row["difference"]) for row in rows), default=0.0),
            found.limits,
            found.logits_PV,
        )

    @property
    def claim(self) -> ClaimedRollout:
        """The rollout as its worker sent it: tokens, authors and log-probs as bytes."""
        return claim_of(self.reading, self.place, self.index)

    def checks(self, claim: ClaimedRollout | None = None, *, own_files: bool = False) -> Frame:
        """What each check of the validators says about the group, if `claim` had been sent for this rollout; without it,
        about what was sent.

        `own_files` runs environment files of the run, its host's code, as `shoal.open(..., own_files=True)` does. Raises as
        `replay`.
        """
        rows = judge(self.reading, self.place, self.index, claim, own_files or self.reading.runs_files)
        what = "as it was sent" if claim is None else f"with another claim for rollout {self.name}"
        return Frame("checks", f"What the checks say about the group, {what}.", CHECK_COLUMNS, rows)

    def __str__(self) -> str:
        """Its facts, and what was said."""
        return printable(f"{self._headline()}\n\n{self.facts.text()}", keep="\n")

    def __repr__(self) -> str:
        return f"<{printable(self._headline())}>"

    def _repr_html_(self) -> str:
        largest = max((abs(worth) for turn in self.turns for worth in turn.advantages), default=0.0)
        parts = [f"<p><b>{escaped(self._headline())}</b></p>"]
        parts += [f"<p>cannot be read: {escaped(self.facts.flaw)}</p>"] if self.facts.flaw else []
        for turn in self.turns:
            body = "".join(_token_html(turn, i, largest) for i in range(len(turn.token_ids)))
            parts.append(
                f'<div style="margin:0.3em 0"><small>{turn.author}, {len(turn.token_ids)} tokens</small>'
                f'<pre style="margin:0;white-space:pre-wrap">{body}</pre></div>'
            )
        return "".join(parts)

    def _headline(self) -> str:
        facts, group = self.facts, self.group
        worth = "" if facts.advantage is None else f", advantage {facts.advantage:+.3g}"
        reward = "not known" if facts.reward is None else f"{facts.reward:.3g}"
        return (
            f"rollout {self.name}: {group.env}, task {group.task}; {group.status}, reward {reward}{worth}; "
            f"ended by {facts.ending}, {facts.policy_tokens} policy tokens"
        )


def _token_rows(number: int, turn: ReadTurn) -> list[Row]:
    return [
        {
            "position": turn.start + i,
            "turn": number,
            "author": turn.author,
            "token_id": token_id,
            "text": turn.pieces[i] if turn.pieces else None,
            "logprob": turn.logprobs[i] if turn.logprobs else None,
            "advantage": turn.advantages[i] if turn.advantages else None,
        }
        for i, token_id in enumerate(turn.token_ids)
    ]


def _figures(own: list[Row], found: Scores) -> list[Row]:
    return [
        {
            "recomputed": float(found.logprobs_P[i]),
            "difference": row["logprob"] - float(found.logprobs_P[i]),
            "gap": float(found.gaps_P[i]),
            "largest": None if found.largest_P is None else float(found.largest_P[i]),
        }
        for i, row in enumerate(own)
    ]


def _token_html(turn: ReadTurn, i: int, largest: float) -> str:
    text = escaped(turn.pieces[i]) if turn.pieces else ""
    if not turn.logprobs:
        return text
    worth = turn.advantages[i] if turn.advantages else 0.0
    share = abs(worth) / largest if largest else 0.0
    colour = f"rgba({'46,139,87' if worth > 0 else '205,92,92'},{0.5 * share:.2f})"
    title = f"log-prob {turn.logprobs[i]:.4g} nats" + (f", advantage {worth:+.3g}" if turn.advantages else "")
    return f'<span title="{title}" style="background:{colour};color:inherit">{text}</span>'


# --- What each check of the validators says of a group ---


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


def judge(reading: RunReader, place: GroupRef, index: int, claim: ClaimedRollout | None, own_files: bool) -> list[Row]:
    """A row for each check, with `claim` in the place of the rollout `index` if it is given. Raises `ShoalError`."""
    return in_a_thread(lambda: _judge(reading, place, index, claim, own_files))


def claim_of(reading: RunReader, place: GroupRef, index: int) -> ClaimedRollout:
    """A rollout as its worker sent it. Raises `NothingYet` for what is private."""
    return decoded(reading.bytes_of(place)).rollouts[index]


async def _judge(
    reading: RunReader, place: GroupRef, index: int, claim: ClaimedRollout | None, own_files: bool
) -> list[Row]:
    reading.bytes_of(place)  # raises for what is private
    async with rebuilt(reading.name, place, load_envs(reading.state.envs, own_files)) as work:
        engine = await work.context.take_weights(work.lease.version)
        group = work.group
        if claim is not None:
            rollouts = list(group.rollouts)
            rollouts[index] = claim
            group = replace(group, rollouts=tuple(rollouts))
        ctx = Context(
            work.context.tools(engine), work.lease, work.slot, work.submission,
            proof=work.submission.proofs[place.index] if work.submission.proofs else b"",
            record=await _record(work, place.index),
        )  # fmt: skip
        return await asyncio.to_thread(_told, group, ctx)


async def _record(work: Rebuilt, index: int) -> GroupRecord | None:
    """What the host's stage says of the group, in a run whose host plays. Raises `ShoalError`."""
    if not work.booked.record:
        return None
    try:
        return from_msgpack(await work.context.run.blob(work.booked.record), Record).groups[index]
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
