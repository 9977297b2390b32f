"""Learning from pairs of answers of which one is preferred: a policy by DPO, or a reward model by its scores.

A pair is two rows with the same prompt, and always in one micro-batch. The formulas are in `algos/preference_losses`.
The same model, pairs, settings and number of threads give the same bits.

Axes: B pairs of a micro-batch, K rows of it (the chosen ones first), T input tokens, N policy tokens of a micro-batch.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shoal.algos.preference_losses import bradley_terry_loss, dpo_loss
from shoal.config import TrainConfig
from shoal.models.interface import PolicyModel
from shoal.train.logprobs import predict
from shoal.train.microbatches import MicroBatch, collate, input_length
from shoal.train.optimiser import Optimiser, learning_rate
from shoal.train.rows import TrainingRow
from shoal.train.sft import shuffled

MICROBATCH_TOKENS = 4096
"""Padded tokens of one forward pass, at most, except for a single pair."""

HELD_OUT = 8
"""One pair in this many is not learned from, but measured."""


class TokenPair(NamedTuple):
    """Two answers to one prompt."""

    chosen: TrainingRow
    rejected: TrainingRow


@dataclass(frozen=True)
class PairSettings:
    """How pairs are learned from."""

    steps: int
    batch: int
    """Pairs a step."""
    lr: float
    warmup_steps: int
    max_grad_norm: float
    seed: int


@dataclass(frozen=True)
class PairFigures:
    """How well a model tells the preferred answer, over pairs that it does not learn from."""

    accuracy: float
    """Share of pairs whose preferred answer has the higher reward; half of those where both have the same."""
    stderr: float
    """Standard error of that share."""
    margin: float
    """Mean difference of the rewards."""
    pairs: int

    @staticmethod
    def of(margins: Sequence[float]) -> "PairFigures":
        """From the differences, one for each pair."""
        found = np.asarray(margins, dtype=np.float64)
        right = float(((found > 0) + 0.5 * (found == 0)).mean())
        return PairFigures(right, math.sqrt(right * (1 - right) / len(found)), float(found.mean()), len(found))


Score = Callable[[MicroBatch, Sequence[TrainingRow]], Tensor]
"""What the rows of a micro-batch are worth, float32[K], with gradients."""


def held_out(pairs: Sequence[TokenPair]) -> tuple[list[TokenPair], list[TokenPair]]:
    """Pairs to learn from, and every HELD_OUT-th one, to measure; all are both if there are fewer than two times that."""
    if len(pairs) < 2 * HELD_OUT:
        return list(pairs), list(pairs)
    learned = [pair for index, pair in enumerate(pairs) if index % HELD_OUT]
    return learned, list(pairs[::HELD_OUT])


def prefer_policy(
    model: PolicyModel, pairs: Sequence[TokenPair], measured: Sequence[TokenPair], beta: float, settings: PairSettings,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> tuple[PairFigures, int]:  # fmt: skip
    """Train a policy in place by DPO; the reference is the policy as it is now. Gives the figures of `measured` after it,
    by the implied rewards, and the number of tokens learned from. Before it, all implied rewards are 0."""
    references = {id(pair): pair_sums(model, pair) for pair in [*pairs, *measured]}

    def loss_of(now_K: Tensor, members: Sequence[TokenPair], num_pairs: int) -> tuple[Tensor, Tensor]:
        chosen_B, rejected_B = now_K.chunk(2)
        known = torch.tensor([references[id(pair)] for pair in members], dtype=torch.float32)
        terms = dpo_loss(chosen_B, rejected_B, known[:, 0], known[:, 1], beta=beta, num_pairs=float(num_pairs))
        return terms.loss, terms.chosen_B - terms.rejected_B

    score = answer_logps(model)
    tokens = _learn(model.train().trainable(), score, loss_of, pairs, settings, progress)
    return _measure(score, loss_of, measured), tokens


def prefer_scores(
    parameters: Mapping[str, nn.Parameter], score: Score, pairs: Sequence[TokenPair], measured: Sequence[TokenPair],
    settings: PairSettings, progress: Callable[[int, float], None] = lambda step, loss: None,
) -> tuple[PairFigures, int]:  # fmt: skip
    """Train a model whose score of a text is `score`; gives what `prefer_policy` gives."""

    def loss_of(now_K: Tensor, members: Sequence[TokenPair], num_pairs: int) -> tuple[Tensor, Tensor]:
        chosen_B, rejected_B = now_K.chunk(2)
        loss = bradley_terry_loss(chosen_B, rejected_B, num_pairs=float(num_pairs))
        return loss, (chosen_B - rejected_B).detach()

    tokens = _learn(parameters, score, loss_of, pairs, settings, progress)
    return _measure(score, loss_of, measured), tokens


def answer_logps(model: PolicyModel) -> Score:
    """The log-probability of each row's whole answer under a policy, nats."""

    def score(batch: MicroBatch, rows: Sequence[TrainingRow]) -> Tensor:
        logp_N, _ = predict(model, batch, 1.0)
        return torch.zeros(len(rows)).index_add(0, batch.row_N, logp_N)

    return score


