"""The coordinator's desk: what the rules must not have, the clock, the secrets, the blobs, and who is checking what.

Called by `api` for each request. It turns a request into a command for the book and the state into an answer. It
knows no HTTP; the rules are in `ledger/rules`.
"""

import logging
from collections.abc import Callable, Sequence
from itertools import islice

import msgspec

from shoal.algos.projection import VALUES, agree
from shoal.config import RunConfig
from shoal.errors import NothingYet
from shoal.folder import RunFolder
from shoal.ledger.answers import Refused, Wait
from shoal.ledger.facts.leases import AskLease, ReturnLeases
from shoal.ledger.facts.members import NodeQuarantined, ValidatorFault
from shoal.ledger.facts.pay import Slash
from shoal.ledger.facts.run import RulesChanged, Tick
from shoal.ledger.facts.submissions import Submit
from shoal.ledger.facts.verdicts import Judge
from shoal.ledger.facts.versions import Publish
from shoal.ledger.log.book import Book
from shoal.ledger.log.credits import explain
from shoal.ledger.log.statement import sign_statement
from shoal.ledger.log.verify import AUDIT_CHAIN, SLOT_CHAIN
from shoal.ledger.rules.batches import groups_beyond_share, next_members
from shoal.ledger.rules.leases import groups_in_flight, without_signal
from shoal.ledger.rules.submissions import lease_to_fill
from shoal.ledger.rules.verdicts import is_open, to_judge
from shoal.ledger.seeds import audit_draws, lease_of, recheck_draw, turns
from shoal.ledger.state import LeaseRecord, Member, State, SubmissionRecord, state_hash
from shoal.ledger.table import decide, read_entry
from shoal.net.blobs import FolderBlobs, Upload
from shoal.proofs.commit import largest_submission_bytes
from shoal.protocol import types as t
from shoal.protocol.accounts import CreditLine, CreditPage, Statement
from shoal.protocol.constants import CHAIN_LENGTH, MAX_CHUNK_BYTES, MAX_EVENTS, MAX_NODES, PROTOCOL_VERSION
from shoal.protocol.identity import Key
from shoal.protocol.randomness import SecretChain
from shoal.protocol.wire import WireError, digest, from_json, from_msgpack, to_json
from shoal.roles.coordinator.kept import Kept
from shoal.weights.manifest import is_renewal, open_manifest

log = logging.getLogger("coordinator")

MAX_CREDIT_LINES = 500
"""Of one page of a node's pay explained."""
HASHING_SHARE = 0.02
"""Of the coordinator's time, at most, that goes into hashing its whole state for whoever asks."""
LOOK_BACK_EVENTS = 200
"""Before a page, so that it knows the verdicts behind its first lines."""


