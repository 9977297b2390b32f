"""Spearman's rank correlation. Called by `findings` and `preferred`; numpy alone."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Values = Sequence[float] | NDArray[np.float64]


def spearman(one: Values, other: Values) -> float:
    """Rank correlation, equal values sharing the mean of their ranks; 0 if all values of a side are equal."""
    a, b = _ranks(one), _ranks(other)
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size else 0.0


def _ranks(values: Values) -> NDArray[np.float64]:
    _, where, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    found: NDArray[np.float64] = (ends - (counts - 1) / 2)[where]
    return found
