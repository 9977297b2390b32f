"""A toy application behind a real gate: one idempotent counter, as all writes of ours are."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.errors import NothingYet, StateError, Superseded
from shoal.net import server
from shoal.protocol.messages import Message
from shoal.protocol.signing import Caller

RUN = "run-1"


class Deposit(Message):
    """What the toy takes: the same id twice is one deposit."""

    id: str
    amount: int


class Balance(Message):
    """What it answers."""

    total: int
    digest: str


class Time:
    """A clock that only sleeping moves."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


async def take(gate: server.Gate, request: Request) -> tuple[Caller, bytes]:
    """The verified sender and the body of a request that anyone with a key may send."""
    caller = gate.admit(request, run=RUN, cap=1000)
    return caller, await gate.body(request, caller)


class Toy:
    """The application and what it remembers."""

    def __init__(self, time: Time, **options: object) -> None:
        self.gate = server.Gate(time, **options)
        self.deposits: dict[str, int] = {}
        self.calls = 0
        self.callers: list[object] = []
        self.app = server.application(
            [
                Route("/deposits", self.deposit, methods=["POST", "PUT"]),
                Route("/open", self.open, methods=["GET"]),
                Route("/raise/{what}", self.fail, methods=["GET"]),
            ]
        )

    async def deposit(self, request: Request) -> Response:
        self.calls += 1
        caller, body = await take(self.gate, request)
        self.callers.append(caller)
        deposit = server.decode(body, Deposit)
        if self.deposits.setdefault(deposit.id, deposit.amount) != deposit.amount:
            raise server.RequestRefused(409, "conflict", f"deposit {deposit.id} was another amount: use another id")
        return server.answer(Balance(total=sum(self.deposits.values()), digest="x" * 40))

    async def open(self, request: Request) -> Response:
        await self.gate.anyone(request)
        return server.answer(Balance(total=len(self.deposits), digest=request.url.query))

    async def fail(self, request: Request) -> Response:
        self.calls += 1
        raise {
            "superseded": Superseded("the lease went to another: ask for the next"),
            "nothing": NothingYet("no batch yet: ask again later"),
            "disk": StateError("the disk is full: free some space"),
            "forbidden": server.RequestRefused(403, "not_admitted", "this key may not validate: ask the host"),
            "again": server.RequestRefused(503, "replayed", "a later request came: sign again", retry_s=1.0),
            "bug": RuntimeError("secret detail"),
        }[request.path_params["what"]]
