"""Continuations: which rollouts are continued, from where, how often, and with which seeds.

All follows from the bytes of the accepted group, its parent, and from the run's settings, so neither the log nor a lease
lists any place. Pure. What continuations are worth is for `algos/advantages`.

A block of continuations belongs to a block of parents: its number is the parents' plus FIRST_BLOCK, and the numbers of its
slots follow from that as always. So all that the log says of blocks and slots holds for it, too.

Axes: T tokens of one rollout, P tokens of it that the policy learns from.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.protocol.algorithm_config import Vine, vine_of
from shoal.protocol.constants import MAX_BLOCK_ROLLOUTS, MAX_GROUP_ROLLOUTS
from shoal.protocol.messages import ENVIRONMENT, POLICY, Group, Rollout, Rules, Slot
from shoal.protocol.seed_chain import continuation_seed, sample_seed

FIRST_BLOCK = 1_000_000
"""The block that continues block 0; no ordinary block has this number or a larger one. Changing breaks: every log with
continuations."""


class Branch(NamedTuple):
    """One continuation: of which rollout of the parent, from which token index, and its number among those from there."""

    rollout: int
    position: int
    number: int

    def seed(self, parent: bytes) -> bytes:
        """Its sample seed; `parent` is the seed of the parent's slot."""
        return continuation_seed(parent, *self)


def is_continued(block: int) -> bool:
    """Whether a block is one of continuations."""
    return block >= FIRST_BLOCK


def is_continued_slot(slot: int, block_groups: int) -> bool:
    """Whether a slot is one of continuations."""
    return is_continued(slot // block_groups)


def continued_slot(slot: int, block_groups: int) -> int:
    """The slot of a group's continuations."""
    return slot + FIRST_BLOCK * block_groups


def parent_slot(slot: int, block_groups: int) -> int:
    """The slot that a slot of continuations continues."""
    return slot - FIRST_BLOCK * block_groups


def slot_in_batch(slot: int, block_groups: int) -> int:
    """The slot that a batch holds if it learns from this one: its parent's for a slot of continuations."""
    return parent_slot(slot, block_groups) if is_continued_slot(slot, block_groups) else slot


def places(rollout: Rollout, vine: Vine) -> tuple[int, ...]:
    """Token indices from which a rollout is continued, rising: every so many of its learned tokens, never the first, whose
    value the group itself gives. None for a rollout of several rows."""
    learned_P = np.flatnonzero(rollout.author_T() == POLICY)
    possible = (len(learned_P) - 1) // vine.every
    if rollout.starts or possible < 1:
        return ()
    apart = vine.every * -(-possible // vine.most)
    return tuple(map(int, learned_P[apart::apart]))


def branches(parent: Group, vine: Vine) -> list[Branch]:
    """All continuations of a group, in the order in which its slot holds them."""
    return [
        Branch(index, position, number)
        for index, rollout in enumerate(parent.rollouts)
        for position in places(rollout, vine)
        for number in range(vine.continuations)
    ]


def continued_rollouts(parent: Group, vine: Vine) -> list[Rollout]:
    """Those rollouts of a group that are continued. If one of them is not what the environment plays, nobody can continue
    the group: its slot is void."""
    return [rollout for rollout in parent.rollouts if places(rollout, vine)]


def most_rollouts(rules: Rules, vine: Vine) -> int:
    """Rollouts of a group of continuations, at most."""
    return rules.group_size * vine.most * vine.continuations


def seeds_of(slot: Slot, num: int, continued: Sequence[Branch] = ()) -> list[bytes]:
    """Sample seeds of a slot's rollouts, 32 bytes each: of so many, or of these continuations."""
    seed = bytes.fromhex(slot.seed)
    return [branch.seed(seed) for branch in continued] if continued else [sample_seed(seed, i) for i in range(num)]


def other_prefix(rollout: Rollout, parent: Rollout, position: int) -> int:
    """The first token index, at most `position`, at which a rollout does not continue its parent from there; -1 if it does.

    Before `position` it must have the parent's tokens, none of them as the policy's work. The token at `position` must be
    the policy's.
    """
    tokens_T, author_T = rollout.tokens_T(), rollout.author_T()
    same_T = tokens_T[:position] == parent.tokens_T()[:position] if len(tokens_T) > position else None
    if same_T is None or (rollout.starts and rollout.starts[0] <= position):
        return min(len(tokens_T), *(rollout.starts or (len(tokens_T),)), position)
    theirs_T = same_T & (author_T[:position] == ENVIRONMENT)
    if not theirs_T.all():  # guard: continues-its-parent
        return int(np.argmin(theirs_T))
    return position if author_T[position] == ENVIRONMENT else -1  # guard: continues-at-once


NO_FIT = (
    f"groups of fewer than 1 or more than {MAX_GROUP_ROLLOUTS} rollouts (MAX_GROUP_ROLLOUTS), groups of such "
    f"continuations, or blocks of no group or of more than {MAX_BLOCK_ROLLOUTS} rollouts (MAX_BLOCK_ROLLOUTS)"
)
"""What a run has whose groups do not fit."""


def groups_fit(rules: Rules) -> bool:
    """Whether all groups and blocks of a run may be made. A host that lies may ask for any number of rollouts,
    continuations or groups, and those who read its log would count to it."""
    vine, most = vine_of(rules.algorithm), rules.group_size
    if vine is not None:
        most = most_rollouts(rules, vine) if min(vine.continuations, vine.every, vine.most) >= 1 else 0
    if rules.group_size < 1 or not 1 <= most <= MAX_GROUP_ROLLOUTS:
        return False
    return 1 <= rules.block_groups <= MAX_BLOCK_ROLLOUTS // rules.group_size  # guard: blocks-fit


def num_rollouts(rules: Rules, slot: int) -> tuple[int, int]:
    """The fewest and the most rollouts that an accepted group of a slot may have."""
    vine = vine_of(rules.algorithm)
    if vine is not None and is_continued_slot(slot, rules.block_groups):
        return 0, most_rollouts(rules, vine)
    return rules.group_size, rules.group_size


def work_of_block(vine: Vine) -> float:
    """About how many ordinary blocks a block of continuations is worth, at most: on average, each writes half a rollout."""
    return max(1.0, vine.most * vine.continuations / 2)


def whole_author(
    parent: Rollout, author_T: NDArray[np.uint8], position: int, stop_ids: frozenset[int]
) -> NDArray[np.uint8]:
    """Authors of a continuation as of a rollout that was played in one go, uint8[T].

    A turn has one author, so the part of a turn that the parent wrote has that of the part which continues it.
    """
    before_T, tokens_T = parent.author_T()[:position].copy(), parent.tokens_T()
    begin = position
    while begin > 0 and before_T[begin - 1] != ENVIRONMENT and int(tokens_T[begin - 1]) not in stop_ids:
        begin -= 1
    if position < len(author_T):
        before_T[begin:] = author_T[position]
    return np.concatenate([before_T, author_T[position:]])
