"""A worker or a validator: its options, how it joins a run, and its life until it leaves."""

import asyncio
import logging
import os
import platform
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from shoal.chat.isolated import RendererLimits
from shoal.chat.renderer import Renderer
from shoal.config.role_options import NodeOptions
from shoal.engine.dishonest import cheating
from shoal.engine.interface import Engine
from shoal.engine.open import EngineSpec, demand_kind, open_engine
from shoal.env import Env
from shoal.envs.isolated.connection import LIMITS
from shoal.envs.isolated.environment import in_child
from shoal.envs.isolated.pool import MAX_PROCESSES, Processes
from shoal.envs.load import load_run_envs
from shoal.errors import Overreach, PeerError
from shoal.ledger.constants import RULES_VERSION
from shoal.models.device import CPU, demand_device
from shoal.net.client import Client, PeerRefused
from shoal.net.key_files import load_or_make_key
from shoal.net.server_address import Stopping
from shoal.protocol import messages as t
from shoal.protocol.constants import COMPLETIONS, VLLM
from shoal.protocol.continuations import NO_FIT, groups_fit
from shoal.protocol.messages.run import kind_of
from shoal.protocol.noise import PHILOX
from shoal.protocol.tolerances import LOCAL, TRANSFORMERS
from shoal.roles.node.activity import NodeActivity
from shoal.roles.node.device_queue import Shift, shift_of
from shoal.roles.node.evidence_store import (
    DISK_PART,
    EvidenceStore,
    joined_before,
    retry_while_disk_full,
    take_publishers,
)
from shoal.roles.node.package_consent import HostPackages, NoPackages, Packages, aside, room_of
from shoal.roles.node.session import Session
from shoal.roles.node.share_weights import WeightSharing, sharing
from shoal.roles.node.throttle import Allowance, BoundedEngine
from shoal.run_folder import RunFolder
from shoal.sandbox.limits import Limits as SandboxLimits
from shoal.weights.engine_loader import LoadedEngine, contained, demand_engine_fits
from shoal.weights.fetch.version_directory import disk_limit
from shoal.weights.memory_limit import Memory, enforced, limit_of, memory_mb, share_of_free_mb

log = logging.getLogger("node")

GOODBYE_S = 5.0
"""How long a node that leaves tries to say so. Less than the time in which the launcher expects a role to end."""

ASK_S = 2.0
"""How long after an answer a node that was told to stop, and still works, asks whether the host is there."""

LAST_S = 2.0
"""What a node whose host is gone takes at most to end, once it has left its work."""

ADMISSION_POLL_S = 0.5
"""How often a validator asks whether it was admitted. A host whose run has ended goes after one look, a second, or more."""


@dataclass
class Node:
    """What a role works with before it has joined."""

    client: Client
    key: str
    """The public key that the client signs with."""
    options: NodeOptions
    make_engine: Callable[..., Engine]
    """Makes an engine for a dtype; keywords: its kind and noise."""
    clock: Callable[[], float] = time.time
    packages: Packages | None = None
    """Packages of others that are played; None: the host's own nodes play all, and other nodes none."""
    share: WeightSharing | None = None
    shift: Shift = field(default_factory=Shift)
    allowance: Allowance = field(default_factory=Allowance)
    stopping: Stopping = field(default_factory=Stopping)
    leave_at_once: Callable[[], None] = lambda: None
    """Called when the host is gone and we were told to stop: the process need not wait for its threads."""

    def __post_init__(self) -> None:
        self.home = Path(self.options.home)
        self.name = t.fact(self.options.name or (self.home.name if self.options.is_own else platform.node()))
        self.activity = NodeActivity(
            key=self.key, name=self.name, memory=memory_mb,
            answered_at=lambda: self.client.answered_at, stopping=lambda: bool(self.stopping),
        )  # fmt: skip

    @staticmethod
    def open(
        options: NodeOptions,
        packages: Packages | None = None,
        share: tuple[int, str] | None = None,
        allowance: Allowance | None = None,
    ) -> "Node":
        """A node of this process. `share` is port and URL at which it serves weights. Raises `ConfigError` if device or
        engine are not there, `StateError` if its memory is too small."""
        demand_device(options.device)
        demand_kind(options.engine)
        home, allowed, stopping = Path(options.home), allowance or Allowance(), Stopping()
        key = load_or_make_key(Path(options.key_file) if options.key_file else home / "node.key")
        shift = shift_of(Path(options.shifts) if options.shifts else None, home.name)

        def make_engine(dtype: str, kind: str = LOCAL, noise: str = PHILOX) -> Engine:
            spec = EngineSpec(options.engine or kind, dtype, options.threads, options.device, noise)
            engine = open_engine(spec)
            shift.keeps(engine)
            bounded = BoundedEngine(engine, allowed, lambda: bool(stopping)) if allowed.cpu_share < 1 else engine
            return cheating(options.cheat, bounded) if options.cheat else bounded

        make: Callable[..., Engine] = make_engine
        if not options.is_own:
            options = msgspec.structs.replace(options, max_memory_mb=limit_of(options.max_memory_mb))
            make = enforced(make_engine, options.max_memory_mb, options.threads)
        sharing_at = None if share is None else WeightSharing(key, share[0], url=share[1])
        client = Client(options.url, key)
        return Node(
            client, key.public, options, make, packages=packages, share=sharing_at, shift=shift, allowance=allowed,
            stopping=stopping, leave_at_once=exit_after_timeout,
        )  # fmt: skip


