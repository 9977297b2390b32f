"""One hash for an ordered list: the Merkle tree of RFC 6962, with our domain.

Called by `weights` for the root of a policy version. Leaves and inner nodes are hashed for different purposes, so an inner
node cannot be presented as a leaf (second preimage). A last node without a partner moves up as it is, so a list that
repeats its end has another root.
"""

from collections.abc import Sequence

from shoal.protocol.wire import domain_hash


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """Root of the tree over the leaves in their order, 32 bytes; an empty list has a root of its own."""
    if not leaves:
        return domain_hash("merkle/empty")
    level = [domain_hash("merkle/leaf", leaf) for leaf in leaves]
    while len(level) > 1:
        pairs = [domain_hash("merkle/node", level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]