@torch.no_grad()
def pair_sums(model: PolicyModel, pair: TokenPair) -> tuple[float, float]:
    """The log-probabilities of a pair's answers under a policy, nats. Computed by itself, so that neither the order of the
    pairs nor their company changes a bit."""
    chosen, rejected = answer_logps(model)(collate(pair), pair).tolist()
    return chosen, rejected


LossOf = Callable[[Tensor, Sequence[TokenPair], int], tuple[Tensor, Tensor]]
"""(scores of the rows, the pairs, pairs of the whole batch) -> (loss, differences of the rewards without gradient)."""


def _learn(
    parameters: Mapping[str, nn.Parameter], score: Score, loss_of: LossOf, pairs: Sequence[TokenPair],
    settings: PairSettings,
    progress: Callable[[int, float], None],
) -> int:  # fmt: skip
    """Take all steps; gives how many tokens were learned from, prompts and repetitions included."""
    config = TrainConfig(
        lr=settings.lr,
        schedule="cosine",
        warmup_steps=settings.warmup_steps,
        max_grad_norm=settings.max_grad_norm,
    )
    optimiser, order, tokens = Optimiser(parameters, config), shuffled(len(pairs), settings.seed), 0
    for step in range(settings.steps):
        batch, total = [pairs[next(order)] for _ in range(settings.batch)], 0.0
        for members in in_microbatches(batch):
            rows = [*(pair.chosen for pair in members), *(pair.rejected for pair in members)]
            loss, _ = loss_of(score(collate(rows), rows), members, len(batch))
            loss.backward()
            total += loss.item()
            tokens += sum(len(row.tokens_T) for row in rows)
        optimiser.update(learning_rate(step, config, peak=settings.lr, steps=settings.steps))
        progress(step, total)
    return tokens


@torch.no_grad()
def _measure(score: Score, loss_of: LossOf, pairs: Sequence[TokenPair]) -> PairFigures:
    margins = list[float]()
    for members in in_microbatches(pairs):
        rows = [*(pair.chosen for pair in members), *(pair.rejected for pair in members)]
        _, margin_B = loss_of(score(collate(rows), rows), members, len(pairs))
        margins += margin_B.tolist()
    return PairFigures.of(margins)


def measure_scores(score: Score, pairs: Sequence[TokenPair]) -> PairFigures:
    """How well scores tell the preferred answer."""

    def margins(now_K: Tensor, members: Sequence[TokenPair], num_pairs: int) -> tuple[Tensor, Tensor]:
        chosen_B, rejected_B = now_K.chunk(2)
        return now_K.sum(), chosen_B - rejected_B

    return _measure(score, margins, pairs)


def in_microbatches(pairs: Sequence[TokenPair]) -> Iterator[list[TokenPair]]:
    """The pairs in their order, cut so that rows times the longest row stay within MICROBATCH_TOKENS."""
    members, longest = list[TokenPair](), 0
    for pair in pairs:
        length = max(longest, *(input_length(row) for row in pair))
        if members and 2 * (len(members) + 1) * length > MICROBATCH_TOKENS:
            yield members
            members, length = [], max(input_length(row) for row in pair)
        members.append(pair)
        longest = length
    if members:
        yield members
