"""The coordinator's connection to the stage, which plays the environments of a run whose workers only extend token ids.

Called by the desk for turns, and for the record of a submission. It decodes what both sides say and limits how much is
asked at a time. It does not deal with environments. If the stage does not answer, workers are told to ask again.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from shoal.errors import PeerError
from shoal.ledger.answers import Refused
from shoal.net.client import Client, PeerRefused
from shoal.net.server import RequestRefused
from shoal.protocol import types as t
from shoal.protocol.constants import MAX_SUBMISSION_BYTES
from shoal.protocol.identity import Key

MAX_WORKER_TURNS = 16
"""Turns of one worker that are answered at a time. It may play this many blocks at once."""

MAX_TURNS = 256
"""Turns of all workers that are answered at a time. For one more the coordinator answers 503."""

STAGE_S = 25.0
"""How long the stage may take. It always answers sooner, if only to say that it is still at work."""

T = TypeVar("T")


class StageDoor:
    """Requests to the stage, signed with the run key."""

    def __init__(self, address: Path, key: Key, run: str, connect: Callable[[str], Client] | None = None) -> None:
        """`address` is the file in which the stage says where it is. `connect` makes a client of a URL."""
        self._address, self._run = address, run
        self._connect = connect or (lambda url: Client(url, key, run=run))
        self._client: Client | None = None
        self._asking: Counter[str] = Counter()

    async def turn(self, asked: t.Staged, cap: int) -> t.TurnAnswer:
        """The answer to a turn. Raises `RequestRefused` as the stage does, and 503 if it is not there."""
        return await self._ask("/v1/turns", asked, t.TurnAnswer, cap)

    async def record(self, asked: t.Staged) -> t.Record:
        """The record of a lease whose rollouts have all ended. Raises as `turn`."""
        return await self._ask("/v1/records", asked, t.Record, MAX_SUBMISSION_BYTES)

    @contextlib.contextmanager
    def place(self, worker: str) -> Iterator[None]:
        """To hold around one turn of a worker. Raises `Refused` if too many are being answered."""
        own, all_ = self._asking[worker], self._asking.total()
        if own >= MAX_WORKER_TURNS or all_ >= MAX_TURNS:  # guard: turns-at-a-time
            raise Refused("busy", f"{own} turns of this worker (limit {MAX_WORKER_TURNS}), and {all_} of all (limit "
                          f"{MAX_TURNS}), are being answered: ask again in a moment")  # fmt: skip
        self._asking[worker] += 1
        try:
            yield
        finally:
            self._asking[worker] -= 1
            self._asking += Counter()  # drops workers that ask nothing

    async def _ask(self, path: str, asked: t.Staged, kind: type[T], cap: int) -> T:
        try:
            return await self._reached().post_packed(path, asked, kind, cap=cap, deadline_s=STAGE_S)
        except PeerRefused as refused:
            raise RequestRefused(refused.status, refused.code, refused.reason) from None
        except PeerError as trouble:
            # guard: no-stage-is-no-refusal
            raise RequestRefused(503, "busy", f"the host's stage gives no answer now: {trouble}", retry_s=1.0) from None

    def _reached(self) -> Client:
        """A client of the stage where it is now: it comes back at another port when it was killed."""
        try:
            url = str(json.loads(self._address.read_text())["url"])
        except (OSError, ValueError, KeyError):
            raise PeerError("it has not started yet") from None
        if self._client is None or self._client.base_url != url:
            self._client = self._connect(url)  # an old one may have requests under way, which fail by themselves
        return self._client
