"""The coordinator's desk: what the rules must not have, the clock, the secrets, the blobs, and who is checking what.

Called by `api` for each request. It turns a request into a command for the book and the state into an answer. It
knows no HTTP; the rules are in `ledger/decide`.
"""

import logging
from collections.abc import Callable

import msgspec

from shoal.config import RunConfig
from shoal.folder import RunFolder
from shoal.ledger import events as ev
from shoal.ledger.book import Book
from shoal.ledger.commands import AskLease, Judge, Publish, Refused, ReturnLeases, Submit, Wait
from shoal.ledger.decide import groups_in_flight
from shoal.ledger.state import Lease, Node, State, state_hash
from shoal.ledger.verify import AUDIT_CHAIN, SLOT_CHAIN
from shoal.net.blobs import FolderBlobs
from shoal.protocol import types as t
from shoal.protocol.constants import MAX_CHUNK_BYTES, PROTOCOL_VERSION
from shoal.protocol.identity import Key
from shoal.protocol.randomness import SecretChain, draw_task, slot_seed, uniform
from shoal.protocol.wire import WireError, digest, from_json, from_msgpack, to_json
from shoal.weights.manifest import open_manifest

log = logging.getLogger("coordinator")

CHECK_S = 60.0
"""A validator has this long for one submission before another may take it."""