class Desk:
    """An open run."""

    def __init__(self, folder: RunFolder, config: RunConfig, book: Book, key: Key, clock: Callable[[], float]) -> None:
        self.book, self.clock = book, clock
        self._config, self._key = config, key
        self.blobs = FolderBlobs(folder.blobs)
        seed = folder.seed()
        self._slot_links = SecretChain(seed, SLOT_CHAIN).links()
        self._audit_links = SecretChain(seed, AUDIT_CHAIN).links()
        self.kept = Kept(self.blobs, book, config.storage)
        self._waiting = ("", clock())
        self.last_seen: dict[str, float] = {}
        self._hashed: t.StateHash | None = None
        self._hash_again_at = 0.0

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
            sampling=state.sampling, rules=state.rules, phase=state.phase, version=state.main.version,  # type: ignore[arg-type]
        )  # fmt: skip

    def nodes(self, after: str = "") -> list[t.NodeState]:
        """The next `MAX_NODES` members after one, or the first, in the order in which they joined. Raises `Refused`."""
        keys = iter(self.state.members)
        if after and after not in keys:  # which also takes it and all before it off
            raise Refused("unknown", f"no node {after[:16]} in this run")
        return [node_state(self.state.members[key]) for key in islice(keys, MAX_NODES)]  # guard: page-of-nodes

    def status(self) -> t.Status:
        """Where the run stands and what it waits for."""
        state, reason, flat = self.state, self._waiting_for(), without_signal(self.state, self.state.main)
        same = "no signal" if flat else reason
        if same != self._waiting[0]:
            self._waiting = (same, self.clock())
        if flat and state.phase != "paused":
            reason = f"{reason}; {flat}"
        return t.Status(
            name=state.name, phase=state.phase, version=state.main.version, steps=state.rules.steps,
            accepted=state.accepted_groups, refused=state.refused, in_flight=groups_in_flight(state, state.main),
            pending=len(state.pending) + len(state.rechecks), waiting_for=reason, waiting_s=self.clock() - self._waiting[1],
            flat_groups=state.main.flat, flat_reward=state.main.flat_reward / max(1, state.main.flat),
            pause_cause=state.pause_cause,
        )  # fmt: skip

    def _waiting_for(self) -> str:
        state = self.state
        if state.phase == "ended":
            return (
                f"validators: {len(state.pending)} submissions to judge"
                if state.pending
                else "nothing: the run has ended"
            )
        if state.phase == "paused" and (flat := without_signal(state, state.main)):
            return f"the host: {flat}. Look at some of them, then `shoal admin resume` or `shoal admin drain`"
        if state.phase == "paused":
            return "the host: the run is paused"
        if state.main.version < 0:
            return "the trainer: the first version"
        if state.main.version in state.main.batches:
            return f"the trainer: step {state.main.version}"
        need, have = state.rules.batch_groups, len(next_members(state, state.main))
        if state.pending:
            judged = f"{have} of {need} groups for step {state.main.version}"
            return f"validators: {len(state.pending)} submissions to judge ({judged})"
        if state.phase == "draining":
            out = len(state.open_leases)
            return f"workers: {out} lease{'s' if out != 1 else ''} to finish, then the run ends"
        if not any(node.role == "worker" for node in state.members.values()):
            return "workers: none has joined yet"
        surplus = groups_beyond_share(state, state.main)
        if surplus:
            return (
                f"other workers: {have} of {need} groups for step {state.main.version}, and {surplus} more of workers that "
                "have filled their share (verify.worker_share)"
            )
        return f"workers: {have} of {need} groups for step {state.main.version}"

    def state_hash(self) -> t.StateHash:
        """What a replay must give at the newest event; or, where that takes long to reckon, at one a little older."""
        began, known = self.clock(), self._hashed
        if known is not None and (known.head == self.state.head or began < self._hash_again_at):  # guard: seldom-hashed
            return known
        self._hashed = t.StateHash(self.state.seq, self.state.head, state_hash(self.state))
        self._hash_again_at = began + (self.clock() - began) / HASHING_SHARE
        return self._hashed

    def credit_page(self, key: str, after: int) -> CreditPage:
        """What touched the pay of a member after an event, at most `MAX_EVENTS` events or `MAX_CREDIT_LINES` lines."""
        after = max(-1, after)
        first = max(-1, after - LOOK_BACK_EVENTS)
        rows = self.book.store.read(first, after - first + MAX_EVENTS)
        entries = [read_entry(data)[0] for data, _ in rows]
        end = max(after, entries[-1].seq) if entries else after
        lines: list[CreditLine] = []
        for line in explain(entries, self.state, key):
            if line.seq <= after:
                continue
            if len(lines) >= MAX_CREDIT_LINES and line.seq > lines[-1].seq:
                end = lines[-1].seq
                break
            lines.append(line)
        node = self.state.members[key]
        return CreditPage(key, node.leases, node.lapsed, tuple(lines), end, end < self.state.seq)

    def statement(self, key: str) -> Statement:
        """The balance of a member, signed."""
        return sign_statement(self.state, key, self._key, self.clock())

    # --- leases ---

    async def lease(self, key: str, request: t.LeaseRequest, in_turn: bool = True) -> t.LeaseAnswer:
        """The open lease of a worker, or a new one if it is its turn. Raises `Wait`, `Refused`."""
        self.last_seen[key] = self.clock()
        if request.returning:
            await self.book.submit(ReturnLeases(key, request.returning, self.clock()))
            return t.LeaseAnswer(None, 0.0, "given back")
        quota = self._config.storage.quota_mb * 1_000_000
        if not self.kept.has_room(quota):  # guard: quota
            raise Wait(f"the host's disk quota is used up ({quota // 1_000_000} MB, storage.quota_mb)", 10.0)
        ask = AskLease(key, request.holding, request.tokens_per_s, self.clock())
        if not in_turn and decide(ask, self.state):
            raise Wait("workers that have waited longer come first", 1.0)
        await self.book.submit(ask)
        lease = next((x for x in self.state.open_leases_of(key) if x.id not in request.holding), None)
        if lease is None:
            raise Wait("the lease was taken back at this moment", 0.5)
        return t.LeaseAnswer(self.wire_lease(lease), 0.0, "")

    def wire_lease(self, lease: LeaseRecord) -> t.Lease:
        """A lease with the seeds, environments and tasks of its slots."""
        return lease_of(self.state, lease, self._slot_links[lease.version + 1])

    # --- submissions and verdicts ---

    def expect_submission(self, key: str, lease_id: str, name: str, size_bytes: int) -> t.Receipt | None:
        """Whether a body of this digest and size may come: its receipt if it came before. Raises `Refused`, `WireError`."""
        lease = lease_to_fill(self.state, key, lease_id, name)
        if lease.submission:  # guard: booked-is-not-read-again
            return self._receipt(name)
        largest = self._largest_body(lease)
        if size_bytes > largest:  # guard: body-size-of-the-lease
            raise WireError(
                f"the submission has {size_bytes} bytes, more than the {largest} that lease {lease_id} can need"
            )
        return None

    async def take_submission(self, key: str, lease_id: str, upload: Upload, name: str) -> t.Receipt:
        """Keep a submission and book it; the receipt is signed after the log has it. Raises `Refused`, `WireError`.

        `name` is the digest of what was uploaded, verified.
        """
        known = self.expect_submission(key, lease_id, name, upload.size)
        if known is not None:
            return known
        lease = self.state.leases[lease_id]
        groups = self._read_groups(lease, upload.read())
        link = self._audit_links[lease.version + 1]
        draws, order = audit_draws(name, len(groups), link), turns(name, self.state.validators, link)
        upload.keep(name)
        try:
            await self.book.submit(Submit(key, lease_id, name, upload.size, groups, draws, order, self.clock()))
        except Refused:
            if name not in self.state.submissions:
                self.blobs.delete(name)  # what is not booked would fill the disk, and nobody would ever delete it
            raise
        self.kept.bodies[name] = lease.version
        return self._receipt(name)

    def _read_groups(self, lease: LeaseRecord, body: bytes) -> tuple[str, ...]:
        """Digests of a submission's groups. Raises `WireError` when it is not one for the lease."""
        due = len(lease.blocks) * self.state.rules.block_groups
        submission = from_msgpack(body, t.Submission)
        if (submission.run, submission.lease, submission.version) != (self.state.run, lease.id, lease.version):
            raise WireError(f"the submission names another run, lease or version than lease {lease.id}")
        if len(submission.groups) != due:  # before each is hashed and drawn for: there may be millions
            raise WireError(f"lease {lease.id} has {due} slots, the submission {len(submission.groups)} groups")
        return tuple(digest(group) for group in submission.groups)

    def _receipt(self, name: str) -> t.Receipt:
        booked = self.state.submissions[name]
        receipt = t.Receipt(self.state.run, booked.lease, name, booked.seq, booked.head, booked.time, "")
        return msgspec.structs.replace(receipt, signature=self._key.sign("receipt", to_json(receipt)))

    def _largest_body(self, lease: LeaseRecord) -> int:
        """Bytes that a lease can need: what is decoded and kept is bounded by what was asked for."""
        return largest_submission_bytes(self.wire_lease(lease), self.state.rules)

    def next_check(self, key: str) -> t.Check | None:
        """The oldest submission whose turn is this validator's. Raises `Refused`."""
        node = self.state.members.get(key)
        if node is None or node.role != "validator":
            raise Refused("not_joined", f"{key[:12]} has not joined as a validator: POST /v1/nodes first")
        if key not in self.state.judges():  # guard: suspended-gets-no-work
            raise Refused("kicked", f"validator {node.name} ({key[:12]}) is asked no more: {node.last_reason}")
        now = self.clock()
        self.last_seen[key] = now
        names = to_judge(self.state, key, now)
        if not names:
            return None
        submission = self.state.submissions[names[0]]
        lease = self.wire_lease(self.state.leases[submission.lease])
        return t.Check(
            names[0], lease, submission.audited, now + self.state.law.turn_s, submission.draws, submission.rate,
            submission.mean_influence, (key, *submission.verdicts) if len(self.state.judges()) > 1 else (),
        )  # fmt: skip

    async def take_verdict(self, key: str, verdict: t.Verdict) -> None:
        """Book a verdict. Raises `Refused`."""
        submission = self.state.submissions.get(verdict.submission)
        if submission is None:
            raise Refused("unknown", f"no submission {verdict.submission[:12]}")
        projection, differs_from = self._compare(key, submission, verdict)
        bare = msgspec.structs.replace(verdict, projections={})
        link = self._audit_links[self.state.leases[submission.lease].version + 1]
        again = recheck_draw(verdict.submission, link)
        judged = Judge(key, bare, self.clock(), projection, again, differs_from)
        for entry in await self.book.submit(judged):
            match entry.body:
                case NodeQuarantined(node=node, cause=cause):
                    log.info("quarantined node=%s cause=%r", node[:12], cause)
                case RulesChanged(phase="paused"):
                    log.warning("paused: %s", without_signal(self.state, self.state.main))
                case Slash(node=node, tokens=tokens):
                    log.warning("slashed node=%s tokens=%d submission=%s", node[:12], tokens, verdict.submission[:12])
                case ValidatorFault(validator=validator, cause=cause):
                    log.warning("validator=%s submission=%s fault=%r", validator[:12], verdict.submission[:12], cause)
                case _:
                    pass

    def _compare(self, key: str, submission: SubmissionRecord, verdict: t.Verdict) -> tuple[str, tuple[str, ...]]:
        """Keep what a verdict shows of the activations; returns its blob, and the earlier voices that show others.

        Raises `Refused` for one that does not show what the check asked for, or that was overtaken by another voice.
        """
        state, slots, judges = self.state, _audited(verdict.groups), self.state.judges()
        sits = key in judges and len(judges) > 1  # guard: projections-of-judges
        # guard: projections-of-first-verdicts
        if not sits or key in submission.verdicts or not is_open(state, submission) or not slots:
            return "", ()
        asked = (key, *submission.verdicts)
        if any(len(verdict.projections.get(other, ())) != VALUES for other in asked):  # guard: compared-with-all
            raise Refused("not_your_turn", f"submission {submission.digest[:12]}: the verdict lacks a projection for each "
                          "validator that has judged by now: ask GET /v1/checks again")  # fmt: skip
        shown = {other: verdict.projections[other] for other in asked}  # guard: projections-asked-for
        blob = self.blobs.put(to_json(shown))
        self.kept.projections[blob] = submission.digest
        # guard: accuse-of-the-same-slots
        alike = [other for other, groups in submission.verdicts.items() if _audited(groups) == slots]
        # guard: accuse-who-differs
        return blob, tuple(other for other in alike if not self._agrees(submission, other, shown))

    def _agrees(self, submission: SubmissionRecord, other: str, found: dict[str, tuple[float, ...]]) -> bool:
        """Whether another validator's projection is what a later one found for its key."""
        try:
            data = self.blobs.get(submission.projections.get(other, ""))
            claimed = from_json(data, dict[str, tuple[float, ...]])
        except (NothingYet, WireError):
            claimed = {}
        return agree(claimed.get(other, ()), found.get(other, ()))

    async def tick(self) -> None:
        """Tell the rules that time has passed; after the end also the secrets that are still kept."""
        now, ended = self.clock(), self.state.phase == "ended"
        # Each answers the first kind of what is due: nobody's lapses may keep a dispute from its end.
        while await self.book.submit(Tick(now, self._links(self._hidden() if ended else []))):
            pass

    def _hidden(self) -> list[int]:
        """Versions whose links are not revealed."""
        return [v for v, version in self.state.main.versions.items() if not version.revealed]

    def _links(self, versions: Sequence[int]) -> dict[int, tuple[str, str]]:
        return {v: (self._slot_links[v + 1].hex(), self._audit_links[v + 1].hex()) for v in versions}

    # --- versions ---

    def admit_trainer(self, key: str) -> None:
        """Raises `Refused` unless the key is the trainer's."""
        if key != self.state.trainer_key:  # guard: trainer-puts-chunks
            raise Refused(
                "not_admitted",
                "only the trainer puts chunks and versions; submissions go to /v1/leases/{id}/submission",
            )

    def admit_validator(self, key: str) -> None:
        """Raises `Refused` unless the key is that of a validator of this run, asked or not."""
        if key not in self.state.validators:
            raise Refused("not_admitted", f"{key[:12]} is not a validator's key: `shoal admin admit` admits it")

    async def take_checkpoint(self, key: str, signed: bytes) -> None:
        """Book a new version whose chunks are all here, or a later date of one. Raises `Refused`, `PeerError`."""
        state = self.state
        manifest = open_manifest(signed, run=state.run, keys=(state.trainer_key,), now=self.clock())
        missing = [c for f in manifest.files for c in f.chunks if not self.blobs.has(c)]
        if missing:
            raise Refused("incomplete", f"{len(missing)} chunks are missing, such as {missing[0][:12]}: PUT them first")
        known = self.kept.manifests.get(manifest.version)
        sent_again = known is not None and not is_renewal(manifest, known)  # guard: renewal-interval
        name = state.main.versions[manifest.version].manifest if sent_again else self.blobs.put(signed)
        links = self._links([*self._hidden(), manifest.version])
        await self.book.submit(Publish(key, manifest.version, manifest.root, name, links, self.clock()))
        self.kept.remember(manifest.version)
        self.kept.forget_old()

    def manifest(self, version: str) -> bytes:
        """The signed manifest of a version or of "latest", as stored. Raises `NothingYet`."""
        # guard: number-length
        known = version.isdecimal() and len(version) <= len(str(CHAIN_LENGTH))  # Python reads no number of 5,000 digits
        number = self.state.main.version if version == "latest" else int(version) if known else -1
        record = self.state.main.versions.get(number)
        if record is None:
            raise Refused(
                "nothing_yet", f"version {version[:16]} is not published; the latest is {self.state.main.version}"
            )
        return self.blobs.get(record.manifest)

    # --- blobs ---

    def put_chunk(self, key: str, name: str, body: bytes, found: str) -> None:
        """Keep a chunk from the trainer, which hashes to `found`. Raises `Refused`."""
        self.admit_trainer(key)
        if len(body) > MAX_CHUNK_BYTES or found != name:  # guard: chunk-name
            raise Refused("malformed", "the bytes do not have the hash in the path, or are longer than MAX_CHUNK_BYTES")
        self.blobs.put(body, found)


def _audited(groups: Sequence[t.GroupVerdict]) -> set[int]:
    """Slots whose activations a verdict speaks of."""
    return {group.slot for group in groups if group.audited}


def node_state(node: Member) -> t.NodeState:
    """What the wire says of a node."""
    return t.NodeState(
        key=node.key, role=node.role, name=node.name, standing=node.standing,  # type: ignore[arg-type]
        credits=node.credits, accepted=node.accepted, refused=node.refused, lapsed=node.lapsed, reasons=node.reasons,
        last_reason=node.last_reason, vested=node.vested, leases=node.leases, influence=node.influence,
        stale=node.stale,
    )  # fmt: skip


def batch_of(state: State, step: int) -> t.Batch | None:
    """The batch of a step as the trainer reads it, or None before it is formed."""
    if step not in state.main.batches:
        return None
    members = []
    for version, number in state.main.batches[step]:
        slot = state.main.versions[version].slots[number]
        members.append(t.BatchGroup(version, number, slot.submission, slot.index, slot.digest, slot.rewards))
    return t.Batch(step, tuple(members))
