"""What strangers may ask of a coordinator, and how often: stories over its real application."""

import asyncio
from functools import partial

import httpx
import pytest

from shoal.errors import PeerError
from shoal.ledger.commands import Reconfigure
from shoal.net.client import Client
from shoal.net.server import Gate
from shoal.protocol import messages as t
from shoal.protocol.encoding import digest
from shoal.protocol.signing import Key, content_digest
from shoal.roles.coordinator import request_context
from shoal.roles.coordinator.request_context import PART_BYTES, Pages
from shoal.roles.coordinator.routes import CALLS, application
from tests.roles.testbed import URL, RunTestbed, tiny_run

OPEN_CALLS = sorted(call.path for call, _ in CALLS if call.who.startswith("anyone"))


@pytest.fixture
def testbed(tmp_path):
    return RunTestbed(tmp_path / "run", tiny_run())


@pytest.fixture(scope="module")
def idle(tmp_path_factory):
    return RunTestbed(tmp_path_factory.mktemp("idle") / "run", tiny_run())


def once_each(testbed, monkeypatch, **rates):
    """The same coordinator with other rates."""
    monkeypatch.setattr("shoal.roles.coordinator.routes.Gate", partial(Gate, **rates))
    testbed.app = application(testbed.coordinator)


@pytest.mark.parametrize("path", OPEN_CALLS)
def test_every_call_that_is_open_to_anyone_counts_for_its_address(idle, monkeypatch, path):
    once_each(idle, monkeypatch, address_rate=(0.001, 1))

    async def scenario():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(idle.app), base_url=URL) as http:
            used = await http.get("/v1/run")
            asked = path.replace(":path}", "}").format(key="0", hash="0", version="0", step="0", path="x")
            return used.status_code, (await http.get(asked)).status_code

    assert asyncio.run(scenario()) == (200, 429)


def test_an_address_adds_few_new_keys_to_the_log_and_known_ones_join_again(testbed, monkeypatch):
    once_each(testbed, monkeypatch, newcomer_rate=(0.001, 2))
    keys = [Key(bytes([i]) * 32) for i in range(4)]

    async def join(key, name="node"):
        async with Client(
            URL, key, transport=httpx.ASGITransport(testbed.app), run=testbed.coordinator.state.run
        ) as client:
            await client.post_json(
                "/v1/nodes", t.Join("worker", name, 0.0, "x", "float32", "cpu"), t.NodeState, deadline_s=3.0
            )

    async def scenario():
        joined = []
        for key in keys:
            try:
                await join(key)
            except PeerError as error:
                joined.append(str(error))
            else:
                joined.append("joined")
        await asyncio.sleep(1.1)  # `created` counts whole seconds
        await join(keys[0], "another name")
        return joined

    joined = asyncio.run(scenario())
    assert joined[:2] == ["joined"] * 2 and all("from one address by new keys" in error for error in joined[2:])
    assert (
        len(testbed.coordinator.state.members) == 2
        and testbed.coordinator.state.members[keys[0].public].name == "another name"
    )


def long_log(testbed, events, size):
    for number in range(events):
        now = testbed.clock()
        testbed.coordinator.log_writer.write(Reconfigure({"x": str(number) + "y" * size}, 3, 5.0, now), now)


async def sent(response):
    return [part async for part in response.body_iterator]


def test_a_page_of_the_log_goes_out_in_parts_and_is_what_the_log_holds(testbed):
    long_log(testbed, 40, PART_BYTES // 4)
    stored = [data for data, _ in testbed.coordinator.log_writer.store.read()]
    for after in (-1, 0, 17, len(stored) - 1):
        response = asyncio.run(Pages(testbed.coordinator.log_writer.store).after(after))
        parts = asyncio.run(sent(response))
        page = b"".join(parts)
        assert page == b"".join(data + b"\n" for data in stored[after + 1 :])
        assert response.headers["content-length"] == str(len(page))
        assert response.headers["content-digest"] == content_digest(digest(page))
        assert all(len(part) < 2 * PART_BYTES for part in parts)


def test_pages_that_nobody_reads_take_no_memory_and_others_are_served_meanwhile(testbed, monkeypatch):
    """Before, each of the 256 connections of an address could hold a page of 8 MiB."""
    long_log(testbed, 40, PART_BYTES)
    pages, read, at_once = Pages(testbed.coordinator.log_writer.store), testbed.coordinator.log_writer.store.read, []

    def counted(*how):
        at_once.append(1)
        try:
            yield from read(*how)
        finally:
            at_once.pop()

    monkeypatch.setattr(testbed.coordinator.log_writer.store, "read", counted)

    async def many(ask, count):
        most, turns = 0, 0
        asked = [asyncio.create_task(ask()) for _ in range(count)]
        while not all(one.done() for one in asked):
            most, turns = max(most, len(at_once)), turns + 1
            await asyncio.sleep(0)
        assert most == 1 and turns > count * 40 and len(at_once) == 0
        return [one.result() for one in asked]

    async def scenario():
        firsts = [await anext(page.body_iterator) for page in await many(lambda: pages.after(-1), 8)]
        assert all(len(first) < 2 * PART_BYTES for first in firsts)
        monkeypatch.setattr(request_context, "ROWS", 1)
        monkeypatch.setattr(request_context, "MAX_EVENTS_BYTES", 45 * PART_BYTES)
        assert [len(entries) for entries in await many(lambda: pages.entries(-1), 2)] == [41, 41]
        monkeypatch.setattr(request_context, "MAX_EVENTS_BYTES", 4 * PART_BYTES)
        assert [entry.seq for entry in await pages.entries(20)] == [*range(22)], "with one event after it"

    asyncio.run(scenario())
