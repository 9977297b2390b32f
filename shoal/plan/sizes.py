"""What a run takes in memory, on disk and for each version, by its run file alone.

Used by `forecast`. All results are bytes. A worker's memory is that of the embedded engine, which `engine/needs` knows.
"""

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path

from shoal.config import RunConfig
from shoal.policy.spec import PolicySpec

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
"""Of a published weight."""

TRAINER_BYTES = 16
"""Of one weight in the trainer: itself, its gradient and AdamW's two moments, in float32."""

STATE_BYTES = 12
"""Of one weight in the trainer's state on disk: itself and the two moments."""

KEPT_VERSIONS = 2
"""Versions that a worker keeps on disk; one more is on its way."""

TOKEN_BYTES = 16.0
"""Of a submission, for each policy token: its id and its log-prob."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of one run."""

    parameters: float
    version: float
    """A whole version, as it is fetched."""
    worker_memory: float
    validator_memory: float
    trainer_memory: float
    worker_disk: float
    host_disk: float
    is_exact: bool
    """Whether the model's shape was known; if not, memory is of the weights alone."""


def sizes_of(config: RunConfig, recipe_dir: Path, parameters: float = 0.0) -> Sizes:
    """The sizes of a run. `parameters` replaces the run file's model. Raises `StateError`, `ConfigError`."""
    spec = None if parameters else spec_of(config, recipe_dir)
    count = float(sum(math.prod(shape) for shape in spec.tensor_shapes().values())) if spec else parameters
    version = count * ITEM_BYTES[config.policy.dtype]
    play = check = version * (2 if config.sampled_dtype == "int8" and config.policy.dtype == "bfloat16" else 1)
    exact = False
    if spec is not None:
        with contextlib.suppress(ModuleNotFoundError):  # without torch: the weights alone
            from shoal.engine.needs import Needs

            needs, r, longest = Needs(spec, config.sampled_dtype), config.rollouts, config.sampling.max_tokens
            play = max(float(needs.load()), float(needs.loaded + needs.play(r.block_rollouts, longest)))
            check = max(play, float(needs.loaded + needs.score(r.block_rollouts * longest, longest, hidden=True)))
            exact = True
    window = config.storage.window_steps
    bodies = config.rollouts.batch_groups * config.rollouts.group_size * config.most_paid_tokens * TOKEN_BYTES
    kept = 1 + config.steps // config.storage.checkpoint_every
    blobs = min(config.storage.quota_mb * 1e6, window * (version + bodies)) if config.storage.retain != "all" else 0.0
    return Sizes(
        parameters=count, version=version, worker_memory=play, validator_memory=check,
        trainer_memory=count * TRAINER_BYTES, worker_disk=(KEPT_VERSIONS + 1) * version,
        host_disk=blobs + kept * version + 2 * count * STATE_BYTES, is_exact=exact,
    )  # fmt: skip


def spec_of(config: RunConfig, recipe_dir: Path) -> PolicySpec:
    """The shape of a run's model. Raises `StateError`, `ConfigError`."""
    if config.policy.path:
        return PolicySpec.from_directory((recipe_dir / config.policy.path).resolve())
    from shoal.policy.tiny import tiny_spec  # imports torch

    return tiny_spec(config.policy.tiny)
