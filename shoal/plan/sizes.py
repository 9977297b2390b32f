"""What a run takes in memory, on disk and for each version, by its run file alone.

All results are bytes. A worker's memory is that of the embedded engine, as `models/memory` has it.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from shoal.config import RunConfig
from shoal.config.load import resolve_path
from shoal.errors import ConfigError, ShoalError
from shoal.models.config import ModelConfig
from shoal.models.hub_download import Hub
from shoal.models.memory import ITEM_BYTES as LOADED_BYTES
from shoal.models.memory import critic_parameters, engine_memory, weight_bytes
from shoal.models.open_model import AUTO
from shoal.models.open_model import spec_of as shape_of
from shoal.models.random_model import tiny_spec
from shoal.models.transformer_config import TransformerConfig
from shoal.protocol.algorithm_config import needs_critic
from shoal.protocol.hub_reference import is_hub
from shoal.protocol.tolerances import may_be_patched

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
"""Of a published weight; the scales of int8 are less than a hundredth more."""

TRAINER_BYTES = 16
"""Of one weight in the trainer: itself, its gradient and AdamW's two moments, in float32."""

STATE_BYTES = 12
"""Of one weight in the trainer's state on disk: itself and the two moments."""

KEPT_VERSIONS = 2
"""Versions that a worker keeps on disk; one more is on its way."""

PATCH_SHARE = 1 / 150
"""Of a version in bfloat16: what a patch takes at lr 1e-6 (`benchmarks/patches.py`). Versions in float32 change whole."""

TOKEN_BYTES = 16.0
"""Of a submission, for each policy token: its id and its log-prob."""


class UnknownShape(ConfigError):
    """The run file's model is not here, or its shape is none that shoal knows."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of one run."""

    parameters: float
    version: float
    """A whole version, as it is fetched."""
    patch: float
    """What leads to a version from the one before; 0: there are no patches."""
    worker_memory: float
    validator_memory: float
    trainer_memory: float
    worker_disk: float
    host_disk: float
    """With the host's own validators."""
    needed_blobs: float
    """What `storage.quota_mb` must hold: versions that nodes may still need, and submissions that are still used."""
    least_blobs: float
    """The weights among them that are kept in any case: below that, a run stands still for ever."""
    base: float
    """What the versions of a run of adapters belong to, which a node gets once; 0 if versions are whole."""
    is_exact: bool
    """Whether the model's shape was known; if not, memory is of the weights alone."""


def quota_mb_of(sizes: Sizes) -> int:
    """The least `storage.quota_mb` that holds what a run needs."""
    return math.ceil(max(sizes.needed_blobs, sizes.least_blobs) / 1e6)


def sizes_of(config: RunConfig, recipe_dir: Path, parameters: float = 0.0, patch_share: float = -1.0) -> Sizes:
    """The sizes of a run. `parameters` replaces the run file's model; `patch_share` is what a patch has of a version, below
    0 if that is assumed. Raises `StateError`, `UnknownShape`."""
    spec = None if parameters else spec_of(config, recipe_dir)
    count = float(spec.num_parameters()) if spec else parameters
    version, kept_version = (count * ITEM_BYTES[dtype] for dtype in (config.policy.dtype, config.policy.kept_dtype))
    share = patch_share if patch_share >= 0 else PATCH_SHARE
    patch = share * version if may_be_patched(config.policy.dtype) else 0.0
    base, model, learned, adapter = 0.0, 0.0, count, config.policy.adapter
    if adapter.rank and spec is not None:  # whose base is published once, or by a hub
        base = float(weight_bytes(spec, ITEM_BYTES[config.policy.dtype], adapter.base))
        learned, patch = float(spec.adapter_parameters(adapter.rank, adapter.targets)), 0.0
        model = kept_version if adapter.base else 0.0  # which is here while it is coded
        version = kept_version = 4 * learned
    play = check = count * LOADED_BYTES[config.sampled_dtype]
    if spec is not None:
        needs = engine_memory(spec, config.sampled_dtype, adapter.rank, adapter.targets, adapter.base)
        r, longest = config.rollouts, config.sampling.max_tokens
        play = max(float(needs.load()), float(needs.loaded + needs.play(r.block_rollouts, longest)))
        check = max(play, float(needs.loaded + needs.score(r.block_rollouts * longest, longest, hidden=True)))
    critic = 0.0
    if needs_critic(config.train.algorithm):
        critic = float(critic_parameters(spec)) if spec else count
    stored, needed, least = _blobs(config, version, patch)
    served = 0.0 if is_hub(config.policy.path) and not adapter.base else base  # codes are published
    kept = 1 + config.steps // config.storage.checkpoint_every
    judged = config.rollouts.max_staleness + KEPT_VERSIONS + 1
    of_nodes = judged * (
        config.validators.count + (config.sampled_dtype != "float32")
    )  # the trainer's denominators, too
    publishing = 2  # of the trainer: one is written while the one before is the base of a patch
    return Sizes(
        parameters=count, version=version, patch=patch, worker_memory=play, validator_memory=check,
        trainer_memory=base + (learned + critic) * TRAINER_BYTES + kept_version,
        worker_disk=base + (KEPT_VERSIONS + 1) * version,
        host_disk=model + base + served + stored + kept * kept_version + (of_nodes + publishing) * version
        + 3 * (learned + critic) * STATE_BYTES,  # two are kept while the next is written
        needed_blobs=needed + served, least_blobs=least + served, base=base, is_exact=spec is not None,
    )  # fmt: skip


def _blobs(config: RunConfig, version: float, patch: float) -> tuple[float, float, float]:
    """What the coordinator stores, how much of it the run cannot do without, and how much of that are weights that it never
    deletes. See `roles/coordinator/blob_retention`."""
    storage, rollouts = config.storage, config.rollouts
    tokens = config.most_paid_tokens or config.sampling.all_tokens
    bodies = rollouts.batch_groups * rollouts.group_size * tokens * TOKEN_BYTES
    every = storage.anchor_every if patch else 1
    fresh = rollouts.max_staleness + 2  # with the one that is coming
    anchors = fresh if every == 1 else 3  # the newest, the one before, and the one that is coming
    needed = anchors * version + max(fresh, 2 * every) * patch + fresh * bodies
    of_a_step = version / every + patch + bodies
    if storage.retain == "all":
        return config.steps * of_a_step, max(needed, config.steps * of_a_step), (1 + config.steps // every) * version
    if storage.retain == "batches":
        needed += max(0, config.steps - fresh) * bodies
    least = (1 + min(rollouts.max_staleness, 1 if every > 1 else config.steps)) * version
    return max(needed, min(storage.quota_mb * 1e6, storage.window_steps * of_a_step)), needed, least


def spec_of(config: RunConfig, recipe_dir: Path) -> ModelConfig:
    """The shape of a run's model. Raises `UnknownShape`."""
    if config.policy.path:
        directory = resolve_path("policy.path", config.policy.path, recipe_dir)
        try:
            if is_hub(config.policy.path):
                directory = Hub().config(config.policy.path)
            if config.policy.implementation == AUTO:
                return shape_of(directory)
            return TransformerConfig.from_directory(directory)
        except ShoalError as error:
            raise UnknownShape(str(error)) from None
    return tiny_spec(config.policy.tiny)
