"""Draws of a slot: its seed, its environment and its task, by the pools of task difficulty."""

from collections.abc import Sequence

from shoal.ledger.state import State
from shoal.ledger.state_records import LeaseRecord, StreamRecord
from shoal.ledger.task_difficulty import Records, SolvedGroup, apply_change, solve_rate, table_after
from shoal.protocol import messages as t
from shoal.protocol.constants import CONTINUATIONS
from shoal.protocol.continuations import FIRST_BLOCK, is_continued, is_continued_slot, parent_slot
from shoal.protocol.messages.run import kind_of
from shoal.protocol.reward_rules import without_faults
from shoal.protocol.seed_chain import slot_seed, uniform
from shoal.protocol.task_draws import DrawTable, EnvDraw, TaskList, draw_task

# --- The draw table of each version, by the log ---


KEPT = 8
"""Tables that a state remembers: those of the versions in use, and of the one that is audited."""


def first_table(state: State) -> DrawTable:
    """The table of the run file."""
    lists = state.task_lists or {}
    return [env_draw(env.label, env.weight, env.num_tasks, lists.get(env.label)) for env in state.envs]


def env_draw(label: str, weight: float, num_tasks: int, listed: TaskList | None) -> EnvDraw:
    """One environment of the run file's table: all of its tasks, or those of a list."""
    if listed is None:
        return EnvDraw(label, weight, num_tasks)
    return EnvDraw(label, weight, len(listed.tasks), listed=listed.tasks)


def table_of(state: State, stream: StreamRecord, version: int) -> DrawTable:
    """What the slots of a version are drawn from: the table as it was when the version was published."""
    rule, first = state.difficulty, first_table(state)
    if rule is None:
        return first
    known: dict[tuple[str, int, int], DrawTable] = state.__dict__.setdefault(f"{__name__}.known", {})
    key = stream.name, version, len(stream.changes)
    if key not in known:
        records: Records = {}
        for changed, change in stream.changes.items():  # they are in the order of versions
            if changed <= version:  # guard: table-of-the-version
                apply_change(change, first, records)
        while len(known) >= KEPT:
            del known[next(iter(known))]
        known[key] = table_after(first, records, rule)
    return known[key]


# --- What the secret links of a version decide ---


MOST_COUNTED = 8192
"""Slots of a version that count for the draws, at most: it bounds the size of an event."""


def slot_of(state: State, stream: StreamRecord, version: int, slot: int, link: bytes) -> t.Slot:
    """A slot with its seed, environment and task; `link` is link(version) of the slot chain. One of continuations has those
    of its parent."""
    size, slots = state.rules.block_groups, stream.versions[version].slots
    continued = is_continued_slot(slot, size)
    number = parent_slot(slot, size) if continued else slot
    seed = slot_seed(state.run, version, stream.versions[version].root, link, number, stream.name)
    parent = None
    if continued and slots[number].status == "signal":
        parent = t.Parent(slots[number].submission, slots[number].index, slots[number].digest)
    return t.Slot(slot, seed.hex(), *draw_task(seed, table_of(state, stream, version)), parent)


def lease_of(state: State, lease: LeaseRecord, link: bytes) -> t.Lease:
    """A lease as its worker was given it, all slots with their seeds."""
    size, stream = state.rules.block_groups, state.stream_of(lease)
    blocks = tuple(
        t.Block(
            b,
            tuple(slot_of(state, stream, lease.version, s, link) for s in range(b * size, (b + 1) * size)),
            CONTINUATIONS if is_continued(b) else kind_of(state.envs),
        )
        for b in lease.blocks
    )
    return t.Lease(lease.id, lease.worker, lease.version, blocks, state.sampling, lease.issued, lease.deadline)


def solved_groups(state: State, stream: StreamRecord, version: int, link: bytes) -> list[SolvedGroup]:
    """The groups of a retired version that count for the draws to come, in the order of their slots, with or without
    signal; arguments as of `slot_of`.

    At `max_staleness = 0` those up to the last one of the batch: workers may or may not have made more, and who they are
    must not decide what is learned.
    """
    solved, slots = state.difficulty.solved if state.difficulty else {}, stream.versions[version].slots
    last = stream.batches[version][-1][1]
    if state.rules.max_staleness:  # guard: counts-to-the-batch
        last = FIRST_BLOCK * state.rules.block_groups - 1  # all but continuations
    found = []
    for number in sorted(slots)[:MOST_COUNTED]:
        if number <= last and slots[number].status in ("signal", "flat"):
            slot = slot_of(state, stream, version, number, link)
            rewards = without_faults(slots[number].rewards, slots[number].faults or ())
            if rewards:
                found.append(SolvedGroup(slot.env, slot.task, solve_rate(rewards, solved.get(slot.env, 1.0))))
    return found


def audit_draws(state: State, lease: LeaseRecord, link: bytes) -> tuple[float, ...]:
    """One draw in [0, 1) for each group of a submission; `link` is that of the audit chain.

    The draws follow from the lease and its slots, so nothing that a worker puts into its submission changes them.
    """
    return slot_draws(lease.id, state.slots_of(lease), link)


def slot_draws(lease: str, slots: Sequence[int], link: bytes) -> tuple[float, ...]:
    """The draws of `audit_draws`, by the id of the lease."""
    return tuple(uniform("audit/slot", link, lease.encode(), slot.to_bytes(8, "big")) for slot in slots)


def recheck_draw(lease: LeaseRecord, link: bytes) -> float:
    """A draw in [0, 1) for judging a submission a second time; `link` as of `audit_draws`."""
    return uniform("recheck/lease", link, lease.id.encode())


def turns(lease: LeaseRecord, validators: Sequence[str], link: bytes) -> tuple[str, ...]:
    """Keys of validators in the order in which they may judge a submission: nobody picks whom to judge, or by whom."""
    draws = turn_draws(lease, validators, link)
    return tuple(sorted(validators, key=lambda key: (draws[key], key)))


def turn_draws(lease: LeaseRecord, validators: Sequence[str], link: bytes) -> dict[str, float]:
    """The draws behind `turns`, in [0, 1), by validator: the smallest is first."""
    return {key: uniform("turn/lease", link, lease.id.encode(), bytes.fromhex(key)) for key in validators}
