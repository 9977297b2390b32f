"""Generalised advantage estimation (arXiv:1506.02438) over the tokens of one rollout, from a critic's values.

numpy alone. It does not train the critic: `value_loss` does. It knows no group.

    symbol     meaning                                                                         argument
    V(s_t)     value of the state before token t is written                                    values_T
    r_t        reward that token t earns; in most runs only the last one earns any             rewards_T
    gamma      discount of a token; 1 in language models, whose episodes end                   gamma
    lambda     0: trust the critic after one token; 1: wait for the rewards, as REINFORCE      lam
    delta_t    r_t + gamma V(s_t+1) - V(s_t);  V after the last token is 0                     equation 12
    A_t        sum_l (gamma lambda)^l delta_t+l                                                equation 16
    R_t        A_t + V(s_t): what the critic should have said (TD(lambda))                     what `value_loss` takes

With the true values every lambda has the gradient's expectation, and less variance the smaller lambda is. With a wrong
critic only lambda = 1 keeps that expectation (`docs/design/results-claims.md`).

Changed from the paper: the state after the last token has value 0 also where a token limit ended the rollout, because its
reward is final. The environment's tokens are no steps: the state before the policy's next token follows the one before.

Axes: T tokens that the policy wrote in one rollout.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Estimate(NamedTuple):
    """Credit of each token, and the critic's targets."""

    A_T: NDArray[np.float64]
    R_T: NDArray[np.float64]


def gae(values_T: Sequence[float], rewards_T: Sequence[float], *, gamma: float = 1.0, lam: float = 0.95) -> Estimate:
    """A_t and R_t of each token. Raises ValueError if there is not one reward for each value."""
    V_T = np.asarray(values_T, dtype=np.float64)
    r_T = np.asarray(rewards_T, dtype=np.float64)
    if V_T.shape != r_T.shape:
        raise ValueError(f"{V_T.size} values but {r_T.size} rewards: give one of each for every token")
    delta_T = r_T + gamma * np.append(V_T[1:], 0.0) - V_T
    A_T, following = np.empty_like(delta_T), 0.0
    for t in reversed(range(len(delta_T))):
        following = delta_T[t] + gamma * lam * following
        A_T[t] = following
    return Estimate(A_T, A_T + V_T)
