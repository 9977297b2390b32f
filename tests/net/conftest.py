"""Fixtures of this room: the toy bank, its clock, and clients of it."""

import random

import httpx
import pytest

from shoal.net.client import Client, Timing
from shoal.protocol.signing import Key
from tests.net.toy_bank import RUN, Time, Toy


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def toy(time: Time) -> Toy:
    return Toy(time)


@pytest.fixture
def connect(time: Time):
    """A client of an application, in memory, with the test's clock; `wrap` may put a bad network between."""

    def make(app: object, key: Key | None = None, *, wrap=lambda transport: transport, **options: object) -> Client:
        transport = wrap(httpx.ASGITransport(app=app))  # type: ignore[arg-type]
        options = {"run": RUN, "timing": Timing(time, time.sleep, time, random.Random(0))} | options
        return Client("http://toy", key, transport=transport, **options)

    return make
