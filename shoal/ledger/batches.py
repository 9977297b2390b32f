"""Accepted groups, void slots, and the batches that the trainer learns from."""

from msgspec import UNSET, UnsetType

from shoal.ledger.batch_selection import blocks_in_the_way, first_by_slot, is_settled, next_members, usable
from shoal.ledger.event import Body, Entry
from shoal.ledger.fault_rate import FaultsRecord, GroupOutcome
from shoal.ledger.state import State
from shoal.ledger.state_records import SlotRecord, StreamRecord
from shoal.protocol.audit_and_pay import influence
from shoal.protocol.constants import MAIN_STREAM
from shoal.protocol.continuations import is_continued_slot
from shoal.protocol.encoding import float_sum
from shoal.protocol.messages import Faults, Message, StepRewards
from shoal.protocol.reward_rules import fault_indices, has_enough_rollouts, without_faults

# --- What becomes of slots, and the batches that the trainer learns from ---


class GroupAccepted(Message, frozen=True):
    """A slot is final, with this group."""

    version: int
    slot: int
    submission: str
    index: int
    """The group's place in the submission."""
    digest: str
    tokens: int
    """Policy tokens."""
    rewards: tuple[float, ...]
    signal: bool
    """Whether the run's algorithm can learn from it. It is decided once and stored, so replaying the state needs no
    algorithm. Deciding it again, as `shoal ledger verify` does, needs the algorithm. False of continuations."""
    stream: str = MAIN_STREAM
    steps: tuple[StepRewards, ...] | UnsetType = UNSET
    """What the turns or steps of each rollout earn; only in runs whose credit asks for it."""
    faults: Faults | UnsetType = UNSET
    """Where the environment failed, as the verdict says it; only if it did."""
    env: str | UnsetType = UNSET
    """Label of its environment, in runs with several."""
    confirmed: bool | UnsetType = UNSET
    """Of a group with faults: whether two validators found them, or one that no other can check and that is the host's or
    has the record of its stage. Only then can they pause the run."""


class SlotVoid(Message, frozen=True):
    """Slots that will have no group."""

    version: int
    slots: tuple[int, ...]
    cause: str
    """environment: it cannot begin the task; replay: it was stopped where validators replayed; stale: their version is too
    old; dropped: as many workers gave their block back as may be leased it; stopped: the same, since an environment took
    too long, or ended its process, on each of their machines; drained: of continuations that nobody had been leased when an
    asynchronous run was drained."""
    stream: str = MAIN_STREAM

    def unbegun(self) -> str:
        """Why the tasks of these slots can never begin; empty if something else left them void."""
        return self.cause.removeprefix(BY_ENVIRONMENT) if self.cause.startswith(BY_ENVIRONMENT) else ""


class BatchFormed(Message, frozen=True):
    step: int
    groups: tuple[tuple[int, int], ...]
    """(version, slot) of each member, in canonical order."""
    stream: str = MAIN_STREAM


BY_ENVIRONMENT = "environment: "
"""How the cause of a void slot begins if validators found that nobody can fill it."""


def apply_group_accepted(body: GroupAccepted, state: State, entry: Entry) -> None:
    stream = state.streams[body.stream]
    continued = is_continued_slot(body.slot, state.rules.block_groups)
    status = "continued" if continued else "signal" if body.signal else "flat"
    faults = fault_indices(body.faults)
    stream.versions[body.version].slots[body.slot] = SlotRecord(
        status, body.submission, body.index, body.digest, body.rewards, body.tokens, steps=body.steps,
        faults=faults or UNSET,
    )  # fmt: skip
    _count_faults(body, state)
    worker = state.lease_of(state.submissions[body.submission]).worker
    state.members[worker].accepted += body.tokens > 0 or not continued  # guard: nothing-due-is-no-record
    if continued:  # guard: continuations-are-no-groups
        return  # no batch takes it, and what is usual for groups is not usual for it
    state.influence += influence(body.rewards, body.tokens, state.rules.algorithm, steps=body.steps, faults=faults)
    if body.signal:  # guard: signal-fills-batches
        stream.pool.append((body.version, body.slot))
        stream.forget_flat()
    elif not has_enough_rollouts(len(body.rewards), faults):  # guard: too-few-left-are-not-equal
        stream.count_failed()
    else:
        stream.flat += 1
        rewards = without_faults(body.rewards, faults)
        stream.flat_reward += float_sum(rewards) / max(1, len(rewards))
    state.block_tokens += body.tokens
    state.accepted_groups += 1


