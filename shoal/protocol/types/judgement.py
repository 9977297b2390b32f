"""Judgement: what a validator is asked, and what it answers.

How a verdict is found is in `proofs`, what it settles in `ledger/rules`.
"""

from typing import Literal

from shoal.protocol.types.message import Message
from shoal.protocol.types.work import Lease


class Check(Message, frozen=True):
    """`GET /v1/checks`: one submission for a validator to judge."""

    id: str
    """The submission's digest: fetch it from `/v1/blobs/{id}`."""
    lease: Lease
    audited: tuple[int, ...]
    """Slots drawn for the checks that need the model."""
    deadline: float
    draws: tuple[float, ...] = ()
    """One for each slot, in [0, 1): with the rewards they decide which further groups are audited."""
    rate: float = 1.0
    mean_influence: float = 0.0
    """Of the run's groups when these draws were made; see `protocol.audits.must_audit`."""
    project_for: tuple[str, ...] = ()
    """Keys to project the activations for: the validator's own, and of those who judged before it."""


class GroupVerdict(Message, frozen=True):
    """What a validator found of one group. Accepts have an empty `check`."""

    slot: int
    audited: bool
    outcome: Literal["accept", "void", "soft", "hard"]
    """Void: the environment itself fails on this task, as anyone can see: no pay, no blame, no rollouts."""
    check: str = ""
    detail: str = ""
    rollout: int = -1
    position: int = -1
    figure: float = 0.0
    bound: float = 0.0
    rewards: tuple[float, ...] = ()
    """As recomputed; empty unless accepted."""
    tokens: int = 0
    """Policy tokens of the group: the credit."""
    flipped: int = 0
    """Tokens whose gap exceeds the bound; 0 unless audited."""
    gap_sum: float = 0.0
    """Sum of the tokens' gaps, each counted at most the bound, nats; 0 unless audited."""


class Verdict(Message, frozen=True):
    """`PUT /v1/checks/{id}/verdict`."""

    submission: str
    groups: tuple[GroupVerdict, ...]
    projections: dict[str, tuple[float, ...]] = {}
    """Of the audited groups' activations, by validator key as the check asks; see `algos/projection`."""
