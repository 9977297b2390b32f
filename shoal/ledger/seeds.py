"""What the secret links of a version decide: the seed, environment and task of each slot; audits, rechecks and turns.

Called by the coordinator's desk, which holds the links, and by auditors once they are revealed. Pure: it knows a run's
state and no secret but the one that it is given.
"""

from collections.abc import Sequence

from shoal.ledger.drawn import table_of
from shoal.ledger.pools import SolvedGroup, solve_rate
from shoal.ledger.state import State
from shoal.ledger.state_records import LeaseRecord, StreamRecord
from shoal.protocol import types as t
from shoal.protocol.constants import CONTINUATIONS
from shoal.protocol.continuations import FIRST_BLOCK, is_continued, is_continued_slot, parent_slot
from shoal.protocol.draws import draw_task
from shoal.protocol.env_faults import without_faults
from shoal.protocol.needs import kind_of
from shoal.protocol.randomness import slot_seed, uniform

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
