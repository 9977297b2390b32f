"""Supervised fine-tuning on scripted players' games: the cold start before RL.

Called by `shoal sft` and by tests. The caller plays the games and passes token ids with their authors; this file uses
neither environment nor tokenizer. The seed alone decides the examples of each step.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from shoal.config import SftConfig, TrainConfig
from shoal.policy.base import PolicyModel
from shoal.train.objective import sft_objective
from shoal.train.rows import Row, example_row
from shoal.train.step import Learner

MICROBATCH_TOKENS = 4096
"""Padded tokens of one forward pass. On a CPU, more do not fit the cache and take more memory."""


def fine_tune(
    model: PolicyModel,
    examples: Sequence[tuple[Sequence[int], Sequence[int]]],
    config: SftConfig,
    progress: Callable[[int, dict[str, Any]], None] = lambda step, metrics: None,
) -> None:
    """Train `model` in place for `config.steps` steps of `config.batch` examples, each (token ids, authors).

    `progress` gets the number and metrics of every step; the loss is in nats per policy token. The learning rate follows a
    cosine down to a tenth.
    """
    rows = [example_row(tokens_T, author_T) for tokens_T, author_T in examples]
    train = TrainConfig(
        lr=config.lr,
        schedule="cosine",
        warmup_steps=config.warmup_steps,
        max_grad_norm=config.max_grad_norm,
        microbatch_tokens=MICROBATCH_TOKENS,
    )
    learner = Learner(model, train, temperature=1.0, steps=config.steps, objective=sft_objective)
    order = _shuffled(len(rows), config.seed)
    for step in range(config.steps):
        batch: list[Row] = [rows[next(order)] for _ in range(config.batch)]
        metrics = learner.step(batch, step)
        told = ("loss", "entropy_nats", "grad_norm", "lr", "tokens", "train_tokens_per_s")
        progress(step, {name: metrics[name] for name in told})


def _shuffled(count: int, seed: int) -> Iterator[int]:
    """Endless indices: each pass over the examples is in a new order."""
    rng = np.random.default_rng(seed)
    while True:
        yield from rng.permutation(count).tolist()
