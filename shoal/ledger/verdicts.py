"""Verdicts of validators on submissions, and the decisions that they add up to."""

from shoal.algos.sampling_evidence import EvidenceFigures, SamplingEvidence, grown, update
from shoal.ledger.event import Entry
from shoal.ledger.state import State
from shoal.ledger.state_records import LeaseRecord, NodeRecord, SubmissionRecord
from shoal.ledger.validator_turns import idle_since, silent, slack_s, turn_begins, turn_s
from shoal.protocol.continuations import is_continued
from shoal.protocol.messages import GroupVerdict, Message
from shoal.protocol.tolerances import bounds_for


class VerdictGiven(Message, frozen=True):
    submission: str
    validator: str
    groups: tuple[GroupVerdict, ...]
    projection: str = ""
    """Digest of its projections of the activations, a blob that stays private until all have judged."""
    differs_from: tuple[str, ...] = ()
    """Validators that judged before, and whose projections are not of the activations that this one found."""


class Decision(Message, frozen=True):
    """How a submission ended: its blocks accepted and refused."""

    submission: str
    accepted: tuple[int, ...]
    refused: tuple[int, ...]
    disputed: tuple[int, ...] = ()
    """Of the refused: those on which validators differ. They bring no pay and no blame, but if one of the validators found
    a forgery, the worker is audited fully again."""
    recheck: bool = False
    """Whether a second validator judges it again. Said only now, so that no validator knows where lying is safe."""
    copied: tuple[int, ...] = ()
    """Blocks that another worker's submission had filled before. They bring neither pay nor blame."""


class Rechecked(Message, frozen=True):
    """How a second look at an accepted submission ended: confirmed, forged, refused or undecided."""

    submission: str
    outcome: str


def apply_verdict_given(body: VerdictGiven, state: State, entry: Entry) -> None:
    submission = state.submissions[body.submission]
    member = state.members[state.lease_of(submission).worker]
    member.evidence = {**member.evidence, body.validator: evidence_after(state, body.validator, member, body.groups)}
    _book_turns(state, submission, body.validator, entry.time)
    submission.verdicts = {**submission.verdicts, body.validator: body.groups}
    submission.differs += [(body.validator, other) for other in body.differs_from]
    if body.projection:
        submission.projections[body.validator] = body.projection
    state.forget(submission.judged_at, "judged", submission.digest)
    submission.judged_at = entry.time
    state.expect(submission.judged_at, "judged", submission.digest)
    for verdict in body.groups:
        if verdict.outcome in ("soft", "hard"):
            member.last_reason = f"{verdict.check}: {verdict.detail}"
            if verdict.bound:
                member.last_reason += f" ({verdict.figure:.3g}, limit {verdict.bound:.3g})"


def _book_turns(state: State, submission: SubmissionRecord, judge: str, now: float) -> None:
    """Validators whose turn came before this one's missed it, and this one was late if it took longer than a turn."""
    ahead, slack = submission.ahead_of(judge, silent(state, now)), slack_s(state)
    counts_s = state.law.missed_counts_turns * turn_s(state)
    for place, member in enumerate(state.members[key] for key in ahead):
        idle = idle_since(member, submission, turn_begins(state, submission, ahead[:place]))
        if idle >= member.turns.missed_at:  # guard: passed-together-count-once
            member.turns.miss(now, counts_s)  # guard: passed-is-missed
    turns, begun = state.members[judge].turns, turn_begins(state, submission, ahead)
    took_s = now - max(begun, turns.voted, turns.joined)  # guard: waits-before-a-join-are-no-check
    if took_s > slack:  # guard: late-is-missed
        turns.miss(now, counts_s)
    turns.vote(now, submission.seq, min(took_s, slack))


def evidence_after(
    state: State, validator: str, member: NodeRecord, groups: tuple[GroupVerdict, ...]
) -> SamplingEvidence:
    """A validator's evidence about a worker, with the audited groups of its verdict added."""
    evidence = member.evidence.get(validator, SamplingEvidence())
    judge = state.members[validator]
    noise = bounds_for(state.rules, member.implementation, judge.implementation, judge.dtype)
    for group in groups:
        if noise is not None and group.audited and group.outcome == "accept":  # guard: audited-is-evidence
            evidence = update(evidence, EvidenceFigures(group.tokens, group.flipped, group.gap_sum), noise)
            if noise.logprob_mean:
                claims = grown(evidence.claims, group.off_sum, group.off_weighted, group.tokens, noise)
                evidence = evidence._replace(claims=claims)
    return evidence


