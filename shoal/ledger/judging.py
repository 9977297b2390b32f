"""From verdicts to decisions: pay, penalties, second opinions and rechecks. Pure.

Called by `decide` for each verdict, and by the desk to know what a validator may judge now. The constants and the
counting of votes stand in `audits`; this file turns them into events of a run.

A submission's way: the first voice accepts, and it is paid (a drawn share is judged again afterwards, its votes still
open); or it refuses, or calls a slot void, and another validator is asked. Two who agree decide, a third is asked where
they differ, and what nobody can settle ends without pay and without penalty. A slash takes all pay that is not vested.
"""

from collections.abc import Iterator
from itertools import combinations

from shoal.algos.replay import excessive
from shoal.ledger import audits
from shoal.ledger import events as ev
from shoal.ledger.apply import evidence_after
from shoal.ledger.commands import Judge, Refused
from shoal.ledger.state import Lease, Node, State, Submission
from shoal.protocol.types import GroupVerdict


def judge(command: Judge, state: State) -> list[ev.Body]:
    """Events of a verdict. Raises `Refused` for one that is malformed, or from a validator whose turn it is not."""
    submission = state.submissions.get(command.verdict.submission)
    if submission is None:
        raise Refused("unknown", f"no submission {command.verdict.submission[:12]}")
    if command.key in submission.votes or not is_open(state, submission):
        return []
    lease = state.leases[submission.lease]
    refuse_malformed(state, lease, submission, command.verdict.groups)
    if not _may_judge(submission, state.silent(), command.key, command.now):
        order = [key[:12] for key in audits.ahead(submission.order, submission.votes, state.silent(), command.key)]
        raise Refused("not_your_turn", f"submission {submission.digest[:12]} is for {', '.join(order)} first: ask "
                      "GET /v1/checks for one of yours")  # fmt: skip
    votes = {**submission.votes, command.key: command.verdict.groups}
    given = ev.VerdictGiven(
        submission.digest, command.key, command.verdict.groups, command.projection, command.differs_from
    )
    events: list[ev.Body] = [given]
    idle = _idle(submission, command)
    for validator in sorted(idle):
        cause = "its projection is not of this submission's activations: it voted without the work"
        events.append(ev.ValidatorFault(validator, submission.digest, cause))
    more = _more(state, votes)
    worked = {key: groups for key, groups in votes.items() if key not in idle}
    settled = audits.settle(worked, lease.blocks, state.law.block_groups, more)
    if command.differs_from and more:
        settled = None  # one of two did not do the work: a third will tell which
    if submission.decided:
        return [*events, *_end_recheck(state, submission, lease, settled, command.now)]
    if _is_noisy(state, state.nodes[lease.worker], command):
        settled = audits.Settlement({}, lease.blocks, (), slash=False, outvoted=())
        why = "sampling: more noise over time than honest arithmetic makes"
        events += _quarantine(state, lease.worker, submission, why, command.now)
    elif len(votes) == 1:
        events += _first_failure(state, lease, submission, command)
    if settled is not None:
        recheck = command.recheck < audits.RECHECK_RATE and len(votes) == 1 and more and not settled.refused
        events += _decide(state, submission, lease, settled, recheck)
    return events


def to_judge(state: State, key: str, now: float) -> list[str]:
    """Submissions that a validator may judge now, oldest first; those that block the run come before rechecks."""
    waiting, silent = (*state.pending, *state.rechecks), state.silent()
    return [name for name in waiting if _may_judge(state.submissions[name], silent, key, now)]


def overdue(state: State, now: float) -> Iterator[ev.Body]:
    """Disputes and rechecks that found no further voice in time: they end softly. At the run's end nobody waits long."""
    limit_s = audits.DISPUTE_S if state.phase != "ended" else audits.VOICES * audits.TURN_S
    for name in (*state.pending, *state.rechecks):
        submission = state.submissions[name]
        if not submission.votes or now - submission.voted_at < limit_s:
            continue
        if submission.decided:
            yield ev.Rechecked(name, "undecided")
        else:
            lease = state.leases[submission.lease]
            settled = audits.settle(submission.votes, lease.blocks, state.law.block_groups, more=False)
            assert settled is not None, "without more voices every submission ends"
            two_spoke = len(submission.votes) > 1 and not submission.differs
            disputed = settled.disputed if two_spoke else settled.refused
            yield from _decide(state, submission, lease, settled._replace(slash=False, disputed=disputed))
        return  # the next one is settled on the state that this one leaves


