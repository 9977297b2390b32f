"""The worker: takes leases, plays their tasks with the leased policy and seeds, submits, and shows what came of it.

It needs one outbound connection and chooses nothing: policy version, tasks and seeds come with the lease. It verifies every
byte of the weights. It uses torch through the engine; transformers only where the run's policy needs it.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TypeAlias

from shoal.config.role_options import NodeOptions
from shoal.engine.interface import ScoreRequest
from shoal.envs.isolated.pool import Processes
from shoal.envs.play_continuations import OtherStart, continue_block
from shoal.envs.play_episodes import play_block
from shoal.errors import Interrupted, NothingYet, PeerError, Superseded, Undecided
from shoal.net.client import PeerRefused
from shoal.protocol import messages as t
from shoal.protocol.algorithm_config import vine_of
from shoal.protocol.constants import COMPLETIONS, CONTINUATIONS, MAX_SUBMISSION_BYTES
from shoal.protocol.continuations import branches
from shoal.protocol.encoding import WireError, digest, from_msgpack, to_json
from shoal.protocol.host_signatures import is_promised
from shoal.protocol.message_sizes import turn_answer_bytes
from shoal.protocol.rollout_validation import readable_parent
from shoal.roles.node.activity import NodeReport
from shoal.roles.node.device_queue import load_on_shift
from shoal.roles.node.evidence_store import retry_while_disk_full
from shoal.roles.node.lease_client import Leases
from shoal.roles.node.lifecycle import Node, NodeRole, open_session, run_role
from shoal.roles.node.session import SOONEST_S, Contradiction, Session
from shoal.roles.worker.remote_env import AHEAD, EngineShare, EngineTurn, PlayContext, TooLate, play_blocks
from shoal.verification.check_context import score_requests
from shoal.verification.encode_submission import encode_submission, prove_activations
from shoal.weights.engine_loader import loaded_in_time
from shoal.weights.fetch.chunks import NoSpace

log = logging.getLogger("worker")

LATE = 4.0
"""A lease is dropped between two blocks once playing has taken this many times the time that the lease allows: its blocks
are others' by then, and a host could ask for days of work. At the deadline itself the work may still be taken."""

Made: TypeAlias = tuple[list[t.Group], tuple[bytes, ...]]
"""Groups of a lease, and their proofs."""


Parents: TypeAlias = dict[int, t.Group]
"""By slot of a lease of continuations: what it continues. Slots in which nothing is due are missing."""


class VersionExpired(Exception):
    """The lease's version is too old by now. The host closes the lease, which costs nothing."""


class StoppedWhileLoading(VersionExpired):
    """We were told to stop before the version was here, or an environment was stopped. The lease was given back."""


def main(options: NodeOptions) -> None:
    """Work for a run until it ends, as its host's own worker. Raises `PeerError`, `StateError`, `ConfigError`."""
    run_role(Worker(Node.open(options)))


class BlockStopped(Undecided):
    """A call of an environment took too long in this block, or ended its process."""

    def __init__(self, block: int, why: Undecided) -> None:
        super().__init__(str(why))
        self.block = block


