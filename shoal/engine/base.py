"""The one seam to generation: extend conversations of token ids, and score them by one prefill.

Called by `envs/play`, the validator's checks and evaluation. Light: whoever only passes an engine on needs no torch.
It knows no environment and no text.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.protocol.types import EngineFacts


class Request(NamedTuple):
    """Write on from `token_ids`, all of them: environment and policy, from the conversation's first."""

    rollout: str
    """Names the conversation, so that what the engine remembers of it can be used again."""
    token_ids: Sequence[int]
    seed: bytes
    """Sample seed, 32 bytes: with a token's absolute index it decides the noise."""
    max_new: int
    stop_ids: frozenset[int]


class Continuation(NamedTuple):
    """What the policy wrote; a stop token, if it came, is the last of both."""

    token_ids: list[int]
    logprobs: list[float]
    """Log-softmax(logits / temperature), nats."""


class ScoreRequest(NamedTuple):
    """A conversation as claimed, and which of its tokens the policy is said to have written."""

    token_ids: Sequence[int]
    policy_positions: Sequence[int]
    """Absolute indices, each at least 1."""
    seed: bytes


class Score(NamedTuple):
    """What the model says of the policy's tokens (axis P, in the order of the request)."""

    logprobs_P: NDArray[np.float32]
    gaps_P: NDArray[np.float32]
    """Best of logits / temperature + noise, less that of the token written: 0 for an honest token, nats."""
    hidden_PD: NDArray[np.float32] | None
    """Hidden states after the final norm that predicted each token, where asked for."""


class Engine(Protocol):
    """A policy that can be sampled. What it remembers between calls of one conversation is its own matter."""

    @property
    def facts(self) -> EngineFacts:
        """What verifying bounds depend on."""

    @property
    def version(self) -> int:
        """Of the policy that is loaded; -1 before the first."""

    def load(self, directory: Path, version: int) -> None:
        """Take the policy of a checkpoint directory; forgets all conversations. Raises `StateError`."""

    def extend(self, requests: Sequence[Request], temperature: float) -> list[Continuation]:
        """One turn of each conversation, as one batch: the bits depend on these requests and their earlier turns only."""

    def forget(self, rollouts: Iterable[str]) -> None:
        """These conversations are over."""

    def score(self, requests: Sequence[ScoreRequest], temperature: float, hidden: bool = False) -> list[Score]:
        """Log-probs and replay gaps of the policy's tokens, by one prefill of each conversation."""
