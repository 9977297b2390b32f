"""What the weights say of a group's tokens, with the auditor's code: seeds from the log, weights verified, one prefill.

It judges nothing: `verification` decides what honest arithmetic may differ by.

Axes: G rollouts of a group, P tokens that the policy wrote, V vocabulary, C tokens of a row, D width.
"""

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from anyio.from_thread import start_blocking_portal
from numpy.typing import NDArray

from shoal.engine.interface import PolicyScore, ScoreRequest
from shoal.engine.open import EngineSpec, kind_for, open_engine
from shoal.env import Env
from shoal.errors import ConfigError, NothingYet, ShoalError, StateError, no_torch
from shoal.ledger.state_records import SubmissionRecord
from shoal.models.open_model import AUTO, open_policy, spec_of
from shoal.protocol.continuations import is_continued_slot
from shoal.protocol.encoding import WireError, digest, from_msgpack
from shoal.protocol.messages import Group, Lease, Slot, Submission
from shoal.protocol.tolerances import bounds_for
from shoal.roles.auditor.context import AuditContext
from shoal.roles.auditor.evidence import leased
from shoal.roles.auditor.verify_log import replay_log
from shoal.runs.log_source import open_run
from shoal.runs.rollouts import decoded
from shoal.runs.run_reader import GroupRef, RunReader, slot_of
from shoal.verification.check_context import by_group, score_requests
from shoal.verification.checks_with_model import gaps_of, limit_of_a_token

T = TypeVar("T")

MAX_LOGITS = 1 << 26
"""Logits that are kept of a rollout, at most: 256 MiB."""


class TokenTolerances(NamedTuple):
    """What honest arithmetic may differ by at a single token."""

    gap: float
    """Nats; as the sampling check has it. Above half of it, a token counts as one that its seed did not choose."""
    logprob: float
    """Nats."""


@dataclass(frozen=True)
class Scores:
    """Of a rollout's policy tokens, its rows one after another."""

    logprobs_P: NDArray[np.float32]
    gaps_P: NDArray[np.float32]
    largest_P: NDArray[np.float32] | None
    limits: TokenTolerances | None
    logits_PV: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class Rebuilt:
    """A group, and what its worker was asked for, by the log and the revealed seeds alone."""

    context: AuditContext
    lease: Lease
    slot: Slot
    group: Group
    submission: Submission
    """What was sent, with its groups as bytes."""
    booked: SubmissionRecord


class GroupScores(NamedTuple):
    """Of all rollouts of a group."""

    scores_G: list[PolicyScore]
    """Gaps as the sampling check looks at them."""
    limits: TokenTolerances | None
    """None if the run has no bounds for the two engines."""
    policy: Path
    """The weights."""


def score(reading: RunReader, place: GroupRef, index: int, policy: Path | None, logits: bool) -> Scores:
    """Score a rollout by its version's weights, or by those of `policy`. Raises `ShoalError`."""
    return in_a_thread(lambda: _score(reading, place, index, policy, logits))


