"""The trainer's models: the first policy, its reference, a judge, and past versions of the policy."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch

from shoal.config import AdapterConfig, RunConfig
from shoal.errors import StateError, cause_of
from shoal.models.checkpoint import write_nf4
from shoal.models.hub_download import Hub, source_of
from shoal.models.interface import PolicyModel
from shoal.models.lora_config import AdapterSpec
from shoal.models.nf4_layout import NF4, is_coded
from shoal.models.open_model import demand_named_base, demand_no_adapter, open_adapted, open_policy
from shoal.models.random_model import make_tiny
from shoal.net.client import Client
from shoal.protocol import messages as t
from shoal.protocol.algorithm_config import judge_named, needs_reference
from shoal.protocol.constants import MAX_MANIFEST_BYTES
from shoal.protocol.hub_reference import is_hub
from shoal.roles.trainer.publish_version import copy_checkpoint
from shoal.run_folder import RunFolder, write_atomically
from shoal.train.frozen_models import AdvantageModel, KLReference, judge_of, reference_of
from shoal.train.master_weights import module_dtype
from shoal.weights.base_model import base_of
from shoal.weights.fetch.fetch import fetch_version
from shoal.weights.fetch.sources import sources_of
from shoal.weights.fetch.version_directory import VersionFolder
from shoal.weights.manifest import ManifestTrust, weights_root

# --- The first version of a run's policy ---
#
# A copy of the run file's model, or a tiny one, and the adapter that begins over it.


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


# --- The published versions that sampled a batch's rows, as directories in the trainer's folder ---
#
# It fetches them from the coordinator like any node, so each byte is verified by the manifest that the trainer signed,
# and a restart finds them again. The coordinator keeps the weights of every version that a batch may still hold.


class PastPolicies:
    """The last versions of a run, fetched when a batch needs them."""

    def __init__(self, folder: RunFolder, client: Client) -> None:
        self._folder, self._store, self._client = folder.trainer / "published", folder.blobs, client

    async def directories(self, versions: Iterable[int], info: t.RunInfo) -> dict[int, Path]:
        """The directory of each version. Raises `PeerError`, `StateError`."""
        keep = info.rules.max_staleness + 2  # a repeated step may find one that is newer than its batch
        folder, trust = (
            VersionFolder(self._folder, keep, store=self._store),
            ManifestTrust(info.run, info.all_publishers),
        )
        return {
            version: await fetch_version(version, sources_of(info, self._client), folder, trust, self._signed)
            for version in sorted(set(versions))
        }

    async def _signed(self, version: int) -> bytes:
        return await self._client.get(f"/v1/manifests/{version}", cap=MAX_MANIFEST_BYTES)


# --- The reference policy of a run, opened from the run's folder ---
#
# The same bytes at every start.
#
# It is made from the folder's copy of the first policy, whose weights root is written beside the trainer's states at the
# first start and compared at every later one: another reference would teach something else.
#
#       trainer/reference.root    weights root of the reference, hex


ROOT = "reference.root"


def open_reference(folder: RunFolder, config: RunConfig, learned: PolicyModel, device: str) -> KLReference | None:
    """What computes log-probs under the run's first policy; None if the run needs none. Raises `StateError`."""
    if not needs_reference(config.train.algorithm):
        return None
    demand_same(folder.policy, folder.trainer / ROOT, f"the policy in {folder.policy}", "its KL penalty needs")
    load: Callable[[], PolicyModel] = partial(_load, folder.policy, config, device)
    return reference_of(learned, load, config.sampling.temperature, config.train.microbatch_tokens)


def demand_same(directory: Path, kept: Path, what: str, need: str) -> None:
    """Raise `StateError` if the model in a directory is another than at the first call, whose weights root is kept. `what`
    it is and what has `need` of it is said then."""
    root = weights_root(directory)
    try:
        if not kept.exists():
            write_atomically(kept, root.encode())
        before = kept.read_text()
    except OSError as error:
        raise StateError(f"cannot keep {kept}: {cause_of(error)}. Make the folder writable and start again") from None
    if before != root:  # guard: same-reference
        raise StateError(
            f"{what} is not the one that this run began with ({root[:12]} instead of {before[:12]}), and {need} that one: "
            "put it back from a copy, or start a new run"
        )


def _load(directory: Path, config: RunConfig, device: str) -> PolicyModel:
    return open_policy(directory, module_dtype(config.train), config.policy.implementation).to(device)


# --- The judge of a run, opened where the run file says, and with the same bytes at every start ---
#
# Its weights root is written beside the trainer's states at the first start and compared at every later one: another
# model would teach something else.
#
#       trainer/teacher.root, trainer/reward_model.root    weights root of the judge, hex


def open_judge(folder: RunFolder, config: RunConfig, device: str) -> AdvantageModel | None:
    """What gives rows their advantages; None if the run needs no judge. Raises `StateError`."""
    named = judge_named(config.train.algorithm)
    if not named:
        return None
    directory = Path(getattr(config.train, named))
    found = judge_of(config, folder.policy, device)
    demand_same(
        directory, folder.trainer / f"{named}.root", f"the model in train.{named}, {directory},", "its advantages need"
    )
    return found
