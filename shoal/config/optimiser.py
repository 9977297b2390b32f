"""What a run file or a recipe may not say about the optimiser.

Called by `check` for every run file and by `load` for every recipe of `shoal sft`. A negative limit on the gradient would
turn it around, and what is no number would become every weight.
"""

import math
from collections.abc import Iterator

from shoal.config.sections import SftConfig, TrainConfig


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
    else:
        yield 0 <= config.lr < math.inf, f"{table}lr = {config.lr}: must be at least 0, and finite"