class NodeRole(ABC):
    """The life of a worker or a validator in one run. Subclasses do the work."""

    def __init__(self, node: Node) -> None:
        self.node, self.client, self.key, self.clock = node, node.client, node.key, node.clock
        self.stopping, self.activity = node.stopping, node.activity
        self.session: Session

    @abstractmethod
    async def join(self) -> None:
        """Join the run: sets `session`."""

    @abstractmethod
    async def work(self) -> None:
        """Work until the run has ended or we are told to stop. Raises `Overreach` if the host asks for too much."""

    @abstractmethod
    async def finish(self) -> None:
        """Say what was done, at the end."""

    @abstractmethod
    def lost(self) -> str:
        """What is lost if the node leaves now and the host does not answer, and what comes after."""

    async def run(self) -> None:
        """The role's whole job. At the first SIGINT or SIGTERM it finishes the work in hand and leaves."""

        async def joined() -> bool:
            await self.join()
            return True

        async with self.client:
            with self.stopping.at_signals():
                if not await self.stopping.unless(joined()):
                    log.info("stopped before it joined a run")
                    return
                try:
                    async with sharing(self.node.share, self.client, self.session.shared):
                        # guard: stop-without-a-host
                        if not await unless_gone(self.work(), self.stopping, self.client, self._leave_without_host):
                            return
                except Overreach:
                    await say_goodbye(self.client, GOODBYE_S)  # others get its work at once
                    raise
                if self.stopping and not await say_goodbye(self.client, GOODBYE_S):
                    self._leave_without_host()
                    return
                await self.finish()

    def _leave_without_host(self) -> None:
        logging.getLogger(self.session.role).warning("left, because the host does not answer: %s", self.lost())
        self.node.leave_at_once()


def run_role(role: NodeRole) -> None:
    """Run a role in this process. Raises `PeerError`, `StateError`, `Overreach`."""
    try:
        asyncio.run(role.run())
    except RuntimeError as failed:  # no memory is left for the thread that would end the others
        if isinstance(failed.__context__, Overreach):
            raise failed.__context__ from None
        raise


async def open_session(node: Node, role: Literal["worker", "validator"], processes: Processes = Processes()) -> Session:
    """Read the run's description, load its environments, make an engine for its dtype (kind and noise), and join.

    `processes` says when it waits for no environment. Raises `PeerError`, `StateError`.
    """
    client, home, is_own = node.client, node.home, node.options.is_own
    if joined_before(home, client.base_url):  # guard: strangers-at-a-known-url
        client.expect_run()
    await client.demand_versions(RULES_VERSION)
    info = await client.get_json("/v1/run", t.RunInfo)
    if not groups_fit(info.rules):  # guard: group-size-of-the-run
        raise PeerError(f"the run has {NO_FIT}: tell the host")
    demand_engine_fits(info, node.options.engine)  # guard: unfit-engines-stay-closed
    # A share is settled now: the disk may fill up.
    max_disk_bytes = None if is_own else disk_limit(home / "weights", node.options.max_disk_mb)
    # guard: evidence-of-strangers
    most_bytes = None if max_disk_bytes is None else max_disk_bytes // DISK_PART
    known = partial(asyncio.to_thread, _known_host, home, info, most_bytes)
    evidence, publishers = await retry_while_disk_full(client, known)  # before anything is signed
    client.run, client.head = info.run, evidence.last_seen_head() or info.head  # guard: forks-are-met-again
    limit_mb = node.options.max_memory_mb or share_of_free_mb()
    sandboxes, most, reserved_mb = (LIMITS, MAX_PROCESSES, 0) if is_own else room_of(info.envs, limit_mb)
    load = partial(_load, info, node, replace(processes, most=most), sandboxes)
    envs = {} if kind_of(info.envs) == COMPLETIONS else await aside(load)  # guard: host-plays-its-own
    named = {} if info.sampling.noise == PHILOX else {"noise": info.sampling.noise}
    engine = node.make_engine(info.rules.dtype, *({TRANSFORMERS} & {*info.needs}), **named)
    facts = engine.facts
    demand_engine_fits(info, facts.implementation)
    join = t.Join(role, node.name, 0.0, facts.implementation, facts.dtype, facts.device)
    state = await join_run(client, join, node.activity.now)
    await retry_while_disk_full(client, partial(asyncio.to_thread, evidence.note_url, client.base_url))
    ours = CPU if node.options.engine == VLLM else facts.device  # vLLM takes a share of a GPU when it starts
    memory = Memory.of(limit_mb, reserved_mb, ours)  # guard: packages-take-memory
    limits = RendererLimits.within(memory.limit_mb)
    stops = info.sampling.stops
    # guard: strangers-are-contained
    opened = partial(Renderer.from_directory, stops=stops) if is_own else contained(limits, stops)
    node.activity.joined(info, state)
    return Session(
        client, home, info, envs, LoadedEngine(engine, opened), state, node.clock, evidence, max_disk_bytes,
        memory=None if is_own else memory, publishers=publishers,
        store=RunFolder(Path(node.options.run_dir)).blobs if is_own else None, role=role,
    )  # fmt: skip