def in_a_thread(make: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine where the caller may have an event loop of its own. Raises `ShoalError` without torch."""
    if find_spec("torch") is None:
        raise ShoalError(no_torch())
    with start_blocking_portal(name="shoal replay") as portal:
        return portal.call(make)


@asynccontextmanager
async def rebuilt(where: str, place: GroupRef, envs: Mapping[str, Env]) -> AsyncIterator[Rebuilt]:
    """Rebuild what a group's worker was asked for. Raises `NothingYet` while the seeds are secret, else `ShoalError`.

    In a folder it also reads what is private: callers ask a `RunReader` first.
    """
    import torch

    async with open_run(where) as run:
        log = await replay_log(run)
        if place.submission not in log.state.submissions:
            raise ConfigError(f"the log has no submission {place.submission[:12]}")
        booked = log.state.submissions[place.submission]
        lease = log.state.leases[booked.lease]
        number = slot_of(log.state, lease, place.index)
        if is_continued_slot(number, log.state.rules.block_groups):
            raise ConfigError("a continuation begins within another rollout: `shoal audit` computes it again")
        revealed = log.links.get(lease.version)
        if revealed is None:
            raise NothingYet(
                f"the seeds of version {lease.version} are secret until nothing of it can be submitted any more: wait"
            )
        asked = leased(log.state, lease, bytes.fromhex(revealed.link))
        slot = next(slot for block in asked.blocks for slot in block.slots if slot.slot == number)
        try:
            submission = from_msgpack(await run.blob(place.submission), Submission)
            data = submission.groups[place.index]
        except (WireError, IndexError) as error:
            raise StateError(f"submission {place.submission[:12]} cannot be read: {error}") from None
        group = decoded(data)
        if digest(data) != booked.groups[place.index] or group.slot != number:
            raise StateError(
                f"group {place.index} of submission {place.submission[:12]} is not the one that the log names"
            )
        with tempfile.TemporaryDirectory(prefix="shoal-replay-") as home:
            context = AuditContext(run, log, envs, EngineSpec(threads=torch.get_num_threads()), Path(home), 0)
            yield Rebuilt(context, asked, slot, group, submission, booked)


async def scored(work: Rebuilt, policy: Path | None = None) -> GroupScores:
    """Score a group by its version's weights, or by those of `policy`. Raises `ShoalError`."""
    context, state, version = work.context, work.context.state, work.lease.version
    requests = score_requests(work.slot, work.group)
    if policy is None:
        engine = await context.take_weights(version)
        found = context.tools(engine).score(requests)
        policy = next(context.home.glob(f"v{version:06d}-*"))  # where `fetch_weights` leaves it
    else:
        _demand_vocabulary(policy, requests)
        kind, noise = kind_for(policy), state.sampling.noise
        engine = open_engine(EngineSpec(kind, state.rules.dtype, context.spec.threads, noise=noise))
        engine.load(policy, version)
        found = engine.score(requests, state.sampling.temperature)
    scores_G = by_group([work.group], found)[0]
    maker = work.submission.engine.implementation
    bounds = bounds_for(state.rules, maker, engine.facts.implementation, state.rules.dtype)
    if bounds is None:
        return GroupScores(scores_G, None, policy)
    judged_G = [each._replace(gaps_P=gaps_of(each, bounds)) for each in scores_G]
    return GroupScores(judged_G, TokenTolerances(limit_of_a_token(bounds), bounds.logprob), policy)


async def _score(reading: RunReader, place: GroupRef, index: int, policy: Path | None, logits: bool) -> Scores:
    reading.bytes_of(place)  # raises for what is private
    async with rebuilt(reading.name, place, {}) as work:
        found = await scored(work, policy)
        own, requests = found.scores_G[index], score_requests(work.slot, work.group)
        kept = _logits(found.policy, _of_rollout(requests, work.group, index)) if logits else None
    return Scores(own.logprobs_P, own.gaps_P, own.largest_P, found.limits, kept)


def _demand_vocabulary(policy: Path, requests: Sequence[ScoreRequest]) -> None:
    largest = max((max(request.token_ids) for request in requests), default=0)
    if largest >= spec_of(policy).vocab_size:
        raise ConfigError(f"{policy} has another vocabulary than the run's policy: give a checkpoint of this run")


def _of_rollout(requests: Sequence[ScoreRequest], group: Group, index: int) -> Sequence[ScoreRequest]:
    before = sum(1 + len(rollout.starts) for rollout in group.rollouts[:index])
    return requests[before : before + 1 + len(group.rollouts[index].starts)]


def _logits(directory: Path, rows: Sequence[ScoreRequest]) -> NDArray[np.float32]:
    """Logits at each policy token, float32[P, V], as the trainer computes them. Raises `ConfigError` for too many."""
    import torch

    spec = spec_of(directory)
    count = sum(len(row.policy_positions) for row in rows) * spec.vocab_size
    if count > MAX_LOGITS:
        raise ConfigError(f"logits=True would keep {count} numbers, limit {MAX_LOGITS}: leave it out")
    model, kept = open_policy(directory, implementation=AUTO), []
    with torch.inference_mode():
        for row in rows:
            hidden_CD = model.hidden(torch.tensor([list(row.token_ids)]))[0]
            kept.append(model.logits(hidden_CD[torch.tensor(row.policy_positions) - 1]).float().numpy())
    return np.concatenate(kept)