def refuse_malformed(state: State, lease: Lease, submission: Submission, groups: tuple[GroupVerdict, ...]) -> None:
    """A verdict speaks of every slot once, in order, and has audited what was drawn. Raises `Refused`."""
    if tuple(group.slot for group in groups) != tuple(slots_of(state, lease)):
        raise Refused("malformed", "a verdict names every slot of the lease once, in order")
    for group in groups:
        said = group.check + group.detail
        if group.check not in (("",) if group.outcome == "accept" else audits.CHECKS):
            raise Refused("malformed", f"slot {group.slot}: a refusal names one of the run's checks")
        if len(said) > audits.MAX_REASON_CHARS or not said.isprintable():
            raise Refused(
                "malformed", f"slot {group.slot}: a reason is one line of at most {audits.MAX_REASON_CHARS} characters"
            )
    for group, draw in zip(groups, submission.draws or (0.0,) * len(groups), strict=True):
        if group.outcome != "accept":
            if group.rewards or group.tokens:
                raise Refused("malformed", f"slot {group.slot}: only an accepted group has rewards and policy tokens")
            continue
        if len(group.rewards) != state.law.group_size or not all(abs(r) <= audits.MAX_REWARD for r in group.rewards):
            raise Refused("malformed", f"slot {group.slot}: an accepted group has {state.law.group_size} rewards of at "
                          f"most {audits.MAX_REWARD:g} by size")  # fmt: skip
        assert state.sampling is not None, "the run is not created"
        most = state.sampling.max_tokens * state.law.group_size
        if not 0 <= group.tokens <= most:
            raise Refused("malformed", f"slot {group.slot}: a group has 0 to {most} policy tokens")
        if not 0 <= group.flipped <= group.tokens or not 0.0 <= group.gap_sum <= 1e9:
            raise Refused("malformed", f"slot {group.slot}: figures of replayed sampling that no group has")
        weight = audits.influence(group.rewards, group.tokens)
        due = group.slot in submission.audited or audits.must_audit(
            draw, submission.rate, weight, submission.mean_influence
        )
        # Neither less nor more: projections are compared only where two looked at the same groups.
        if due != group.audited:
            but = "was drawn for audit but not audited" if due else "was audited but not drawn for it"
            raise Refused("malformed", f"slot {group.slot} {but}")


def slots_of(state: State, lease: Lease) -> list[int]:
    """Slots of a lease, in the order of its groups."""
    per_block = state.law.block_groups
    return [slot for block in lease.blocks for slot in range(block * per_block, (block + 1) * per_block)]


def is_open(state: State, submission: Submission) -> bool:
    """Whether another voice may still be heard."""
    return not submission.decided or submission.digest in state.rechecks


def _idle(submission: Submission, command: Judge) -> set[str]:
    """Validators who found other activations than two others did, who agree with each other: they never saw them.

    Made-up numbers differ from everybody's: of an accuser who stands alone, and of three who all differ, nothing is known.
    """
    pairs = [*submission.differs, *((command.key, other) for other in command.differs_from)]
    differ, voices = {frozenset(pair) for pair in pairs}, {*submission.votes, command.key}
    return {
        voice
        for voice in voices
        for one, other in combinations(sorted(voices - {voice}), 2)
        if {frozenset((voice, one)), frozenset((voice, other))} <= differ and frozenset((one, other)) not in differ
    }


def _is_noisy(state: State, node: Node, command: Judge) -> bool:
    """Whether two validators, or the only one, each by its own figures, find more noise over time than is honest.

    Figures are not compared between validators, so those of one alone must not decide where there are others.
    """
    found = {**node.evidence, command.key: evidence_after(state, command.key, node, command.verdict.groups)}
    judges = state.judges()
    alarmed = [key for key in judges if key in found and excessive(found[key])]
    return command.key in alarmed and len(alarmed) >= min(2, len(judges))


def _may_judge(submission: Submission, silent: set[str], key: str, now: float) -> bool:
    """Whether the turns of those who stand before a validator have passed since the submission or its last vote."""
    place = len(audits.ahead(submission.order, submission.votes, silent, key))
    return key not in submission.votes and now >= audits.turn_begins(submission.voted_at, place)


def _more(state: State, votes: dict[str, tuple[GroupVerdict, ...]]) -> bool:
    """Whether another voice can be had."""
    return len(votes) < audits.VOICES and any(key not in votes for key in state.judges())


