"""How a run shapes the rewards of an environment: what `[envs.shaping]` of a run file says, and its first event.

No formula is here: those are in `algos`. Each term is a named part of the score; left out, it does not exist.
"""

import msgspec


class LengthTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """-weight for each token by which a rollout misses the length that its prompt asks for (INTELLECT-2)."""

    targets: tuple[int, ...]
    """Lengths, tokens. A task's index decides which of them its prompt asks for."""
    weight: float = 0.0003
    """Reward lost for each token of difference."""
    most: int = 0
    """Largest difference that counts, tokens; 0 is the largest target. It bounds the lowest reward."""
    say: str = " Think for {target} tokens before giving a response."
    """What the opening ends with; {target} stands for the number."""


class OverlongPenalty(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """-weight for a rollout that reaches a length, and less for one that comes near it (DAPO)."""

    limit: int
    """Length at which the penalty is whole, tokens."""
    buffer: int
    """How many tokens below the limit it begins."""
    weight: float = 1.0
    """The whole penalty."""


class RepetitionPenalty(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """-weight times the share of a rollout's sequences of tokens that occurred before in it."""

    size: int = 4
    """Tokens of a sequence."""
    weight: float = 1.0
    """Penalty of a rollout that only repeats itself."""


class Shaping(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Terms that the run adds to the environment's score. They count the tokens that the policy wrote, stop tokens
    included."""

    length: LengthTarget | None = None
    overlong: OverlongPenalty | None = None
    repetition: RepetitionPenalty | None = None