class Worker(NodeRole):
    """One worker in one run."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.engine_share = EngineShare()
        self.due = math.inf  # a step that hung is not tried again so late that the lease would lapse meanwhile
        self.idle_since = 0.0
        """When the engine was needed no more for a lease."""
        self.report: NodeReport
        self.leases: Leases

    async def join(self) -> None:
        processes = Processes(stopping=lambda: bool(self.stopping), left_s=lambda: self.due - time.monotonic())
        self.session = await open_session(self.node, "worker", processes)
        self.leases = Leases(self.node, self.session)
        self.report, info = NodeReport(self.client, self.key, self.session.node), self.session.info
        log.info(
            "joined run=%s as=%s key=%s credits=%d run_key=%s",
            info.name, self.node.name, self.key[:12], self.report.state.credits, info.run_key,
        )  # fmt: skip

    def lost(self) -> str:
        lost = "no lease was held, so nothing is lost"
        if held := ", ".join(self.leases.holding):
            lost = f"leases {held} are lost, and what a worker does not fill may cost it pay"
        return f"{lost}. What the host took stays booked, and the same command joins again"

    async def finish(self) -> None:
        await self.report.tell(self.leases.tokens_per_s, last=True)

    async def work(self) -> None:
        """Fill leases until the run has ended or we are told to stop. Raises `Overreach` if a lease asks for too much.

        Where the host plays, a lease begins while the one before it is played, so that the engine waits for no answer.
        """
        before = EngineTurn()
        before.end()
        async with contextlib.aclosing(self.leases.granted()) as grants:
            with _first_error():
                async with asyncio.TaskGroup() as filling:
                    async for grant in grants:
                        use = EngineTurn(grant.lease.version)
                        task = filling.create_task(self._fill(grant, before, use))
                        if self.session.kind != COMPLETIONS:
                            await task
                        before = use

    async def _fill(self, grant: t.Grant, before: EngineTurn, use: EngineTurn) -> None:
        """Fill a lease, and submit it. `before` is the engine's use by the lease before it, `use` that by this one."""
        lease, play = grant.lease, self._play_turns if self.session.kind == COMPLETIONS else self._play_whole
        try:
            async with use.shift:
                with self.session.within_memory(f"playing lease {lease.id}"):
                    made = await play(grant, before, use)
            await self._end(before, use)
            if made is None:
                await self.leases.give_back(lease)
                return
            await self._submit(lease, *made)
        except VersionExpired:
            await self._end(before, use)
        finally:
            self.leases.ended(lease)
        await self.report.tell(self.leases.tokens_per_s)
        self.activity.worked(self.report.state, self.leases.tokens_per_s)
        if not self.leases.holding:
            self.activity.now("waiting for a lease")

    async def _end(self, before: EngineTurn, use: EngineTurn) -> None:
        """Let the engine go, once the leases before have."""
        await before.over.wait()
        self.idle_since = time.perf_counter()
        use.end()

    async def _load_for(self, grant: t.Grant, use: EngineTurn | None = None) -> None:
        """Load the lease's version, on a shift that ends with its use. Raises `VersionExpired` if the host may have deleted
        the weights, and `StoppedWhileLoading`."""
        lease, shift = grant.lease, (use or EngineTurn()).shift
        self.activity.now(f"fetching version {lease.version}")
        try:
            load = load_on_shift(self.session, self.node.shift, shift, lease.version, grant=grant)
            if not await loaded_in_time(load, self.stopping):
                await self.leases.give_back(lease)
                raise StoppedWhileLoading
            self.activity.now(
                f"filling a lease of {sum(len(b.slots) for b in lease.blocks)} groups, version {lease.version}"
            )
        except Contradiction:
            await self.leases.give_back(lease)
            raise
        except PeerError:
            newest = (await self.client.get_json("/v1/status", t.Status)).version
            if newest - lease.version <= self.session.info.rules.max_staleness:  # guard: stale-load-goes-on
                raise
            log.warning("dropped lease=%s reason='version %d is too old by now'", lease.id, lease.version)
            await self.stopping.unless(asyncio.sleep(SOONEST_S))
            raise VersionExpired from None

    async def _play_whole(self, grant: t.Grant, before: EngineTurn, use: EngineTurn) -> Made | None:
        """Generate the groups of a lease, and prove them. None if it is to be given back. Raises `VersionExpired`."""
        lease = grant.lease
        await self._load_for(grant, use)
        self.session.demand_play(lease)
        parents = await self._parents(lease)
        self.due = self.leases.came[lease.id] + 0.9 * (lease.deadline - lease.issued)
        try:
            groups = await asyncio.to_thread(self._play, lease, parents)
        except (OtherStart, Interrupted, BlockStopped) as why:
            log.warning("dropped lease=%s reason=%r", lease.id, str(why))
            # guard: stopped-is-given-back
            stopped, said = (why.block, str(why)) if isinstance(why, BlockStopped) else (-1, "")
            await self.leases.give_back(lease, stopped, said)  # guard: other-starts-are-given-back
            raise StoppedWhileLoading from None
        return None if groups is None else (groups, await asyncio.to_thread(self._prove, lease, groups, parents))

    async def _parents(self, lease: t.Lease) -> Parents:
        """The groups that a lease continues. Raises `VersionExpired` if the lease ended meanwhile, or if the host lacks
        them: it gives the lease again, and perhaps restores its disk. One that serves anything else gets the lease back."""
        try:
            return await fetch_parents(self.session, lease)
        except PeerError as reason:
            log.warning("dropped lease=%s reason=%r", lease.id, str(reason))
            if not isinstance(reason, NothingYet | Superseded):
                await self.leases.give_back(lease)  # guard: other-parents-end-no-worker
            await self.stopping.unless(asyncio.sleep(SOONEST_S))  # guard: missing-parents-are-waited-for
            raise VersionExpired from None

    async def _play_turns(self, grant: t.Grant, before: EngineTurn, use: EngineTurn) -> Made | None:
        """`_play_whole` where the host plays the environments."""
        lease, started, session = grant.lease, time.perf_counter(), self.session
        size, allowed_s = session.info.rules.group_size, lease.deadline - lease.issued
        most = max((len(block.slots) for block in lease.blocks), default=0) * size
        loaded_s, tokens = started, self.engine_share.tokens
        cap = turn_answer_bytes(most, lease.sampling.max_tokens)

        async def ask(turn: t.EnvTurn) -> t.TurnAnswer:
            return await self.client.post_packed(f"/v1/leases/{lease.id}/turns", turn, t.TurnAnswer, cap=cap)

        def taken_s() -> float:
            return time.perf_counter() - max(started, self.idle_since)

        def why_late() -> str:
            if not before.over.is_set():
                return "told to stop" if self.stopping else ""
            too_slow = taken_s() > LATE * allowed_s  # guard: late-turns-are-dropped
            return f"took {LATE:.0f} times the time allowed" if too_slow else ""

        async def ready() -> int:
            await use.follow(before)
            if self.stopping:
                raise TooLate("told to stop")
            await self._load_for(grant, use)
            nonlocal loaded_s, tokens
            loaded_s, tokens = time.perf_counter(), self.engine_share.tokens
            at_once = session.blocks_at_once(lease, AHEAD)
            if at_once < AHEAD:
                await before.over.wait()  # guard: blocks-of-two-leases-fit
            use.loaded.set()
            return at_once

        table = PlayContext(session.engine, lambda: session.policy.renderer, size, lease.sampling, ask, why_late, ready)
        try:
            groups = await play_blocks(table, lease.blocks, self.engine_share)
        except (TooLate, Superseded) as reason:
            log.warning("dropped lease=%s reason=%r", lease.id, str(reason))
            return None
        except PeerRefused as refused:
            if refused.code != "conflict":  # guard: other-turns-are-given-back
                raise
            log.warning("dropped lease=%s reason=%r", lease.id, str(refused))
            return None
        # The engine may have worked for other leases, too.
        self.leases.tokens_per_s = (self.engine_share.tokens - tokens) / max(time.perf_counter() - loaded_s, 1e-6)
        async with self.engine_share.engine:
            return groups, await asyncio.to_thread(self._prove, lease, groups, {})

    def _play(self, lease: t.Lease, parents: Parents) -> list[t.Group] | None:
        """Generate the groups of a lease, block by block, and measure how fast. None if that takes far too long."""
        started, session, allowed_s = time.perf_counter(), self.session, lease.deadline - lease.issued
        groups: list[t.Group] = []
        taken_s = 0.0
        for block in lease.blocks:
            if groups and taken_s > LATE * allowed_s:  # guard: late-lease-is-dropped
                log.warning("dropped lease=%s reason='took %.0f s of %.0f allowed'", lease.id, taken_s, allowed_s)
                return None
            if groups:
                self.node.shift.pause()
            try:
                groups += play_leased(session, lease, block, parents)
            except Undecided as why:
                raise BlockStopped(block.index, why) from None
            finally:
                taken_s = time.perf_counter() - started
                tokens = sum(rollout.num_policy_tokens() for group in groups for rollout in group.rollouts)
                # also of a lease that is dropped: the next is then smaller, and a block that hangs alone in it
                self.leases.tokens_per_s = tokens / max(taken_s, 1e-6)
        if session.memory is not None:
            session.memory.demand_within()
        return groups

    def _prove(self, lease: t.Lease, groups: list[t.Group], parents: Parents) -> tuple[bytes, ...]:
        """Proofs of the activations, if the run asks for them. They take one more prefill of the rollouts."""
        if self.session.info.rules.proofs == "none":
            return ()
        requests = to_prove(lease, groups, parents, self.session.info.rules)
        return prove_activations(groups, self.session.engine.score(requests, lease.sampling.temperature, hidden=True))

    async def _submit(self, lease: t.Lease, groups: list[t.Group], proofs: tuple[bytes, ...]) -> None:
        """Send the groups, and keep them with the receipt. A superseded lease is dropped, and one whose turns the host has
        forgotten is given back."""
        self.activity.now(f"sending a lease of version {lease.version}")
        body = encode_submission(self.session.info.run, lease, groups, self.session.engine.facts, proofs)
        try:
            keep = partial(asyncio.to_thread, self.session.evidence.keep, "submission", body)
            await retry_while_disk_full(self.client, keep, self.stopping)  # guard: body-is-kept
            receipt = await self.client.put_bytes(f"/v1/leases/{lease.id}/submission", body, t.Receipt)
        except Superseded as reason:
            log.warning("dropped lease=%s reason=%r", lease.id, str(reason))
            return
        except NoSpace as full:
            log.warning("dropped lease=%s, told to stop while the disk is full reason=%r", lease.id, str(full))
            await self.leases.give_back(lease)
            return
        except PeerRefused as refused:
            if refused.code != "conflict" or self.session.kind != COMPLETIONS:  # guard: forgotten-turns-are-given-back
                raise
            log.warning("dropped lease=%s reason=%r", lease.id, str(refused))
            await self.leases.give_back(lease)
            return
        if receipt.digest != digest(body) or not is_promised(receipt, self.session.info.run_key):
            raise PeerError(
                "the coordinator's receipt is for other bytes than we sent, or not signed by the run key: leave this run"
            )
        self.client.head = receipt.head
        note = partial(asyncio.to_thread, self.session.evidence.note_receipt, to_json(receipt))
        try:
            await retry_while_disk_full(self.client, note, self.stopping)
        except NoSpace as full:
            log.warning(
                "told to stop while the disk is full reason=%r receipt=%s", str(full), to_json(receipt).decode()
            )
        self.leases.demand_same_time(receipt.time)  # guard: receipt-from-the-future


