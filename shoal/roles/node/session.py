"""What a worker or a validator has once it joined a run: the engine, the versions that it loads, and its limits.

Every byte of the weights is verified.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from shoal.engine.interface import Engine
from shoal.env import Env
from shoal.errors import Overreach, PeerError
from shoal.models.memory import EngineMemory, engine_memory_in, played_on_gpu, scored_on_gpu
from shoal.net.client import Client
from shoal.protocol import messages as t
from shoal.protocol.constants import MAX_MANIFEST_BYTES
from shoal.protocol.encoding import digest, to_json
from shoal.protocol.host_signatures import is_promised, terms_of
from shoal.protocol.message_sizes import BYTES_PER_TOKEN
from shoal.protocol.messages.run import kind_of
from shoal.roles.node.evidence_store import EvidenceStore, retry_while_disk_full, take_publishers
from shoal.roles.node.share_weights import SHARED_PART, SharedVersions
from shoal.verification.encode_submission import largest_submission_bytes
from shoal.weights.engine_loader import LoadedEngine
from shoal.weights.fetch.fetch import fetch
from shoal.weights.fetch.relay_sources import Relays
from shoal.weights.fetch.sources import HostAway, sources_of
from shoal.weights.fetch.transfer import TransferEvents
from shoal.weights.fetch.version_directory import VersionFolder, room_for_version
from shoal.weights.manifest import ManifestTrust, content_of, open_manifest, signer_of
from shoal.weights.memory_limit import Memory

log = logging.getLogger("session")


SOONEST_S = 0.1
"""A node that got nothing to do waits at least this long before it asks again, however quickly the host answers."""

COPIES = 4
"""Most copies of a lease's rollouts at one time: as objects, as groups, in the submission, and on their way."""


class Contradiction(PeerError):
    """What the host signed for this node is not what it serves. The evidence is kept; nothing is played."""


