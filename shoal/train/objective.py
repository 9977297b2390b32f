"""From an algorithm's settings to its loss over per-token tensors: the only place in `train/` that knows losses.

Called by `train/step`, `train/together` and `roles/trainer` (by the settings), and by `train/sft`. An objective sees the
tokens of one micro-batch and the number of policy tokens in the whole batch; it does not deal with the model, the
optimiser or rows.

Axes: N policy tokens of a micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from shoal.algos.entropy import entropy_bonus
from shoal.algos.grpo import grpo_loss
from shoal.algos.sft import sft_loss
from shoal.algos.truncated import truncated_weights
from shoal.config import TrainConfig
from shoal.protocol.algorithms import Grpo


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


Objective = Callable[[TokenTerms, float], tuple[Tensor, dict[str, Tensor]]]
"""(terms, policy tokens of the whole batch) -> (scalar loss, per-token figures by metric name, to be averaged)."""


QUANTISED_TRUNCATION = 2.0
"""C of runs that publish int8 and name none: what most libraries for such runs take."""


def objective_of(train: TrainConfig, published: str = "float32") -> Objective:
    """The loss of the run's algorithm, with its arguments, in a run that publishes in this dtype.

    Unless `train.truncation` is set, this dtype alone decides whether there are weights. Actors that round published
    floats (`sampling.dtype = "int8"`) sample a policy that the trainer does not have, too: their runs may set it. The
    default leaves them as they are, because the steps of existing runs must repeat with the same bits.
    """
    match train.algorithm:
        case Grpo():
            by_itself = QUANTISED_TRUNCATION if published == "int8" else 0.0
            return _grpo(train.algorithm, by_itself if train.truncation < 0 else train.truncation)


def sft_objective(terms: TokenTerms, num_tokens: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross entropy on the examples' tokens."""
    return sft_loss(terms.logp_N, terms.weight_N, num_tokens=num_tokens), {}


def _grpo(settings: Grpo, truncation: float) -> Objective:
    def objective(terms: TokenTerms, num_tokens: float) -> tuple[Tensor, dict[str, Tensor]]:
        figures = {}
        mu_logp_N, weight_N = terms.behaviour_logp_N, terms.weight_N
        if truncation:
            w_N, cut_N = truncated_weights(terms.old_logp_N, mu_logp_N, C=truncation)
            mu_logp_N, weight_N = terms.old_logp_N, weight_N * w_N
            figures["truncated_share"] = cut_N
        loss, figures["clip_share"] = grpo_loss(
            terms.logp_N,
            mu_logp_N,
            terms.advantage_N,
            weight_N,
            eps=settings.epsilon,
            delta=settings.delta,
            num_tokens=num_tokens,
        )
        if settings.entropy_bonus:
            loss = loss + entropy_bonus(
                terms.entropy_N, terms.weight_N, beta=settings.entropy_bonus, num_tokens=num_tokens
            )
        return loss, figures

    return objective
