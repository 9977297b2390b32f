"""The trainer's own denominators of the importance ratio, for runs in which it must not take those that workers claim.

Where honest machines differ as much as in bfloat16, the checks cannot stop a worker from claiming log-probs that mute or
amplify its tokens. So the trainer computes each row's log-probs itself, with the published bytes of the version that
sampled the row. It does so in its own precision, so that rounding does the same to both sides of the ratio. These log-probs
depend on the version and the tokens alone, so no worker can change them, and a step that is repeated has the same bits. It
costs one forward pass. It uses no network: it is told where each version is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.models.checkpoint import load_int8
from shoal.models.lora import adapted_by
from shoal.models.open_model import AUTO, open_policy
from shoal.models.transformer import Transformer
from shoal.train.logprobs import logprobs_of
from shoal.train.rows import TrainingRow, learned

LogprobsAt = Callable[[Path, Sequence[TrainingRow]], list[NDArray[np.float32]]]
"""Log-probs, float32[P], of each row's policy tokens under the policy in a directory, nats."""


def with_own_denominators(
    rows: Sequence[TrainingRow],
    published: Mapping[int, Path],
    *,
    dtype: str,
    temperature: float,
    microbatch_tokens: int,
    device: str = "cpu",
    trained_in: torch.dtype = torch.float32,
    logprobs_at: LogprobsAt | None = None,
) -> list[TrainingRow]:
    """The rows with log-probs that this machine computed instead of those that their workers claimed.

    `published` has the directory of each version that sampled a row; `dtype` is the one in which workers sample. int8
    is another policy, which this computes in float32; bfloat16 is only a coarser arithmetic of the same one. `trained_in`
    is the trainer's precision. A trainer of several processes gives `logprobs_at`, which they compute together; one that
    learns an adapter gives `over_the_base`.
    """
    if logprobs_at is None or dtype == "int8":
        logprobs_at = partial(
            _logprobs_alone, dtype=dtype, temperature=temperature, microbatch_tokens=microbatch_tokens, device=device,
            trained_in=trained_in,
        )  # fmt: skip
    own: dict[int, TrainingRow] = {}
    for version in sorted({row.version for row in learned(rows)}):
        places = [i for i, row in enumerate(rows) if row.version == version and not row.counts_only]
        logp = logprobs_at(published[version], [rows[place] for place in places])
        own |= {
            place: replace(rows[place], behaviour_logp_P=logp_P) for place, logp_P in zip(places, logp, strict=True)
        }
    return [own.get(place, row) for place, row in enumerate(rows)]


def over_the_base(model: Transformer, temperature: float, microbatch_tokens: int) -> LogprobsAt:
    """As `with_own_denominators` takes it, for versions that are adapters over the base of the model that learns.

    The model has each version's adapter for a moment, so the base is in memory once. The bits are those of the version as
    it would be loaded anew.
    """

    def logprobs_at(directory: Path, rows: Sequence[TrainingRow]) -> list[NDArray[np.float32]]:
        with adapted_by(model, directory):
            return logprobs_of(model, rows, temperature, microbatch_tokens)

    return logprobs_at


def _logprobs_alone(
    directory: Path, rows: Sequence[TrainingRow], *, dtype: str, temperature: float, microbatch_tokens: int, device: str,
    trained_in: torch.dtype,
) -> list[NDArray[np.float32]]:  # fmt: skip
    model = load_int8(directory) if dtype == "int8" else open_policy(directory, trained_in, AUTO)
    return logprobs_of(model.to(device), rows, temperature, microbatch_tokens)