@dataclass
class Session:
    """A node that has joined a run."""

    client: Client
    home: Path
    info: t.RunInfo
    envs: Mapping[str, Env]
    policy: LoadedEngine
    node: t.NodeState
    """What the coordinator reported of the node when it joined."""
    clock: Callable[[], float]
    evidence: EvidenceStore
    max_disk_bytes: int | None
    """Limit of all versions and evidence on disk. None means no limit, for the host's nodes."""
    memory: Memory | None = None
    """Limit of memory. None means no limit, for the host's own nodes."""
    needs: EngineMemory | None = None
    """What the version that was loaded last needs, if there is a limit."""
    publishers: t.Publishers | None = None
    """All that the root named, as this node pinned them; None: the trainer key of `info`."""
    manifest: t.Manifest | None = None
    """Of the version that the engine has. All requests name its signed bytes."""
    store: Path | None = None
    """The coordinator's blobs, if it is on this machine and this node is the host's."""
    role: str = "worker"
    issued: dict[int, float] = field(default_factory=dict)
    """The newest date of issue seen of each version's manifest: an older one is a rollback."""
    relays: Relays = field(init=False)
    """Those of the run."""
    shared: SharedVersions = field(init=False)
    """What this node has, for others, if its user shares it."""
    _brought: "FetchedVersion | None" = None
    """The version that was fetched last and is not loaded yet."""
    _in_use: Path | None = None
    """The directory of the version that the engine has."""
    _bringing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Versions are fetched one at a time: each fetch clears away what others left unfinished."""

    def __post_init__(self) -> None:
        self.relays = Relays(self.client, but=self.client.key.public if self.client.key else "")
        self.shared = SharedVersions(self.home / "weights", (self.max_disk_bytes or 0) // SHARED_PART)

    @property
    def engine(self) -> Engine:
        return self.policy.engine

    @property
    def kind(self) -> str:
        """Who plays the environments of this run: "episodes" for the workers, "completions" for the host."""
        return kind_of(self.info.envs)

    def open_grant(self, answer: t.LeaseAnswer, lease: t.Lease) -> t.Grant:
        """The host's signed word for a lease. Raises `PeerError`, `Contradiction`."""
        grant = t.Grant(self.info.run, lease, answer.terms, answer.root, answer.content, answer.signature)
        if not is_promised(grant, self.info.run_key):  # guard: lease-is-signed
            raise PeerError(
                f"lease {lease.id[:40]!r} is not signed by the run key, so you could not prove what you were asked for: "
                "nothing was played. The host must run a version of shoal that signs leases"
            )
        if grant.terms != terms_of(self.info.envs, self.info.rules):  # guard: terms-of-the-lease
            raise self._contradiction(f"lease {lease.id[:40]!r} is signed for other environments or group sizes than the "
                                      "host told us when we joined", grant)  # fmt: skip
        told, signed = self.info.sampling, lease.sampling
        for other, what in (
            (signed.stops != told.stops, "turns that end at other tokens"),  # guard: stops-of-the-lease
            (signed.noise != told.noise, "another noise family"),  # guard: noise-of-the-lease
        ):
            if other:
                raise self._contradiction(f"lease {lease.id[:40]!r} is signed for {what} than the host told us when we "
                                          "joined", grant)  # fmt: skip
        return grant

    def _contradiction(self, what: str, grant: t.Grant, manifest: bytes = b"") -> Contradiction:
        self._keep(grant, manifest)
        return Contradiction(f"{what}: nothing was played. Leave this run; what the host signed is kept in "
                             f"{self.evidence.folder} for `shoal audit --evidence`")  # fmt: skip

    def _keep(self, grant: t.Grant | None, manifest: bytes) -> None:
        """Keep what the host signed for work that is about to be done, or that contradicts itself. Otherwise a host could
        push old evidence out with leases that nobody plays."""
        if manifest:
            self.evidence.keep("manifest", manifest)
        if grant is not None:
            self.evidence.keep("grant", to_json(grant))

    async def load(
        self, version: int, *, keep: int = 2, max_bytes: int | None = None, grant: t.Grant | None = None
    ) -> None:
        """Fetch, verify and load a version, unless the engine has it already; arguments as for `fetch_version`.

        The versions on disk stay within `max_disk_bytes`. Raises `Overreach` if the policy does not fit into the memory,
        and `Contradiction` if a grant names other weights or files.
        """
        if self.manifest is not None and self.engine.version == version:
            self._demand_granted(grant, self.manifest, b"")
            await retry_while_disk_full(self.client, lambda: asyncio.to_thread(self._keep, grant, b""))
            return
        brought = await self.bring(version, keep=keep, max_bytes=max_bytes, grant=grant)
        self._in_use = brought.directory  # a tokenizer that is started again reads its files
        await self._load(brought)
        self.manifest, self.client.manifest = brought.manifest, digest(brought.signed)
        if self._brought is brought:  # a lease ahead may have brought the next one meanwhile
            self._brought = None
        await retry_while_disk_full(self.client, lambda: asyncio.to_thread(self._keep, grant, brought.signed))

    async def bring(
        self, version: int, *, keep: int = 2, max_bytes: int | None = None, grant: t.Grant | None = None
    ) -> "FetchedVersion":
        """Fetch and verify a version, so that `load` finds it; arguments and errors as for `load`. It may go on while the
        engine is at work with another version."""
        async with self._bringing:
            known = self._brought
            if known is None or known.manifest.version != version or not known.directory.exists():
                known = await retry_while_disk_full(self.client, partial(self._fetch, version, keep, max_bytes, grant))
            self._demand_granted(grant, known.manifest, known.signed)
            self._brought = known
            return known

    async def _fetch(self, version: int, keep: int, max_bytes: int | None, grant: t.Grant | None) -> "FetchedVersion":
        most_bytes = self._most_bytes(keep, max_bytes)

        async def earlier(other: int) -> t.Manifest:  # it is old, and the new one names its root
            return self._open(await self._signed_manifest(other), other, most_bytes, None)

        signed = await self._signed_manifest(version)
        if signer_of(signed) not in self._publishers().keys:  # guard: new-publisher-is-asked-for
            info = await self.client.get_json("/v1/run", t.RunInfo)
            if info.run != self.info.run:  # guard: publishers-of-this-run
                raise PeerError(f"the host serves run {info.run[:16]!r} now, not {self.info.run[:16]!r}: join again")
            self.publishers = take_publishers(self.evidence.publishers, info)
        manifest = self._open(signed, version, most_bytes, self.clock())
        self.issued[version] = manifest.issued
        self._demand_granted(grant, manifest, signed)
        started = self.clock()
        while True:
            sources = self.relays.usable(sources_of(self.info, self.client, await self.relays.sources()))
            try:
                directory = await fetch(
                    manifest,
                    sources,
                    VersionFolder(
                        self.shared.folder, keep=keep, max_bytes=most_bytes, in_use=self._in_use, store=self.store
                    ),
                    manifest_of=earlier,
                    shared=self.shared if self.shared.is_on else None,
                    events=TransferEvents(on_lie=self.relays.lied),
                )
                return FetchedVersion(manifest, signed, directory)
            except HostAway as error:
                log.warning(
                    "waiting for the weights of version=%d for %.0f s: %s", version, self.clock() - started, error
                )
                newest = (await self.client.get_json("/v1/status", t.Status)).version  # once the host is back
                if newest - version > self.info.rules.max_staleness:  # guard: weights-outlast-an-outage
                    raise
            finally:
                self.relays.learn(sources)

    def _demand_granted(self, grant: t.Grant | None, manifest: t.Manifest, signed: bytes) -> None:
        """Raise `Contradiction` if a grant names other weights or files than the manifest."""
        # guard: manifest-of-the-lease
        if grant is not None and (manifest.root, content_of(manifest)) != (grant.root, grant.content):
            what = "files" if manifest.root == grant.root else "weights"
            raise self._contradiction(f"the manifest of version {manifest.version} that the host serves names other {what} "
                                      "than the lease that it signed", grant, signed)  # fmt: skip

    async def _signed_manifest(self, version: int) -> bytes:
        return await self.client.get(f"/v1/manifests/{version}", cap=MAX_MANIFEST_BYTES)

    def _open(self, signed: bytes, version: int, most_bytes: int | None, now: float | None) -> t.Manifest:
        """A manifest of this run; `most_bytes` and `now` are as of `open_manifest`."""
        return open_manifest(
            signed,
            ManifestTrust(self.info.run, self._publishers(), most_bytes),
            now=now,
            version=version,
            issued_since=self.issued.get(version, 0.0),
        )

    def _most_bytes(self, keep: int, max_bytes: int | None) -> int | None:
        """The most bytes that a version may have here."""
        if self.max_disk_bytes is not None:  # guard: disk-of-strangers
            other_bytes = self.evidence.most_bytes + (self.shared.most_bytes if self.shared.is_on else 0)
            room = room_for_version(self.max_disk_bytes - other_bytes, keep)
            max_bytes = room if max_bytes is None else min(room, max_bytes)
        if self.memory is not None:  # a weight takes at least the bytes in memory that it takes in its file
            max_bytes = min(self.memory.left_bytes, self.memory.left_bytes if max_bytes is None else max_bytes)
        return max_bytes

    def _publishers(self) -> t.Publishers:
        return self.publishers or self.info.all_publishers

    async def _load(self, brought: "FetchedVersion") -> None:
        """Let the engine load a version from its directory. Raises `Overreach` if it does not fit into the memory."""
        directory, version = brought.directory, brought.manifest.version
        if self.memory is not None:
            self.needs = engine_memory_in(directory, self.engine.facts.dtype)
            # guard: policy-fits-memory
            self.memory.demand(f"loading version {version}", self.needs.load(), self.needs.loaded)
        with self.within_memory(f"loading version {version}"):
            await asyncio.to_thread(self.policy.load, directory, version)

    def within_memory(self, what: str) -> AbstractContextManager[None]:
        """Around work: an allocation that fails becomes an `Overreach`. `what` begins its sentence."""
        return contextlib.nullcontext() if self.memory is None else self.memory.told(what)

    def demand_play(self, lease: t.Lease, at_once: int = 1) -> None:
        """Raise `Overreach` if playing a lease, and proving it, would take more memory than there is. Of several blocks at
        once, some may be of the next lease."""
        if self.memory is None or self.needs is None:
            return
        rules, sampling, needs = self.info.rules, lease.sampling, self.needs
        rows = [len(block.slots) * rules.group_size for block in lease.blocks]
        need = needs.play(max(rows, default=0) * at_once, sampling.max_tokens, sampling.all_tokens)
        on_gpu = played_on_gpu(need)
        if rules.proofs != "none":
            proven = needs.score(sum(rows) * sampling.all_tokens, sampling.max_tokens, hidden=True)
            need, on_gpu = max(need, proven), max(on_gpu, scored_on_gpu(proven))
        kept = COPIES * largest_submission_bytes(lease, rules) * (2 if at_once > 1 else 1)
        what = f"a lease of {sum(rows)} rollouts of up to {sampling.all_tokens} tokens"
        self.memory.demand(what, needs.loaded + need + kept, needs.loaded + on_gpu)  # guard: lease-fits-memory

    def blocks_at_once(self, lease: t.Lease, most: int) -> int:
        """How many blocks like those of a lease fit into the memory together. Raises `Overreach` if not even one does."""
        for count in range(most, 1, -1):
            with contextlib.suppress(Overreach):
                self.demand_play(lease, count)
                return count
        self.demand_play(lease)
        return 1

    def demand_judge(self, check: t.Check, size_bytes: int, parents_bytes: int = 0) -> None:
        """Raise `Overreach` if judging a submission of this size, which continues groups of that size, would take more
        memory than there is."""
        if self.memory is None or self.needs is None:
            return
        tokens, loaded = size_bytes // BYTES_PER_TOKEN, self.needs.loaded
        need = self.needs.score(tokens, check.lease.sampling.max_tokens, hidden=True)
        on_gpu, need = loaded + scored_on_gpu(need), loaded + need + COPIES * (size_bytes + parents_bytes)
        self.memory.demand(f"a submission of {tokens} tokens", need, on_gpu)  # guard: check-fits-memory


@dataclass(frozen=True)
class FetchedVersion:
    """A version that is on the disk, verified."""

    manifest: t.Manifest
    signed: bytes
    directory: Path
