"""What sampling and scoring need of a loaded policy, whatever computes it.

Axes: B rows, C new tokens of a row, N = B * C, D width, V vocabulary; x any axes.
"""

from collections.abc import Sequence
from typing import Any, Protocol, Self

from torch import Tensor

from shoal.models.interface import Spec


class KVCache(Protocol):
    """What a batch of conversations has been read so far: keys and values, or a state."""

    def rebuilt(self, rows: Sequence[int], room: int) -> Self:
        """One with the chosen rows, in that order, and room for at least `room` more tokens. This one is of no more use."""


class DecoderBackend(Protocol):
    """A policy ready to generate."""

    device: str

    @property
    def spec(self) -> Spec: ...

    def rope(self, positions_x: Tensor) -> Any:
        """What `extend` needs to know of these positions; it has their axes first."""

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits, fp32[N, V], in memory of their own."""

    def hidden_states(self, tokens_BC: Tensor) -> Tensor:
        """Hidden states, [B, C, D], of right-padded conversations, without a cache."""

    def extend(self, tokens_BC: Tensor, rope: Any, cache: Any) -> Tensor:
        """Hidden states, [N, D], of the next C tokens of every row, which are added to the cache."""
