"""What a worker may claim about the rows of a rollout that has several: each is false."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from shoal.protocol.messages import Rollout

LIES: dict[str, Callable[[Rollout], dict[str, Any]]] = {
    "a branch where none opens": lambda r: {"starts": (*r.starts, len(r.author) - 3)},
    "no branch where one opens": lambda r: {"starts": r.starts[1:]},
    "no branches at all": lambda r: {"starts": ()},
    "a token moved to the row after": lambda r: {"starts": (r.starts[0] - 1, *r.starts[1:])},
    "a token moved to the row before": lambda r: {"starts": (r.starts[0] + 1, *r.starts[1:])},
    "beyond the end": lambda r: {"starts": (*r.starts, len(r.author) + 4)},
    "at the end": lambda r: {"starts": (*r.starts, len(r.author))},
    "at the beginning": lambda r: {"starts": (0, *r.starts)},
    "before the beginning": lambda r: {"starts": (-3, *r.starts)},
    "not increasing": lambda r: {"starts": (*r.starts, r.starts[0])},
    "the last row dropped": lambda r: _cut(r, r.starts[-1]) | {"starts": r.starts[:-1]},
    "the first row dropped": lambda r: _from(r, r.starts[0]) | {"starts": tuple(s - r.starts[0] for s in r.starts[1:])},
    "two rows swapped": lambda r: _swapped(r),
}  # fmt: skip


def _cut(rollout: Rollout, at: int) -> dict[str, Any]:
    written = int(np.count_nonzero(rollout.author_T()[:at]))
    return {
        "token_ids": rollout.token_ids[: 4 * at], "author": rollout.author[:at], "logprobs": rollout.logprobs[: 4 * written]
    }  # fmt: skip


def _from(rollout: Rollout, at: int) -> dict[str, Any]:
    written = int(np.count_nonzero(rollout.author_T()[:at]))
    return {
        "token_ids": rollout.token_ids[4 * at :], "author": rollout.author[at:], "logprobs": rollout.logprobs[4 * written :]
    }  # fmt: skip


def _swapped(rollout: Rollout) -> dict[str, Any]:
    first, second, *rest = rollout.rows()
    rows = [second, first, *rest]
    join = [np.concatenate([row[i] for row in rows]).tobytes() for i in range(3)]  # type: ignore[arg-type]
    return {
        "token_ids": join[0], "author": join[1], "logprobs": join[2],
        "starts": tuple(itertools.accumulate(len(row.author_T) for row in rows[:-1])),
    }  # fmt: skip
