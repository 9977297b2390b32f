"""Rows: what the trainer learns from, made from the bytes of groups and the rewards that validators recomputed.

A worker's bytes are checked here again, with the function that validators use: nothing that a worker claims reaches the
model but token ids within the vocabulary and finite log-probabilities. Rewards come from the batch, never from the worker.
`ledger/group_advantages` decides what a rollout is worth.

Axes: T tokens of one row, P tokens of it that the policy wrote and learns from, G rollouts of a group.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.errors import PeerError
from shoal.protocol.algorithm_config import Algorithm
from shoal.protocol.encoding import WireError, digest, from_msgpack
from shoal.protocol.messages import ENVIRONMENT, POLICY, BatchGroup, Group
from shoal.protocol.rollout_validation import flaw_of
from shoal.train.token_advantages import credit, token_rewards


class Unlearnable(PeerError):
    """The bytes are those that the batch names, but nothing can be learned from them. Every reader finds the same."""


@dataclass(frozen=True, eq=False)
class TrainingRow:
    """One row of a rollout as the learner sees it: usually the whole rollout. It does not show which algorithm made its
    advantages and weights.

    A row without positions is counted only: its rollout has a place in the divisor of the average, and adds nothing to the
    sum. `counted_only` makes such rows, and `algos/losses` divides.
    """

    tokens_T: NDArray[np.int64]
    positions_P: NDArray[np.int64]
    """Indices into `tokens_T` of the policy's tokens: rising, and none is 0 (nothing predicts the first token)."""
    behaviour_logp_P: NDArray[np.float32]
    """Log-probabilities under the policy that sampled the tokens, nats."""
    advantage_P: NDArray[np.float32]
    weight_P: NDArray[np.float32]
    """Multiplies each token's term of the loss."""
    reward: float
    version: int
    """Version of the policy that sampled it."""
    env: str = ""
    """Label of its environment, for reports."""
    id: tuple[int, int, int] | None = None
    """Version, slot and place in the group of its rollout. None: it is from no group."""
    reference_logp_P: NDArray[np.float32] | None = None
    """Log-probabilities under the run's first policy, nats; None in runs that do not need them."""
    value_P: NDArray[np.float32] | None = None
    """What the critic expected before each token, before its first update; None outside a step with a critic."""
    target_P: NDArray[np.float32] | None = None
    """What it should have expected."""
    reward_P: NDArray[np.float32] | None = None
    """What is earned at each token, for a critic; None if the rollout's last token earns its reward."""
    overlong: bool = False
    """Whether a token limit ended its rollout."""
    faulted: bool = False
    """Whether the environment failed on its rollout, which has no reward."""

    @property
    def counts_only(self) -> bool:
        """Whether nothing is learned from it."""
        return not len(self.positions_P)

    @property
    def group(self) -> tuple[int, int] | None:
        """Version and slot of the group that it is from: its rows begin with the same prompt."""
        return self.id and self.id[:2]


