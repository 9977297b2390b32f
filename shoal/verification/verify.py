"""Verdicts on a submission: one for each slot of its lease, whatever bytes came in.

A stranger's fault is returned as data. An exception means that the fault is ours.

Checks that need no model run on every group, in order, and the first failure decides. Groups that pass and are drawn
for audit share one prefill; the audit checks read its scores. There the first hard failure decides, or else the first.
"""

from collections.abc import Mapping, Sequence

import msgspec

from shoal.algos.activation_projection import project
from shoal.errors import Undecided
from shoal.protocol.audit_and_pay import REPLAY, influence, must_audit, pay_of
from shoal.protocol.constants import COMPLETIONS
from shoal.protocol.encoding import WireError, from_msgpack
from shoal.protocol.messages import Check, Group, GroupRecord, GroupVerdict, Record, Submission, Verdict
from shoal.protocol.reward_rules import fault_indices
from shoal.verification.check_context import CheckFailure, Context, GroupCheck, Tools, by_group
from shoal.verification.checks_with_model import AUDIT, figures_of, leaning_of
from shoal.verification.checks_without_model import MODEL_FREE, SHAPE
from shoal.verification.encode_submission import largest_submission_bytes

STOPPED = "the sandbox stopped the environment"
"""Why a slot is void that another machine might be able to judge."""


def verify_submission(
    body: bytes, check: Check, tools: Tools, record: bytes = b"", parents: Mapping[str, Group | None] | None = None
) -> Verdict:
    """Judge the bytes that a worker sent for a lease. `record` is what the host's stage played for it, if the host plays;
    `parents` are the groups that the lease continues, by their digests, None for those that nobody can.

    The role must make sure that `check.id` is the digest of `body`, that `tools` are of the lease's policy version, and
    that all parents are there.
    Nothing in `body` makes this raise.
    """
    submission = _open(body, check, tools)
    slots = [slot for block in check.lease.blocks for slot in block.slots]
    if isinstance(submission, CheckFailure):
        return Verdict(check.id, tuple(_refuse(slot.slot, SHAPE, submission) for slot in slots))

    proofs = submission.proofs or (b"",) * len(slots)
    recorded = _open_record(record, check, tools)
    if isinstance(recorded, str):
        return Verdict(check.id, tuple(_void(slot.slot, recorded) for slot in slots))
    continued = [(parents or {})[slot.parent.digest] if slot.parent else None for slot in slots]
    contexts = [
        Context(tools, check.lease, slot, submission, proof=proof, record=group, parent=parent)
        for slot, proof, group, parent in zip(slots, proofs, recorded or (None,) * len(slots), continued, strict=True)
    ]
    groups = [_open_group(encoded) for encoded in submission.groups]
    verdicts = [_judge_without_model(group, ctx) for group, ctx in zip(groups, contexts, strict=True)]
    draws = check.draws or (1.0,) * len(slots)
    audited = [
        (place, group)
        for place, (group, verdict, draw) in enumerate(zip(groups, verdicts, draws, strict=True))
        if isinstance(group, Group) and verdict.outcome == "accept" and _is_due(verdict, draw, check, tools)
    ]
    _prefill([(group, contexts[place]) for place, group in audited], tools)
    for place, group in audited:
        verdicts[place] = _judge_with_model(group, contexts[place])
    for judged, verdict, ctx in zip(groups, verdicts, contexts, strict=True):
        if isinstance(judged, Group) and verdict.outcome == "accept" and not ctx.is_continued:
            tools.on_accept(ctx.slot.env, ctx.replays(judged))
    return Verdict(check.id, tuple(verdicts), _projections([contexts[place] for place, _ in audited], check))


def _projections(audited: Sequence[Context], check: Check) -> dict[str, tuple[float, ...]]:
    """Project the activations of all audited groups, for each key that the check names; empty without activations."""
    hidden = [score.hidden_PD for ctx in audited for score in ctx.scores if score.hidden_PD is not None]
    if not hidden:
        return {}
    name = bytes.fromhex(check.id)
    # guard: projection-of-one-key, projection-of-one-submission
    return {key: project(hidden, bytes.fromhex(key) + name) for key in check.project_for}


def _is_due(verdict: GroupVerdict, draw: float, check: Check, tools: Tools) -> bool:
    """Whether to audit a group: it was drawn beforehand, or its influence or its pay makes it due."""
    rules = tools.info.rules
    faults = fault_indices(verdict.faults)
    weight = influence(verdict.rewards, verdict.tokens, rules.algorithm, verdict.steps, faults)
    pay = pay_of(verdict, rules)
    # guard: influence-is-checked
    return verdict.slot in check.audited or must_audit(
        draw, check.rate, weight, check.mean_influence, pay, check.mean_pay, bool(verdict.faults)
    )


