"""The accepted groups that a lease of continuations names, out of the bodies of their submissions.

Bodies are large and a lease may name many, so they are read one after another, and of each only the named groups are kept.
"""

from collections.abc import Awaitable, Callable, Mapping

from shoal.errors import PeerError
from shoal.protocol.constants import MAX_SUBMISSION_BYTES
from shoal.protocol.encoding import WireError, digest, from_msgpack, is_digest
from shoal.protocol.messages import Group, Lease, Parent, Rules, Submission
from shoal.protocol.rollout_validation import most_bytes, readable_parent


class OtherParents(PeerError):
    """A submission does not hold what a lease says that it continues."""


async def fetch_parents(lease: Lease, rules: Rules, fetch: Callable[[str], Awaitable[bytes]]) -> dict[str, bytes]:
    """The bytes of the groups that a lease continues, by their digests; `fetch` gives the body of a submission. No bytes
    for one of a size that none can continue. Raises `OtherParents` if a body does not hold what the lease names, or if that
    is more than a submission may hold: then the host that made the lease is at fault, not the worker that fills it. Raises
    as `fetch`."""
    found = dict[str, bytes]()
    for name in dict.fromkeys(parent.submission for parent in named_parents(lease)):
        if not is_digest(name):  # guard: parents-have-names
            raise OtherParents(
                f"lease {lease.id} continues a group of submission {name[:12]!r}, which is no name. Tell the host"
            )
        named = [parent for parent in named_parents(lease) if parent.submission == name]
        found |= _named_in(await fetch(name), named, lease, most_bytes(rules, lease.sampling, 0))
        if sum(map(len, found.values())) > MAX_SUBMISSION_BYTES:  # guard: parents-of-a-lease
            raise OtherParents(
                f"lease {lease.id} continues groups of more than {MAX_SUBMISSION_BYTES} bytes in all "
                "(MAX_SUBMISSION_BYTES): tell the host"
            )
    return found


def _named_in(body: bytes, named: list[Parent], lease: Lease, most: int) -> dict[str, bytes]:
    found = dict[str, bytes]()
    try:
        groups = from_msgpack(body, Submission).groups
        for parent in named:
            data = groups[parent.index] if 0 <= parent.index < len(groups) else b""
            if digest(data) != parent.digest:  # guard: named-parents
                raise WireError(f"its group {parent.index} is not {parent.digest[:12]}")
            found[parent.digest] = data if len(data) <= most else b""  # guard: parents-that-are-kept
    except WireError as error:
        raise OtherParents(
            f"lease {lease.id} continues a group of submission {named[0].submission[:12]} that is not there: {error}. "
            "Tell the host"
        ) from None
    return found


def read_parents(found: Mapping[str, bytes], rules: Rules, lease: Lease, vocabulary: int) -> dict[str, Group | None]:
    """The groups that a lease continues, by their digests; None for one that nobody can continue."""
    return {name: readable_parent(data, rules, lease.sampling, vocabulary) for name, data in found.items()}


def named_parents(lease: Lease) -> list[Parent]:
    """Those of all slots of a lease, in their order."""
    return [slot.parent for block in lease.blocks for slot in block.slots if slot.parent is not None]