def rows_of_group(
    member: BatchGroup,
    data: bytes,
    *,
    algorithm: Algorithm,
    vocabulary: int,
    max_tokens: int,
    max_rollout_tokens: int = 0,
) -> list[TrainingRow]:
    """The rows of a batch member, from its bytes, in order of sample index. A row without a token to learn from is counted
    only, and so are those of a rollout on which the environment failed.

    All rows of a rollout have its reward, and its advantage unless its tokens have different ones.

    Raises `PeerError` if the bytes are not the group that the batch names. Raises `Unlearnable`, naming slot, rollout and
    fault, if they hold anything that must not reach the model.
    """
    place = f"group of slot {member.slot}, version {member.version}"
    if digest(data) != member.digest:
        raise PeerError(_refusal(place, f"its bytes hash to {digest(data)[:12]}, the batch says {member.digest[:12]}"))
    try:
        group = from_msgpack(data, Group)
    except WireError as error:
        raise Unlearnable(_refusal(place, str(error))) from None
    if group.slot != member.slot:
        raise Unlearnable(_refusal(place, f"it says that it is slot {group.slot}"))
    if not group.rollouts or len(group.rollouts) != len(member.rewards):
        raise Unlearnable(_refusal(place, f"{len(group.rollouts)} rollouts for {len(member.rewards)} rewards"))
    if not np.isfinite(member.rewards).all():
        raise Unlearnable(_refusal(place, f"rewards are not finite: {member.rewards}"))
    for i, rollout in enumerate(group.rollouts):
        if rollout.version != member.version:
            fault = f"it says that version {rollout.version} sampled it, which would evade the staleness bound"
            raise Unlearnable(_refusal(place, f"rollout {i}: {fault}"))
    flaw = flaw_of(group.rollouts, vocabulary=vocabulary, max_tokens=max_tokens, max_rollout_tokens=max_rollout_tokens)
    if flaw is not None:
        raise Unlearnable(_refusal(place, str(flaw)))
    try:
        credit_G = credit(
            group, member.rewards, member.continuations, algorithm, member.steps, member.faults,
            member.faulted_continuations,
        )  # fmt: skip
        earned_G = token_rewards(group, member.rewards, algorithm, member.steps)
    except ValueError as error:
        raise Unlearnable(_refusal(place, str(error))) from None
    rows = []
    for i, (rollout, reward, A_P) in enumerate(zip(group.rollouts, member.rewards, credit_G, strict=True)):
        first = 0
        for part in rollout.rows():
            author_T = part.author_T
            written_P = np.flatnonzero(author_T != ENVIRONMENT)
            learned_P = author_T[written_P] == POLICY  # guard: masked-turns-teach-nothing
            positions_P = written_P[learned_P]
            begin, first = first, first + len(positions_P)
            row = TrainingRow(
                tokens_T=part.tokens_T.astype(np.int64),
                positions_P=positions_P,
                behaviour_logp_P=part.logprobs_P[learned_P].astype(np.float32),
                advantage_P=A_P[begin:first],
                weight_P=np.ones(len(positions_P), dtype=np.float32),
                reward=reward,
                version=rollout.version,
                env=group.env,
                id=(member.version, member.slot, i),
                reward_P=earned_G[i][begin:first] if earned_G else None,
                overlong=rollout.ending == "length",
            )
            # guard: faults-teach-nothing
            rows.append(counted_only(row, faulted=True) if i in member.faults else row)
    return rows


def counted_only(row: TrainingRow, *, faulted: bool = False) -> TrainingRow:
    """A row from which nothing is learned, though its rollout counts in the divisor of the average.

    Its advantage stays in the deviation of the batch, if the run has one, unless it is `faulted`: a truncated rollout has
    an advantage, one without a reward has none.
    """
    none_P = np.zeros(0, dtype=np.float32)
    return replace(
        row,
        positions_P=np.zeros(0, dtype=np.int64),
        behaviour_logp_P=none_P,
        advantage_P=none_P if faulted else row.advantage_P,
        weight_P=none_P,
        reward_P=None,
        faulted=faulted,
    )


def learned(rows: Sequence[TrainingRow]) -> list[TrainingRow]:
    """The rows that something is learned from, without those that are only counted."""
    return [row for row in rows if not row.counts_only]


def change_learned(rows: Sequence[TrainingRow], changed: Sequence[TrainingRow]) -> list[TrainingRow]:
    """The rows in their order, with `changed` in the place of those that something is learned from."""
    left = iter(changed)
    return [row if row.counts_only else next(left) for row in rows]


def one_of_each(rows: Sequence[TrainingRow]) -> list[TrainingRow]:
    """One row of each rollout, so that a rollout of several rows counts once; all rows that are from no group."""
    seen: set[tuple[int, int, int]] = set()
    firsts = []
    for row in rows:
        if row.id is None or row.id not in seen:
            firsts.append(row)
        if row.id is not None:
            seen.add(row.id)
    return firsts


