"""A repository in memory: a publisher, the log that names what it published, and a relay that serves what a test says.

A client of it does what a node does: it asks the relay for a version's manifest, demands what the log says of it, and
fetches its chunks.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from shoal.protocol import encoding
from shoal.protocol.messages import Manifest, SignedManifest
from shoal.protocol.signing import Key
from shoal.weights.fetch.fetch import fetch
from shoal.weights.fetch.version_directory import VersionFolder
from shoal.weights.manifest import PURPOSE, ManifestTrust, content_of, open_manifest, sign_manifest
from shoal.weights.publish import PublishSettings, publish
from tests.weights.checkpoints import CHUNK_BYTES, KEY, NOW, RUN, Chunks, make_checkpoint


def signed(manifest: Manifest, key: Key = KEY, purpose: str = PURPOSE) -> bytes:
    """A manifest signed as it stands, however wrong."""
    body = encoding.to_json(manifest)
    return encoding.to_json(SignedManifest(body=body, key=key.public, signature=key.sign(purpose, body)))


class Repository:
    """Versions 0 to `newest` of one run, published an hour apart until now."""

    def __init__(self, folder: Path, newest: int = 3) -> None:
        self.folder, self.chunks, self.now = folder, Chunks("http://relay"), NOW
        self.manifests: dict[int, Manifest] = {}
        self.stored: dict[int, bytes] = {}
        """What an honest relay serves."""
        self.logged: dict[int, list[str]] = {}
        """Digests of the signed manifests that the log names for each version."""
        self.roots: dict[int, str] = {}
        self.serve: Callable[[int], bytes] = lambda version: self.stored[version]
        """What the relay answers."""
        self.seen: dict[int, float] = {}
        """The newest date of issue that the client has seen of each version."""
        for version in range(newest + 1):
            self.now = NOW - 3600.0 * (newest - version)
            self.put(version, seed=version)

    def made(self, version: int, seed: int, **fields: object) -> Manifest:
        """The manifest of a checkpoint with weights of its own, whose chunks the relay has."""
        directory = self.folder / f"{version}-{seed}"
        directory = directory if directory.exists() else make_checkpoint(directory, seed)
        scenario = publish(directory, self.chunks, PublishSettings(RUN, version, "float32", CHUNK_BYTES))
        return msgspec.structs.replace(self.dated(asyncio.run(scenario)), **fields)

    def dated(self, manifest: Manifest) -> Manifest:
        return encoding.from_json(sign_manifest(manifest, KEY, now=self.now).body, Manifest)

    def put(self, version: int, seed: int) -> None:
        """Publish a version."""
        manifest = self.made(version, seed)
        self.manifests[version], self.roots[version], self.logged[version] = manifest, manifest.root, []
        self.log(version, signed(manifest))

    def log(self, version: int, data: bytes) -> None:
        """Store a signed manifest and name it in the log."""
        self.stored[version] = data
        self.logged[version].append(encoding.digest(data))

    def renew(self, version: int) -> None:
        """Sign a version again, now."""
        self.manifests[version] = self.dated(self.manifests[version])
        self.log(version, signed(self.manifests[version]))

    def grant(self, version: int) -> str:
        """What a signed lease says of the version's manifest."""
        return content_of(self.manifests[version])

    def open(self, version: int, max_bytes: int | None = None, **options: object) -> Manifest:
        """The manifest of a version, as the relay gives it and the client accepts it."""
        told = {"logged": self.logged[version], "root": self.roots[version], "now": self.now}
        manifest = open_manifest(
            self.serve(version), ManifestTrust(RUN, (KEY.public,), max_bytes), version=version,
            issued_since=self.seen.get(version, 0.0), **(told | options),
        )  # type: ignore[arg-type]  # fmt: skip
        self.seen[version] = manifest.issued
        return manifest

    def load(self, version: int, *sources: Chunks) -> Path:
        """The directory of a version, fetched from the relay."""
        return asyncio.run(fetch(self.open(version), sources or [self.chunks], VersionFolder(self.folder / "client")))
