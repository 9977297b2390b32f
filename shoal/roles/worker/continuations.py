"""What a worker does for leases of continuations: it fetches the groups that they continue, plays on, and scores.

The groups come from the coordinator, under a call that only the lease's worker may use. They are a stranger's bytes: the
lease, which the run key signed, names their digests.
"""

from collections.abc import Sequence
from typing import TypeAlias

from shoal.engine.interface import ScoreRequest
from shoal.envs.branching import continue_block
from shoal.envs.play import play_block
from shoal.errors import PeerError
from shoal.protocol import messages as t
from shoal.protocol.algorithm_config import vine_of
from shoal.protocol.branching import branches
from shoal.protocol.constants import CONTINUATIONS, MAX_SUBMISSION_BYTES
from shoal.protocol.encoding import WireError, digest, from_msgpack
from shoal.protocol.rollout_validation import readable_parent
from shoal.roles.node.session import Session
from shoal.verification.context import score_requests

Parents: TypeAlias = dict[int, t.Group]
"""By slot of a lease of continuations: what it continues. Slots in which nothing is due are missing."""


async def fetch_parents(seat: Session, lease: t.Lease) -> Parents:
    """The groups that a lease continues; none of another kind. Raises `PeerError` if the host serves others, and as
    `Client.get`."""
    if all(block.kind != CONTINUATIONS for block in lease.blocks):
        return {}
    path, vocabulary = f"/v1/leases/{lease.id}/parents", seat.policy.renderer.vocabulary
    fault = ""
    for _ in range(2):  # they may have been damaged on the way
        try:
            told = from_msgpack(await seat.client.get(path, cap=MAX_SUBMISSION_BYTES), t.Parents)
            return parents_of(lease, told.groups, seat.info.rules, vocabulary)
        except WireError as error:
            fault = str(error)
    raise PeerError(f"lease {lease.id} cannot be played: {fault}. Tell the host")


def parents_of(lease: t.Lease, encoded: Sequence[bytes], rules: t.Rules, vocabulary: int) -> Parents:
    """The groups that a lease continues, by slot, without those that nobody can. Raises `WireError` for bytes that are not
    what the lease names."""
    named = [(slot, slot.parent) for block in lease.blocks for slot in block.slots if slot.parent is not None]
    if len(encoded) != len(named):
        raise WireError(f"{len(encoded)} groups came, the lease names {len(named)}")
    found = Parents()
    for (slot, parent), data in zip(named, encoded, strict=True):
        if digest(data) != parent.digest:  # guard: parents-of-the-lease
            raise WireError(f"slot {slot.slot} continues {parent.digest[:12]}, other bytes came")
        group = readable_parent(data, rules, lease.sampling, vocabulary)
        if group is not None:
            found[slot.slot] = group
    return found


def play_leased(seat: Session, lease: t.Lease, block: t.Block, parents: Parents) -> list[t.Group]:
    """Fill the slots of a block."""
    rules, engine, renderer = seat.info.rules, seat.engine, seat.policy.renderer
    vine = vine_of(rules.algorithm)
    if vine is None or block.kind != CONTINUATIONS:
        return play_block(engine, renderer, seat.envs, block, rules.group_size, lease.sampling)
    of_block, at_once = [parents.get(slot.slot) for slot in block.slots], rules.group_size * rules.block_groups
    return continue_block(engine, renderer, seat.envs, block, of_block, vine, at_once, lease.sampling)


def to_prove(lease: t.Lease, groups: Sequence[t.Group], parents: Parents, rules: t.Rules) -> list[ScoreRequest]:
    """What to prefill for the proofs of a lease's groups."""
    slots, vine = [slot for block in lease.blocks for slot in block.slots], vine_of(rules.algorithm)
    requests: list[ScoreRequest] = []
    for slot, group in zip(slots, groups, strict=True):
        continued = branches(parents[slot.slot], vine) if vine and slot.slot in parents else ()
        requests += score_requests(slot, group, continued)
    return requests
