"""Publishes the trainer's versions, and keeps checkpoints for the host.

It writes the policy, sends its chunks, signs its manifest, and copies a version that is to be kept.
"""

import asyncio
import filecmp
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from shoal.config import RunConfig
from shoal.errors import StateError, cause_of
from shoal.models.checkpoint import WeightSnapshot, save_policy, snapshot
from shoal.models.interface import PolicyModel
from shoal.models.lora_config import LoraBase, has_adapter
from shoal.models.safetensors_header import files_of_base
from shoal.net.client import Client, PeerRefused
from shoal.protocol import messages as t
from shoal.protocol.constants import MANIFEST_LIFETIME_S, MAX_MANIFEST_BYTES
from shoal.protocol.encoding import to_json
from shoal.protocol.signing import Key
from shoal.protocol.tolerances import may_be_patched
from shoal.run_folder import RunFolder, clear_leftovers, replaced_folder
from shoal.weights.base_model import directory_root, link_base, link_from
from shoal.weights.delta.tensor_codes import coded_directory
from shoal.weights.manifest import ManifestTrust, chunks_of, open_manifest, renew_at, sign_manifest, signer_of
from shoal.weights.publish import ChunkSink, FolderSink, HttpSink, PatchBase, PublishHistory, PublishSettings, publish

log = logging.getLogger("trainer")


