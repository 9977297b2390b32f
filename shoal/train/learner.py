"""One training step: rows in, a changed model and the step's metrics out.

The learner does not know the algorithm: rows carry advantages, weights and behaviour log-probs, and an objective turns them
into a number. The same state, rows and thread count give the same
bits.

Axes: N policy tokens of a micro-batch, P policy tokens of a row.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.config import PRESET_LR, SamplingConfig, TrainConfig, preset_lr
from shoal.errors import StateError
from shoal.models.cpu_offload import Parked
from shoal.models.interface import PolicyModel
from shoal.protocol.algorithm_config import needs_old
from shoal.train.critic import Critic, credited
from shoal.train.distributed.ranks import ALONE, Ranks
from shoal.train.logprobs import logprobs_of, predict
from shoal.train.loss import Objective, TokenTerms, averaged, bonus_of, normalised, objective_of
from shoal.train.master_weights import layout_of
from shoal.train.microbatches import MicroBatch, Plan, free_cached, is_shortage, minibatches, plan, smaller_budget
from shoal.train.optimiser import Optimiser, learning_rate
from shoal.train.rows import TrainingRow, learned, one_of_each, rewarded

T = TypeVar("T")
LARGEST = "log_ratio_abs_max_nats"
"""The metric whose maximum over updates is told; of the others it is the mean."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class LearnerState:
    """Everything that the next step depends on: float32 weights, AdamW's moments by name, and two counts.

    It has no random state, because a step draws no random numbers.
    """

    version: int
    """Version of the policy with these weights."""
    updates: int
    """Taken by AdamW: `updates_per_batch` times `minibatches` for each version, less those that were skipped."""
    tensors: dict[str, Tensor]
    """The learner's own tensors, not copies."""
    layout: str = ""
    """Which precision and moments of the config they belong to, see `layout_of`."""
    critic_updates: int = 0
    """Taken by the critic's AdamW, if the run has a critic: its weights and moments are among the tensors."""


@dataclass(eq=False)
class _Part:
    """Rows that an update learns from, and their log-probs before the step's first update, as far as they are known."""

    rows: Sequence[TrainingRow]
    old: dict[int, Tensor] = field(default_factory=dict)
    """By index of the row. Each of several processes has those of its own rows."""

    def keep(self, members: Sequence[int], logp_N: Tensor) -> None:
        """Take the log-probs of a micro-batch of these rows."""
        counts = [len(self.rows[i].positions_P) for i in members]
        self.old |= zip(members, logp_N.split(counts), strict=True)


