"""The worker: takes leases, plays their tasks with the leased policy and seeds, submits, and shows what came of it.

It needs one outbound connection and chooses nothing: policy version, tasks and seeds come with the lease. It verifies every
byte of the weights. It uses torch through the engine; transformers only where the run's policy needs it.
"""

import asyncio
import contextlib
import logging
import math
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeAlias

from shoal.engine.dishonest import cheating
from shoal.engine.interface import Engine
from shoal.engine.open import EngineSpec, demand_kind, open_engine
from shoal.envs.branching import OtherStart
from shoal.envs.isolated.pool import Processes
from shoal.errors import Interrupted, NothingYet, Overreach, PeerError, Superseded, Undecided
from shoal.models.device import CPU, demand_device
from shoal.net.client import Client, PeerRefused
from shoal.net.key_files import load_or_make_key
from shoal.net.server_process import Stopping
from shoal.protocol import messages as t
from shoal.protocol.constants import COMPLETIONS
from shoal.protocol.encoding import digest, to_json
from shoal.protocol.host_signatures import is_promised
from shoal.protocol.message_sizes import turn_answer_bytes
from shoal.protocol.noise import PHILOX
from shoal.protocol.tolerances import LOCAL
from shoal.roles.node.activity import NodeActivity, NodeReport
from shoal.roles.node.device_queue import ExclusiveDevice, Shift, load_on_shift, shift_of
from shoal.roles.node.evidence import retry_while_disk_full
from shoal.roles.node.lease_client import Leases
from shoal.roles.node.packages import Packages
from shoal.roles.node.session import (
    GOODBYE_S,
    SOONEST_S,
    Contradiction,
    Session,
    exit_after_timeout,
    say_goodbye,
    take_seat,
    unless_gone,
)
from shoal.roles.node.share_weights import WeightSharing, sharing
from shoal.roles.node.throttle import Allowance, BoundedEngine
from shoal.roles.worker.continuations import Parents, fetch_parents, play_leased, to_prove
from shoal.roles.worker.remote_env import AHEAD, EngineShare, EngineTurn, PlayContext, TooLate, play_blocks
from shoal.verification.encode_submission import encode_submission, prove_activations
from shoal.weights.engine_loader import loaded_in_time
from shoal.weights.fetch.chunks import NoSpace
from shoal.weights.memory_limit import enforced, limit_of, memory_mb

log = logging.getLogger("worker")

LATE = 4.0
"""A lease is dropped between two blocks once playing has taken this many times the time that the lease allows: its blocks
are others' by then, and a host could ask for days of work. At the deadline itself the work may still be taken."""

Made: TypeAlias = tuple[list[t.Group], tuple[bytes, ...]]
"""Groups of a lease, and their proofs."""


class VersionExpired(Exception):
    """The lease's version is too old by now. The host closes the lease, which costs nothing."""


class StoppedWhileLoading(VersionExpired):
    """We were told to stop before the version was here, or an environment was stopped. The lease was given back."""


def main(
    url: str,
    home: Path,
    threads: int,
    max_memory_mb: int,
    name: str,
    cheat: str = "",
    own_files: bool = False,
    max_disk_mb: int = 0,
    packages: Packages | None = None,
    share_port: int | None = None,
    share_url: str = "",
    device: str = CPU,
    engine: str = "",
    shifts: Path | None = None,
    allowance: Allowance | None = None,
    doing: NodeActivity | None = None,
) -> None:
    """Work for the run at `url` until it ends. At the first SIGINT or SIGTERM, finish the lease in hand and leave.

    `own_files` allows environments that are files on this machine; without it, only built-in ones and `packages` are
    played, and the work stays within `max_memory_mb`. `engine` is a kind that the user chose; empty takes the run's.
    `shifts` is the folder in which the processes queue that share the device, if any do. `allowance` is what the user lets
    it take of the machine; `doing` is filled with what it does. Raises `PeerError`, `StateError`, and `ConfigError` if the
    device is not there.
    """
    demand_device(device)
    allowed = allowance or Allowance()
    demand_kind(engine)
    key, shift = load_or_make_key(home / "node.key"), shift_of(shifts, name)

    def make_engine(dtype: str, kind: str = LOCAL, noise: str = PHILOX) -> Engine:
        opened = open_engine(EngineSpec(engine or kind, dtype, threads, device, noise))
        shift.keeps(opened)
        bounded = BoundedEngine(opened, allowed) if allowed.cpu_share < 1 else opened
        return cheating(cheat, bounded) if cheat else bounded

    limit_mb = 0 if own_files else limit_of(max_memory_mb)
    make = make_engine if own_files else enforced(make_engine, limit_mb, threads)
    worker = Worker(
        Client(url, key), key.public, home, make, limit_mb, t.fact(name or platform.node()),
        own_files, max_disk_mb=max_disk_mb, packages=packages,
    )  # fmt: skip
    worker.chosen, worker.shift, worker.allowance, worker.leave_at_once = engine, shift, allowed, exit_after_timeout
    if doing is not None:
        doing.stopping, worker.doing = worker.doing.stopping, doing
        doing.answered_at = lambda: worker.client.answered_at
    worker.share = None if share_port is None else WeightSharing(key, share_port, url=share_url)
    try:
        asyncio.run(worker.run())
    except RuntimeError as failed:  # no memory is left for the thread that would end the others
        if isinstance(failed.__context__, Overreach):
            raise failed.__context__ from None
        raise


