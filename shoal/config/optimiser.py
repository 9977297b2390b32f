"""The learning rate of a run file that names none, and what a run file or a recipe may not say about the optimiser.

A negative limit on the gradient would turn it around, and what is no number would become every weight.
"""

import math
from collections.abc import Iterator
from typing import Literal

from shoal.config.sections import PRESET_LR, SftConfig, TrainConfig

MIN_PRESET_LR, MAX_PRESET_LR = 1e-6, 5e-4

MAX_LR_DIVISOR, MAX_LR_FACTOR = 5.0, 3.0
"""Of a preset, to the rates that fit. `recipes/arithmetic.toml` learns with a fifth; far above, the reward falls again."""

MIN_STEP_ROLLOUTS = 128
"""Of a step. With 64, which of them won is mostly luck."""

IMITATION_TIMES, MAX_IMITATION_LR = 10, 3e-3
"""Imitation is told each token, and bears a higher learning rate than RL."""


def preset_lr(parameters: int) -> float:
    """Learning rate of RL for a policy with so many parameters that learn: 500 divided by their number, within limits.

    1e-6 from 500 million on, which is usual for pretrained models; 5e-4 up to one million. An adapter has fewer parameters
    that learn, and so a higher rate.
    """
    return _rounded(min(MAX_PRESET_LR, max(MIN_PRESET_LR, 500 / max(1, parameters))))


def lr_misfit(lr: float, preset: float) -> Literal["", "low", "high"]:
    """How a learning rate of RL does not fit; empty if it does, or if it is 0 or the preset is not known (0)."""
    if 0 < lr < preset / MAX_LR_DIVISOR:
        return "low"
    return "high" if 0 < preset * MAX_LR_FACTOR < lr else ""


def preset_imitation_lr(parameters: int) -> float:
    """The same of supervised fine-tuning: ten times as high, and at most 3e-3."""
    return _rounded(min(MAX_IMITATION_LR, IMITATION_TIMES * max(MIN_PRESET_LR, 500 / max(1, parameters))))


def _rounded(lr: float) -> float:
    return float(f"{lr:.1e}")


def optimiser_fits(config: TrainConfig | SftConfig, table: str = "") -> Iterator[tuple[bool, str]]:
    """What must hold, each with what to say if it does not. `table` is what stands before the names of the keys."""
    norm, warmup = config.max_grad_norm, config.warmup_steps
    # guard: gradients-keep-their-sign
    yield norm > 0, f"{table}max_grad_norm = {norm}: must be above 0; inf never scales a gradient down"
    yield warmup >= 0, f"{table}warmup_steps = {warmup}: must be at least 0"
    if isinstance(config, TrainConfig):
        for name in ("beta1", "beta2"):
            value = getattr(config, name)
            yield 0 <= value < 1, f"{table}{name} = {value}: must be at least 0 and below 1"
        decay = config.weight_decay
        yield 0 <= decay < math.inf, f"{table}weight_decay = {decay}: must be at least 0, and finite"
    fits, preset = config.lr == PRESET_LR or 0 <= config.lr < math.inf, "or -1 for the preset of the policy's size"
    yield fits, f"{table}lr = {config.lr}: must be at least 0, and finite; {preset}"