def overlong_share(rows_G: Sequence[Sequence[TrainingRow]]) -> float | None:
    """Share of these groups' rollouts that a token limit ended; None if there are none."""
    rollouts = one_of_each([row for rows in rows_G for row in rows])
    return sum(row.overlong for row in rollouts) / len(rollouts) if rollouts else None


def rewarded(rows: Sequence[TrainingRow]) -> list[TrainingRow]:
    """One row of each rollout that has a reward: also of one from which nothing is learned, but not of one whose
    environment failed."""
    return [row for row in one_of_each(rows) if not row.faulted]


def mean_rewards(rows: Sequence[TrainingRow], labels: Sequence[str]) -> dict[str, float | None]:
    """Mean reward of each environment's rollouts; None for an environment without rows."""
    rollouts = rewarded(rows)
    rewards = {label: [row.reward for row in rollouts if row.env == label] for label in labels}
    return {label: float(np.mean(found)) if found else None for label, found in rewards.items()}


def example_row(tokens_T: Sequence[int], author_T: Sequence[int]) -> TrainingRow:
    """A row for supervised fine-tuning: the model imitates every policy token, so only ids and authors count."""
    positions_P = np.flatnonzero(np.asarray(author_T) == POLICY)
    ones_P = np.ones(len(positions_P), dtype=np.float32)
    assert len(tokens_T) == len(author_T), f"{len(tokens_T)} tokens, {len(author_T)} authors"
    assert len(positions_P) and positions_P[0] > 0, "an example needs a prompt and a policy token after it"
    return TrainingRow(
        tokens_T=np.asarray(tokens_T, dtype=np.int64),
        positions_P=positions_P,
        behaviour_logp_P=np.zeros_like(ones_P),
        advantage_P=ones_P,
        weight_P=ones_P,
        reward=0.0,
        version=0,
    )


def _refusal(place: str, fault: str) -> str:
    return f"will not train on {place}: {fault}. A validator should have refused it: see `shoal ledger show`"


# --- Rows as bytes: what the journal keeps, and what the processes of a trainer send each other. All bits come back ---


class RowBytes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A `Row`, whose arrays are little-endian bytes: int32 or float32."""

    tokens_T: bytes
    positions_P: bytes
    behaviour_logp_P: bytes
    advantage_P: bytes
    weight_P: bytes
    reward: float
    version: int
    env: str
    id: tuple[int, int, int] | None
    reference_logp_P: bytes = b""
    """Empty if the row has none."""
    reward_P: bytes = b""
    """Likewise."""
    faulted: bool = False


def bytes_of(row: TrainingRow) -> RowBytes:
    """A row, to be written or sent."""

    def whole(values: NDArray[np.int64]) -> bytes:
        return values.astype("<i4").tobytes()

    def real(values: NDArray[np.float32]) -> bytes:
        return values.astype("<f4").tobytes()

    optional = (row.reference_logp_P, row.reward_P)
    reference, earned = (b"" if values is None else real(values) for values in optional)
    return RowBytes(
        whole(row.tokens_T), whole(row.positions_P), real(row.behaviour_logp_P), real(row.advantage_P),
        real(row.weight_P), row.reward, row.version, row.env, row.id, reference, earned, row.faulted,
    )  # fmt: skip


def row_of(kept: RowBytes) -> TrainingRow:
    """The row that `bytes_of` was given."""

    def whole(data: bytes) -> NDArray[np.int64]:
        return np.frombuffer(data, "<i4").astype(np.int64)

    def real(data: bytes) -> NDArray[Any]:
        return np.frombuffer(data, "<f4").astype(np.float32)

    return TrainingRow(
        whole(kept.tokens_T), whole(kept.positions_P), real(kept.behaviour_logp_P), real(kept.advantage_P),
        real(kept.weight_P), kept.reward, kept.version, kept.env, kept.id,
        real(kept.reference_logp_P) if kept.reference_logp_P else None,
        reward_P=real(kept.reward_P) if kept.reward_P else None, faulted=kept.faulted,
    )  # fmt: skip
