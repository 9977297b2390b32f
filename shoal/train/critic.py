"""The critic: what a rollout is still expected to earn, before each of its tokens, learned beside the policy.

It begins as the layers of the run's first policy below a head of zeros, and has an optimiser of its own, so its loss needs
no weight beside the policy's. It belongs to the trainer's state and is never published: no other node needs it, because a
step that is repeated from its state gives the same credit.

Axes: P policy tokens of a row, N of a micro-batch, T of a rollout.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.algos.advantages import gae
from shoal.algos.losses import value_loss
from shoal.config import CriticConfig, TrainConfig
from shoal.models.value_head import TransformerWithValueHead
from shoal.protocol.algorithm_config import needs_critic
from shoal.train.microbatches import MicroBatch, Plan, join
from shoal.train.optimiser import Optimiser, learning_rate
from shoal.train.rows import TrainingRow


class Critic:
    """The model with its optimiser. `Learner` calls it, plans its micro-batches and saves it."""

    def __init__(self, model: TransformerWithValueHead, config: TrainConfig) -> None:
        """It computes on the model's device, and the model must have the config's precision."""
        self.model = model.train()
        self.model.recompute = config.recompute == "layers"
        self.config = config
        self.updates = 0
        parameters = model.trainable()
        self._device = next(iter(parameters.values())).device
        self._optimiser = Optimiser(parameters, config)

    def learns_alone(self, version: int) -> bool:
        """Whether the policy waits in this step, because values of a critic that knows nothing would mislead it."""
        return version < self.config.critic.warmup_steps

    @torch.no_grad()
    def values(self, rows: Sequence[TrainingRow], packed: Sequence[Plan]) -> list[NDArray[np.float32]]:
        """The value before each policy token of each row, float32[P]."""
        found: dict[int, NDArray[np.float32]] = {}
        for planned in packed:
            found |= planned.by_row(rows, self._values_of(planned.build(rows).on(self._device)))
        return [found[i] for i in range(len(rows))]

    def gradients(self, rows: Sequence[TrainingRow], packed: Sequence[Plan]) -> dict[str, float]:
        """Add up the gradients of micro-batches of rows that `credited` made. Returns means over tokens, by metric."""
        num_tokens = sum(len(row.positions_P) for row in rows)
        sums = {"value_loss": 0.0, "value_clip_share": 0.0}
        eps = self.config.critic.clip or math.inf
        for planned in packed:
            value_N = self._values_of(planned.build(rows).on(self._device))
            old_N, target_N = (
                join([_known(one) for one in held]).to(self._device)
                for held in zip(*((rows[i].value_P, rows[i].target_P) for i in planned.members), strict=True)
            )
            terms = value_loss(value_N, old_N, target_N, torch.ones_like(value_N), eps=eps, num_tokens=num_tokens)
            terms.loss.backward()
            sums["value_loss"] += terms.loss.item()
            sums["value_clip_share"] += terms.clipped_N.sum().item() / num_tokens
        return sums

    def update(self, version: int, steps: int) -> float:
        """Take one AdamW step and drop the gradient. Returns its norm before clipping; if that is not finite, nothing
        changes."""
        lr = learning_rate(version, self.config, peak=self.config.critic.lr, steps=steps)
        norm = self._optimiser.update(lr)
        self.updates += math.isfinite(norm)
        return norm

    def drop(self) -> None:
        """Forget all gradients."""
        self._optimiser.drop()

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments by the names that the trainer's state has: its own, not copies."""
        return {f"critic/{name}": tensor for name, tensor in self._optimiser.tensors().items()}

    def resume(self, updates: int) -> None:
        """Go on after so many updates: `tensors` were replaced."""
        self._optimiser.resume(updates)
        self.updates = updates

    def _values_of(self, batch: MicroBatch) -> Tensor:
        hidden_BTD = self.model.hidden(batch.tokens_BT, batch.families)
        return self.model.values(hidden_BTD.flatten(0, 1).index_select(0, batch.predictor_N))


def critic_of(config: TrainConfig, begin: Callable[[], TransformerWithValueHead]) -> Critic | None:
    """The critic of a run that is about to learn, if its algorithm has one. `begin` gives the layers of the first policy
    below a head of zeros, on the device that computes."""
    return Critic(begin(), config) if needs_critic(config.algorithm) else None


def credited(
    rows: Sequence[TrainingRow], values: Sequence[NDArray[np.float32]], settings: CriticConfig
) -> tuple[list[TrainingRow], dict[str, float]]:
    """The rows with advantages by these values, the values, and what they should have been; and the figures of a step.

    The policy's tokens of a rollout follow each other, its rows in the order of the batch. The last one earns the reward,
    unless the rows say what each token earns.
    """
    rollouts: dict[Hashable, list[int]] = {}
    for i, row in enumerate(rows):
        rollouts.setdefault(i if row.id is None else row.id, []).append(i)
    found, returns = dict[int, TrainingRow](), list[NDArray[np.float64]]()
    for members in rollouts.values():
        V_T = np.concatenate([values[i] for i in members]).astype(np.float64)
        r_T = np.zeros(len(V_T))
        r_T[-1] = rows[members[-1]].reward
        earned = [r_P for i in members if (r_P := rows[i].reward_P) is not None]
        if earned:
            r_T = np.concatenate(earned).astype(np.float64)
        estimate, whole = (
            gae(V_T.tolist(), r_T.tolist(), gamma=settings.gamma, lam=lam) for lam in (settings.lam, 1.0)
        )
        returns.append(whole.R_T)
        begin = 0
        for i in members:
            own = slice(begin, begin := begin + len(values[i]))
            found[i] = replace(
                rows[i],
                advantage_P=estimate.A_T[own].astype(np.float32),
                value_P=values[i],
                target_P=estimate.R_T[own].astype(np.float32),
            )
    V_I = np.concatenate([values[i] for members in rollouts.values() for i in members])
    return [found[i] for i in range(len(rows))], {
        "value_mean": float(V_I.mean()),
        "value_explained_share": explained_share(V_I, np.concatenate(returns)),
    }


def explained_share(V_I: NDArray[np.float32], G_I: NDArray[np.float64]) -> float:
    """How much of the variance of the tokens' returns their values explain: 1 at most, 0 for a constant value, below 0 for
    values that are worse than a constant; NaN if all returns are equal."""
    variance = G_I.var()
    return float(1 - (G_I - V_I).var() / variance) if variance > 0 else math.nan


def _known(held: NDArray[np.float32] | None) -> NDArray[np.float32]:
    assert held is not None, "the rows lack what the critic said of them"
    return held