async def join_run(client: Client, join: t.Join, now: Callable[[str], None]) -> t.NodeState:
    """Join; a validator that is not admitted yet says what its host must type, and asks again until it is. `now` is told
    that it waits. Raises `PeerError`, also if the run ends before."""
    waiting, told = logging.getLogger("validator"), False
    while True:
        try:
            node = await client.post_json("/v1/nodes", join, t.NodeState)
            if told:
                now("admitted: asking for work")
            return node
        except PeerRefused as refusal:
            if refusal.code != "not_admitted" or join.role != "validator" or client.key is None:
                raise
        if not told:
            told = True
            waiting.info("this validator waits until the host admits it. Send the host this key:")
            waiting.info("%s", client.key.public)
            waiting.info(
                "The host types, with the run's folder: shoal admin admit RUN_DIR KEY (all keys at once). Ctrl-C ends this"
            )
        now("waiting: the host has not admitted this validator's key")
        await asyncio.sleep(ADMISSION_POLL_S)
        if (await client.get_json("/v1/status", t.Status)).phase == "ended":
            raise PeerError(f"the run at {client.base_url} has ended before its host admitted {client.key.public}")


def _load(info: t.RunInfo, node: Node, processes: Processes, sandboxes: SandboxLimits) -> dict[str, Env]:
    """The environments of a run whose nodes play them."""
    is_own = node.options.is_own
    packages = node.packages or (HostPackages() if is_own else NoPackages())
    packages.demand(info.envs)
    return load_run_envs(info.envs, is_own, packages.open(processes, sandboxes), partial(in_child, processes=processes))


def _known_host(home: Path, info: t.RunInfo, most_bytes: int | None) -> tuple[EvidenceStore, t.Publishers]:
    """The evidence of a run, and its publishers, if its host is that of before. Raises `PeerError`, `StateError`."""
    evidence = EvidenceStore(home, info.run, most_bytes)
    evidence.demand_same_host(info.run_key)
    return evidence, take_publishers(evidence.publishers, info)


async def unless_gone(
    work: Coroutine[Any, Any, None], stopping: Stopping, client: Client, leave: Callable[[], None]
) -> bool:
    """Do the work. Once told to stop, leave it as soon as the host answers nothing for `GOODBYE_S`: it could not be handed
    in. `leave` is called just before. Returns whether the host was there."""
    doing, gone = asyncio.create_task(work), asyncio.create_task(_gone(stopping, client))
    try:
        await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            doing.result()
            return True
        gone.result()
        leave()
        return False
    finally:
        for task in (doing, gone):
            task.cancel()
        ended, _ = await asyncio.wait({doing, gone}, timeout=GOODBYE_S)
        for task in ended:
            task.cancelled() or task.exception()  # else asyncio prints a traceback of what failed as it was left


def exit_after_timeout() -> None:
    """End this process, also if a thread is still at work that nobody will take."""
    timer = threading.Timer(LAST_S, os._exit, (130,))
    timer.daemon = True
    timer.start()


async def _gone(stopping: Stopping, client: Client) -> None:
    """Ends when we are told to stop and the host does not answer."""
    await stopping.wait()
    while True:
        if not await _is_answered(client, client.get("/v1/status", deadline_s=GOODBYE_S)):
            return
        await asyncio.sleep(ASK_S)


async def say_goodbye(client: Client, deadline_s: float) -> bool:
    """Tell the coordinator that we leave, so that requests which we signed earlier get no lease. Returns whether it
    answers."""
    left = client.send("POST", "/v1/nodes/leave", b"", t.NodeState, deadline_s=deadline_s)
    return await _is_answered(client, left)


async def _is_answered(client: Client, call: Awaitable[object]) -> bool:
    """Whether the host answers a call, if only by refusals."""
    before = client.answered_at
    try:
        await call
    except PeerError:
        return client.answered_at != before  # guard: refusal-is-an-answer
    return True
