"""One sentence for each event of a log, for a timeline.

Names and reasons in it are strangers' text: code that shows it must escape it. Keys and digests are cut, because the event
itself has them whole.
"""

from collections.abc import Sequence

from shoal.ledger.batches import BatchFormed, GroupAccepted, SlotVoid
from shoal.ledger.draw_table_changes import PoolsChanged
from shoal.ledger.event import Body
from shoal.ledger.leases import LeaseGranted, LeaseLapsed
from shoal.ledger.members import NodeJoined, NodeLeft, NodeQuarantined, NodeRestored, ValidatorFault
from shoal.ledger.pay import Credit, Forfeited, Slash, Vested
from shoal.ledger.run_decisions import in_words
from shoal.ledger.run_events import RulesChanged, RunCreated, RunEnded
from shoal.ledger.submissions import AuditDrawn, SubmissionReceived
from shoal.ledger.verdicts import Decision, Rechecked, VerdictGiven
from shoal.ledger.versions import CheckpointPublished, LinkRevealed, PublisherChanged
from shoal.protocol.reward_rules import fault_indices, without_faults

KEY_CHARS = 12
"""Characters of a key or digest that are shown."""


def sentence_of(body: Body) -> str:
    """What an event says."""
    match body:
        case RunCreated():
            return (
                f"run {body.name} begins: {body.rules.steps} steps, environments {_list([e.label for e in body.envs])}"
            )
        case RulesChanged():
            return _change(body)
        case RunEnded():
            return f"the run ends with version {body.version}"
        case NodeJoined():
            facts = f"{body.implementation}, {body.dtype}, {body.device}"
            return f"{body.role} {body.name} ({_cut(body.key)}) joins with {facts}"
        case NodeLeft():
            return f"node {_cut(body.key)} leaves"
        case NodeQuarantined():
            return f"worker {_cut(body.node)} is quarantined: {body.cause}"
        case NodeRestored():
            return f"the quarantine of worker {_cut(body.node)} ends"
        case ValidatorFault():
            return f"validator {_cut(body.validator)} is found at fault: {body.cause}"
        case _:
            return _of_work(body) or _of_pay(body) or type(body).__name__


def _of_work(body: Body) -> str:
    match body:
        case LeaseGranted():
            return (
                f"worker {_cut(body.worker)} gets {_blocks(body.blocks)} of version {body.version} (lease {body.lease})"
            )
        case LeaseLapsed():
            return f"lease {body.lease} ends unfilled: {body.cause}"
        case SubmissionReceived():
            size, groups = body.size_bytes / 1e6, len(body.groups)
            return f"worker {_cut(body.worker)} submits {groups} groups, {size:.1f} MB ({_cut(body.digest)})"
        case AuditDrawn():
            return f"submission {_cut(body.submission)}: {len(body.slots)} groups are drawn for audit, rate {body.rate:.2f}"
        case VerdictGiven():
            return f"validator {_cut(body.validator)} on submission {_cut(body.submission)}: {_outcomes(body)}"
        case Decision():
            parts = ((name, getattr(body, name)) for name in ("accepted", "refused", "disputed", "copied"))
            said = ", ".join(f"{_blocks(blocks)} {name}" for name, blocks in parts if blocks)
            again = "; a second validator judges it again" if body.recheck else ""
            return f"submission {_cut(body.submission)}: {said or 'nothing'}{again}"
        case Rechecked():
            return f"the second look at submission {_cut(body.submission)}: {body.outcome}"
        case GroupAccepted():
            left = without_faults(body.rewards, fault_indices(body.faults))
            mean = sum(left) / max(1, len(left))
            flat = "" if body.signal else ", without signal"
            num = len(body.rewards) - len(left)
            failed = f", the environment fails on {num} rollout{'s' if num != 1 else ''}" if num else ""
            figures = f"mean reward {mean:.3g}, {body.tokens} tokens{flat}{failed}"
            return f"slot {body.slot} of version {body.version} is filled: {figures}"
        case SlotVoid():
            return f"slots {_list(body.slots)} of version {body.version} get no group: {body.cause}"
        case BatchFormed():
            return f"the batch of step {body.step} is formed of {len(body.groups)} groups"
        case PoolsChanged():
            return f"from version {body.version} on, draws follow the solve rates of a retired version"
        case CheckpointPublished():
            return f"version {body.version} is published: weights root {_cut(body.root)}"
        case LinkRevealed():
            return f"version {body.version} is retired: its secret link is revealed"
        case PublisherChanged():
            return f"the root key names another publisher from version {body.since} on: {_cut(body.key)}"
        case _:
            return ""


def _of_pay(body: Body) -> str:
    match body:
        case Credit():
            return f"node {_cut(body.node)} is paid {body.tokens} tokens for slot {body.slot} of version {body.version}"
        case Vested():
            return f"{body.tokens} tokens of node {_cut(body.node)} vest"
        case Forfeited():
            return f"node {_cut(body.node)} loses {body.tokens} tokens of unvested pay: lease {body.lease} {body.cause}"
        case Slash():
            return f"node {_cut(body.node)} loses all of its unvested pay, {body.tokens} tokens, for a forgery"
        case _:
            return ""


def _change(body: RulesChanged) -> str:
    """What the host or the run itself changed, and the alarm or other cause of it."""
    said = [
        f"the run is {body.phase}" if body.phase else "",
        f"validator {_cut(body.admitted_validator)} is admitted" if body.admitted_validator else "",
        f"node {_cut(body.kicked)} is removed" if body.kicked else "",
        f"the host quarantines worker {_cut(body.quarantined)}" if body.quarantined else "",
        f"the learning rate of the run file is multiplied by {body.lr_factor:.3g}" if body.lr_factor else "",
        "the run file changes" if body.config else "",
        f"steps: {body.steps}" if body.steps else "",
        f"leases last at most {body.lease_s:g} s for each block" if body.lease_s else "",
        _flat(body.max_flat_groups),
        f"quarantines last {body.quarantine_s:g} s" if body.quarantine_s >= 0 else "",
    ]
    done = ", ".join(part for part in said if part) or "the host asks for something that changes nothing"
    why = in_words(body.evidence) if body.evidence else body.cause
    return f"{done}, because of {why}" if why else done


def _flat(limit: int) -> str:
    if limit < 0:
        return ""
    return f"{limit} flat groups in a row pause the run" if limit else "flat groups never pause the run"


def _outcomes(body: VerdictGiven) -> str:
    found = [group.outcome for group in body.groups]
    said = ", ".join(
        f"{found.count(outcome)} {outcome}" for outcome in ("accept", "void", "soft", "hard") if outcome in found
    )
    checks = sorted({group.check for group in body.groups if group.check})
    differs = f"; differs from {_list([_cut(key) for key in body.differs_from])}" if body.differs_from else ""
    return f"{said or 'no group'}{f' by {_list(checks)}' if checks else ''}{differs}"


def _blocks(blocks: Sequence[int]) -> str:
    return f"block {blocks[0]}" if len(blocks) == 1 else f"{len(blocks)} blocks"


def _list(items: Sequence[object], most: int = 5) -> str:
    """A few items and the number of the rest."""
    rest = len(items) - most
    return ", ".join(map(str, items[:most])) + (f" and {rest} more" if rest > 0 else "")


def _cut(name: str) -> str:
    return name[:KEY_CHARS]
