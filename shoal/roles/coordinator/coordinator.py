"""An open run of the coordinator: leases and submissions, and what the rules must not have: clock, secrets and blobs.

HTTP is in `routes`, the rules are in `ledger`.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

from msgspec import UNSET, UnsetType

from shoal.config import RunConfig
from shoal.errors import StateError
from shoal.ledger.batches import SlotVoid
from shoal.ledger.commands import AskLease, ReturnLeases, Submit, Tick
from shoal.ledger.errors import Refused, Wait
from shoal.ledger.event_types import decide
from shoal.ledger.log.writer import LogWriter
from shoal.ledger.remedies import QUOTA
from shoal.ledger.run_events import RulesChanged
from shoal.ledger.slot_draws import audit_draws, lease_of, turn_draws, turns
from shoal.ledger.state import State
from shoal.ledger.state_records import LeaseRecord
from shoal.ledger.submissions import lease_to_fill
from shoal.ledger.verdict_decisions import overdue
from shoal.models.open_model import needs_transformers
from shoal.net.blobs import FolderBlobs, Upload
from shoal.net.server_address import port_of_living
from shoal.protocol import messages as t
from shoal.protocol.constants import BODY_WINDOW_S, COMPLETIONS, MAX_LEASE_BLOCKS, MAX_OPEN_LEASES
from shoal.protocol.encoding import WireError, digest, from_msgpack, to_msgpack
from shoal.protocol.host_signatures import sign_promise, terms_of
from shoal.protocol.message_sizes import turn_answer_bytes, turn_bytes
from shoal.protocol.messages.host_environments import difference
from shoal.protocol.messages.run import kind_of
from shoal.protocol.rollout_validation import most_bytes
from shoal.protocol.seed_chain import AUDIT_CHAIN, SLOT_CHAIN, SecretChain
from shoal.protocol.signing import Key
from shoal.roles.coordinator.blob_retention import BlobRetention, origin_of
from shoal.roles.coordinator.env_hang_reports import StopReports
from shoal.roles.coordinator.env_server_client import EnvServerClient, tasks_text
from shoal.roles.coordinator.relays import RelayList
from shoal.run_folder import RunFolder
from shoal.step_metrics import MetricsFollower
from shoal.verification.branch_parents import named_parents
from shoal.verification.encode_submission import largest_submission_bytes

FULL = (
    f"{QUOTA}: {{}} MB are needed now, and storage.quota_mb = {{}}. If that lasts, the host raises it "
    "and starts the run again"
)

log = logging.getLogger("coordinator")


class Coordinator:
    """An open run."""

    def __init__(
        self, folder: RunFolder, config: RunConfig, log_writer: LogWriter, key: Key, clock: Callable[[], float]
    ) -> None:
        self.log_writer, self.clock = log_writer, clock
        self._config, self.key, self._first_policy = config, key, folder.policy
        self.blobs = FolderBlobs(folder.blobs)
        self.hub, self._origin_address = folder.hub, folder.origin_address
        self._dashboard_address = folder.dashboard_address
        self.outgoing = folder.outgoing
        self.metrics, self.reading_metrics = MetricsFollower(folder.metrics), asyncio.Lock()
        self.metrics_file, self.evaluations, self.alarms = folder.metrics, folder.evaluations, folder.alarms
        self.solved = {env.label: env.solved for env in config.envs}
        secret = folder.secret()
        self.slot_links = SecretChain(secret, SLOT_CHAIN).links()
        self.audit_links = SecretChain(secret, AUDIT_CHAIN).links()
        self.kept = BlobRetention(self.blobs, log_writer, config.storage, folder.chunks)
        inside = not config.host.public_url
        # no event has their times, and a clock that is set must not drop all of them
        self.relays = RelayList(log_writer.state.run, time.monotonic, self.kept.public_piece, may_be_inside=inside)
        self.publishing = asyncio.Lock()
        """Versions are taken one at a time: a trainer's request may outlive the trainer."""
        self._telling = set[str]()
        """Leases whose parents are being read."""
        self.reported_void = dict[str, None]()
        """Causes of void slots that were logged, at most `MAX_REPORTED` of `verdicts`."""
        self.entered = dict[str, float]()
        """When each validator joined last since this start: a join that changes nothing is not in the log."""
        self.heard = dict[str, float]()
        """When each member sent its newest signed request since this start."""
        self.forked = set[str]()
        """Members that have seen an event which this log lacks."""
        self.stop_reports = StopReports()
        self.stage = EnvServerClient(folder.stage_address, key, log_writer.state.run)
        self._forgers = set[str]()
        """Workers that sent another rollout than the stage recorded, each told in the log once."""

    @property
    def state(self) -> State:
        return self.log_writer.state

    @property
    def has_adapter(self) -> bool:
        """Whether the versions are adapters."""
        return self._config.policy.adapter.rank > 0

    @property
    def has_coded_base(self) -> bool:
        """Whether the model that they belong to is published as codes."""
        return bool(self._config.policy.adapter.base)

    @cached_property
    def needs_transformers(self) -> bool:
        """Whether nodes compute the policy with transformers: by the files of the first version."""
        first = self._first_policy if self._first_policy.exists() else Path(self._config.policy.path)
        return needs_transformers(first, self._config.policy.implementation)

    @property
    def quota_bytes(self) -> int:
        """Disk space for blobs."""
        return self._config.storage.quota_mb * 1_000_000

    @property
    def over_quota(self) -> str:
        """What to say while more is stored than the quota allows, else nothing."""
        held = self.blobs.size_bytes
        return FULL.format(math.ceil(held / 1e6), self.quota_bytes // 1_000_000) if held > self.quota_bytes else ""

    def origin(self) -> str:
        """Where clients fetch chunks, as in `RunInfo`."""
        return origin_of(self._config.host, self._origin_address)

    def dashboard(self, scheme: str, name: str, proxied: bool) -> str:
        """Where a browser that has reached this machine by a name finds the run's page; "" if it finds none.

        The coordinator serves no page itself, and passes no request on to it: it has one event loop, which takes
        submissions, and hundreds of viewers would hold them up.
        """
        host = self._config.host
        if host.dashboard_url or host.public_url or proxied:  # guard: no-guess-behind-a-proxy
            return host.dashboard_url  # behind a proxy, only the host knows
        port = port_of_living(self._dashboard_address)
        return f"{scheme}://{f'[{name}]' if ':' in name else name}:{port}/" if port and name else ""

    def about_dashboard(self, page: str) -> str:
        """A line of the front page on where the run's page is, if `dashboard` says this; "" if the run has none."""
        if page:
            return f"page:   {page} (if it does not open, its port is closed on the way: ask the host)\n"
        port = port_of_living(self._dashboard_address)
        if not port:
            return ""
        return (
            f"page:   not published by the host. On its machine it is at port {port}. A proxy leads browsers there once it "
            "has a name for that port, and the run file has that name in host.dashboard_url\n"
        )

    def clock_behind(self) -> str:
        """What to say if the clock was set back, and no lease is granted until it has reached the log; else nothing."""
        ahead_s = self.state.time - self.clock()
        if ahead_s <= BODY_WINDOW_S:
            return ""
        return (
            f"no lease is granted until the host's clock, which was set back, has reached the log: the log is "
            f"{max(1.0, ahead_s / 60):.0f} min ahead of the host's clock"
        )

    # --- leases ---

    async def lease(self, key: str, request: t.LeaseRequest, in_turn: bool = True) -> t.LeaseAnswer:
        """A worker's open lease, or a new one if it is the worker's turn. Raises `Wait`, `Refused`."""
        if request.returning:
            lease, tasks = self._stopped(key, request)
            if lease is not None:  # guard: only-its-own-stops
                self.stop_reports.add(lease, self.state.members[key].name, request, tasks)
            for entry in await self.log_writer.submit(
                ReturnLeases(key, request.returning, self.clock(), request.stopped if lease else -1, tasks)
            ):
                match entry.body:
                    case RulesChanged(cause=cause):
                        log.warning("paused: %s", cause)
                    case SlotVoid(cause="stopped", version=version, slots=slots):
                        block = slots[-1] // self.state.rules.block_groups
                        log.warning("void slots: %s; %s", self.stop_reports.newest(version, block), tasks)
                    case _:
                        pass
            return t.LeaseAnswer(None, 0.0, "given back")
        behind = self.clock_behind()
        if behind:  # its leases would end in the past  # guard: clock-set-back
            raise Wait(behind, 5.0)
        if not self.kept.make_room(self.quota_bytes):  # guard: quota
            raise Wait(self.over_quota, 10.0)
        ask = AskLease(key, request.holding, request.tokens_per_s, self.clock(), self._most_blocks())
        if not in_turn and decide(ask, self.state):
            raise Wait("workers that have waited longer come first", 1.0)
        await self.log_writer.submit(ask)
        lease = next((x for x in self.state.open_leases_of(key) if x.id not in request.holding), None)
        if lease is None:
            raise Wait("the lease was taken back at this moment", 0.5)
        return self._granted(lease)

    def _stopped(self, key: str, request: t.LeaseRequest) -> tuple[LeaseRecord | None, str]:
        """The lease with the block that a worker says was stopped, and what to call that block's tasks; None if none of its
        own was, or if workers play no environment."""
        if kind_of(self.state.envs) == COMPLETIONS:  # guard: who-plays-nothing-stops-nothing
            return None, ""
        for lease in self.state.open_leases_of(key):
            if lease.id in request.returning and request.stopped in lease.blocks:
                block = next(one for one in self.wire_lease(lease).blocks if one.index == request.stopped)
                return lease, tasks_text(block)
        return None, ""

    def _most_blocks(self) -> int:
        """Blocks of a lease, at most. Where the host plays, a worker waits for the host after each turn, and fills the wait
        with blocks of its next lease. So there must be room for that one, while the lease before is being judged."""
        if kind_of(self.state.envs) != COMPLETIONS:
            return MAX_LEASE_BLOCKS
        rules = self.state.rules
        in_flight = (rules.max_staleness + 1) * rules.batch_groups // rules.block_groups
        return max(1, min(MAX_LEASE_BLOCKS, in_flight // (MAX_OPEN_LEASES + 1)))

    def lease_again(self, lease_id: str, request: t.LeaseRequest) -> t.LeaseAnswer:
        """The answer to a request that was answered before: the lease that it got then, if it is still open."""
        if lease_id in self.state.open_leases and lease_id not in request.holding:
            return self._granted(self.state.leases[lease_id])
        return t.LeaseAnswer(None, 1.0, "this very request was answered before: sign another")

    def _granted(self, lease: LeaseRecord) -> t.LeaseAnswer:
        grant = self.grant(lease)
        return t.LeaseAnswer(grant.lease, 0.0, "", grant.terms, grant.root, grant.content, grant.signature)

    def grant(self, lease: LeaseRecord) -> t.Grant:
        """A lease as its worker is given it, signed with the version that it must be played with."""
        state, version = self.state, lease.version
        root = state.stream_of(lease).versions[version].root
        terms, content = terms_of(state.envs, state.rules), self.kept.content(version)
        return sign_promise(t.Grant(state.run, self.wire_lease(lease), terms, root, content, ""), self.key)

    def wire_lease(self, lease: LeaseRecord) -> t.Lease:
        """A lease with the seeds, environments and tasks of its slots."""
        return lease_of(self.state, lease, self.slot_links[lease.version + 1])

    def labels(self, lease: LeaseRecord) -> dict[int, str]:
        """The environment of each slot of a lease, in a run with several."""
        if len(self.state.envs) < 2:
            return {}
        return {slot.slot: slot.env for block in self.wire_lease(lease).blocks for slot in block.slots}

    async def parents(self, key: str, lease_id: str) -> t.Parents:
        """The groups that a worker's lease continues, and nothing else of their submissions, in which there may be groups
        that others are still to make. Raises `Refused`, `NothingYet`.

        Bodies are large, so they are read one after another, beside everything else, and for a lease once at a time."""
        lease = self.wire_lease(lease_to_fill(self.state, key, lease_id, ""))  # guard: parents-of-own-leases
        if lease_id in self._telling:  # guard: parents-once-at-a-time
            raise Refused("busy", f"what lease {lease_id} continues is being read: ask again when that has ended")
        self._telling.add(lease_id)
        try:
            return await asyncio.to_thread(self._parents_of, lease)
        finally:
            self._telling.remove(lease_id)

    def _parents_of(self, lease: t.Lease) -> t.Parents:
        named, found = named_parents(lease), dict[t.Parent, bytes]()
        for name in dict.fromkeys(parent.submission for parent in named):
            groups = from_msgpack(self.blobs.get(name), t.Submission).groups
            found |= {parent: groups[parent.index] for parent in named if parent.submission == name}
        return t.Parents(tuple(found[parent] for parent in named))

    # --- turns, where the host plays the environments ---

    def expect_turn(self, key: str, lease_id: str, size_bytes: int) -> t.Lease:
        """The lease that a worker may take a turn of. Raises `Refused`, `WireError`."""
        if kind_of(self.state.envs) != COMPLETIONS:  # guard: turns-of-completions
            raise Refused("malformed", "this run has no turns: its workers play the environments themselves")
        lease = lease_to_fill(self.state, key, lease_id, "")  # guard: turns-of-own-leases
        rules, sampling = self.state.rules, self.state.sampling
        assert sampling is not None, "a run that has begun knows its sampling"
        largest = turn_bytes(rules.block_groups * rules.group_size, sampling.max_turn_tokens)
        if size_bytes > largest:  # guard: turn-size
            raise WireError(f"the turn has {size_bytes} bytes, more than the {largest} that a block can need")
        return self.wire_lease(lease)

    async def take_turn(self, lease: t.Lease, turn: t.EnvTurn) -> t.TurnAnswer:
        """What the stage answers. Raises `RequestRefused`, `WireError`."""
        block = next((block for block in lease.blocks if block.index == turn.block), None)
        if block is None:  # guard: turn-of-a-leased-block
            raise WireError(f"block {turn.block} is not of lease {lease.id}")
        rollouts = len(block.slots) * self.state.rules.group_size
        cap = turn_answer_bytes(rollouts, lease.sampling.max_tokens)
        return await self.stage.turn(t.Staged(lease.id, lease.version, (block,), turn, lease.worker), cap)

    # --- submissions ---

    def expect_submission(self, key: str, lease_id: str, name: str, size_bytes: int) -> t.Receipt | None:
        """Check that a body may fill the lease; its receipt if it already has. Raises `Refused`, `WireError`."""
        lease = lease_to_fill(self.state, key, lease_id, name)
        if lease.submission:  # guard: booked-is-not-read-again
            return self._receipt(name)
        largest = self._largest_body(lease)
        if size_bytes > largest:  # guard: body-size-of-the-lease
            raise WireError(
                f"the submission has {size_bytes} bytes, more than the {largest} that lease {lease_id} can need"
            )
        return None

    async def take_submission(self, key: str, lease_id: str, upload: Upload, name: str, created: int) -> t.Receipt:
        """Keep a submission, book it, and then sign its receipt. Raises `Refused`, `WireError`.

        `name` is the verified digest of the upload, `created` is when its sender signed it.
        """
        known = self.expect_submission(key, lease_id, name, upload.size)
        if known is not None:
            return known
        lease = self.state.leases[lease_id]
        submission = self._read_submission(lease, upload.read())
        groups, record = tuple(digest(group) for group in submission.groups), await self._keep_record(lease, submission)
        link = self.audit_links[lease.version + 1]
        draws = audit_draws(self.state, lease, link)
        judges = (lease, self.state.validators, link)
        order, of_turns = turns(*judges), turn_draws(*judges)
        self.kept.expect(name)
        upload.keep(name)
        try:
            submit = Submit(
                key, lease_id, name, upload.size, groups, draws, order, self.clock(), created, of_turns, record
            )
            await self.log_writer.submit(submit)
        except (Refused, StateError):
            if name not in self.state.submissions:
                for blob in (name, record) if record else (name,):
                    self.blobs.delete(blob)  # otherwise nobody would ever delete it
            raise
        self.kept.bodies[name] = lease.version
        if record:
            self.kept.records[record] = name
        return self._receipt(name)

    async def _keep_record(self, lease: LeaseRecord, submission: t.Submission) -> str | UnsetType:
        """Where the host plays the environments: keep what its stage played for a lease, if this is what was submitted.

        Returns the name of the record's blob. Raises `WireError` if a group differs, and as `EnvServerClient.record`.
        """
        if kind_of(self.state.envs) != COMPLETIONS:
            return UNSET
        blocks = self.wire_lease(lease).blocks
        record = await self.stage.record(t.Staged(lease.id, lease.version, blocks, worker=lease.worker))
        for encoded, recorded in zip(submission.groups, record.groups, strict=True):
            differs = difference(from_msgpack(encoded, t.Group), recorded)
            if differs is not None:  # guard: submission-as-recorded
                if lease.worker not in self._forgers:
                    self._forgers.add(lease.worker)
                    log.warning("refused worker=%s lease=%s reason=%r", lease.worker[:12], lease.id, differs.detail)
                raise WireError(f"slot {recorded.slot}, rollout {differs.rollout}: {differs.detail}")
        name = self.blobs.put(to_msgpack(record))
        self.kept.expect(name)
        return name

    def _read_submission(self, lease: LeaseRecord, body: bytes) -> t.Submission:
        """A submission, its groups still encoded. Raises `WireError` if it is not for the lease."""
        due = len(lease.blocks) * self.state.rules.block_groups
        submission = from_msgpack(body, t.Submission)
        if (submission.run, submission.lease, submission.version) != (self.state.run, lease.id, lease.version):
            raise WireError(f"the submission is for another run, lease or version than that of lease {lease.id}")
        if len(submission.groups) != due:  # checked before they are hashed: there may be millions
            raise WireError(f"lease {lease.id} has {due} slots, but the submission has {len(submission.groups)} groups")
        most = most_bytes(self.state.rules, self.state.sampling, self.state.slots_of(lease)[0])
        if any(len(group) > most for group in submission.groups):  # others may have to read it  # guard: group-size
            raise WireError(f"a group of the submission has more bytes than the {most} that a slot of lease {lease.id} can "
                            "need")  # fmt: skip
        member, engine = self.state.members[lease.worker], submission.engine
        # guard: engine-that-joined
        if (engine.implementation, engine.dtype, engine.device) != (member.implementation, member.dtype, member.device):
            raise WireError(f"the submission names another engine than the one that joined: {member.implementation}, "
                            f"{member.dtype} on {member.device}. Join again first")  # fmt: skip
        return submission

    def _receipt(self, name: str) -> t.Receipt:
        booked = self.state.submissions[name]
        receipt = t.Receipt(self.state.run, booked.lease, name, booked.seq, booked.head, booked.time, "")
        return sign_promise(receipt, self.key)

    def _largest_body(self, lease: LeaseRecord) -> int:
        """Most bytes that a lease can need. Larger bodies are refused before they are decoded or kept."""
        return largest_submission_bytes(self.wire_lease(lease), self.state.rules)

    # --- time and secrets ---

    async def tick(self) -> None:
        """Tell the rules that time has passed; after the run's end, also give them the links that are not revealed."""
        now, ended = self.clock(), self.state.phase == "ended"
        leases = (self.state.leases[name] for name in self.state.open_leases)
        hung, late = self.stage.host_hung(leases), overdue(self.state, now)
        envs = {name: self.labels(self.state.lease_of(self.state.submissions[name])) for name in late}
        # Each tick does only the first kind of what is due: many lapses must not keep a dispute from its end.
        while await self.log_writer.submit(
            Tick(now, self.links_of(self.hidden_versions() if ended else []), hung, envs)
        ):
            pass

    def hidden_versions(self) -> list[int]:
        """Versions whose links are not revealed."""
        return [v for v, version in self.state.main.versions.items() if not version.revealed]

    def links_of(self, versions: Sequence[int]) -> dict[int, tuple[str, str]]:
        """The links of both chains that reveal these versions, as hex."""
        return {v: (self.slot_links[v + 1].hex(), self.audit_links[v + 1].hex()) for v in versions}