def _open(body: bytes, check: Check, tools: Tools) -> Submission | CheckFailure:
    """Decode everything around the groups. Refuses bytes larger than the lease can need."""
    largest = largest_submission_bytes(check.lease, tools.info.rules)
    if len(body) > largest:  # guard: submission-size
        return CheckFailure(-1, -1, len(body), largest, "submission is larger than its lease can need, in bytes")
    try:
        submission = from_msgpack(body, Submission)
    except WireError:
        return CheckFailure(-1, -1, 0, 0, "bytes are not a msgpack Submission")
    if submission.engine.dtype != tools.info.rules.dtype:  # guard: submission-dtype
        return CheckFailure(-1, -1, 0, 0, "made in a dtype other than the run's")
    due = sum(len(block.slots) for block in check.lease.blocks)
    if len(submission.groups) != due:  # guard: submission-groups
        return CheckFailure(-1, -1, len(submission.groups), due, "number of groups differs from the lease's")
    proofs = 0 if tools.info.rules.proofs == "none" else due
    if len(submission.proofs) != proofs:  # guard: submission-proofs
        return CheckFailure(
            -1, -1, len(submission.proofs), proofs, "number of proofs differs from what this run asks for"
        )
    return submission


def _open_record(record: bytes, check: Check, tools: Tools) -> tuple[GroupRecord, ...] | str:
    """The host's record of a lease, group by group, none in a run whose workers play; or what is wrong with it."""
    if all(block.kind != COMPLETIONS for block in check.lease.blocks):
        return ()
    try:
        found = from_msgpack(record, Record)
    except WireError:
        return "the host's record of the lease is not a msgpack Record"
    due = [slot.slot for block in check.lease.blocks for slot in block.slots]
    said = (found.run, found.lease, found.version, [group.slot for group in found.groups])
    if said != (tools.info.run, check.lease.id, check.lease.version, due):  # guard: record-of-the-lease
        return "the host's record is of another lease"
    return found.groups


def _open_group(encoded: bytes) -> Group | CheckFailure:
    try:
        return from_msgpack(encoded, Group)
    except WireError:
        return CheckFailure(-1, -1, 0, 0, "bytes are not a msgpack Group")


def _prefill(audited: Sequence[tuple[Group, Context]], tools: Tools) -> None:
    if not audited:
        return
    requests = [request for group, ctx in audited for request in ctx.requests(group)]
    scores = tools.score(requests) if requests else []
    for (_, ctx), of_group in zip(audited, by_group([group for group, _ in audited], scores), strict=True):
        ctx.scores = of_group


def _judge_without_model(group: Group | CheckFailure, ctx: Context) -> GroupVerdict:
    """Run the checks that need no model. A slot that nobody can fill, or that we cannot replay, is void."""
    if isinstance(group, CheckFailure):
        return _refuse(ctx.slot.slot, SHAPE, group)
    try:
        if why := ctx.unplayable():  # guard: unplayable-is-void
            return _void(ctx.slot.slot, why)
        for check in MODEL_FREE:
            if (failure := check.run(group, ctx)) is not None:
                return _refuse(ctx.slot.slot, check, failure)
        return _accept(group, ctx)
    except Undecided:
        # guard: undecided-is-void
        return _void(ctx.slot.slot, STOPPED, REPLAY)


def _judge_with_model(group: Group, ctx: Context) -> GroupVerdict:
    """Run all checks that read `ctx.scores`, so that a mild failure of one cannot hide a hard failure of another."""
    if not group.rollouts:  # nothing was due
        return msgspec.structs.replace(_accept(group, ctx), audited=True)
    failures = [(check, check.run(group, ctx)) for check in AUDIT]
    found = [_refuse(ctx.slot.slot, check, failure) for check, failure in failures if failure is not None]
    hard = (verdict for verdict in found if verdict.outcome == "hard")
    verdict = next(hard, found[0] if found else _accept(group, ctx))
    figures, leaning = figures_of(ctx), leaning_of(group, ctx)
    return msgspec.structs.replace(
        verdict, audited=True, flipped=figures.flipped, gap_sum=figures.gap_sum,
        off_sum=leaning.plain, off_weighted=leaning.weighted,
    )  # fmt: skip


def _accept(group: Group, ctx: Context) -> GroupVerdict:
    return GroupVerdict(
        slot=ctx.slot.slot,
        audited=False,
        outcome="accept",
        rewards=tuple(float(replayed.reward) for replayed in ctx.replays(group)),
        tokens=sum(rollout.num_policy_tokens() for rollout in group.rollouts),
        steps=ctx.steps(group),
        faults=ctx.faults(group),
    )


def _void(slot: int, why: str, check: str = "environment") -> GroupVerdict:
    """Of a slot that no worker could fill, or that we cannot replay."""
    return GroupVerdict(slot, False, "void", check, why)


def _refuse(slot: int, check: GroupCheck, failure: CheckFailure) -> GroupVerdict:
    return GroupVerdict(
        slot=slot,
        audited=False,
        outcome="soft" if failure.mild else check.severity,
        check=check.name,
        detail=failure.detail,
        rollout=failure.rollout,
        position=failure.position,
        figure=float(failure.figure),
        bound=float(failure.bound),
    )
