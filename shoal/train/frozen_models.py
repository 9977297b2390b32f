"""Frozen models beside the policy: the reference of the KL term, a teacher, reward models, and judges of advantages."""

import contextlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.algos.preference_losses import distillation_advantages
from shoal.config import RunConfig
from shoal.errors import StateError
from shoal.models.cpu_offload import Parked, Resting
from shoal.models.interface import PolicyModel
from shoal.models.lora import base_alone
from shoal.models.open_model import open_policy, spec_of
from shoal.models.tokenizer_loader import demand_same_vocabulary
from shoal.models.transformer import Transformer
from shoal.models.value_head import TransformerWithValueHead, load_valued
from shoal.protocol.algorithm_config import judge_named
from shoal.train.logprobs import logprobs_of
from shoal.train.master_weights import module_dtype
from shoal.train.microbatches import MicroBatch
from shoal.train.rows import TrainingRow, change_learned, learned

# --- The reference of a KL penalty ---
#
# The run's first policy, frozen, and what it says of a batch's tokens.
#
# It belongs to the trainer alone and is never published. If the run learns an adapter, the reference is the
# base without it, and nothing is loaded twice. The log-probs are part of the rows, so a repeated step has the same bits.


class KLReference:
    """The frozen policy. Call it with rows; it leaves a shared device between shifts, unless it is the learner's base."""

    def __init__(
        self, frozen: PolicyModel, adapted: Transformer | None, temperature: float, microbatch_tokens: int
    ) -> None:
        """`adapted` is the policy whose base is the reference, if it has an adapter."""
        self._frozen, self._adapted = frozen, adapted
        self._temperature, self._microbatch_tokens = temperature, microbatch_tokens
        self._parked = Parked()

    def __call__(self, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
        """The rows with log-probs under the reference."""
        return change_learned(rows, self._referred(learned(rows)))

    def _referred(self, rows: list[TrainingRow]) -> list[TrainingRow]:
        with base_alone(self._adapted) if self._adapted is not None else contextlib.nullcontext():
            logp = logprobs_of(self._frozen, rows, self._temperature, self._microbatch_tokens)
        return [replace(row, reference_logp_P=logp_P) for row, logp_P in zip(rows, logp, strict=True)]

    def park(self) -> None:
        """See `Parkable` in `roles/node/device_queue`."""
        if self._adapted is None:
            _, parameter = next(iter(self._frozen.named_parameters()))
            self._parked.park(self._frozen, device=parameter.device.type)

    def come_back(self) -> None:
        """The same."""
        self._parked.come_back()


def reference_of(
    learned: PolicyModel, load: Callable[[], PolicyModel], temperature: float, microbatch_tokens: int
) -> KLReference:
    """The reference of a policy that is about to learn. `load` gives its first version, on the device that computes."""
    adapted = learned if isinstance(learned, Transformer) and learned.adapter is not None else None
    return KLReference(adapted or load(), adapted, temperature, microbatch_tokens)


# --- The teacher of on-policy distillation ---
#
# A frozen policy that judges each token that the student wrote.
#
# The formula is that of `algos/preference_losses`. Both sides are computed here, the student's with the weights that
# the step begins with: no claim of a worker counts, also where rollouts are old. The advantages are part of the rows, so
# a repeated step has the same bits. It belongs to the trainer alone and is never published.


class Teacher(Resting):
    """The frozen policy. Call it with rows, and with what computes their log-probs under the student."""

    def __init__(self, frozen: PolicyModel, temperature: float, microbatch_tokens: int) -> None:
        super().__init__(frozen)
        self._frozen, self._temperature, self._microbatch_tokens = frozen, temperature, microbatch_tokens

    def __call__(
        self, rows: Sequence[TrainingRow], student: Callable[[Sequence[TrainingRow]], Sequence[np.ndarray]]
    ) -> tuple[list[TrainingRow], dict[str, float]]:
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


# --- The trainer's reward model ---
#
# It scores each rollout, and the mean of the group is subtracted.
#
# Such a model is for what no environment
# can check, so the rewards that validators recomputed stay figures. The score is that of a rollout's last token, as the
# model was trained (`algos/preference_losses`); of a rollout with several rows, that of its last one. The advantages are
# part of the rows, so a repeated step has the same bits. It is never published.
#
# Axes: B rows of a micro-batch, K those of a micro-batch of pairs, T tokens, R rows.


class RewardModel(Resting):
    """The frozen model. Call it with rows."""

    def __init__(self, frozen: TransformerWithValueHead, microbatch_tokens: int) -> None:
        super().__init__(frozen)
        self._frozen, self._microbatch_tokens = frozen, microbatch_tokens

    def __call__(
        self, rows: Sequence[TrainingRow], student: Callable[[Sequence[TrainingRow]], Sequence[np.ndarray]]
    ) -> tuple[list[TrainingRow], dict[str, float]]:
        """The rows with advantages by the scores of their rollouts, and the mean score. There must be rows. The student's
        log-probs are not asked for."""
        last = {_rollout_of(row, i): i for i, row in enumerate(rows) if len(row.advantage_P)}
        scores = scores_of(self._frozen, [rows[i].tokens_T for i in last.values()], self._microbatch_tokens)
        score_of = dict(zip(last, scores.tolist(), strict=True))
        groups: dict[Hashable, list[float]] = {}
        for rollout, i in last.items():
            groups.setdefault(_group_of(rows[i], i), []).append(score_of[rollout])
        means = {group: float(np.mean(found)) for group, found in groups.items()}
        judged = []
        for i, row in enumerate(rows):
            if not len(row.advantage_P):
                judged.append(row)
                continue
            A = score_of[_rollout_of(row, i)] - means[_group_of(row, i)]
            judged.append(replace(row, advantage_P=np.full(len(row.advantage_P), A, dtype=np.float32)))
        return judged, {"score_mean": float(scores.mean())}


@torch.no_grad()
def scores_of(
    model: TransformerWithValueHead, tokens_R_T: Sequence[NDArray[np.int64]], budget_tokens: int
) -> NDArray[np.float64]:
    """The score of each text, [R], in micro-batches of similar lengths and at most so many tokens, padding included."""
    device = model.score.weight.device
    found = np.zeros(len(tokens_R_T))
    left = sorted(range(len(tokens_R_T)), key=lambda r: -len(tokens_R_T[r]))
    while left:
        count = max(1, budget_tokens // len(tokens_R_T[left[0]]))
        members, left = left[:count], left[count:]
        tokens_BT, last_B = _padded([tokens_R_T[r] for r in members])
        found[members] = model.scores(tokens_BT.to(device), last_B.to(device)).cpu().numpy()
    return found


def row_scores(model: TransformerWithValueHead) -> Callable[[MicroBatch, Sequence[TrainingRow]], Tensor]:
    """What trains such a model: the score of each row of a micro-batch, float32 [K], with gradients. Every token of a row
    is read, as by `scores_of`; the inputs of the micro-batch lack the last one."""

    def score(batch: MicroBatch, rows: Sequence[TrainingRow]) -> Tensor:
        found: Tensor = model.scores(*_padded([row.tokens_T for row in rows]))
        return found

    return score


def _padded(tokens_B_T: Sequence[NDArray[np.int64]]) -> tuple[Tensor, Tensor]:
    """Right-padded texts, [B, T], and the place of each one's last token, [B]."""
    tokens_BT = torch.zeros(len(tokens_B_T), max(map(len, tokens_B_T)), dtype=torch.int64)
    for b, tokens_T in enumerate(tokens_B_T):
        tokens_BT[b, : len(tokens_T)] = torch.from_numpy(tokens_T)
    return tokens_BT, torch.tensor([len(tokens_T) - 1 for tokens_T in tokens_B_T])


def _rollout_of(row: TrainingRow, place: int) -> Hashable:
    return place if row.id is None else row.id


def _group_of(row: TrainingRow, place: int) -> Hashable:
    return place if row.group is None else row.group


# --- The frozen model that decides what a run's rollouts are worth, if its algorithm has one ---
#
# A model that reads token ids otherwise than the policy does is refused: its judgement would be of another text.


class AdvantageModel(Protocol):
    """What gives rows their advantages before a step."""

    def __call__(
        self, rows: Sequence[TrainingRow], student: Callable[[Sequence[TrainingRow]], Sequence[np.ndarray]]
    ) -> tuple[list[TrainingRow], dict[str, float]]:
        """The rows with advantages, and figures of the step. `student` computes log-probs under the policy that learns."""


def judge_of(config: RunConfig, policy: Path, device: str = "cpu") -> AdvantageModel | None:
    """The judge of a run whose first policy is in a directory; None if groups are judged by their rewards alone, or by a
    critic. Raises `StateError`."""
    named = judge_named(config.train.algorithm)
    if not named:
        return None
    directory = Path(getattr(config.train, named))
    demand_same_vocabulary(directory, policy, f"train.{named}")
    longest, positions = config.sampling.max_tokens, spec_of(directory).max_positions
    if positions < longest:  # guard: judge-reads-whole-rows
        raise StateError(
            f"train.{named} = {directory}: it reads at most {positions} tokens, and a row may have sampling.max_tokens = "
            f"{longest}: choose another model, or lower that"
        )
    dtype, budget = module_dtype(config.train), config.train.microbatch_tokens
    if named == "teacher":
        frozen = open_policy(directory, dtype, config.policy.implementation).to(device)
        return Teacher(frozen, config.sampling.temperature, budget)
    return RewardModel(load_valued(directory, dtype).to(device), budget)
