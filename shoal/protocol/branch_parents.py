"""Which accepted groups may be continued, and how large they are: what all who read a parent's bytes must agree on.

Pure.
"""

from shoal.protocol.branching import num_rollouts
from shoal.protocol.encoding import WireError, from_msgpack
from shoal.protocol.message_sizes import group_bytes
from shoal.protocol.messages import Group, Rules, Sampling
from shoal.protocol.rollout_validation import flaw_of


def most_bytes(rules: Rules, sampling: Sampling, slot: int) -> int:
    """Most bytes that an honest group of a slot can have."""
    return group_bytes(num_rollouts(rules, slot)[1], sampling.all_tokens)


def readable_parent(data: bytes, rules: Rules, sampling: Sampling, vocabulary: int) -> Group | None:
    """The accepted group that these bytes are; None if no model may read it: then nothing is due in the slot that would
    continue it. A validator that lies may accept anything, and all who read it find the same, so nobody stops at it."""
    if len(data) > most_bytes(rules, sampling, 0):  # guard: parents-of-usual-size
        return None
    try:
        group = from_msgpack(data, Group)
    except WireError:
        return None  # guard: any-bytes-may-be-a-parent
    flaw = flaw_of(
        group.rollouts, vocabulary=vocabulary, max_tokens=sampling.max_tokens,
        max_rollout_tokens=sampling.max_rollout_tokens,
    )  # fmt: skip
    # guard: parents-are-sound
    return group if flaw is None and len(group.rollouts) <= rules.group_size else None
