"""The published versions that sampled a batch's rows, as directories in the trainer's folder.

Called by `role`, in runs whose denominators the trainer computes itself. It fetches them from the coordinator like any
node, so each byte is verified by the manifest that the trainer signed, and a restart finds them again. The coordinator
keeps the weights of every version that a batch may still hold.
"""

from collections.abc import Iterable
from pathlib import Path

from shoal.folder import RunFolder
from shoal.net.client import Client
from shoal.protocol import types as t
from shoal.protocol.constants import MAX_MANIFEST_BYTES
from shoal.weights.fetch import fetch_version
from shoal.weights.sources import sources_of


class PastPolicies:
    """The last versions of a run, fetched when a batch needs them."""

    def __init__(self, folder: RunFolder, client: Client) -> None:
        self._folder, self._store, self._client = folder.trainer / "published", folder.blobs, client

    async def directories(self, versions: Iterable[int], info: t.RunInfo) -> dict[int, Path]:
        """The directory of each version. Raises `PeerError`, `StateError`."""
        found = {}
        for version in sorted(set(versions)):
            found[version] = await fetch_version(
                await self._signed(version), version, sources_of(info, self._client), self._folder, run=info.run,
                publishers=info.all_publishers, now=None, signed_of=self._signed, store=self._store,
                keep=info.rules.max_staleness + 2,  # a repeated step may find one that is newer than its batch
            )  # fmt: skip
        return found

    async def _signed(self, version: int) -> bytes:
        return await self._client.get(f"/v1/manifests/{version}", cap=MAX_MANIFEST_BYTES)
