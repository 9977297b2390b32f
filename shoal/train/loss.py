"""From an algorithm's settings to its loss over per-token tensors, and to the weights of a batch's rows.

An objective sees the tokens of one micro-batch and the number of policy tokens in the whole batch.

Axes: N policy tokens of a micro-batch, P policy tokens of a row.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from torch import Tensor

from shoal.algos.advantages import batch_scale
from shoal.algos.corrections import TruncatedWeights, icepop_weights, row_mask, truncated_row_weights, truncated_weights
from shoal.algos.losses import (
    TokenLoss,
    cispo_loss,
    dppo_loss,
    gspo_loss,
    ppo_loss,
    ratio,
    reinforce_loss,
    sft_loss,
    token_weights,
)
from shoal.algos.regularisers import bonus_share, entropy_bonus, kl_terms, rest_of_penalty, squared_ratio
from shoal.protocol import algorithm_config as c
from shoal.protocol.algorithm_config import Algorithm, credits_tokens
from shoal.train.rows import TrainingRow, learned, one_of_each


@dataclass(frozen=True, eq=False)
class TokenTerms:
    """What is known about each policy token; the first two tensors carry gradients."""

    logp_N: Tensor
    """log_softmax(logits / temperature) in float32 at the token, nats."""
    entropy_N: Tensor
    """Entropy of the distribution that the token was drawn from, nats."""
    old_logp_N: Tensor
    """`logp_N` before the step's first update, without gradients."""
    behaviour_logp_N: Tensor
    advantage_N: Tensor
    weight_N: Tensor
    """What the token counts in the average over the batch."""
    row_N: Tensor
    """int64: the row of each token, counted from 0. All policy tokens of a row are here."""
    reference_logp_N: Tensor | None = None
    """None in runs without a reference."""
    bonus: float = 1.0
    """What the entropy bonus of this step is multiplied by, if it is controlled."""


Objective = Callable[[TokenTerms, float], tuple[Tensor, dict[str, Tensor]]]
"""(terms, policy tokens of the whole batch) -> (scalar loss, per-token figures by metric name, to be averaged)."""


def objective_of(algorithm: c.Composition) -> Objective:
    """The loss of an algorithm, with its arguments."""
    return partial(_composed, algorithm)


