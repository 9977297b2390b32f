"""The reference of a KL penalty: the run's first policy, frozen, and what it says of a batch's tokens.

Called by `roles/trainer` and `recipes/one_file.py` once a step, in runs whose algorithm has such a penalty; other runs load
nothing. It belongs to the trainer alone and is never published. If the run learns an adapter, the reference is the base
without it, and nothing is loaded twice. The log-probs are part of the rows, so a repeated step has the same bits. It uses
neither the network nor what workers claim.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from shoal.policy.adapters import base_alone
from shoal.policy.base import PolicyModel
from shoal.policy.model import Transformer
from shoal.policy.parking import Parked
from shoal.train.predict import logprobs_of
from shoal.train.rows import Row, change_learned, learned


class Reference:
    """The frozen policy. Call it with rows; it leaves a shared device between shifts, unless it is the learner's base."""

    def __init__(
        self, frozen: PolicyModel, adapted: Transformer | None, temperature: float, microbatch_tokens: int
    ) -> None:
        """`adapted` is the policy whose base is the reference, if it has an adapter."""
        self._frozen, self._adapted = frozen, adapted
        self._temperature, self._microbatch_tokens = temperature, microbatch_tokens
        self._parked = Parked()

    def __call__(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with log-probs under the reference."""
        return change_learned(rows, self._referred(learned(rows)))

    def _referred(self, rows: list[Row]) -> list[Row]:
        with base_alone(self._adapted) if self._adapted is not None else contextlib.nullcontext():
            logp = logprobs_of(self._frozen, rows, self._temperature, self._microbatch_tokens)
        return [replace(row, reference_logp_P=logp_P) for row, logp_P in zip(rows, logp, strict=True)]

    def park(self) -> None:
        """See `Parkable` in `roles/shifts`."""
        if self._adapted is None:
            _, parameter = next(iter(self._frozen.named_parameters()))
            self._parked.park(self._frozen, device=parameter.device.type)

    def come_back(self) -> None:
        """The same."""
        self._parked.come_back()


def reference_of(
    learned: PolicyModel, load: Callable[[], PolicyModel], temperature: float, microbatch_tokens: int
) -> Reference:
    """The reference of a policy that is about to learn. `load` gives its first version, on the device that computes."""
    adapted = learned if isinstance(learned, Transformer) and learned.adapter is not None else None
    return Reference(adapted or load(), adapted, temperature, microbatch_tokens)