class Learner:
    """A model with its optimiser. Call `step` once a batch, `state` to save, `restore` to resume from a saved state."""

    def __init__(
        self,
        model: PolicyModel,
        config: TrainConfig,
        sampling: SamplingConfig,
        *,
        steps: int,
        objective: Objective | None = None,
        critic: Critic | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """It computes on the model's device. The model must have the config's precision: nothing is converted, so nothing
        is held twice.

        `sampling` is how the rows were sampled: some algorithms divide by the most tokens of a rollout. `steps` is the
        length of the schedule. `objective` replaces the one that the config names; `critic` learns beside the policy and
        decides its advantages; `ranks` are the processes that take each step together, all with the same rows.
        """
        parameters = model.trainable()
        if config.lr == PRESET_LR:
            config = msgspec.structs.replace(config, lr=preset_lr(sum(one.numel() for one in parameters.values())))
        self.model = model.train()
        self.model.recompute = config.recompute == "layers"
        self.config = config
        self.temperature = sampling.temperature
        self.steps = steps
        self.lr_factor = 1.0
        """What the learning rate of the next step is multiplied by; not the critic's, which would fall behind."""
        self.updates = 0
        self.budgets: list[int] = []
        """Tokens of a micro-batch, at most, in each pass of the last step: those for values and old log-probs, and the
        updates."""
        self._budget = config.microbatch_tokens
        self._max_tokens, self._bonus = sampling.all_tokens, 1.0
        self._objective = objective or objective_of(config.algorithm)
        self._needs_old = objective is None and needs_old(config.algorithm)
        self._critic, self._ranks = critic, ranks
        self._device = next(iter(parameters.values())).device
        ranks.demand_dtype(self.model, config)
        self._optimiser = Optimiser(parameters, config, ranks)
        self._parked = Parked()

    def step(self, rows: Sequence[TrainingRow], version: int, budgets: Sequence[int] = ()) -> dict[str, Any]:
        """Learn from rows, turning policy `version` into `version + 1`. Returns metrics of `shoal/step_metrics`.

        The rows are learned from `updates_per_batch` times, in `minibatches` parts. Their log-probs stay those of the
        policy that sampled, or that the step began with, so each update is clipped against that policy, and all have the
        learning rate of the step: a state between two updates is never saved. A gradient that is not finite changes
        nothing: this update and the rest of the step are skipped, said in the log and in `update_skipped`. So is a step
        without rows to learn from, for a batch is an event: the run must get past it, whatever it holds.

        A critic says what it expects of all rows before its first update, and learns after the policy from each part.

        If memory runs out, the update begins again with smaller micro-batches, whose sums have other last bits, and later
        ones are as small. To repeat a step with the same bits, give the `budgets` that it had. Raises `StateError` if even
        one row does not fit.
        """
        self.budgets = []
        counted = [row for row in rows if row.counts_only]
        rows = learned(rows) if counted else rows
        if not rows:  # guard: step-without-rows
            log.warning("nothing to learn from: the policy stays as it is version=%d", version)
            zero = dict.fromkeys(("updates", "reward_mean", "rollouts", "tokens", "policy_tokens", "train_s"), 0)
            return {"update_skipped": 1, **zero}
        started = time.perf_counter()
        lr = self.lr_factor * learning_rate(version, self.config, peak=self.config.lr, steps=self.steps)
        algorithm, learned_tokens = self.config.algorithm, 0
        left, updates, taught = iter(budgets), list[dict[str, float]](), list[dict[str, float]]()
        rows, expected = self._credited(rows, version, left)
        parts = [
            _Part(averaged(part, algorithm, self._max_tokens))
            for part in minibatches(normalised([*rows, *counted], algorithm), self.config.minibatches)
            if learned(part)
        ]
        self._bonus = bonus_of(rows, algorithm)
        waits = self._critic is not None and self._critic.learns_alone(version)
        for part in parts[1:] if self._needs_old and not waits else []:
            self._pass(part.rows, version, left, partial(self._predict_old, part))
        for part in parts * self.config.updates_per_batch:
            if not waits:
                updates.append(self._learn(part, lr, version, left))
            if self._critic is not None:
                taught.append(self._teach(self._critic, part.rows, version, left))
            learned_tokens += sum(len(row.tokens_T) for row in part.rows)
            if not _all_finite(updates, taught):
                break  # what follows would be of another step than the one that was asked for
        num_all_tokens = sum(len(row.tokens_T) for row in rows)
        rollouts = one_of_each(rows)
        step_s = time.perf_counter() - started
        return {
            **expected,
            **_means(taught),
            **_means(updates),
            **{name: max(update[name] for update in updates) for name in (LARGEST,) if updates},
            "updates": sum(math.isfinite(update["grad_norm"]) for update in updates),
            "reward_mean": float(np.mean([row.reward for row in rewarded([*rows, *counted])])),
            "staleness_rollouts": _staleness(rollouts, version),
            "update_skipped": int(not _all_finite(updates, taught)),
            "lr": lr,
            "rollouts": len(rollouts),
            "tokens": num_all_tokens,
            "policy_tokens": sum(len(row.positions_P) for row in rows),
            "train_s": step_s,
            "train_tokens_per_s": learned_tokens / max(step_s, 1e-9),
        }

    def logprobs(self, rows: Sequence[TrainingRow]) -> list[NDArray[np.float32]]:
        """Log-probabilities, float32[P], of each row's policy tokens under the current weights, nats."""
        return logprobs_of(self.model, rows, self.temperature, self.config.microbatch_tokens, self.config.packing)

    def state(self, version: int) -> LearnerState:
        """What must be saved to continue bit for bit; `version` is the policy that the weights now are."""
        tensors, critic = self._optimiser.tensors(), self._critic
        if critic is None:
            return LearnerState(version, self.updates, tensors, layout_of(self.config))
        return LearnerState(version, self.updates, tensors | critic.tensors(), layout_of(self.config), critic.updates)

    def restore(self, state: LearnerState) -> None:
        """Copy a saved state into the learner's own tensors. Raises `StateError` if it is from another model or layout."""
        self.demand_fit(state.version, state.layout, {name: tuple(one.shape) for name, one in state.tensors.items()})
        for name, tensor in self.state(state.version).tensors.items():
            tensor.copy_(state.tensors[name])
        self.resume(state.updates, state.critic_updates)

    def park(self) -> None:
        """Move weights and optimiser out of the device's memory. Until `come_back` nothing may be asked."""
        self._parked.park(self.model, self._optimiser, self._critic, device=self._device.type)

    def come_back(self) -> None:
        """Move them back, with the same bits. Raises `torch.OutOfMemoryError`."""
        self._parked.come_back()

    def demand_fit(self, version: int, layout: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise `StateError` if a state of this layout, with tensors of these shapes, is not one of this learner's."""
        if layout != layout_of(self.config):  # guard: state-of-this-layout
            raise StateError(
                f"the trainer's state of version {version} has the layout {layout or 'float32'!r}, and the run file asks "
                f"for {layout_of(self.config) or 'float32'!r}: restore train.dtype and train.moments in it"
            )
        mine = {name: tuple(tensor.shape) for name, tensor in self.state(version).tensors.items()}
        if mine != shapes:
            odd = sorted(name for name in mine.keys() | shapes.keys() if mine.get(name) != shapes.get(name))[0]
            raise StateError(
                f"the trainer's state of version {version} belongs to another model: {odd} is {shapes.get(odd)} there and "
                f"{mine.get(odd)} here. Start under another name, or restore the run file's [policy]"
            )

    def resume(self, updates: int, critic_updates: int = 0) -> None:
        """Go on after so many updates: a saved state was copied into the learner's own tensors."""
        self._optimiser.resume(updates)
        self.updates = updates
        if self._critic is not None:
            self._critic.resume(critic_updates)

    def _credited(
        self, rows: Sequence[TrainingRow], version: int, left: Iterator[int]
    ) -> tuple[Sequence[TrainingRow], dict[str, float]]:
        """The rows with the critic's credit, and figures of what it expected; as they are if there is no critic."""
        if self._critic is None:
            return rows, {}
        values = self._pass(rows, version, left, partial(self._critic.values, rows))
        return credited(rows, values, self.config.critic)

    def _teach(
        self, critic: Critic, rows: Sequence[TrainingRow], version: int, left: Iterator[int]
    ) -> dict[str, float]:
        """One update of the critic from all rows of a part; gives its metrics."""
        figures = self._pass(rows, version, left, partial(critic.gradients, rows))
        norm = critic.update(version, self.steps)
        if not math.isfinite(norm):
            log.warning("the critic's update skipped, gradient not finite version=%d grad_norm=%s", version, norm)
        return figures | {"critic_grad_norm": norm}

    def _learn(self, part: "_Part", lr: float, version: int, left: Iterator[int]) -> dict[str, float]:
        """One update from all rows of a part, packed into micro-batches; gives its metrics, means over policy tokens."""
        num_tokens = sum(len(row.positions_P) for row in part.rows)
        assert num_tokens, "a step needs policy tokens; a row without one is only counted"
        sums = self._pass(part.rows, version, left, partial(self._gradients, part, num_tokens))
        loss, largest = sums.pop("loss"), sums.pop("largest")
        means = {name: total / num_tokens for name, total in sums.items()}
        grad_norm = self._update(lr, version)
        return {**means, "loss": loss, LARGEST: largest, "grad_norm": grad_norm}

    @torch.no_grad()
    def _predict_old(self, part: "_Part", packed: Sequence[Plan]) -> None:
        """Compute a part's log-probs before the step's first update, in the micro-batches that will be learned from."""
        for share in self._ranks.shares(packed):
            batch = share.plan.build(part.rows).on(self._device)
            logp_N, _ = predict(self.model, batch, self.temperature)
            part.keep(share.plan.members, logp_N)

    def _gradients(self, part: "_Part", num_tokens: int, packed: Sequence[Plan]) -> dict[str, float]:
        """Add up the gradients of micro-batches. Returns sums over tokens by metric, and the `largest` |log-ratio|."""
        sums: Counter[str] = Counter()
        largest, now = 0.0, _Part(part.rows)
        for share in self._ranks.shares(packed):
            members = share.plan.members
            batch, old_N = share.plan.build(part.rows).on(self._device), self._old_of(members, part.old)
            figures, largest_here, logp_N = self._accumulate(
                batch if share.counts else batch.silent(), old_N, num_tokens
            )
            sums.update(figures if share.counts else dict.fromkeys(figures, 0.0))
            largest = max(largest, largest_here)
            now.keep(members, logp_N)
        if not part.old:  # guard: old-is-before-the-first-update
            part.old |= now.old
        totals, largest = self._ranks.add_up(sums, largest)
        return {**totals, "largest": largest}

    def _pass(
        self, rows: Sequence[TrainingRow], version: int, left: Iterator[int], work: Callable[[Sequence[Plan]], T]
    ) -> T:
        """As `_fitting`, with the next of the `left` budgets that a repeated step is given; keeps the one that it had."""
        self._budget = next(left, self._budget)
        found = self._fitting(rows, version, work)
        self.budgets.append(self._budget)
        return found

    def _fitting(self, rows: Sequence[TrainingRow], version: int, work: Callable[[Sequence[Plan]], T]) -> T:
        """Do something with the micro-batches of these rows. If memory runs out, begin again with smaller ones."""
        while True:
            packed = plan(rows, self._budget, self.config.packing)
            try:
                return work(packed)
            except (MemoryError, RuntimeError) as error:
                if not is_shortage(error):
                    raise
                cause = str(error).partition("\n")[0]
            self._ranks.demand_repeat(cause)
            # Only here is the failed pass forgotten: the error held its tensors.
            self._optimiser.drop()  # guard: half-a-gradient-is-dropped
            if self._critic is not None:
                self._critic.drop()  # guard: half-a-gradient-of-the-critic-is-dropped
            free_cached()
            before, self._budget = self._budget, smaller_budget(rows, packed, self._budget, self.config.packing, cause)
            log.warning(
                "memory ran out in a micro-batch of at most %d tokens: the update begins again with %d, as will later "
                "ones; set train.microbatch_tokens so in the next run version=%d cause=%s",
                before, self._budget, version, cause,
            )  # fmt: skip

    def _old_of(self, members: Sequence[int], old: dict[int, Tensor]) -> Tensor | None:
        """The log-probs of rows before the step's first update; None if this is it, or if the loss does not need them.

        Each of several processes has those of its own rows, which are others in an update with another budget.
        """
        if all(i in old for i in members):
            return torch.cat([old[i] for i in members])
        if old and self._needs_old:  # guard: old-of-the-same-rows
            raise StateError(
                "a step that ran out of memory between two of its updates cannot be repeated by several processes with "
                "an algorithm that needs log-probs from before the first (train.algorithm.ratio_to or corrections): "
                "resume with train.processes = 1"
            )
        return None

    def _accumulate(
        self, batch: MicroBatch, old_logp_N: Tensor | None, num_tokens: int
    ) -> tuple[dict[str, float], float, Tensor]:
        """Add a micro-batch's gradients. Returns sums over its tokens by metric, its largest |log-ratio|, and log-probs."""
        logp_N, entropy_N = predict(self.model, batch, self.temperature)
        now_N = logp_N.detach()
        old_N = now_N if old_logp_N is None else old_logp_N
        terms = TokenTerms(
            logp_N, entropy_N, old_N, batch.behaviour_logp_N, batch.advantage_N, batch.weight_N, batch.row_N,
            batch.reference_logp_N, self._bonus,
        )  # fmt: skip
        loss, figures = self._objective(terms, float(num_tokens))
        loss.backward()
        log_ratio_N = (now_N - batch.behaviour_logp_N).abs()
        sums = {name: figure_N.sum().item() for name, figure_N in figures.items()}
        sums["loss"] = loss.item()
        sums["entropy_nats"] = entropy_N.detach().sum().item()
        sums["log_ratio_abs_mean_nats"] = log_ratio_N.sum().item()
        return sums, log_ratio_N.max().item(), now_N

    def _update(self, lr: float, version: int) -> float:
        """Take one AdamW step and drop the gradient. Returns its norm before clipping."""
        norm = self._optimiser.update(lr)
        if math.isfinite(norm):
            self.updates += 1
        else:
            log.warning("update skipped, gradient not finite version=%d grad_norm=%s", version, norm)
        return norm


def _means(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over updates; none if there was no update."""
    return {name: sum(one[name] for one in updates) / len(updates) for name in (updates[0] if updates else ())}


def _all_finite(updates: Sequence[Mapping[str, float]], taught: Sequence[Mapping[str, float]]) -> bool:
    """Whether all gradients of the policy's updates and of the critic's were finite."""
    norms = [one["grad_norm"] for one in updates] + [one["critic_grad_norm"] for one in taught]
    return all(math.isfinite(norm) for norm in norms)


def _staleness(rows: Sequence[TrainingRow], version: int) -> dict[str, int]:
    """Number of rollouts by the age of their policy, in versions."""
    counts = Counter(version - row.version for row in rows)
    return {str(age): counts[age] for age in sorted(counts)}