def sft_objective(terms: TokenTerms, num_tokens: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross entropy on the examples' tokens."""
    return sft_loss(terms.logp_N, terms.weight_N, num_tokens=num_tokens), {}


def _composed(algorithm: c.Composition, terms: TokenTerms, num_tokens: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a composition. Corrections multiply the policy's term alone, not the regularisers."""
    mu_logp_N, figures = terms.behaviour_logp_N, dict[str, Tensor]()
    weight_N = terms.weight_N
    for correction in algorithm.corrections:
        w_N, cut_N = _corrected(correction, terms)
        weight_N = weight_N * w_N
        name = "truncated_share" if isinstance(correction, c.Truncate) else "masked_share"
        figures[name] = figures[name] | cut_N if name in figures else cut_N
    base_N = terms.old_logp_N if algorithm.ratio_to == "old" else mu_logp_N
    A_N, kl = terms.advantage_N, algorithm.kl
    if kl.beta and kl.place == "advantage":
        A_N = A_N - kl.beta * rest_of_penalty(terms.old_logp_N, _reference(terms), terms.row_N)
    policy = policy_loss(algorithm.loss, terms.logp_N, base_N, A_N, terms.row_N)
    figures["clip_share"] = policy.clipped_N
    loss = (weight_N * policy.loss_N).sum() / num_tokens
    if kl.beta:
        far_N = kl_terms(terms.logp_N, _reference(terms), kl.estimator)
        figures["kl_nats"] = kl_terms(terms.logp_N, _reference(terms), "k3").detach()
        if kl.place == "weighted_loss":
            far_N = far_N * ratio(terms.logp_N, base_N)
        if kl.place != "advantage":
            loss = loss + kl.beta * (terms.weight_N * far_N).sum() / num_tokens
    if algorithm.squared_ratio:
        pulled_N = terms.weight_N * squared_ratio(terms.logp_N, mu_logp_N)
        loss = loss + algorithm.squared_ratio * pulled_N.sum() / num_tokens
    if algorithm.entropy_bonus:
        loss = loss + entropy_bonus(
            terms.entropy_N, terms.weight_N, beta=terms.bonus * algorithm.entropy_bonus, num_tokens=num_tokens
        )
    return loss, figures


def _reference(terms: TokenTerms) -> Tensor:
    assert terms.reference_logp_N is not None, "the rows lack log-probs under the reference"
    return terms.reference_logp_N


def policy_loss(loss: c.Loss, logp_N: Tensor, base_N: Tensor, A_N: Tensor, row_N: Tensor) -> TokenLoss:
    """The term of each token, where `base_N` has the log-probs of the ratio's denominator."""
    match loss:
        case c.Clip(eps_low, eps_high, delta):
            return ppo_loss(logp_N, base_N, A_N, eps_low=eps_low, eps_high=eps_high, delta=delta or math.inf)
        case c.Gspo(eps_low, eps_high, by_token):
            return gspo_loss(logp_N, base_N, A_N, row_N, eps_low=eps_low, eps_high=eps_high, by_token=by_token)
        case c.Cispo(least, most):
            return cispo_loss(logp_N, base_N, A_N, least=least, most=most)
        case c.Dppo(bound):
            return dppo_loss(logp_N, base_N, A_N, bound=bound)
        case c.Reinforce():
            return reinforce_loss(logp_N, A_N)


def _corrected(correction: c.Correction, terms: TokenTerms) -> TruncatedWeights:
    old_N, mu_N = terms.old_logp_N, terms.behaviour_logp_N
    match correction:
        case c.Truncate(most, "token"):
            return truncated_weights(old_N, mu_N, C=most)
        case c.Truncate(most, "row"):
            return truncated_row_weights(old_N, mu_N, terms.row_N, C=most)
        case c.IcePop(least, most):
            return icepop_weights(old_N, mu_N, least=least, most=most)
        case c.SequenceMask(least, most):
            return row_mask(old_N, mu_N, terms.row_N, least=least, most=most, geometric=False)
        case c.GeometricMask(least, most):
            return row_mask(old_N, mu_N, terms.row_N, least=least, most=most, geometric=True)
    raise AssertionError(f"no such correction: {correction}")


# --- What a step's rows count ---
#
# An average over rollouts or prompts needs the whole batch, and a micro-batch has only some rows. So it becomes a weight
# of each token, and a loss divides by nothing but the number of policy tokens.


def normalised(rows: Sequence[TrainingRow], algorithm: Algorithm) -> Sequence[TrainingRow]:
    """The rows of a batch with their advantages as the algorithm normalises them over the batch: the same rows if it does
    not. A rollout that is only counted has a part in the deviation, as in TRL, if it has an advantage."""
    if not algorithm.batch_std:
        return rows
    if credits_tokens(algorithm):  # whose advantages differ from token to token
        A_I = np.concatenate([row.advantage_P for row in learned(rows)]).astype(np.float64)
    else:
        A_I = np.array([row.advantage_P.mean() for row in one_of_each(rows) if len(row.advantage_P)], dtype=np.float64)
    scale = batch_scale(A_I)
    return [replace(row, advantage_P=(row.advantage_P * scale).astype(np.float32)) for row in rows]


def bonus_of(rows: Sequence[TrainingRow], algorithm: Algorithm) -> float:
    """How much of the entropy bonus a step from these rows has."""
    return bonus_share(np.concatenate([row.behaviour_logp_P for row in rows]), algorithm.entropy_target)


def averaged(rows: Sequence[TrainingRow], algorithm: Algorithm, max_tokens: int) -> Sequence[TrainingRow]:
    """The rows that an update learns from, with weights that make the sum over tokens, divided by their number, the
    algorithm's average.

    Rows that are only counted are in its divisor, and are left out. `max_tokens` is the most that a rollout may have. The
    mean over tokens leaves the rows as they are.
    """
    counts_all = not any(row.counts_only for row in rows)
    if algorithm.average == "tokens":
        return rows if counts_all else learned(rows)
    rollout_R: list[Hashable] = [i if row.id is None else row.id for i, row in enumerate(rows)]
    prompt_R: list[Hashable] = [i if row.group is None else row.group for i, row in enumerate(rows)]
    L = algorithm.divisor_tokens or float(max_tokens)
    w_R = token_weights(
        [len(row.positions_P) for row in rows], rollout_R, prompt_R, average=algorithm.average, L=L
    )  # fmt: skip
    return [
        replace(row, weight_P=(row.weight_P * w).astype(np.float32))
        for row, w in zip(rows, w_R.tolist(), strict=True)
        if not row.counts_only
    ]
