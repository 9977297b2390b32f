"""The stage: the host's process that plays the environments of a run whose workers only extend token ids.

Started by the launcher beside the coordinator. It answers only the coordinator's signed requests, and only on this machine.
It has no key and no log. Each answer is in its memo before it is sent, so the stage may be killed at any time.
"""

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.config import RunConfig
from shoal.errors import StateError
from shoal.folder import RunFolder
from shoal.ledger.log.creation import creation_of
from shoal.net import server
from shoal.net.connections import Limits as Connections
from shoal.net.connections import http_server
from shoal.net.keys import load_or_make_key
from shoal.net.listening import tell_address
from shoal.net.server import Gate, RequestRefused, answer_bytes
from shoal.policy.render import Renderer
from shoal.protocol import types as t
from shoal.protocol.constants import MAX_SUBMISSION_BYTES
from shoal.protocol.wire import digest, from_msgpack, to_msgpack
from shoal.roles.scores import ScoreFile
from shoal.roles.stage.at_work import AtWork
from shoal.roles.stage.child import Opening
from shoal.roles.stage.memo import Memo
from shoal.roles.stage.players import ChildPlayer, Player
from shoal.roles.stage.troupes import Players
from shoal.roles.stage.turns import Conflict, Limits, record_of, take_turn

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
        make: Callable[[Opening], Player] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`make` replaces the processes that play, in tests."""
        self._folder, self._config, self._make = folder, config, make or self._child
        self._scores = ScoreFile(folder.scores, "stage")
        self.run, self.labels = folder.run_id(), tuple(env.label for env in config.envs)
        self._key = load_or_make_key(folder.keys / "run.key").public
        self._gate = Gate(clock, address_rate=RATE, key_rate=RATE)
        self._memo = Memo(folder.stage_memo)
        self._turns: AtWork[t.TurnAnswer] = AtWork("turn", MAX_TURNS, MAX_WORKER_TURNS)
        self._records: AtWork[t.Record] = AtWork("record", MAX_RECORDS, MAX_WORKER_RECORDS)
        self._newest = -1
        self._forgetting: asyncio.Task[None] | None = None
        self._players: Players | None = None
        self._limits: Limits
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
        self._memo.close()

    async def _turn(self, request: Request) -> Response:
        asked = await self._asked(request)
        if asked.turn is None or len(asked.blocks) != 1:
            raise RequestRefused(400, "malformed", "a turn is of one block")
        return answer_bytes(to_msgpack(await self._answer(asked, asked.turn)), MsgPack)

    async def _record(self, request: Request) -> Response:
        asked = await self._asked(request)
        players, size = await self._open(), self._config.rollouts.group_size
        make = partial(record_of, self._memo, self.run, asked, size, players.judge)
        with _refused():
            record = await self._records.answer(asked.worker, (asked.lease,), "", make)  # guard: judged-once
        return answer_bytes(to_msgpack(record), MsgPack)

    async def _asked(self, request: Request) -> t.Staged:
        """What the coordinator asks. Raises `RequestRefused` for any other key."""
        caller = self._gate.admit(request, run=self.run, cap=MAX_SUBMISSION_BYTES)
        if caller.key != self._key:  # guard: stage-answers-the-coordinator
            raise RequestRefused(403, "not_admitted", "only the coordinator of this run asks the stage")
        return from_msgpack(await self._gate.body(request, caller), t.Staged)

    async def _answer(self, asked: t.Staged, turn: t.Turn) -> t.TurnAnswer:
        """The answer to a turn. Raises `RequestRefused`."""
        players = await self._open()
        self._forget_old(asked.version)
        size, shared = self._config.rollouts.group_size, self._shared.__contains__
        play = partial(take_turn, self._memo, asked, turn, shared, size, self._limits, players.play)
        place = (asked.lease, asked.blocks[0].index)
        with _refused():
            return await self._turns.answer(asked.worker, place, digest(to_msgpack(turn)), play)

    async def _open(self) -> Players:
        """The players, once the trainer has made the first policy, whose tokenizer they need."""
        async with self._opening:
            if self._players is None:
                folder, config = self._folder, self._config
                if not folder.policy.exists():
                    raise RequestRefused(503, "busy", "the first policy is not here yet: ask again", retry_s=1.0)
                created = creation_of(folder.log)  # an environment that was changed since is refused
                renderer = await asyncio.to_thread(Renderer.from_directory, folder.policy, created.sampling.stops)
                self._limits = Limits(renderer.vocabulary, renderer.stop_ids)
                specs = created.envs
                self._shared = {spec.label for spec in specs if spec.reproducible}
                policy = str(folder.policy)
                limits_s = {env.label: env.call_s for env in config.envs}
                opening = {one.label: Opening((one,), policy, created.sampling, limits_s[one.label]) for one in specs}
                make = self._make
                self._players = Players(lambda label: make(opening[label]), self._memo, limits_s.__getitem__)
            return self._players

    def _child(self, opening: Opening) -> Player:
        return ChildPlayer(opening, partial(self._scores.write, opening.envs[0].label))

    def _forget_old(self, version: int) -> None:
        """Begin to delete what no lease can ask for any more."""
        if version > self._newest:
            self._newest = version
            before = version - self._config.rollouts.max_staleness  # guard: leased-is-not-forgotten
            self._forgetting = asyncio.create_task(self._forget(before))

    async def _forget(self, before: int) -> None:
        try:
            await asyncio.to_thread(self._memo.forget, before)
        except StateError as error:
            log.error("old turns are kept reason=%r", str(error))  # until the next version


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Tell the worker that the lease cannot go on here."""
    try:
        yield
    except Conflict as conflict:
        raise RequestRefused(409, "conflict", str(conflict)) from None
