"""Rows as bytes: what the trainer's journal keeps, and what the processes of a trainer send each other.

What a step needs of a row comes back with all bits.
"""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.train.rows import TrainingRow


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
