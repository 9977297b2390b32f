"""A client whose server was outside when it first answered opens no connection to the inside of its own network."""

import asyncio
import contextlib
import socket

import pytest

from shoal.errors import PeerError
from shoal.net import urls
from shoal.net.client import Client

INSIDE, OUTSIDE, ELSEWHERE = "127.0.0.1", "127.0.0.2", "127.0.0.3"


class Names:
    """Where a name leads, as its owner decides. 127.0.0.2 and 127.0.0.3 play the part of public addresses."""

    def __init__(self, monkeypatch):
        self.leads = [OUTSIDE]
        really = socket.getaddrinfo

        def look_up(host, *args, **more):
            if host in ("host.example.org", b"host.example.org"):
                return [entry for address in self.leads for entry in really(address, *args, **more)]
            return really(host, *args, **more)

        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        monkeypatch.setattr(urls, "is_outside", lambda address: address in (OUTSIDE, ELSEWHERE))


@pytest.fixture
def names(monkeypatch):
    return Names(monkeypatch)


@contextlib.asynccontextmanager
async def servers(*at, shoal=True):
    """Servers at one port of several addresses, each of which closes after each answer; and who was connected to."""
    reached, header, open_ = [], b"shoal-protocol: 1\r\n" if shoal else b"", []

    async def serve(reader, writer):
        reached.append(writer.get_extra_info("sockname")[0])
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n" + header + b"content-length: 2\r\n\r\n{}")
            await writer.drain()
        writer.close()

    port = 0
    for address in at:
        open_.append(await asyncio.start_server(serve, address, port))
        port = open_[0].sockets[0].getsockname()[1]
    try:
        yield f"http://host.example.org:{port}", reached
    finally:
        for server in open_:
            server.close()


def test_a_name_that_leads_inside_after_the_first_answer_is_not_followed(names):
    async def scenario():
        async with servers(OUTSIDE, INSIDE) as (url, reached), Client(url) as client:
            await client.get("/v1/run")
            assert not client.may_be_inside and client.address == OUTSIDE
            names.leads = [INSIDE]
            client._network._failed = True  # the server has closed its port
            with pytest.raises(PeerError, match="inside a network: it is not called there"):
                await client.get("/v1/run", deadline_s=0.5)
            assert set(reached) == {OUTSIDE}
            names.leads = [INSIDE, OUTSIDE]  # an honest host with an address on each side
            await client.get("/v1/run", deadline_s=5.0)
            assert set(reached) == {OUTSIDE}

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_server_that_moves_to_another_address_outside_is_found(names):
    async def scenario():
        async with servers(ELSEWHERE) as (url, reached), Client(url) as client:
            names.leads = [ELSEWHERE]
            await client.get("/v1/run")
            names.leads = [OUTSIDE, ELSEWHERE]
            client._network.address = OUTSIDE  # where nothing listens any more
            await client.get("/v1/run", deadline_s=10.0)
            assert client.address == ELSEWHERE and set(reached) == {ELSEWHERE}

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_run_inside_a_network_may_name_what_is_inside(names):
    async def scenario():
        async with servers(INSIDE) as (url, reached), Client(url) as client:
            names.leads = [INSIDE]
            await client.get("/v1/run")
            await client.get("/v1/run")
            assert client.may_be_inside and reached == [INSIDE] * 2

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_another_server_inside_does_not_decide_the_side(names):
    """A name that leads to a router of the guest's network first."""

    async def scenario():
        async with servers(INSIDE, shoal=False) as (url, _), Client(url) as client:
            names.leads = [INSIDE]
            with pytest.raises(PeerError, match="is not a shoal node"):
                await client.get("/v1/run", deadline_s=1.0)
            assert not client.may_be_inside

    asyncio.run(asyncio.wait_for(scenario(), 20))
