"""Policy versions: takes the trainer's chunks and manifests, and serves the manifests.

It takes them from the trainer only, and refuses a chunk whose hash is not its name. A trainer that has the run's folder
leaves its chunks there. `ledger/versions` sees to it that a version is published once; `blob_retention` decides how long
its chunks stay.
"""

import asyncio
import hashlib
import logging
import os
from pathlib import Path

from shoal.errors import PeerError, StateError
from shoal.ledger.commands import Publish, Rotate
from shoal.ledger.errors import Refused
from shoal.protocol.constants import CHAIN_LENGTH, MAX_CHUNK_BYTES
from shoal.protocol.encoding import from_json
from shoal.protocol.messages import Manifest, Rotation, SignedManifest
from shoal.roles.coordinator.coordinator import Coordinator
from shoal.weights.base_model import demand_same_base
from shoal.weights.manifest import ManifestTrust, chunks_of, content_of, is_renewal, open_manifest

log = logging.getLogger("coordinator")


def admit_trainer(coordinator: Coordinator, key: str) -> None:
    """Raises `Refused` unless the key is the trainer's."""
    if key != coordinator.state.trainer_key:  # guard: trainer-puts-chunks
        if key in coordinator.state.publishers.keys:
            rotation = len(coordinator.state.publishers.rotations)
            why = f"rotation {rotation} replaced the trainer key {key[:12]}: publish with the key that the root named last"
            raise Refused("not_admitted", why)
        raise Refused(
            "not_admitted",
            "only the trainer sends chunks and versions; submissions go to /v1/leases/{id}/submission",
        )


def put_chunk(coordinator: Coordinator, name: str, body: bytes, found: str) -> None:
    """Keep a chunk from the trainer. `found` is the hash of its bytes. Raises `Refused`."""
    if len(body) > MAX_CHUNK_BYTES or found != name:  # guard: chunk-name
        raise Refused("malformed", "the bytes do not have the hash in the path, or are longer than MAX_CHUNK_BYTES")
    coordinator.blobs.put(body, found)
    coordinator.kept.stored(found)


async def take_checkpoint(coordinator: Coordinator, key: str, signed: bytes, created: int = 0) -> None:
    """Book a new version whose chunks are all here, or a version's renewed manifest. Raises `Refused`, `PeerError`.

    A version stays as it was published first: the same weights in other files change nothing, and leases name the files.
    Such a manifest comes from a trainer that was killed and started again, beside its last request.
    `created`: when the request was signed. Chunks of older requests are not taken any more.
    """
    manifest = open_manifest(
        signed, ManifestTrust(coordinator.state.run, (coordinator.state.trainer_key,)), now=coordinator.clock()
    )
    async with coordinator.publishing:  # guard: one-publication-at-a-time
        missing = []
        for chunk in sorted(chunks_of(manifest)):
            if not coordinator.blobs.has(chunk) and not await _take_over(coordinator, chunk):
                missing.append(chunk)
        if missing:
            raise Refused("incomplete", f"{len(missing)} chunks are missing, such as {missing[0][:12]}: PUT them first")
        await _write_event(coordinator, key, signed, manifest, created)


async def _write_event(coordinator: Coordinator, key: str, signed: bytes, manifest: Manifest, created: int) -> None:
    state, versions = coordinator.state, coordinator.state.main.versions
    known = coordinator.kept.manifests.get(manifest.version)
    for other in list(coordinator.kept.manifests.values())[-1:]:
        try:
            demand_same_base(manifest, other)
        except PeerError as error:
            raise Refused("conflict", str(error)) from None
    if known is None and manifest.version in versions:  # guard: forgotten-is-not-published-again
        raise Refused("conflict", f"version {manifest.version} is published, and its weights are not kept any more: only "
                      "versions that nodes may still load are signed again")  # fmt: skip
    if known is not None and manifest.root == known.root and content_of(manifest) != content_of(known):
        log.info("version=%d stays as it was published first: other files with the same weights change nothing",
                 manifest.version)  # fmt: skip
    renewed = known is not None and (is_renewal(manifest, known) or _has_other_signer(coordinator, manifest))
    sent_again = known is not None and not renewed  # guard: renewal-interval
    name = state.main.versions[manifest.version].manifest if sent_again else coordinator.blobs.put(signed)
    coordinator.kept.expect(name)
    links = coordinator.links_of([*coordinator.hidden_versions(), manifest.version])
    before = versions[manifest.version].manifest if manifest.version in versions else ""
    try:
        await coordinator.log_writer.submit(
            Publish(key, manifest.version, manifest.root, name, links, coordinator.clock())
        )
    except (Refused, StateError):
        coordinator.kept.forget_unbooked(
            name, [version.manifest for version in coordinator.state.main.versions.values()]
        )
        raise
    coordinator.kept.forget_unbooked(before, [coordinator.state.main.versions[manifest.version].manifest])
    coordinator.kept.remember(manifest.version)
    if not before:
        coordinator.kept.published(created)
    coordinator.kept.forget_old()
    coordinator.kept.make_room(coordinator.quota_bytes)


def _has_other_signer(coordinator: Coordinator, manifest: Manifest) -> bool:
    """Whether a known version's manifest, which a new publisher signs again, is still that of the one before."""
    data = coordinator.blobs.get(coordinator.state.main.versions[manifest.version].manifest)
    return from_json(data, SignedManifest).key != coordinator.state.trainer_key and content_of(manifest) == content_of(
        coordinator.kept.manifests[manifest.version]
    )


async def rotate(coordinator: Coordinator, key: str, rotation: Rotation) -> None:
    """Book that the root names another publisher. Raises `Refused`."""
    if key != coordinator.state.root:  # guard: root-rotates
        raise Refused(
            "not_admitted", f"only the root key may name a publisher; this run's root is {coordinator.state.root}"
        )
    await coordinator.log_writer.submit(Rotate(rotation, coordinator.clock()))


async def _take_over(coordinator: Coordinator, chunk: str) -> bool:
    """Keep a chunk that the trainer left in the run's folder; returns whether it was there."""
    file = coordinator.outgoing / chunk
    try:
        size, found = await asyncio.to_thread(_size_and_digest, file)
    except OSError:
        return False
    if size > MAX_CHUNK_BYTES or found != chunk:  # guard: left-chunk-name
        return False
    coordinator.blobs.adopt(file, chunk, size)
    coordinator.kept.stored(chunk)
    return True


def _size_and_digest(path: Path) -> tuple[int, str]:
    """Of a file that is perhaps a chunk. What is larger than a chunk is not hashed."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return size, "" if size > MAX_CHUNK_BYTES else hashlib.file_digest(file, "sha256").hexdigest()


def signed_manifest(coordinator: Coordinator, version: str) -> bytes:
    """The signed manifest of a version or of "latest", as stored. Raises `Refused`, `NothingYet`."""
    # guard: number-length
    known = version.isdecimal() and len(version) <= len(str(CHAIN_LENGTH))  # int() refuses 5,000 digits
    number = coordinator.state.main.version if version == "latest" else int(version) if known else -1
    record = coordinator.state.main.versions.get(number)
    if record is None:
        raise Refused(
            "nothing_yet", f"version {version[:16]} is not published; the latest is {coordinator.state.main.version}"
        )
    return coordinator.blobs.get(record.manifest)