class Publisher:
    """Publishes a run's versions through its coordinator, and keeps checkpoints in its folder."""

    def __init__(
        self, folder: RunFolder, config: RunConfig, client: Client, key: Key, clock: Callable[[], float]
    ) -> None:
        self._folder, self._config, self._client = folder, config, client
        self.key = key
        """The key that signs the manifests."""
        self._clock = clock
        self._history = PublishHistory()
        """Of the version published last. Its files are mapped: they stay readable after the next version has replaced them.
        Empty after a start, so that the first version comes whole."""
        self._renew_at = 0.0
        """When to look at the manifests' dates again."""
        self.published_s = 0.0
        """How long the last publication took."""

    def snapshot(self, model: PolicyModel) -> WeightSnapshot | Path:
        """The policy as it is published, which learning on does not change: a copy, or its files if it is divided."""
        return self._write(model) if model.published().gather else snapshot(model, self._config.policy.dtype)

    async def publish(
        self,
        policy: PolicyModel | WeightSnapshot | Path,
        version: int,
        record: Callable[[str], None] = lambda root: None,
    ) -> None:
        """Send the version's chunks and manifest, and keep it if it is due. Doing so twice changes nothing.

        `record` is called with the weights root before the version is announced.
        """
        began = time.perf_counter()
        directory = await asyncio.to_thread(self._write, policy)
        release = PublishSettings(self._client.run, version, self._config.policy.dtype)

        async def sent(sink: ChunkSink) -> t.Manifest:
            whole = version % self._config.storage.anchor_every == 0
            manifest = await publish(
                directory, sink, release, self._history, whole=whole, adapts=self._adapts(directory)
            )
            await asyncio.to_thread(record, manifest.root)  # guard: recorded-before-announced
            signed = to_json(sign_manifest(manifest, self.key, now=self._clock()))
            await self._client.send("POST", "/v1/checkpoints", signed, t.WriteAck)
            return manifest

        try:
            manifest = await sent(FolderSink(self._folder.outgoing))
        except PeerRefused as refused:
            if refused.code != "incomplete":
                raise
            manifest = await sent(HttpSink(self._client))  # the coordinator does not see our folder
        self._history.sent = chunks_of(manifest)
        if may_be_patched(self._config.policy.dtype) and not has_adapter(directory):  # an adapter is float32
            self._history.base = PatchBase(version, manifest.root, coded_directory(directory))
        await asyncio.to_thread(self._keep, policy, self._due(version), directory)
        self.published_s = time.perf_counter() - began

    def root_of(self, model: PolicyModel) -> str:
        """Weights root of a policy as it would be published."""
        return directory_root(self._write(model))

    def keep_due(self, model: PolicyModel, version: int) -> None:
        """Keep a published version if it is due: a kill may have prevented that."""
        if due := self._due(version):  # guard: checkpoint-kept-later
            self._keep(model, due)

    def keep_final(self, model: PolicyModel) -> None:
        """Keep the policy of a run that ends early."""
        self._keep(model, ["final"])

    async def renew(self, newest: int, info: t.RunInfo) -> None:
        """Sign manifests past half their life again, so that nodes can still load them after a long pause; and those that a
        key signed which was replaced since."""
        if self._clock() < self._renew_at:
            return
        dates = []
        for version in range(max(0, newest - info.rules.max_staleness), newest + 1):
            data = await self._client.get(f"/v1/manifests/{version}", cap=MAX_MANIFEST_BYTES)
            keys = info.all_publishers
            manifest = open_manifest(data, ManifestTrust(self._client.run, keys), now=None, version=version)
            replaced = signer_of(data) != self.key.public  # guard: new-publisher-signs-again
            if replaced or renew_at(manifest) <= self._clock():
                signed = sign_manifest(manifest, self.key, now=self._clock())
                await self._client.send("POST", "/v1/checkpoints", to_json(signed), t.WriteAck)
                log.info("renewed version=%d", version)
                dates.append(self._clock() + MANIFEST_LIFETIME_S / 2)
            else:
                dates.append(renew_at(manifest))
        self._renew_at = min(dates)

    def sign_with(self, key: Key) -> None:
        """Publish with another key, and sign what can still be fetched again."""
        self.key, self._renew_at = key, 0.0

    def _write(self, policy: PolicyModel | WeightSnapshot | Path, name: str = "publishing", dtype: str = "") -> Path:
        """Write the policy in HF format, to a directory that the next version replaces, unless it is there. What is
        published and kept of it is made durable; each start writes it anew."""
        if isinstance(policy, Path):
            return policy
        directory, dtype = self._folder.trainer / name, dtype or self._config.policy.dtype
        save_policy(policy, directory, dtype, tokenizer_from=self._folder.policy, durable=False)
        if has_adapter(directory):
            try:
                link_from(self._folder.policy, directory)
            except OSError as error:
                raise StateError(f"cannot put the base beside its adapter in {directory}: {cause_of(error)}") from None
        return directory

    def _adapts(self, directory: Path) -> t.AdapterBase | None:
        """What the adapter in a directory belongs to."""
        base = LoraBase.from_directory(directory)
        return None if base is None else t.AdapterBase(base.root, base.source)

    def _due(self, version: int) -> list[str]:
        """The names under which a version is kept for the host; most versions are not kept."""
        if version == self._config.steps:
            return [f"v{version:06d}", "final"]
        return [f"v{version:06d}"] if version % self._config.storage.checkpoint_every == 0 else []

    def _keep(
        self, policy: PolicyModel | WeightSnapshot | Path, names: list[str], published: Path | None = None
    ) -> None:
        """Keep the policy under these names. `published` is the directory that it was published from, if it was."""
        if not names:
            return
        kept, dtypes = published, self._config.policy
        if dtypes.kept_dtype != dtypes.dtype:  # guard: kept-in-full-precision
            kept = self._write(policy, "keeping", dtypes.kept_dtype)
        elif kept is None:
            kept = self._write(policy)
        for name in names:
            copy_checkpoint(kept, self._folder.checkpoints / name)
        shutil.rmtree(self._folder.trainer / "keeping", ignore_errors=True)


def copy_checkpoint(source: Path, target: Path) -> None:
    """Copy a version's directory to `target`, whole or not at all. An identical copy is left alone."""
    try:
        if _are_alike(source, target):
            clear_leftovers(target)
            return
        with replaced_folder(target) as scratch:
            base = {path.name: path for path in files_of_base(source)} if has_adapter(source) else {}
            shutil.copytree(source, scratch, dirs_exist_ok=True, ignore=lambda folder, names: base.keys() & {*names})
            link_base(base, scratch)
    except OSError as error:
        raise StateError(
            f"cannot write checkpoint {target}: {cause_of(error)}. Free disk space and start again"
        ) from None


def _are_alike(left: Path, right: Path) -> bool:
    """Whether two directories hold the same files with the same bytes."""
    names = sorted(path.name for path in left.iterdir())
    if not right.is_dir() or sorted(path.name for path in right.iterdir()) != names:
        return False
    other = [name for name in names if not (left / name).samefile(right / name)]
    return filecmp.cmpfiles(left, right, other, shallow=False)[0] == other
