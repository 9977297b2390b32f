"""Engines: what samples and scores tokens, the requests they take, and the requests they refuse."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from shoal.errors import StateError
from shoal.protocol.messages import EngineFacts

# --- The interface to generation ---
#
# Extend conversations of token ids, and score them with one prefill.
#
# Light: code that only passes an engine on needs no torch.


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


class InPlace(Protocol):
    """An engine that can also go from one version to another without loading it anew."""

    def change(self, before: Path, after: Path, version: int, is_right: Callable[[Path], bool]) -> bool:
        """Turn the policy in `before`, which the engine has, into the one in `after`, if that is cheaper than loading it.

        `is_right` is asked at the end whether the files in both directories are what they should be: earlier answers would
        not hold for what was read afterwards. Until then the weights are torn: they belong to no version, and all uses
        raise `StateError` until a version is loaded. Returns whether the engine now has `version`; if not, nothing changed.
        Raises `StateError` if the files are not right, or not of the engine's policy. No block may be open.
        """


def is_in_place(engine: Engine) -> TypeGuard[InPlace]:
    """Whether an engine, or the one that a wrapper passes on to, is `InPlace`."""
    return hasattr(engine, "change")


# --- What every engine refuses before it computes ---
#
# Conversations that are too long, empty, or of other tokens.


class SizedModel(Protocol):
    """The part of a policy's spec that says how long conversations may be, and of which tokens."""

    @property
    def max_positions(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


def demand_room(spec: SizedModel, token_ids: Sequence[int], max_new: int) -> None:
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
