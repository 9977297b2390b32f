"""What a run is, how far it is, what it waits for, and its nodes, as messages of the wire: all follow from the state."""

from msgspec import UNSET

from shoal.humanize import duration
from shoal.ledger.batch_selection import blocks_in_the_way, groups_in_flight, is_settled, next_members, usable
from shoal.ledger.batches import groups_beyond_share
from shoal.ledger.fault_rate import FAULTS, fault_remedy
from shoal.ledger.lease_granting import without_signal
from shoal.ledger.remedies import ADMIT_REMEDY, ALARM_REMEDY, no_signal_remedy
from shoal.ledger.run_events import NO_SIGNAL
from shoal.ledger.state import State
from shoal.ledger.state_records import NodeRecord
from shoal.protocol import messages as t
from shoal.protocol.constants import MAX_NODES, PROTOCOL_VERSION
from shoal.protocol.continuations import continued_slot

VERDICTS = "validators: "
"""How a wait for verdicts begins."""


ALL_GONE = "; all workers have left or were removed"


def run_info_of(state: State) -> t.RunInfo:
    """A run's description."""
    return t.RunInfo(
        run=state.run, name=state.name, protocol=PROTOCOL_VERSION, run_key=state.run_key,
        trainer_key=state.trainer_key, head=state.head, chain_end=state.chain_end, envs=state.envs,
        sampling=state.sampling, rules=state.rules, phase=state.phase,  # type: ignore[arg-type]
        version=state.main.version, rules_version=state.law.version, root_key=state.root_key or "",
        publishers=state.named or None,
    )  # fmt: skip


def status_of(state: State, now: float) -> t.Status:
    """How far a run is, and what it waits for since its newest event."""
    (waits, remedy), main = awaited(state), state.main
    on = waits.partition(":")[0].split()[-1]
    return t.Status(
        name=state.name, phase=state.phase, version=main.version, steps=state.rules.steps, accepted=state.accepted_groups,
        refused=state.refused, in_flight=groups_in_flight(state, main), pending=len(state.pending) + len(state.rechecks),
        waiting_for=waits, waiting_s=0.0 if on == "nothing" else max(0.0, now - state.time), flat_groups=main.flat,
        flat_reward=main.mean_flat_reward, no_signal=without_signal(state, main), unbegun_groups=main.unbegun or 0,
        unbegun_cause=main.unbegun_cause or "", pause_cause=state.pause_cause, lr_factor=main.lr_factor(len(main.batches)),
        unjoined=tuple(key for key in state.validators if key not in state.members)[-MAX_NODES:], waiting_on=on,
        remedy=remedy,
    )  # fmt: skip


def awaited(state: State) -> tuple[str, str]:
    """Who or what the run waits for, as text, of workers also how many cannot work now; and what the host may do."""
    cause, remedy = _paused(state) if state.phase == "paused" else _awaited(state)
    return f"{cause}{_out_of_work(state)}" if "workers" in cause.partition(":")[0] else cause, remedy


def _out_of_work(state: State) -> str:
    workers = [node for node in state.members.values() if node.role == "worker"]
    here = [node for node in workers if not node.left and node.standing != "kicked"]
    if workers and not here:
        return ALL_GONE
    out = sum(node.standing == "quarantined" for node in here)
    return f"; {out} of {len(here)} workers {'is' if out == 1 else 'are'} quarantined" if out else ""


def waiting_after_lapses(state: State, now: float) -> str:
    """What is said of workers that get no lease yet because theirs lapsed in a row, if there are any."""
    held, first_s = {state.leases[name].worker for name in state.open_leases}, state.rules.lease_s
    here = [one for one in state.members.values() if one.role == "worker" and not one.left and one.standing != "kicked"]
    ends = [one.dropped_at + state.law.lapse_wait_s(one.dropped, first_s) for one in here if one.key not in held]
    if not (left_s := [end - now for end in ends if end > now]):
        return ""
    num = len(left_s)
    return (
        f"; {num} of {len(here)} workers {'waits' if num == 1 else 'wait'} for a lease, because theirs lapsed in a row: "
        f"the first {duration(min(left_s))} more at most"
    )


