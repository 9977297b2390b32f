"""Judgement: what a validator is asked, and what it answers."""

from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from shoal.protocol.constants import MAX_ROLLOUT_STEPS
from shoal.protocol.field_types import Message
from shoal.protocol.messages.rollouts import Lease


class StepReward(NamedTuple):
    """What a part of a rollout earns by itself: a turn, or a step within a turn."""

    end: int
    """Index in the rollout of the part's last token."""
    reward: float


# guard: few-steps
StepRewards = Annotated[tuple[StepReward, ...], msgspec.Meta(max_length=MAX_ROLLOUT_STEPS)]
"""Of one rollout, in the order in which it was played. Their sum is its reward, as `protocol/reward_rules` adds."""


class Faults(Message, frozen=True, omit_defaults=True):
    """The rollouts of a group on which the environment failed in a way that every replay of their tokens repeats."""

    rollouts: tuple[int, ...] = ()
    """Indices of those that count in nothing that is learned, rising. Their rewards are the environment's lowest."""
    outside: tuple[int, ...] = ()
    """Indices of those with a score outside the environment's bounds, rising, whether they count or not."""
    score: float = 0.0
    """The first of these scores."""
    said: str = ""
    """The first error, as this validator words it."""


class Check(Message, frozen=True):
    """`GET /v1/checks`: one submission for a validator to judge."""

    id: str
    """The submission's digest: fetch it from `/v1/blobs/{id}`."""
    lease: Lease
    audited: tuple[int, ...]
    """Slots that were drawn for the checks that need the model."""
    deadline: float
    draws: tuple[float, ...] = ()
    """One number in [0, 1) for each slot. With rewards and lengths, they decide which other groups are audited."""
    rate: float = 1.0
    mean_influence: float = 0.0
    """Mean influence of the run's groups when the draws were made; see `protocol.audit_and_pay.must_audit`."""
    mean_pay: float = 0.0
    """Mean pay of the worker's newest groups when the draws were made, tokens; see
    `protocol.audit_and_pay.must_audit`."""
    project_for: tuple[str, ...] = ()
    """Keys to project the activations for: the validator's own, and those of the validators that judged before it."""
    record: str | UnsetType = UNSET
    """Blob of the host's `Record` of the lease; only where the host plays the environments."""


class GroupVerdict(Message, frozen=True):
    """What a validator found in one group. `check` is empty if it accepts the group."""

    slot: int
    audited: bool
    outcome: Literal["accept", "void", "soft", "hard"]
    """Void: the environment fails on this task, which anyone can repeat. This brings no pay, no blame and no rollouts."""
    check: str = ""
    detail: str = ""
    rollout: int = -1
    position: int = -1
    figure: float = 0.0
    bound: float = 0.0
    rewards: tuple[float, ...] = ()
    """One for each rollout, as the validator recomputed it; empty unless accepted."""
    tokens: int = 0
    """Policy tokens of the group, from which its pay follows; 0 unless accepted."""
    flipped: int = 0
    """Tokens whose gap exceeds the bound; 0 unless audited."""
    gap_sum: float = 0.0
    """Sum of the tokens' gaps, each counted at most the bound, nats; 0 unless audited."""
    off_sum: float = 0.0
    """Sum of claimed - replayed log-probs, each cut to the bound, nats; 0 unless audited."""
    off_weighted: float = 0.0
    """The same with the sign of each rollout's advantage, so that false claims against the advantages do not cancel. Where
    tokens of a rollout have different ones by its steps, with the sign of each token's."""
    steps: tuple[StepRewards, ...] | UnsetType = UNSET
    """What the turns or steps of each rollout earn, as the validator recomputed it; only in runs whose credit asks for it,
    of accepted groups."""
    faults: Faults | UnsetType = UNSET
    """Where the environment failed; only of accepted groups, and only if it did."""


class Verdict(Message, frozen=True):
    """`PUT /v1/checks/{id}/verdict`."""

    submission: str
    groups: tuple[GroupVerdict, ...]
    projections: dict[str, tuple[float, ...]] = {}
    """Projections of the audited groups' activations, by validator key, as the check asks; see
    `algos/activation_projection`."""