def _first_failure(state: State, lease: Lease, submission: Submission, command: Judge) -> Iterator[ev.Body]:
    """Quarantine at the first refusal that is hard, or at every third that is soft."""
    node = state.nodes[lease.worker]
    failed = [group for group in command.verdict.groups if group.outcome in ("soft", "hard")]
    hard = any(group.outcome == "hard" for group in failed)
    if hard or (failed and (node.failures + 1) % audits.SOFT_FAILURES == 0):
        yield from _quarantine(state, node.key, submission, f"{failed[0].check}: {failed[0].detail}", command.now)


def _quarantine(state: State, worker: str, submission: Submission, cause: str, now: float) -> Iterator[ev.Body]:
    """No leases for a while, longer each time; those in hand are given back."""
    first_s = float(state.config.get("verify", {}).get("quarantine_s", 30.0))
    until = now + audits.quarantine_s(state.nodes[worker].failures + 1, first_s)
    for held in state.open_leases_of(worker):
        yield ev.LeaseLapsed(held.id, "quarantine")
    if state.nodes[worker].standing in ("kicked", "suspended"):
        return  # the end of a quarantine would bring it back
    yield ev.NodeQuarantined(worker, until, cause, submission.digest)


def _decide(
    state: State, submission: Submission, lease: Lease, settled: audits.Settlement, recheck: bool = False
) -> Iterator[ev.Body]:
    """The end of a submission: pay for what is accepted, and a slash where two found a forgery."""
    yield ev.Decision(submission.digest, tuple(settled.accepted), settled.refused, settled.disputed, recheck)
    order = slots_of(state, lease)
    paid: list[int] = []
    for groups in settled.accepted.values():
        for group in groups:
            index = order.index(group.slot)
            if group.outcome == "void":
                yield ev.SlotVoid(lease.version, (group.slot,), f"environment: {group.detail}")
                continue
            digest = submission.groups[index]
            yield ev.GroupAccepted(
                lease.version, group.slot, submission.digest, index, digest, group.tokens, group.rewards
            )
            paid.append(audits.paid_tokens(group.tokens, state.law))
            yield ev.Credit(lease.worker, lease.version, group.slot, paid[-1])
    yield from _outvoted(submission, settled)
    node = state.nodes[lease.worker]
    blamed = set(settled.refused) - set(settled.disputed)
    if settled.slash:
        yield ev.Slash(node.key, submission.digest, sum(node.escrow) + sum(paid))
    elif blamed:
        yield from _refusal_cost(state, node, lease, [*node.escrow, *paid])
    elif not recheck:
        yield from _vest(state, node, [*node.escrow, *paid])
    if not blamed and node.standing == "quarantined" and node.quarantined_for == submission.digest:
        yield ev.NodeRestored(node.key)


def _end_recheck(
    state: State, submission: Submission, lease: Lease, settled: audits.Settlement | None, now: float
) -> Iterator[ev.Body]:
    """What a recheck of an accepted submission found. Where two refuse it, it costs what any refusal costs."""
    if settled is None:
        return
    yield from _outvoted(submission, settled)
    node = state.nodes[lease.worker]
    if settled.slash:
        yield ev.Rechecked(submission.digest, "forged")
        yield ev.Slash(node.key, submission.digest, sum(node.escrow))
        yield from _quarantine(state, node.key, submission, "forged, as a second look found", now)
        return
    if set(settled.refused) - set(settled.disputed):
        yield ev.Rechecked(submission.digest, "refused")
        yield from _refusal_cost(state, node, lease, node.escrow)
        return
    disputed = settled.refused or next(iter(submission.votes)) in settled.outvoted
    yield ev.Rechecked(submission.digest, "undecided" if disputed else "confirmed")


def _outvoted(submission: Submission, settled: audits.Settlement) -> Iterator[ev.Body]:
    for validator in settled.outvoted:
        yield ev.ValidatorFault(validator, submission.digest, "two others agree on another verdict")


def _refusal_cost(state: State, node: Node, lease: Lease, escrow: list[int]) -> Iterator[ev.Body]:
    """A refusal without a slash costs the newest pay that is not vested."""
    groups = min(len(escrow), audits.REFUSED_BLOCKS * state.law.block_groups)
    if groups:
        yield ev.Forfeited(node.key, lease.id, groups, sum(escrow[-groups:]), "refused")


def _vest(state: State, node: Node, escrow: list[int]) -> Iterator[ev.Body]:
    """Pay that has waited for its window of later blocks is the worker's for good."""
    if any(state.leases[state.submissions[name].lease].worker == node.key for name in state.rechecks):
        return  # a slash may follow, for pay that the window has passed
    due = len(escrow) - audits.VESTING_BLOCKS * state.law.block_groups
    if due > 0:
        yield ev.Vested(node.key, due, sum(escrow[:due]))