def _paused(state: State) -> tuple[str, str]:
    """The cause of a pause, and what the host may do."""
    cause, main = state.pause_cause, state.main
    if cause.startswith(FAULTS):
        return f"the host: {cause}", fault_remedy(cause)
    if cause not in ("", NO_SIGNAL):
        return f"the host: the {cause} paused the run, as its run file says", ALARM_REMEDY
    if flat := without_signal(state, main):
        return f"the host: {flat}", no_signal_remedy(main.flat, main.unbegun or 0, main.unbegun_cause or "")
    return "the host: the run is paused", ""


def _awaited(state: State) -> tuple[str, str]:
    """The same of a run that is not paused."""
    if state.phase == "ended":
        return f"{VERDICTS}{_to_judge(state)}" if state.pending else "nothing: the run has ended", ""
    if state.main.version < 0:
        return "the trainer: the first version", ""
    if state.main.version in state.main.batches:
        return "the trainer: the next step", ""
    need, have = state.rules.batch_groups, len(next_members(state, state.main))
    if state.pending:
        judged = f"{_to_judge(state)} ({have} of {need} groups for the next step)"
        if state.validators:
            return f"{VERDICTS}{judged}", ""
        return f"the host: {judged}, and no validator is admitted", ADMIT_REMEDY
    return _awaited_of_workers(state, have), ""


def _awaited_of_workers(state: State, have: int) -> str:
    """What workers have to do before the next step, for which so many groups are there."""
    need = state.rules.batch_groups
    if state.phase == "draining":
        out = len(state.open_leases)
        return f"workers: {out} lease{'s' if out != 1 else ''} to finish, then the run ends"
    if not any(node.role == "worker" for node in state.members.values()):
        return "workers: none has joined yet"
    open_ = sum(not is_settled(state, state.main, place) for place in usable(state, state.main))
    if have + open_ >= need and open_:
        return f"workers: continuations of {open_} groups, for the next step"
    held = blocks_in_the_way(state, state.main)
    if held:
        left = f"{len(held)} block{'s' if len(held) > 1 else ''} of version {held[0][0]}"
        return f"workers: {left}, of which the next step is the last that may learn"
    surplus = groups_beyond_share(state, state.main)
    if surplus:
        return (
            f"other workers: {have} of {need} groups for the next step, and {surplus} more of workers that "
            "have filled their share (verify.worker_share)"
        )
    return f"workers: {have} of {need} groups for the next step"


def _to_judge(state: State) -> str:
    waiting = len(state.pending)
    return f"{waiting} submission{'s' if waiting != 1 else ''} to judge"


def node_state(node: NodeRecord) -> t.NodeState:
    """A node as the wire shows it."""
    return t.NodeState(
        key=node.key, role=node.role, name=node.name, standing=node.standing,  # type: ignore[arg-type]
        credits=node.credits, accepted=node.accepted, refused=node.refused, lapsed=node.lapsed, reasons=node.reasons,
        last_reason=node.last_reason, vested=node.vested, leases=node.leases, influence=node.influence,
        stale=node.stale, left=node.left, given=node.given, unfilled=node.unfilled,
    )  # fmt: skip


def batch_of(state: State, step: int) -> t.Batch | None:
    """The batch of a step as the trainer reads it, or None before it is formed."""
    if step not in state.main.batches:
        return None
    members = []
    for version, number in state.main.batches[step]:
        slots = state.main.versions[version].slots
        slot, continued = slots[number], slots.get(continued_slot(number, state.rules.block_groups))
        rewards = continued.rewards if continued is not None else ()
        place = version, number, slot.submission, slot.index
        failed = (continued.faults or ()) if continued is not None else ()
        members.append(
            t.BatchGroup(*place, slot.digest, slot.rewards, rewards, slot.steps or (), slot.faults or (), failed)
        )
    factor = state.main.lr_factor(step)
    return t.Batch(step, tuple(members), lr_factor=UNSET if factor == 1.0 else factor)
