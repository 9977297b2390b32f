"""From an algorithm's settings to its loss over per-token tensors: the only place in `train/` that knows losses.

An objective sees the tokens of one micro-batch and the number of policy tokens in the whole batch; it does not deal with
the model, the optimiser or rows.

Axes: N policy tokens of a micro-batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from shoal.algos.corrections import TruncatedWeights, icepop_weights, row_mask, truncated_row_weights, truncated_weights
from shoal.algos.losses import TokenLoss, cispo_loss, dppo_loss, gspo_loss, ppo_loss, ratio, reinforce_loss, sft_loss
from shoal.algos.regularisers import entropy_bonus, kl_terms, rest_of_penalty, squared_ratio
from shoal.protocol import algorithm_config as c


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
