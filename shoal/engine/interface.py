"""Engines: what samples and scores tokens, the requests they take and refuse, and what they need of a loaded policy.

Light: code that only passes an engine on needs no torch.

Axes: B rows, C new tokens of a row, N = B * C, P tokens of the policy, D width, V vocabulary; x any axes.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from shoal.errors import StateError
from shoal.models.config import ModelConfig
from shoal.protocol.messages import EngineFacts

if TYPE_CHECKING:
    from torch import Tensor


class EngineRequest(NamedTuple):
    """Continue from `token_ids`: all tokens of the conversation from the first, by environment and policy."""

    rollout: str
    """Name of the conversation, by which the engine finds what it remembers of it."""
    token_ids: Sequence[int]
    seed: bytes
    """Sample seed, 32 bytes. It decides the noise, together with a token's absolute index."""
    max_new: int
    stop_ids: frozenset[int]


class Continuation(NamedTuple):
    """What the policy wrote. If a stop token came, it is the last entry of both lists."""

    token_ids: list[int]
    logprobs: list[float]
    """Log-softmax(logits / temperature), nats."""


class ScoreRequest(NamedTuple):
    """A claimed conversation, and the positions that the policy is said to have written."""

    token_ids: Sequence[int]
    policy_positions: Sequence[int]
    """Absolute indices, each at least 1."""
    seed: bytes


class PolicyScore(NamedTuple):
    """What the model says about the policy's tokens (axis P, in the order of the request)."""

    logprobs_P: NDArray[np.float32]
    gaps_P: NDArray[np.float32]
    """The largest logits / temperature + noise, minus that of the written token, nats: 0 for an honest token."""
    hidden_PD: NDArray[np.float32] | None
    """Hidden states after the final norm that predicted each token, if requested."""
    largest_P: NDArray[np.float32] | None = None
    """Largest |logit / temperature| at each token, to which its rounding errors are in proportion; None if unknown."""


class Engine(Protocol):
    """A policy that can be sampled. Its memory between calls of one conversation is its own business."""

    @property
    def facts(self) -> EngineFacts:
        """Facts on which the verifying bounds depend."""

    @property
    def version(self) -> int:
        """Version of the loaded policy; -1 before the first."""

    def load(self, directory: Path, version: int) -> None:
        """Load the policy of a checkpoint directory and forget all conversations. Raises `StateError`."""

    def extend(self, requests: Sequence[EngineRequest], temperature: float) -> list[Continuation]:
        """One turn of each conversation, as one batch. The bits depend only on these requests and earlier turns."""

    def forget(self, rollouts: Iterable[str]) -> None:
        """Forget these conversations, which are over."""

    def score(self, requests: Sequence[ScoreRequest], temperature: float, hidden: bool = False) -> list[PolicyScore]:
        """Log-probs and replay gaps of the policy's tokens, with one prefill of each conversation."""


class KVCache(Protocol):
    """What a batch of conversations has been read so far: keys and values, or a state."""

    def rebuilt(self, rows: Sequence[int], room: int) -> Self:
        """One with the chosen rows, in that order, and room for at least `room` more tokens. This one is of no more use."""


class DecoderBackend(Protocol):
    """A policy ready to generate."""

    device: str

    @property
    def spec(self) -> ModelConfig: ...

    def rope(self, positions_x: "Tensor") -> Any:
        """What `extend` needs to know of these positions; it has their axes first."""

    def logits(self, hidden_ND: "Tensor") -> "Tensor":
        """Logits, fp32[N, V], in memory of their own."""

    def hidden_states(self, tokens_BC: "Tensor") -> "Tensor":
        """Hidden states, [B, C, D], of right-padded conversations, without a cache."""

    def extend(self, tokens_BC: "Tensor", rope: Any, cache: Any) -> "Tensor":
        """Hidden states, [N, D], of the next C tokens of every row, which are added to the cache."""


def demand_room(spec: ModelConfig, token_ids: Sequence[int], max_new: int) -> None:
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
