"""A policy so small that every rollout and every group of rollouts can be counted: the ground on which `exact.py` stands.

It writes at most four letters of a, b and the full stop, which ends. Its logits are one row for each of the 15 texts that
can go on. So expectations and variances are sums over 31 rollouts, or over all groups of them, without sampling. numpy
alone.

Axes: S states, V letters, R rollouts, T tokens, P = S * V parameters, M groups, G rollouts of a group.
"""

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LETTERS, END, LENGTH = "ab.", 2, 4

STATES = [text for n in range(LENGTH) for text in itertools.product((0, 1), repeat=n)]
"""What can go on."""

ROLLOUTS = sorted(
    [(*text, END) for text in STATES] + list(itertools.product((0, 1), repeat=LENGTH)),
    key=lambda rollout: (len(rollout), rollout),
)
"""Every text that the policy can finish."""

LENGTHS_R = np.array([len(rollout) for rollout in ROLLOUTS])
WRITTEN_RT = np.arange(LENGTH) < LENGTHS_R[:, None]
"""Whether a rollout has a token there."""

TOKENS_RT = np.array([[*rollout, *[0] * (LENGTH - len(rollout))] for rollout in ROLLOUTS])
STATES_RT = np.array([
    [STATES.index(rollout[:t]) if t < len(rollout) else 0 for t in range(LENGTH)] for rollout in ROLLOUTS
])  # fmt: skip


class Policy:
    """A table of logits, and what follows from it for every rollout."""

    def __init__(self, logits_SV: Array) -> None:
        self.logits_SV = logits_SV
        logits_SV = logits_SV - logits_SV.max(1, keepdims=True)
        self.logp_SV: Array = logits_SV - np.log(np.exp(logits_SV).sum(1, keepdims=True))
        self.logp_RT: Array = self.logp_SV[STATES_RT, TOKENS_RT] * WRITTEN_RT
        """Of each token; 0 where there is none."""
        self.logp_R: Array = self.logp_RT.sum(1)
        self.p_R: Array = np.exp(self.logp_R)
        self.scores_RTP = self._scores()
        """Gradient of each token's log-probability; 0 where there is none."""

    def _scores(self) -> Array:
        S, V = self.logp_SV.shape
        chosen_RTV = np.eye(V)[TOKENS_RT] - np.exp(self.logp_SV)[STATES_RT]
        scores_RTSV = np.eye(S)[STATES_RT][..., None] * chosen_RTV[:, :, None, :]
        scores: Array = (scores_RTSV * WRITTEN_RT[..., None, None]).reshape(len(ROLLOUTS), LENGTH, S * V)
        return scores

    def mean(self, values_R: Array) -> float:
        """Expectation of a value of a rollout."""
        return float(self.p_R @ values_R)

    def gradient(self, values_R: Array) -> Array:
        """The gradient of that expectation, [P]."""
        return self.pushed(np.broadcast_to(values_R[:, None], WRITTEN_RT.shape))

    def pushed(self, c_RT: Array) -> Array:
        """Expected update, [P], if each token's score counts c times."""
        found: Array = np.einsum("r,rt,rtp->p", self.p_R, c_RT, self.scores_RTP)
        return found

    def spread(self, c_RT: Array) -> float:
        """Variance of that update of one rollout, summed over the parameters."""
        g_RP = np.einsum("rt,rtp->rp", c_RT, self.scores_RTP)
        return float(self.p_R @ np.square(g_RP).sum(1) - np.square(self.p_R @ g_RP).sum())

    def groups(self, G: int) -> tuple[NDArray[np.int64], Array]:
        """Every group: its rollouts, [M, G], and its probability, [M]."""
        rollouts_MG = np.array(list(itertools.product(range(len(ROLLOUTS)), repeat=G)))
        p_M: Array = self.p_R[rollouts_MG].prod(1)
        return rollouts_MG, p_M

    def over_groups(self, c_MGT: Array, rollouts_MG: NDArray[np.int64], p_M: Array) -> tuple[Array, float]:
        """Expected update of a group, [P], and its variance, summed over the parameters."""
        g_MP = np.zeros((len(p_M), self.scores_RTP.shape[2]))
        for g in range(rollouts_MG.shape[1]):
            g_MP += np.einsum("mt,mtp->mp", c_MGT[:, g], self.scores_RTP[rollouts_MG[:, g]])
        mean_P: Array = p_M @ g_MP
        return mean_P, float(p_M @ np.square(g_MP).sum(1) - np.square(mean_P).sum())

    def values_S(self, rewards_R: Array) -> Array:
        """The true value of each state: the mean reward of what the policy makes of it."""
        total_S, weight_S = np.zeros(len(STATES)), np.zeros(len(STATES))
        for r, rollout in enumerate(ROLLOUTS):
            for t in range(len(rollout)):
                state = STATES_RT[r, t]
                total_S[state] += self.p_R[r] * rewards_R[r]
                weight_S[state] += self.p_R[r]
        return total_S / weight_S


def policy_of(seed: int, scale: float = 1.0) -> Policy:
    """A policy of random logits."""
    return Policy(scale * np.random.default_rng(seed).normal(size=(len(STATES), len(LETTERS))))


def policy_with(p_R: Array) -> Policy:
    """The policy that writes rollouts with these probabilities, which are all above 0."""
    p_SV = np.zeros((len(STATES), len(LETTERS)))
    np.add.at(p_SV, (STATES_RT[WRITTEN_RT], TOKENS_RT[WRITTEN_RT]), np.repeat(p_R, LENGTHS_R))
    return Policy(np.log(p_SV))


def rewards_by(seed: int) -> Array:
    """Random rewards of all rollouts, no two alike."""
    return np.random.default_rng(seed).random(len(ROLLOUTS))


def right_ones(letter: str = "a") -> Array:
    """1 for the rollouts that hold this letter exactly twice, else 0."""
    wanted = LETTERS.index(letter)
    return np.array([float(rollout.count(wanted) == 2) for rollout in ROLLOUTS])


def off(found: Sequence[float] | Array, wanted: Sequence[float] | Array) -> float:
    """Relative distance of two vectors."""
    return float(np.linalg.norm(np.subtract(found, wanted)) / np.linalg.norm(wanted))


def cosine(left: Array, right: Array) -> float:
    """Of the angle between two vectors."""
    return float(left @ right / (np.linalg.norm(left) * np.linalg.norm(right)))
