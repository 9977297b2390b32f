"""The first version of a run's policy: a copy of the run file's model, or a tiny one, and the adapter that begins over it.

Called by `role` at each start. It does not publish.
"""

from pathlib import Path

import torch

from shoal.config import AdapterConfig, RunConfig
from shoal.folder import RunFolder
from shoal.policy.adapterspec import AdapterSpec
from shoal.policy.base import PolicyModel
from shoal.policy.files import write_nf4
from shoal.policy.hub import Hub, source_of
from shoal.policy.kinds import demand_named_base, demand_no_adapter, open_adapted, open_policy
from shoal.policy.nf4spec import NF4, is_coded
from shoal.policy.tiny import make_tiny
from shoal.protocol.hubref import is_hub
from shoal.roles.trainer.publishing import copy_checkpoint
from shoal.weights.bases import base_of


def start_policy(folder: RunFolder, config: RunConfig) -> Path:
    """The directory of version 0: a copy of the run file's policy, or a tiny policy with random weights. In runs of
    adapters it holds their base, which is coded here, once, if the run file asks for it."""
    if not folder.policy.exists():
        if is_hub(config.policy.path):
            Hub().bring(config.policy.path, folder.policy)
        elif config.policy.path:
            copy_checkpoint(Path(config.policy.path), folder.policy)
        else:
            make_tiny(config.policy.tiny, folder.policy, folder.weights_seed(config), config.policy.kept_dtype)
    if config.policy.adapter.base == NF4 and not is_coded(folder.policy):  # guard: base-is-coded-once
        write_nf4(folder.policy, folder.policy)
    return folder.policy


def first_model(folder: RunFolder, config: RunConfig, dtype: torch.dtype) -> PolicyModel:
    """The policy of version 0, ready to learn. Raises `StateError`."""
    directory, adapter = start_policy(folder, config), adapter_of(config.policy.adapter)
    demand_no_adapter(directory)
    demand_named_base(directory, config.policy.adapter.base)
    if adapter is None:
        return open_policy(directory, dtype, config.policy.implementation)
    return open_adapted(
        directory, dtype, adapter, folder.weights_seed(config), base_of(directory, source_of(directory))
    )


def adapter_of(config: AdapterConfig) -> AdapterSpec | None:
    """The adapter of a run file; None if the whole model is learned."""
    return AdapterSpec(config.rank, config.alpha, config.targets) if config.rank else None
