"""How the terms of tokens become one number: the four averages of the field, each as a weight of the row's tokens.

numpy alone. A loss is sum_n w_n loss_n / N with N policy tokens, whatever the average, so it may be added up in any
micro-batches.

    average    mean of                                                weight of a token of rollout i, task q
    tokens     all tokens of the batch: DAPO, arXiv:2503.14476        1
    rollouts   rollouts' means: GRPO, arXiv:2402.03300, eq. 3         N / (I |o_i|)
    prompts    tasks' means over the tokens of all their rollouts:    N / (Q sum of |o_j| over rollouts j of q)
               ScaleRL, arXiv:2510.13786
    constant   rollouts' sums divided by L: Dr.GRPO,                  N / (I L)
               arXiv:2503.20783; L = 1 in its formula

The mean over rollouts pushes a token of a long wrong answer less than one of a short wrong answer, so wrong answers grow
longer; a constant does not (Dr.GRPO). The mean over tokens gives a task with long answers more weight; that over prompts
does not.

I and Q count every rollout and task of the batch: also those without a token in the loss, because they were truncated and
are masked, ended by a fault, or wrote nothing. Such a rollout is a row of 0 tokens: it is in the divisor, and adds nothing
to the sum. |o_i| and N count tokens of the loss alone, so the mean over tokens does not see it. TRL has these denominators
if it masks truncated completions: its losses grpo (rollouts) and dr_grpo (constant) divide by all rollouts, and bnpo, dapo
and cispo (tokens) by the tokens that are not masked. It has no mean over prompts.

Axes: R rows of a batch. I rollouts, Q tasks; a rollout may have several rows.
"""

from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Average = Literal["tokens", "rollouts", "prompts", "constant"]


def token_weights(
    tokens_R: Sequence[int], rollout_R: Sequence[Hashable], prompt_R: Sequence[Hashable], *, average: Average, L: float
) -> NDArray[np.float64]:
    """w of each token of a row, float64[R]. `tokens_R` counts the tokens of a row in the loss, 0 if it is in the divisor
    alone; the next two name its rollout and its task. `L` counts only for the constant average."""
    num_tokens = sum(tokens_R)
    match average:
        case "tokens":
            return np.ones(len(tokens_R))
        case "constant":
            return np.full(len(tokens_R), num_tokens / (len(set(rollout_R)) * L))
        case "rollouts":
            owner_R = rollout_R
        case "prompts":
            owner_R = prompt_R
    held: dict[Hashable, int] = {}
    for owner, tokens in zip(owner_R, tokens_R, strict=True):
        held[owner] = held.get(owner, 0) + tokens
    return np.array([num_tokens / (len(held) * max(held[owner], 1)) for owner in owner_R])