def _count_faults(body: GroupAccepted, state: State) -> None:
    """Count what the environment did on a group, for the run's pauses. Faults that nobody has confirmed yet wait."""
    label = body.env or (state.envs[0].label if len(state.envs) == 1 else "")
    if not label:  # nobody said it
        return
    state.faults = state.faults or FaultsRecord()
    lowest = any(env.label == label and env.on_fault == "lowest" for env in state.envs)
    group = GroupOutcome.of(body.rewards, body.faults, lowest)
    if body.faults is UNSET or body.confirmed:
        state.faults.count(label, group, state.law.fault_window)
    elif body.submission in state.rechecks:  # guard: lone-faults-wait
        state.faults.wait(body.submission, label, group)


GIVEN_UP = ("stale", "dropped", "stopped", "drained")
"""Causes of slots whose blocks nobody is leased any more."""


def apply_slot_void(body: SlotVoid, state: State, entry: Entry) -> None:
    stream = state.streams[body.stream]
    version = stream.versions[body.version]
    for slot in body.slots:
        version.slots[slot] = SlotRecord("void")
    size = state.rules.block_groups
    count = sum(not is_continued_slot(slot, size) for slot in body.slots)
    # guard: unbegun-counts-as-flat
    if count and body.unbegun():
        stream.count_unbegun(count, body.unbegun())
    if count and body.cause == "stopped":  # guard: stopped-counts-as-flat
        stops = version.blocks[body.slots[-1] // size].stopped
        stream.count_stopped(count, stops.tasks if stops else "")
    given_up = {(body.version, slot // size) for slot in body.slots if body.cause in GIVEN_UP}
    for place in [place for place in stream.free if place in given_up]:
        stream.free.remove(place)
        version.blocks[place[1]].status = "done"


def apply_batch_formed(body: BatchFormed, state: State, entry: Entry) -> None:
    stream = state.streams[body.stream]
    stream.batches[body.step] = body.groups
    members = set(body.groups)
    stream.pool = [place for place in stream.pool if place not in members]
    stream.forget_flat()
    for version, number in body.groups:
        slot = stream.versions[version].slots[number]
        slot.step = body.step
        maker = state.members[state.maker_of(stream, (version, number))]
        maker.influence += influence(
            slot.rewards, slot.tokens, state.rules.algorithm, steps=slot.steps,
            faults=slot.faults or (),
        )  # fmt: skip


EVENTS = {
    "group_accepted": (GroupAccepted, apply_group_accepted),
    "slot_void": (SlotVoid, apply_slot_void),
    "batch_formed": (BatchFormed, apply_batch_formed),
}


# --- Which accepted groups make the next batch ---


def form_batch(state: State, stream: StreamRecord) -> list[Body]:
    """The next batch, if it is due and its groups are there."""
    step, rules = len(stream.batches), state.rules
    if step >= rules.steps or step > stream.version + rules.max_staleness:
        return []
    synchronous = rules.max_staleness == 0
    members = list(first_by_slot(state, stream, step)) if synchronous else next_members(state, stream)
    if len(members) < rules.batch_groups or blocks_in_the_way(state, stream):  # guard: last-batch-waits
        return []
    if not all(is_settled(state, stream, place) for place in members):  # guard: batch-waits-for-continuations
        return []
    return [BatchFormed(step, tuple(members), stream.name)]


def groups_beyond_share(state: State, stream: StreamRecord) -> int:
    """Usable groups that the next batch leaves out because their workers have filled their share of it."""
    members = next_members(state, stream)
    ready = [place for place in usable(state, stream) if is_settled(state, stream, place)]
    return len(ready) - len(members) if len(members) < state.rules.batch_groups else 0
