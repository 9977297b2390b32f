"""What every engine refuses before it computes: conversations that are too long, empty, or of other tokens.

Called by the engines. Light.
"""

from collections.abc import Sequence
from typing import Protocol

from shoal.errors import StateError


class Sized(Protocol):
    """The part of a policy's spec that says how long conversations may be, and of which tokens."""

    @property
    def max_positions(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


def demand_room(spec: Sized, token_ids: Sequence[int], max_new: int) -> None:
    """Refuse a conversation that would pass the last position, and token ids that the policy does not have. Raises
    `StateError`."""
    length = len(token_ids)
    if length + max_new > spec.max_positions:
        raise StateError(
            f"a conversation of {length} tokens may grow by {max_new}, but the policy ends at {spec.max_positions}: "
            f"lower sampling.max_tokens, or use a policy with more positions"
        )
    if length == 0 or min(token_ids) < 0 or max(token_ids) >= spec.vocab_size:
        raise StateError(f"a conversation is empty or has token ids outside 0..{spec.vocab_size - 1}")