class BlockStopped(Undecided):
    """A call of an environment took too long in this block, or ended its process."""

    def __init__(self, block: int, why: Undecided) -> None:
        super().__init__(str(why))
        self.block = block


class Worker:
    """One worker in one run."""

    def __init__(
        self,
        client: Client,
        key: str,
        home: Path,
        make_engine: Callable[..., Engine],
        max_memory_mb: int,
        name: str,
        own_files: bool,
        clock: Callable[[], float] = time.time,
        max_disk_mb: int = 0,
        packages: Packages | None = None,
    ) -> None:
        """`key` is the public key that the client signs with; `make_engine` is as in `take_seat`."""
        self.client, self.key, self.home, self.make_engine = client, key, home, make_engine
        self.max_memory_mb, self.max_disk_mb, self.name, self.own_files = max_memory_mb, max_disk_mb, name, own_files
        self.clock, self.packages = clock, packages
        self.stopping = Stopping()
        self.share: WeightSharing | None = None
        self.shift: Shift = ExclusiveDevice()
        self.chosen = ""
        """Kind of the engine that the user chose."""
        self.allowance, self.doing = Allowance(), NodeActivity(stopping=lambda: bool(self.stopping))
        self.hands = EngineShare()
        self.leave_at_once: Callable[[], None] = lambda: None
        """Called when the host is gone and we were told to stop: the process need not wait for its threads."""
        self.due = math.inf  # a step that hung is not tried again so late that the lease would lapse meanwhile
        self.idle_since = 0.0
        """When the engine was needed no more for a lease."""
        self.standing = NodeReport(client, key, name)
        self.seat: Session
        self.leases: Leases

    async def run(self) -> None:
        """The worker's whole job."""
        async with self.client:
            with self.stopping.at_signals():
                if not await self.stopping.unless(self._join()):
                    log.info("stopped before it joined a run")
                    return
                try:
                    async with sharing(self.share, self.client, self.seat.shared):
                        # guard: stop-without-a-host
                        if not await unless_gone(self._work(), self.stopping, self.client, self._leave_without_host):
                            return
                except Overreach:
                    await say_goodbye(self.client, GOODBYE_S)  # others get its leases at once
                    raise
                if self.stopping and not await say_goodbye(self.client, GOODBYE_S):
                    self._leave_without_host()
                    return
                await self.standing.tell(self.leases.tokens_per_s, last=True)

    def _leave_without_host(self) -> None:
        lost = "no lease was held, so nothing is lost"
        if held := ", ".join(self.leases.holding):
            lost = f"leases {held} are lost, and what a worker does not fill may cost it pay"
        log.warning(
            "left, because the host does not answer: %s. What the host took stays booked, and the same command joins again",
            lost,
        )
        self.leave_at_once()

    async def _work(self) -> None:
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
                        if self.seat.kind != COMPLETIONS:
                            await task
                        before = use

    async def _fill(self, grant: t.Grant, before: EngineTurn, use: EngineTurn) -> None:
        """Fill a lease, and submit it. `before` and `use` are the uses of the engine by the lease before it and by this
        one."""
        lease, play = grant.lease, self._play_turns if self.seat.kind == COMPLETIONS else self._play_whole
        try:
            async with use.shift:
                with self.seat.within_memory(f"playing lease {lease.id}"):
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
        await self.standing.tell(self.leases.tokens_per_s)
        self.doing.node, self.doing.tokens_per_s = self.standing.state, self.leases.tokens_per_s
        if not self.leases.holding:
            self.doing.now("waiting for a lease")

    async def _end(self, before: EngineTurn, use: EngineTurn) -> None:
        """Let the engine go, once the leases before have."""
        await before.over.wait()
        self.idle_since = time.perf_counter()
        use.end()

    async def _join(self) -> bool:
        """Join the run; returns True when done."""
        self.seat = await take_seat(
            self.client, "worker", self.name, self.home, self.make_engine, self.own_files, self.clock,
            self.max_memory_mb, self.max_disk_mb, self.packages, self.chosen,
            processes=Processes(stopping=lambda: bool(self.stopping), left_s=lambda: self.due - time.monotonic()),
        )  # fmt: skip
        self.allowance.stopping = lambda: bool(self.stopping)
        self.leases = Leases(self.seat, self.stopping, self.clock, self.allowance, self.doing)
        self.standing.state, info = self.seat.node, self.seat.info
        self.doing.key, self.doing.name, self.doing.info, self.doing.node = self.key, self.name, info, self.seat.node
        self.doing.memory = memory_mb
        log.info(
            "joined run=%s as=%s key=%s credits=%d run_key=%s",
            info.name, self.name, self.key[:12], self.standing.state.credits, info.run_key,
        )  # fmt: skip
        return True

    async def _load_for(self, grant: t.Grant, use: EngineTurn | None = None) -> None:
        """Load the lease's version, on a shift that ends with its use. Raises `VersionExpired` if the host may have deleted
        the weights, and `Left`."""
        lease, shift = grant.lease, (use or EngineTurn()).shift
        self.doing.now(f"fetching version {lease.version}")
        try:
            load = load_on_shift(self.seat, self.shift, shift, lease.version, grant=grant)
            if not await loaded_in_time(load, self.stopping):
                await self.leases.give_back(lease)
                raise StoppedWhileLoading
            self.doing.now(
                f"filling a lease of {sum(len(b.slots) for b in lease.blocks)} groups, version {lease.version}"
            )
        except Contradiction:
            await self.leases.give_back(lease)
            raise
        except PeerError:
            newest = (await self.client.get_json("/v1/status", t.Status)).version
            if newest - lease.version <= self.seat.info.rules.max_staleness:  # guard: stale-load-goes-on
                raise
            log.warning("dropped lease=%s reason='version %d is too old by now'", lease.id, lease.version)
            await self.stopping.unless(asyncio.sleep(SOONEST_S))
            raise VersionExpired from None

    async def _play_whole(self, grant: t.Grant, before: EngineTurn, use: EngineTurn) -> Made | None:
        """Generate the groups of a lease, and prove them. None if it is to be given back. Raises `VersionExpired`."""
        lease = grant.lease
        await self._load_for(grant, use)
        self.seat.demand_play(lease)
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
            return await fetch_parents(self.seat, lease)
        except PeerError as reason:
            log.warning("dropped lease=%s reason=%r", lease.id, str(reason))
            if not isinstance(reason, NothingYet | Superseded):
                await self.leases.give_back(lease)  # guard: other-parents-end-no-worker
            await self.stopping.unless(asyncio.sleep(SOONEST_S))  # guard: missing-parents-are-waited-for
            raise VersionExpired from None

    async def _play_turns(self, grant: t.Grant, before: EngineTurn, use: EngineTurn) -> Made | None:
        """The same while the host plays the environments."""
        lease, started, seat = grant.lease, time.perf_counter(), self.seat
        size, allowed_s = seat.info.rules.group_size, lease.deadline - lease.issued
        most = max((len(block.slots) for block in lease.blocks), default=0) * size
        loaded_s, tokens = started, self.hands.tokens
        cap = turn_answer_bytes(most, lease.sampling.max_tokens)

        async def ask(turn: t.EnvTurn) -> t.TurnAnswer:
            return await self.client.post_packed(f"/v1/leases/{lease.id}/turns", turn, t.TurnAnswer, cap=cap)

        def taken_s() -> float:
            return time.perf_counter() - max(started, self.idle_since)

        def is_late() -> bool:
            if not before.over.is_set():
                return bool(self.stopping)
            return taken_s() > LATE * allowed_s  # guard: late-turns-are-dropped

        async def ready() -> int:
            await use.follow(before)
            if self.stopping:
                raise TooLate
            await self._load_for(grant, use)
            nonlocal loaded_s, tokens
            loaded_s, tokens = time.perf_counter(), self.hands.tokens
            at_once = seat.blocks_at_once(lease, AHEAD)
            if at_once < AHEAD:
                await before.over.wait()  # guard: blocks-of-two-leases-fit
            use.loaded.set()
            return at_once

        table = PlayContext(seat.engine, lambda: seat.policy.renderer, size, lease.sampling, ask, is_late, ready)
        try:
            groups = await play_blocks(table, lease.blocks, self.hands)
        except (TooLate, Superseded) as reason:
            log.warning(
                "dropped lease=%s reason=%r", lease.id, str(reason) or f"took {LATE:.0f} times the time allowed"
            )
            return None
        except PeerRefused as refused:
            if refused.code != "conflict":  # guard: other-turns-are-given-back
                raise
            log.warning("dropped lease=%s reason=%r", lease.id, str(refused))
            return None
        # The engine may have worked for other leases, too.
        self.leases.tokens_per_s = (self.hands.tokens - tokens) / max(time.perf_counter() - loaded_s, 1e-6)
        async with self.hands.engine:
            return groups, await asyncio.to_thread(self._prove, lease, groups, {})

    def _play(self, lease: t.Lease, parents: Parents) -> list[t.Group] | None:
        """Generate the groups of a lease, block by block, and measure how fast. None if that takes far too long."""
        started, seat, allowed_s = time.perf_counter(), self.seat, lease.deadline - lease.issued
        groups: list[t.Group] = []
        taken_s = 0.0
        for block in lease.blocks:
            if groups and taken_s > LATE * allowed_s:  # guard: late-lease-is-dropped
                log.warning("dropped lease=%s reason='took %.0f s of %.0f allowed'", lease.id, taken_s, allowed_s)
                return None
            if groups:
                self.shift.pause()
            try:
                groups += play_leased(seat, lease, block, parents)
            except Undecided as why:
                raise BlockStopped(block.index, why) from None
            finally:
                taken_s = time.perf_counter() - started
                tokens = sum(rollout.num_policy_tokens() for group in groups for rollout in group.rollouts)
                # also of a lease that is dropped: the next is then smaller, and a block that hangs alone in it
                self.leases.tokens_per_s = tokens / max(taken_s, 1e-6)
        if seat.memory is not None:
            seat.memory.demand_within()
        return groups

    def _prove(self, lease: t.Lease, groups: list[t.Group], parents: Parents) -> tuple[bytes, ...]:
        """Proofs of the activations, if the run asks for them. They take one more prefill of the rollouts."""
        if self.seat.info.rules.proofs == "none":
            return ()
        requests = to_prove(lease, groups, parents, self.seat.info.rules)
        return prove_activations(groups, self.seat.engine.score(requests, lease.sampling.temperature, hidden=True))

    async def _submit(self, lease: t.Lease, groups: list[t.Group], proofs: tuple[bytes, ...]) -> None:
        """Send the groups, and keep them with the receipt. A superseded lease is dropped, and one whose turns the host has
        forgotten is given back."""
        self.doing.now(f"sending a lease of version {lease.version}")
        body = encode_submission(self.seat.info.run, lease, groups, self.seat.engine.facts, proofs)
        try:
            keep = partial(asyncio.to_thread, self.seat.evidence.keep, "submission", body)
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
            if refused.code != "conflict" or self.seat.kind != COMPLETIONS:  # guard: forgotten-turns-are-given-back
                raise
            log.warning("dropped lease=%s reason=%r", lease.id, str(refused))
            await self.leases.give_back(lease)
            return
        if receipt.digest != digest(body) or not is_promised(receipt, self.seat.info.run_key):
            raise PeerError(
                "the coordinator's receipt is for other bytes than we sent, or not signed by the run key: leave this run"
            )
        self.client.head = receipt.head
        note = partial(asyncio.to_thread, self.seat.evidence.note_receipt, to_json(receipt))
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
