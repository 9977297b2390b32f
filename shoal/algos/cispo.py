"""CISPO: REINFORCE with a bounded importance weight, which never takes a token's gradient away (arXiv:2506.13585).

Called by `train/objective` for each micro-batch. Pure: it uses no model, optimiser or batch beyond its arguments.

    symbol   meaning                                                  argument
    r        importance ratio pi_theta(o) / pi_old(o) of one token    exp(logp_N - old_logp_N)
    A        advantage of the token                                   A_N
    a, b     smallest and largest weight                              least, most
    J_n      sg[ clip(r, a, b) ] A log pi_theta(o)                    eq. 4 and 5; sg: no gradient flows through it

PPO's clip gives a token outside the range no gradient at all, and these are often the rare words at which a chain of
thought turns. Here such a token has the gradient of a token at the bound. The paper tunes only b and leaves a out (0).
ScaleRL (arXiv:2510.13786, section 3.2) has min(r, b) and finds little difference between b = 4, 5 and 8.

Axes: N policy tokens of a micro-batch.
"""

from torch import Tensor

from shoal.algos.ratios import TokenLoss, ratio


def cispo_loss(logp_N: Tensor, old_logp_N: Tensor, A_N: Tensor, *, least: float, most: float) -> TokenLoss:
    """-J_n of each token. Its value depends on how likely the tokens are, so only its gradient means something."""
    r_N = ratio(logp_N, old_logp_N).detach()
    return TokenLoss(-r_N.clamp(least, most) * A_N * logp_N, ((r_N < least) | (r_N > most)) & (A_N != 0))