@contextlib.contextmanager
def _first_error() -> Iterator[None]:
    """Around a group of tasks: raise what failed first."""
    try:
        yield
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None


# --- leases of continuations: the groups that they continue are a stranger's bytes, and the lease names their digests ---


async def fetch_parents(seat: Session, lease: t.Lease) -> Parents:
    """The groups that a lease continues; none of another kind. Raises `PeerError` if the host serves others, and as
    `Client.get`."""
    if all(block.kind != CONTINUATIONS for block in lease.blocks):
        return {}
    path, vocabulary = f"/v1/leases/{lease.id}/parents", seat.policy.renderer.vocabulary
    fault = ""
    for _ in range(2):  # they may have been damaged on the way
        try:
            told = from_msgpack(await seat.client.get(path, cap=MAX_SUBMISSION_BYTES), t.Parents)
            return parents_of(lease, told.groups, seat.info.rules, vocabulary)
        except WireError as error:
            fault = str(error)
    raise PeerError(f"lease {lease.id} cannot be played: {fault}. Tell the host")


def parents_of(lease: t.Lease, encoded: Sequence[bytes], rules: t.Rules, vocabulary: int) -> Parents:
    """The groups that a lease continues, by slot, without those that nobody can. Raises `WireError` for bytes that are not
    what the lease names."""
    named = [(slot, slot.parent) for block in lease.blocks for slot in block.slots if slot.parent is not None]
    if len(encoded) != len(named):
        raise WireError(f"{len(encoded)} groups came, the lease names {len(named)}")
    found = Parents()
    for (slot, parent), data in zip(named, encoded, strict=True):
        if digest(data) != parent.digest:  # guard: parents-of-the-lease
            raise WireError(f"slot {slot.slot} continues {parent.digest[:12]}, other bytes came")
        group = readable_parent(data, rules, lease.sampling, vocabulary)
        if group is not None:
            found[slot.slot] = group
    return found


def play_leased(seat: Session, lease: t.Lease, block: t.Block, parents: Parents) -> list[t.Group]:
    """Fill the slots of a block."""
    rules, engine, renderer = seat.info.rules, seat.engine, seat.policy.renderer
    vine = vine_of(rules.algorithm)
    if vine is None or block.kind != CONTINUATIONS:
        return play_block(engine, renderer, seat.envs, block, rules.group_size, lease.sampling)
    slots, at_once = [(slot, parents.get(slot.slot)) for slot in block.slots], rules.group_size * rules.block_groups
    return continue_block(engine, renderer, seat.envs, slots, vine, at_once, lease.sampling)


def to_prove(lease: t.Lease, groups: Sequence[t.Group], parents: Parents, rules: t.Rules) -> list[ScoreRequest]:
    """What to prefill for the proofs of a lease's groups."""
    slots, vine = [slot for block in lease.blocks for slot in block.slots], vine_of(rules.algorithm)
    requests: list[ScoreRequest] = []
    for slot, group in zip(slots, groups, strict=True):
        continued = branches(parents[slot.slot], vine) if vine and slot.slot in parents else ()
        requests += score_requests(slot, group, continued)
    return requests
