"""The teacher of on-policy distillation: a frozen policy that judges each token that the student wrote.

Called by `roles/trainer` and `recipes/one_file.py` once a step, in runs with `advantage = "teacher"`; other runs load
nothing. The formula is that of `algos/distillation`. Both sides are computed here, the student's with the weights that the
step begins with: no claim of a worker counts, also where rollouts are old. The advantages are part of the rows, so a
repeated step has the same bits. It belongs to the trainer alone and is never published.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from shoal.algos.distillation import distillation_advantages
from shoal.policy.base import PolicyModel
from shoal.policy.parking import Resting
from shoal.train.predict import logprobs_of
from shoal.train.rows import Row, change_learned, learned


class Teacher(Resting):
    """The frozen policy. Call it with rows, and with what computes their log-probs under the student."""

    def __init__(self, frozen: PolicyModel, temperature: float, microbatch_tokens: int) -> None:
        super().__init__(frozen)
        self._frozen, self._temperature, self._microbatch_tokens = frozen, temperature, microbatch_tokens

    def __call__(
        self, rows: Sequence[Row], student: Callable[[Sequence[Row]], Sequence[np.ndarray]]
    ) -> tuple[list[Row], dict[str, float]]:
        """The rows with the teacher's advantages, and how far the student is from it. There must be rows."""
        judged = learned(rows)
        own = student(judged)
        wanted = logprobs_of(self._frozen, judged, self._temperature, self._microbatch_tokens)
        taught = [
            replace(
                row,
                advantage_P=distillation_advantages(torch.from_numpy(own_P), torch.from_numpy(wanted_P)).numpy(),
            )
            for row, own_P, wanted_P in zip(judged, own, wanted, strict=True)
        ]
        return change_learned(rows, taught), {
            "teacher_kl_nats": -float(np.concatenate([row.advantage_P for row in taught]).mean())
        }
