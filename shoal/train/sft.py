"""Supervised fine-tuning on scripted players' games: the cold start before RL.

The caller plays the games and passes token ids with their authors; this file uses neither environment nor tokenizer. The
seed alone decides the examples of each step.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shoal.config import PRESET_LR, SamplingConfig, SftConfig, TrainConfig, preset_imitation_lr
from shoal.models.interface import PolicyModel
from shoal.train.checkpoint import States
from shoal.train.learner import Learner
from shoal.train.loss import sft_objective
from shoal.train.rows import TrainingRow, example_row

MICROBATCH_TOKENS = 4096
"""Padded tokens of one forward pass. On a CPU, more do not fit the cache and take more memory."""

log = logging.getLogger("sft")


class FineTuning:
    """A model that learns from examples, each (token ids, authors): `config.steps` steps of `config.batch` examples.

    The learning rate follows a cosine down to a tenth. What is saved after a step continues with the same bits.
    """

    def __init__(
        self, model: PolicyModel, examples: Sequence[tuple[Sequence[int], Sequence[int]]], config: SftConfig
    ) -> None:
        if config.lr == PRESET_LR:
            learned = sum(one.numel() for one in model.trainable().values())
            config = msgspec.structs.replace(config, lr=preset_imitation_lr(learned))
            log.info("lr=%g, the preset for %d parameters", config.lr, learned)
        self.config = config
        """With the learning rate that it leaves open."""
        self._rows = [example_row(tokens_T, author_T) for tokens_T, author_T in examples]
        train = TrainConfig(
            lr=config.lr,
            schedule="cosine",
            warmup_steps=config.warmup_steps,
            max_grad_norm=config.max_grad_norm,
            microbatch_tokens=MICROBATCH_TOKENS,
        )
        self._learner = Learner(model, train, SamplingConfig(), steps=config.steps, objective=sft_objective)
        self._order = shuffled(len(self._rows), config.seed)
        self._batch_rows = config.batch
        self.steps_done = 0
        self.tokens = 0
        """Learned from so far, prompts and repetitions included."""

    def step(self) -> dict[str, Any]:
        """Take the next step. Returns its metrics; the loss is in nats per policy token."""
        metrics = self._learner.step(self._batch(), self.steps_done)
        self.steps_done += 1
        names = ("loss", "entropy_nats", "grad_norm", "lr", "tokens", "train_tokens_per_s")
        return {name: metrics[name] for name in names}

    def save(self, folder: Path) -> None:
        """Save under `folder` what `resume` continues from. Raises `StateError`."""
        States(folder, self._learner).save(self.steps_done)

    def resume(self, folder: Path) -> None:
        """Go on from the newest state under `folder`, if there is one. Raises `StateError`."""
        steps_done = States(folder, self._learner).load() or 0
        while self.steps_done < steps_done:
            self._batch()
            self.steps_done += 1

    def _batch(self) -> list[TrainingRow]:
        rows = [self._rows[next(self._order)] for _ in range(self._batch_rows)]
        self.tokens += sum(len(row.tokens_T) for row in rows)
        return rows


def fine_tune(
    model: PolicyModel,
    examples: Sequence[tuple[Sequence[int], Sequence[int]]],
    config: SftConfig,
    progress: Callable[[int, dict[str, Any]], None] = lambda step, metrics: None,
) -> None:
    """Train `model` in place for all of `config.steps`; `progress` gets the number and metrics of every step."""
    tuning = FineTuning(model, examples, config)
    while tuning.steps_done < config.steps:
        progress(tuning.steps_done, tuning.step())


def shuffled(count: int, seed: int) -> Iterator[int]:
    """Endless indices: each pass over the rows is in a new order."""
    rng = np.random.default_rng(seed)
    while True:
        yield from rng.permutation(count).tolist()
