"""The accepted groups that a lease of continuations names, out of the bodies of their submissions.

Called by validators, auditors and the coordinator, who may read whole submissions. Pure.
"""

from collections.abc import Mapping

from shoal.errors import PeerError
from shoal.protocol.continuations import readable_parent
from shoal.protocol.types import Group, Lease, Parent, Rules, Submission
from shoal.protocol.wire import WireError, digest, from_msgpack


def parent_bodies(lease: Lease) -> list[str]:
    """Digests of the submissions that hold the groups which a lease continues."""
    return list(dict.fromkeys(parent.submission for parent in named_parents(lease)))


def parents_in(lease: Lease, bodies: Mapping[str, bytes], rules: Rules, vocabulary: int) -> dict[str, Group | None]:
    """The groups that a lease continues, by their digests; None for one that nobody can continue. Raises `PeerError` if a
    body does not hold what the lease names: then the host that made the lease is at fault, not the worker that fills it."""
    found: dict[str, Group | None] = {}
    for parent in named_parents(lease):
        try:
            groups = from_msgpack(bodies[parent.submission], Submission).groups
            data = groups[parent.index] if 0 <= parent.index < len(groups) else b""
            if digest(data) != parent.digest:  # guard: named-parents
                raise WireError(f"its group {parent.index} is not {parent.digest[:12]}")
            found[parent.digest] = readable_parent(data, rules, lease.sampling, vocabulary)
        except WireError as error:
            raise PeerError(
                f"lease {lease.id} continues a group of submission {parent.submission[:12]} that is not there: {error}. "
                "Tell the host"
            ) from None
    return found


def named_parents(lease: Lease) -> list[Parent]:
    """Those of all slots of a lease, in their order."""
    return [slot.parent for block in lease.blocks for slot in block.slots if slot.parent is not None]