class Desk:
    """An open run."""

    def __init__(self, folder: RunFolder, config: RunConfig, book: Book, key: Key, clock: Callable[[], float]) -> None:
        self.book, self.clock = book, clock
        self._config, self._key = config, key
        self.blobs = FolderBlobs(folder.blobs)
        seed = folder.seed()
        self._slot_links = SecretChain(seed, SLOT_CHAIN).links()
        self._audit_links = SecretChain(seed, AUDIT_CHAIN).links()
        self._manifests: dict[int, t.Manifest] = {}
        for version, record in book.state.versions.items():
            self._remember_manifest(version, record.manifest)
        self._public_chunks = {c for m in self._manifests.values() for f in m.files for c in f.chunks}
        self._checking: dict[str, tuple[str, float]] = {}
        """Submission to (validator, until): not logged, since a restart may hand it out again."""
        self._bodies = {
            name: book.state.leases[submission.lease].version
            for name, submission in book.state.submissions.items()
            if self.blobs.has(name)
        }
        """Submissions whose bytes are kept, with their version."""
        self._waiting = ("", clock())
        self.last_seen: dict[str, float] = {}

    @property
    def state(self) -> State:
        return self.book.state

    # --- what anyone may ask ---

    def info(self) -> t.RunInfo:
        """The run, for a stranger."""
        state = self.state
        assert state.sampling is not None
        return t.RunInfo(
            run=state.run, name=state.name, protocol=PROTOCOL_VERSION, run_key=state.run_key,
            trainer_key=state.trainer_key, head=state.head, chain_end=state.chain_end, envs=state.envs,
            sampling=state.sampling, rules=state.law, phase=state.phase, version=state.version,  # type: ignore[arg-type]
        )  # fmt: skip

    def nodes(self) -> list[t.NodeState]:
        """All members, in the order in which they joined."""
        return [node_state(node) for node in self.state.nodes.values()]

    def status(self) -> t.Status:
        """Where the run stands and what it waits for."""
        state, reason = self.state, self._waiting_for()
        if reason != self._waiting[0]:
            self._waiting = (reason, self.clock())
        return t.Status(
            name=state.name, phase=state.phase, version=state.version, steps=state.law.steps,
            accepted=state.accepted_groups, refused=state.refused, in_flight=groups_in_flight(state),
            pending=len(state.pending), waiting_for=reason, waiting_s=self.clock() - self._waiting[1],
        )  # fmt: skip

    def _waiting_for(self) -> str:
        state = self.state
        if state.phase == "ended":
            return (
                f"validators: {len(state.pending)} submissions to judge"
                if state.pending
                else "nothing: the run has ended"
            )
        if state.phase == "paused":
            return "the host: the run is paused"
        if state.version < 0:
            return "the trainer: the first version"
        if state.version in state.batches:
            return f"the trainer: step {state.version}"
        need, have = state.law.batch_groups, len(state.pool)
        if state.pending:
            judged = f"{have} of {need} groups for step {state.version}"
            return f"validators: {len(state.pending)} submissions to judge ({judged})"
        if not any(node.role == "worker" for node in state.nodes.values()):
            return "workers: none has joined yet"
        return f"workers: {have} of {need} groups for step {state.version}"

    def state_hash(self) -> t.StateHash:
        """What a replay must give."""
        return t.StateHash(self.state.seq, self.state.head, state_hash(self.state))

    # --- leases ---

    async def lease(self, key: str, request: t.LeaseRequest) -> t.LeaseAnswer:
        """The open lease of a worker or a new one. Raises `Wait`, `Refused`."""
        self.last_seen[key] = self.clock()
        if request.returning:
            await self.book.submit(ReturnLeases(key, request.returning, self.clock()))
            return t.LeaseAnswer(None, 0.0, "given back")
        quota = self._config.storage.quota_mb * 1_000_000
        if self.blobs.size_bytes > quota:
            raise Wait(f"the host's disk quota is used up ({quota // 1_000_000} MB, storage.quota_mb)", 10.0)
        await self.book.submit(AskLease(key, request.holding, request.tokens_per_s, self.clock()))
        lease = next((x for x in self.state.open_leases_of(key) if x.id not in request.holding), None)
        if lease is None:
            raise Wait("the lease was taken back at this moment", 0.5)
        return t.LeaseAnswer(self.wire_lease(lease), 0.0, "")

    def wire_lease(self, lease: Lease) -> t.Lease:
        """A lease with the seeds, environments and tasks of its slots."""
        state = self.state
        assert state.sampling is not None
        size = state.law.block_groups
        blocks = tuple(
            t.Block(b, tuple(self._slot(lease.version, s) for s in range(b * size, (b + 1) * size)))
            for b in lease.blocks
        )
        return t.Lease(lease.id, lease.worker, lease.version, blocks, state.sampling, lease.issued, lease.deadline)

    def _slot(self, version: int, slot: int) -> t.Slot:
        state = self.state
        seed = slot_seed(state.run, version, state.versions[version].root, self._slot_links[version + 1], slot)
        env, task = draw_task(seed, [e.weight for e in state.envs], [e.num_tasks for e in state.envs])
        return t.Slot(slot, seed.hex(), state.envs[env].name, task)

    # --- submissions and verdicts ---

    async def take_submission(self, key: str, lease_id: str, body: bytes, name: str) -> t.Receipt:
        """Keep a submission and book it; the receipt is signed after the log has it. Raises `Refused`, `WireError`.

        `name` is the digest of `body`, verified.
        """
        lease = self.state.leases.get(lease_id)
        if lease is None or lease.worker != key:
            raise Refused("not_yours", f"lease {lease_id} is not one of yours")
        submission = from_msgpack(body, t.Submission)
        if (submission.run, submission.lease, submission.version) != (self.state.run, lease_id, lease.version):
            raise WireError(f"the submission names another run, lease or version than lease {lease_id}")
        self.blobs.put(body, name)
        link = self._audit_links[lease.version + 1]
        draws = tuple(
            uniform("audit", link, bytes.fromhex(name), i.to_bytes(8, "big")) for i in range(len(submission.groups))
        )
        groups = tuple(digest(group) for group in submission.groups)
        await self.book.submit(Submit(key, lease_id, name, len(body), groups, draws, self.clock()))
        self._bodies[name] = lease.version
        kept = self.state.submissions[name]
        receipt = t.Receipt(self.state.run, lease_id, name, kept.seq, kept.head, kept.time, "")
        return msgspec.structs.replace(receipt, signature=self._key.sign("receipt", to_json(receipt)))

    def next_check(self, key: str) -> t.Check | None:
        """The submission that a validator is at, or the oldest that nobody is at. Raises `Refused`."""
        node = self.state.nodes.get(key)
        if node is None or node.role != "validator" or node.standing == "kicked":
            raise Refused("not_joined", f"{key[:12]} has not joined as a validator: POST /v1/nodes first")
        now = self.clock()
        self.last_seen[key] = now
        pending = set(self.state.pending)
        self._checking = {s: held for s, held in self._checking.items() if s in pending and held[1] > now}
        mine = [s for s in self.state.pending if self._checking.get(s, ("", 0.0))[0] == key]
        free = [s for s in self.state.pending if s not in self._checking]
        if not mine and not free:
            return None
        name = (mine or free)[0]
        self._checking[name] = (key, now + CHECK_S)
        submission = self.state.submissions[name]
        lease = self.wire_lease(self.state.leases[submission.lease])
        return t.Check(name, lease, submission.audited, now + CHECK_S)

    async def take_verdict(self, key: str, verdict: t.Verdict) -> None:
        """Book a verdict. Raises `Refused`."""
        for entry in await self.book.submit(Judge(key, verdict, self.clock())):
            if isinstance(entry.body, ev.NodeQuarantined):
                log.info("quarantined node=%s cause=%r", entry.body.node[:12], entry.body.cause)

    # --- versions ---

    async def take_checkpoint(self, key: str, signed: bytes) -> None:
        """Book a new version whose chunks are all here. Raises `Refused`, `PeerError`."""
        state = self.state
        manifest = open_manifest(signed, run=state.run, keys=(state.trainer_key,), now=self.clock())
        missing = [c for f in manifest.files for c in f.chunks if not self.blobs.has(c)]
        if missing:
            raise Refused("incomplete", f"{len(missing)} chunks are missing, such as {missing[0][:12]}: PUT them first")
        name = self.blobs.put(signed)
        first = max(0, manifest.version - state.law.max_staleness - 2)
        links = {
            v: (self._slot_links[v + 1].hex(), self._audit_links[v + 1].hex())
            for v in range(first, manifest.version + 1)
        }
        await self.book.submit(Publish(key, manifest.version, manifest.root, name, links, self.clock()))
        self._remember_manifest(manifest.version, self.state.versions[manifest.version].manifest)
        self._public_chunks |= {c for f in manifest.files for c in f.chunks}
        self._forget_old_bodies()

    def manifest(self, version: str) -> bytes:
        """The signed manifest of a version or of "latest", as stored. Raises `NothingYet`."""
        number = self.state.version if version == "latest" else int(version) if version.isdecimal() else -1
        record = self.state.versions.get(number)
        if record is None:
            raise Refused("nothing_yet", f"version {version} is not published; the latest is {self.state.version}")
        return self.blobs.get(record.manifest)

    def _remember_manifest(self, version: int, name: str) -> None:
        if self.blobs.has(name):
            signed = from_json(self.blobs.get(name), t.SignedManifest)
            self._manifests[version] = from_json(signed.body, t.Manifest)

    # --- blobs ---

    def put_chunk(self, key: str, name: str, body: bytes, found: str) -> None:
        """Keep a chunk from the trainer, which hashes to `found`. Raises `Refused`."""
        if key != self.state.trainer_key:
            raise Refused("not_admitted", "only the trainer puts chunks; submissions go to /v1/leases/{id}/submission")
        if len(body) > MAX_CHUNK_BYTES or found != name:
            raise Refused("malformed", "the bytes do not have the hash in the path, or are longer than MAX_CHUNK_BYTES")
        self.blobs.put(body, found)

    def may_read(self, name: str, key: str) -> bool:
        """Chunks and final submissions are for anyone, pending ones for validators, batched ones for the trainer."""
        if name in self._public_chunks:
            return True
        submission = self.state.submissions.get(name)
        return submission is not None and (submission.decided or key in self.state.validators)

    def _forget_old_bodies(self) -> None:
        """Delete the bodies that the run file does not ask to keep: the log remembers their hashes."""
        storage, state = self._config.storage, self.state
        if storage.retain == "all":
            return
        oldest = state.version - max(storage.window_steps, state.law.max_staleness + 1)
        for name in [name for name, version in self._bodies.items() if version < oldest]:
            if not state.submissions[name].decided or (storage.retain == "batches" and self._was_used(name)):
                continue
            del self._bodies[name]
            self.blobs.delete(name)
        kept = {c for v, m in self._manifests.items() if v >= oldest for f in m.files for c in f.chunks}
        for version in [v for v in self._manifests if v < oldest]:
            for chunk in {c for file in self._manifests.pop(version).files for c in file.chunks} - kept:
                self._public_chunks.discard(chunk)
                self.blobs.delete(chunk)

    def _was_used(self, submission: str) -> bool:
        lease = self.state.leases[self.state.submissions[submission].lease]
        slots = self.state.versions[lease.version].slots.values()
        return any(slot.submission == submission and slot.step >= 0 for slot in slots)


def node_state(node: Node) -> t.NodeState:
    """What the wire says of a node."""
    return t.NodeState(
        key=node.key, role=node.role, name=node.name, standing=node.standing,  # type: ignore[arg-type]
        credits=node.credits, accepted=node.accepted, refused=node.refused, lapsed=node.lapsed, reasons=node.reasons,
        last_reason=node.last_reason,
    )  # fmt: skip


def batch_of(state: State, step: int) -> t.Batch | None:
    """The batch of a step as the trainer reads it, or None before it is formed."""
    if step not in state.batches:
        return None
    members = []
    for version, number in state.batches[step]:
        slot = state.versions[version].slots[number]
        members.append(t.BatchGroup(version, number, slot.submission, slot.index, slot.digest, slot.rewards))
    return t.Batch(step, tuple(members))
