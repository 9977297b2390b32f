"""The environment server: it plays the host's environments in processes of their own, and answers workers' turns."""

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.chat.renderer import Renderer
from shoal.config import RunConfig
from shoal.errors import StateError
from shoal.net import server
from shoal.net.connection_limits import ServerLimits as Connections
from shoal.net.connection_limits import http_server
from shoal.net.key_files import load_or_make_key
from shoal.net.server import Gate, RequestRefused, answer_bytes
from shoal.net.server_address import tell_address
from shoal.protocol import messages as t
from shoal.protocol.constants import MAX_SUBMISSION_BYTES
from shoal.protocol.encoding import digest, from_msgpack, to_msgpack
from shoal.roles.env_server.env_child import Opening
from shoal.roles.env_server.episode_processes import ChildPlayer, EnvProcessPool
from shoal.roles.env_server.reply_store import ReplyStore
from shoal.roles.env_server.turns import Conflict, TurnLimits, record_of, take_turn
from shoal.roles.node.reward_part_files import ScoreFile
from shoal.run_folder import RunFolder
from shoal.runs.log_follower import creation_of

# --- What the stage is working on ---
#
# Each thing once, in threads, and so many at a time for each worker.
#
# Work that takes longer than an answer may take goes on, and its worker is told to ask again.


ANSWER_S = 20.0
"""Work that takes longer is answered "come again", and goes on meanwhile."""

T = TypeVar("T")