def apply_decision(body: Decision, state: State, entry: Entry) -> None:
    submission = state.submissions[body.submission]
    submission.decided = True
    state.pending.remove(body.submission)
    lease = state.lease_of(submission)
    lease.status = "decided"
    stream = state.stream_of(lease)
    for number in body.accepted:
        stream.versions[lease.version].blocks[number].fill(lease.id)
    state.release(lease, body.refused, entry.time)
    member = state.members[lease.worker]
    for check, groups in _refused_groups(state, lease, submission, body).items():
        member.refused += groups
        member.reasons[check] = member.reasons.get(check, 0) + groups
        state.refused[check] = state.refused.get(check, 0) + groups
    if set(body.refused) - set(body.disputed):  # guard: dispute-keeps-trust
        member.valid_blocks, member.failures = 0, member.failures + 1  # guard: refusal-ends-trust
    else:
        made = _made(state, submission, body)
        member.valid_blocks += len(made)
        if member.standing == "new" and made:
            member.standing = "good"
        # guard: disputed-forgery-is-audited
        if _has_hard(state, lease, submission, body.disputed):
            member.valid_blocks = 0
    if body.recheck:
        state.rechecks.append(body.submission)
    else:
        _end_judgement(state, submission)


def _made(state: State, submission: SubmissionRecord, body: Decision) -> list[int]:
    """Of the accepted blocks, those in which there was something to make: blocks of continuations may be empty."""
    size = state.rules.block_groups
    filled = {group.slot // size for groups in submission.verdicts.values() for group in groups if group.tokens}
    return [
        block for block in body.accepted if block in filled or not is_continued(block)
    ]  # guard: nothing-due-no-trust


def _has_hard(state: State, lease: LeaseRecord, submission: SubmissionRecord, blocks: tuple[int, ...]) -> bool:
    size = state.rules.block_groups
    found = (
        lease.blocks[index // size]
        for groups in submission.verdicts.values()
        for index, group in enumerate(groups)
        if group.outcome == "hard"
    )
    return not set(blocks).isdisjoint(found)


def _end_judgement(state: State, submission: SubmissionRecord) -> None:
    submission.verdicts = {}
    state.forget(submission.judged_at, "judged", submission.digest)


def _refused_groups(state: State, lease: LeaseRecord, submission: SubmissionRecord, body: Decision) -> dict[str, int]:
    """Groups of the refused blocks by the check that the first verdict names. Disputed blocks are nobody's fault."""
    size, refused = state.rules.block_groups, dict[int, str]()
    faulty = set(body.refused) - set(body.disputed)
    for groups in submission.verdicts.values():
        for index, group in enumerate(groups):
            if lease.blocks[index // size] in faulty and group.outcome in ("soft", "hard"):
                refused.setdefault(group.slot, group.check)
    if faulty and not refused:  # no single group failed; the noise of many did
        return {"sampling": len(faulty) * size}
    return {check: list(refused.values()).count(check) for check in refused.values()}


def apply_rechecked(body: Rechecked, state: State, entry: Entry) -> None:
    state.rechecks.remove(body.submission)
    submission = state.submissions[body.submission]
    if state.faults:
        # guard: absent-judge-hides-no-faults
        alone = len(submission.verdicts) == 1 and state.has_hosts_word(submission, submission.verdicts)
        state.faults.rechecked(body.submission, body.outcome == "confirmed" or alone, state.law.fault_window)
    first, groups = next(iter(submission.verdicts.items()))
    accused = any(first in pair for pair in submission.differs)
    size = state.rules.block_groups
    # guard: nothing-due-is-not-confirmed
    with_model = (group for group in groups if group.audited and (group.tokens or not is_continued(group.slot // size)))
    worked = not accused and any(with_model)  # guard: only-work-is-confirmed
    if body.outcome == "confirmed" and worked:
        state.members[first].turns.confirmed += 1
    lease = state.lease_of(submission)
    worker, refused = state.members[lease.worker], body.outcome in ("forged", "refused")
    worker.failures += refused  # guard: recheck-is-counted
    # guard: recheck-ends-trust, doubted-forgery-is-audited
    if refused or (body.outcome == "undecided" and _has_hard(state, lease, submission, lease.blocks)):
        worker.valid_blocks = 0
    _end_judgement(state, submission)


EVENTS = {
    "verdict_given": (VerdictGiven, apply_verdict_given),
    "decision": (Decision, apply_decision),
    "rechecked": (Rechecked, apply_rechecked),
}