class InFlight(Generic[T]):
    """Work of one kind."""

    def __init__(self, kind: str, most: int, most_each: int) -> None:
        """`most` things are worked on at a time; more wait. `most_each` are of one worker; more are refused."""
        self._kind, self._most_each = kind, most_each
        self._threads = ThreadPoolExecutor(most, kind)
        self._tasks: dict[tuple[object, ...], tuple[str, asyncio.Future[T]]] = {}
        """For each place: the name of what is done there, and its result."""
        self._of: Counter[str] = Counter()
        """How many are of a worker."""

    async def answer(self, worker: str, place: tuple[object, ...], name: str, act: Callable[[], T]) -> T:
        """What `act` returns. If it is under way already, as it was named before, it is not done again. Raises as `act`,
        and `RequestRefused` if its worker must ask again."""
        before, task = self._tasks.get(place, ("", None))
        if task is not None and before != name:  # guard: one-turn-at-a-time
            raise _ask_again("another turn of this block is being played")
        if task is None:
            if self._of[worker] >= self._most_each:  # guard: work-of-one-worker
                raise _ask_again(
                    f"{self._of[worker]} {self._kind}s of this worker are at work, limit {self._most_each}"
                )
            task = asyncio.get_running_loop().run_in_executor(self._threads, act)
            self._tasks[place], self._of[worker] = (name, task), self._of[worker] + 1
            task.add_done_callback(lambda done: self._over(worker, place, done))
        done, _ = await asyncio.wait([task], timeout=ANSWER_S)  # guard: slow-turns-go-on
        if not done:
            raise _ask_again("the environment is still at work")
        return task.result()

    def close(self) -> None:
        """Begin nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _over(self, worker: str, place: tuple[object, ...], task: "asyncio.Future[T]") -> None:
        del self._tasks[place]
        self._of[worker] -= 1
        self._of += Counter()  # drops workers with nothing at work
        if not task.cancelled():
            task.exception()  # nobody may be waiting for it: then it is done again


def _ask_again(why: str) -> RequestRefused:
    return RequestRefused(503, "busy", f"{why}: ask again", retry_s=1.0)


# --- The stage ---
#
# The host's process that plays the environments of a run whose workers only extend token ids.
#
# Started by the launcher beside the coordinator. It answers only the coordinator's signed requests, and only on this
# machine. Each answer is in its reply store before it is sent, so the stage may be killed at any time.


log = logging.getLogger("stage")

MAX_TURNS, MAX_WORKER_TURNS = 256, 16
"""Turns that are played at a time, of all workers and of one. Each waits for its players in a thread. A worker plays 16
blocks at a time, so its own slow turns hold up no other worker."""

MAX_RECORDS, MAX_WORKER_RECORDS = 64, 4
"""The same for records. A worker holds two leases; others of it may be judged still, though they have lapsed."""

RATE = (1e6, 1_000_000)
"""Requests a second. All come from the coordinator, which limits those of its workers."""

MsgPack = "application/msgpack"


def main(run_dir: Path) -> None:
    """Play for a run until told to stop. Raises `StateError` if the folder cannot be used."""
    folder = RunFolder(run_dir)
    stage = Stage(folder, folder.config())
    with _listen(folder.stage_address) as listener:
        port = listener.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        tell_address(folder.stage_address, port, url)
        log.info("playing run=%s envs=%s url=%s", stage.run, ",".join(stage.labels), url)
        http_server(stage.application(), Connections(total=256, trusted=())).run(sockets=[listener])


def _listen(address: Path) -> socket.socket:
    """A listening socket on this machine alone: at the port of the last start, where the coordinator still asks, or else a
    free one."""
    last = 0
    with contextlib.suppress(OSError, ValueError, KeyError):
        last = int(str(json.loads(address.read_text())["url"]).rsplit(":", 1)[1])
    for port in dict.fromkeys((last, 0)):
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
            listener.listen(256)
        except OSError:
            listener.close()
        else:
            return listener
    raise StateError("the stage finds no free port on 127.0.0.1: end some programs that listen there")


class Stage:
    """The stage of one run."""

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        make: Callable[[Opening], ChildPlayer] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`make` replaces the processes that play, in tests."""
        self._folder, self._config, self._make = folder, config, make or self._child
        self._scores = ScoreFile(folder.scores, "stage")
        self.run, self.labels = folder.run_id(), tuple(env.label for env in config.envs)
        self._key = load_or_make_key(folder.keys / "run.key").public
        self._gate = Gate(clock, address_rate=RATE, key_rate=RATE)
        self._reply_store = ReplyStore(folder.reply_store)
        self._turns: InFlight[t.TurnAnswer] = InFlight("turn", MAX_TURNS, MAX_WORKER_TURNS)
        self._records: InFlight[t.Record] = InFlight("record", MAX_RECORDS, MAX_WORKER_RECORDS)
        self._newest = -1
        self._forgetting: asyncio.Task[None] | None = None
        self._players: EnvProcessPool | None = None
        self._limits: TurnLimits
        self._shared: set[str]
        """Labels of environments whose replies leases share, because anybody would get the same."""
        self._opening = asyncio.Lock()

    def application(self) -> Starlette:
        """The stage as an ASGI application."""
        routes = [
            Route("/v1/turns", self._turn, methods=["POST"]),
            Route("/v1/records", self._record, methods=["POST"]),
        ]
        return server.application(routes, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self.close()

    def close(self) -> None:
        """End all processes."""
        self._turns.close()
        self._records.close()
        if self._players is not None:
            self._players.close()
        self._reply_store.close()

    async def _turn(self, request: Request) -> Response:
        asked = await self._asked(request)
        if asked.turn is None or len(asked.blocks) != 1:
            raise RequestRefused(400, "malformed", "a turn is of one block")
        return answer_bytes(to_msgpack(await self._answer(asked, asked.turn)), MsgPack)

    async def _record(self, request: Request) -> Response:
        asked = await self._asked(request)
        players, size = await self._open(), self._config.rollouts.group_size
        make = partial(record_of, self._reply_store, self.run, asked, size, players.judge)
        with _refused():
            record = await self._records.answer(asked.worker, (asked.lease,), "", make)  # guard: judged-once
        return answer_bytes(to_msgpack(record), MsgPack)

    async def _asked(self, request: Request) -> t.Staged:
        """What the coordinator asks. Raises `RequestRefused` for any other key."""
        caller = self._gate.admit(request, run=self.run, cap=MAX_SUBMISSION_BYTES)
        if caller.key != self._key:  # guard: stage-answers-the-coordinator
            raise RequestRefused(403, "not_admitted", "only the coordinator of this run asks the stage")
        return from_msgpack(await self._gate.body(request, caller), t.Staged)

    async def _answer(self, asked: t.Staged, turn: t.EnvTurn) -> t.TurnAnswer:
        """The answer to a turn. Raises `RequestRefused`."""
        players = await self._open()
        self._forget_old(asked.version)
        size, shared = self._config.rollouts.group_size, self._shared.__contains__
        play = partial(take_turn, self._reply_store, asked, turn, shared, size, self._limits, players.play)
        place = (asked.lease, asked.blocks[0].index)
        with _refused():
            return await self._turns.answer(asked.worker, place, digest(to_msgpack(turn)), play)

    async def _open(self) -> EnvProcessPool:
        """The players, once the trainer has made the first policy, whose tokenizer they need."""
        async with self._opening:
            if self._players is None:
                folder, config = self._folder, self._config
                if not folder.policy.exists():
                    raise RequestRefused(503, "busy", "the first policy is not here yet: ask again", retry_s=1.0)
                created = creation_of(folder.log)  # an environment that was changed since is refused
                renderer = await asyncio.to_thread(Renderer.from_directory, folder.policy, created.sampling.stops)
                self._limits = TurnLimits(renderer.vocabulary, renderer.stop_ids)
                specs = created.envs
                self._shared = {spec.label for spec in specs if spec.reproducible}
                policy = str(folder.policy)
                limits_s = {env.label: env.call_s for env in config.envs}
                opening = {one.label: Opening((one,), policy, created.sampling, limits_s[one.label]) for one in specs}
                make = self._make
                self._players = EnvProcessPool(
                    lambda label: make(opening[label]), self._reply_store, limits_s.__getitem__
                )
            return self._players

    def _child(self, opening: Opening) -> ChildPlayer:
        return ChildPlayer(opening, partial(self._scores.write, opening.envs[0].label))

    def _forget_old(self, version: int) -> None:
        """Begin to delete what no lease can ask for any more."""
        if version > self._newest:
            self._newest = version
            before = version - self._config.rollouts.max_staleness  # guard: leased-is-not-forgotten
            self._forgetting = asyncio.create_task(self._forget(before))

    async def _forget(self, before: int) -> None:
        try:
            await asyncio.to_thread(self._reply_store.forget, before)
        except StateError as error:
            log.error("old turns are kept reason=%r", str(error))  # until the next version


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Tell the worker that the lease cannot go on here."""
    try:
        yield
    except Conflict as conflict:
        raise RequestRefused(409, "conflict", str(conflict)) from None
