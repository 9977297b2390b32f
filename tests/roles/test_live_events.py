"""Relays hear of a version when it is published: how the coordinator holds their questions, and how they ask."""

import asyncio
import dataclasses
import time

import httpx
import msgspec
import pytest

from shoal.errors import NothingYet, PeerError
from shoal.ledger.commands import Admin
from shoal.net.client import Client
from shoal.net.connection_limits import ServerLimits
from shoal.net.key_files import load_or_make_key
from shoal.protocol import messages as t
from shoal.protocol.encoding import from_json, to_json
from shoal.protocol.messages import AdminRequest
from shoal.roles.coordinator import routes
from shoal.roles.coordinator.request_context import LongPollLimits
from shoal.roles.coordinator.version_uploads import take_checkpoint
from shoal.roles.relay import relay as news_module
from shoal.roles.relay.chunk_store import ChunkStore
from shoal.roles.relay.relay import ASK_EVERY_S, ChunkFetcher, VersionWatch
from shoal.weights.fetch.relay_sources import Relays
from shoal.weights.manifest import sign_manifest
from tests.net.wires import serving
from tests.roles.testbed import URL, RunTestbed, tiny_run


@pytest.fixture
def testbed(tmp_path):
    return RunTestbed(tmp_path / "run", tiny_run())


async def publish(testbed: RunTestbed) -> str:
    """Publish version 0, of one chunk; returns the chunk's name."""
    key, chunk = load_or_make_key(testbed.folder.keys / "trainer.key"), testbed.coordinator.blobs.put(b"weights")
    entry = t.FileEntry("model.safetensors", 7, chunk, (chunk,))
    manifest = t.Manifest(
        testbed.coordinator.state.run, "policy", 0, (), "float32", "a" * 64, (entry,), 8 << 20, 0.0, 0.0
    )
    await take_checkpoint(testbed.coordinator, key.public, to_json(sign_manifest(manifest, key, now=testbed.clock())))
    return chunk


def strangers(testbed: RunTestbed, host: str) -> httpx.AsyncClient:
    """Callers from an address."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(testbed.app, client=(host, 1)), base_url=URL)


# --- the coordinator holds a question ---


def test_who_asks_for_a_newer_version_is_answered_when_it_is_published(testbed, monkeypatch):
    """Other events wake nobody."""
    really, waits = testbed.coordinator.log_writer.changed, []
    monkeypatch.setattr(testbed.coordinator.log_writer, "changed", lambda *how: waits.append(how) or really(*how))

    async def scenario():
        async with strangers(testbed, "9.9.9.9") as http:
            asked = asyncio.create_task(http.get("/v1/run?after=-1"))
            await asyncio.sleep(0.1)
            for action in ("pause", "resume"):
                await testbed.coordinator.log_writer.submit(Admin(action, AdminRequest(), testbed.clock()))
            await asyncio.sleep(0.1)
            assert not asked.done() and len(waits) == 1
            await publish(testbed)
            told = from_json((await asyncio.wait_for(asked, 1.0)).content, t.RunInfo)
            assert told.version == 0
            for at_once in ("", "?after=-1", "?after=-9"):
                assert (
                    from_json((await asyncio.wait_for(http.get(f"/v1/run{at_once}"), 1.0)).content, t.RunInfo) == told
                )

    asyncio.run(scenario())


def test_a_question_is_answered_after_a_while_without_a_new_version(testbed, monkeypatch):
    monkeypatch.setattr(routes, "LONG_POLL_S", 0.2)

    async def scenario():
        async with strangers(testbed, "9.9.9.9") as http:
            began = time.monotonic()
            told = from_json((await http.get("/v1/run?after=7")).content, t.RunInfo)
            return told.version, time.monotonic() - began

    version, took_s = asyncio.run(scenario())
    assert version == -1 and 0.2 <= took_s < 5.0


@pytest.mark.parametrize(("most", "of_a_crowd"), [(64, 2), (2, 64)])
def test_a_flood_of_waits_leaves_places_and_is_answered_at_once(testbed, monkeypatch, most, of_a_crowd):
    """One network gets few places, and all together no more than there are."""
    monkeypatch.setattr(routes, "LongPollLimits", lambda: LongPollLimits(most, of_a_crowd))
    testbed.app = routes.application(testbed.coordinator)

    async def scenario():
        async with (
            strangers(testbed, "9.9.9.1") as one,
            strangers(testbed, "9.9.9.2") as other,
            strangers(testbed, "8.8.8.8") as far,
        ):
            flood = [asyncio.create_task(http.get("/v1/run?after=-1")) for http in (one, other) for _ in range(8)]
            await asyncio.sleep(0.5)
            assert sum(not asked.done() for asked in flood) == 2
            honest = asyncio.create_task(far.get("/v1/run?after=-1"))
            await asyncio.sleep(0.2)
            assert honest.done() == (most == 2)
            assert (await asyncio.wait_for(far.get("/v1/run"), 1.0)).status_code == 200
            await publish(testbed)
            answers = await asyncio.wait_for(asyncio.gather(honest, *flood), 2.0)
            assert {answer.status_code for answer in answers} == {200}

    asyncio.run(scenario())


def test_who_waits_for_a_batch_takes_one_of_the_same_places(testbed, monkeypatch):
    monkeypatch.setattr(routes, "LongPollLimits", lambda: LongPollLimits(64, 2))
    testbed.app = routes.application(testbed.coordinator)

    async def scenario():
        async with strangers(testbed, "9.9.9.1") as crowd, strangers(testbed, "8.8.8.8") as trainer:
            paths = ["/v1/run?after=-1", *["/v1/batches/0"] * 4]
            flood = []
            for path in paths:
                flood.append(asyncio.create_task(crowd.get(path)))
                await asyncio.sleep(0.05)
            waiting = asyncio.create_task(trainer.get("/v1/batches/0"))
            await asyncio.sleep(0.3)
            assert [asked.done() for asked in (*flood, waiting)] == [False, False, True, True, True, False]
            busy = await flood[-1]
            assert (busy.status_code, busy.headers["retry-after"]) == (503, "1")
            assert "many wait for news" in busy.text
            for asked in (*flood, waiting):
                asked.cancel()

    asyncio.run(scenario())


def test_strangers_who_hold_all_places_keep_no_trainer_from_waiting(testbed, monkeypatch):
    """It renews the manifest and takes a new key when its wait ends without a batch."""
    monkeypatch.setattr(routes, "LongPollLimits", lambda: LongPollLimits(1, 1))
    testbed.app = routes.application(testbed.coordinator)

    def client(name: str) -> Client:
        key = load_or_make_key(testbed.folder.keys / f"{name}.key")
        made = Client(URL, key, transport=httpx.ASGITransport(testbed.app))
        made.run = testbed.coordinator.state.run
        return made

    async def scenario():
        async with strangers(testbed, "9.9.9.1") as far, client("trainer") as trainer, client("stranger") as other:
            waiting = asyncio.create_task(far.get("/v1/run?after=-1"))
            await asyncio.sleep(0.1)
            monkeypatch.setattr(routes, "LONG_POLL_S", 0.3)
            with pytest.raises(NothingYet, match="batch 0 is not formed yet"):
                await trainer.get_json("/v1/batches/0", t.Batch, deadline_s=5.0)
            with pytest.raises(PeerError, match="many wait for news"):
                await other.get_json("/v1/batches/0", t.Batch, deadline_s=1.5)
            forged = {
                "signature-input": f'shoal=();keyid="{testbed.coordinator.state.trainer_key}"',
                "signature": "shoal=::",
            }
            assert (await far.get("/v1/batches/0", headers=forged)).status_code == 401
            waiting.cancel()

    asyncio.run(scenario())


def test_a_place_is_free_again_when_its_wait_ends():
    waits = LongPollLimits(2, 1)
    with waits.place("9.9.9.9", "a key") as first, waits.place("8.8.8.8", "a key") as second:
        assert (first, second) == (True, False)
    assert not waits._of_publishers
    for _ in range(3):
        with waits.place("9.9.9.9") as first, waits.place("9.9.9.8") as second, waits.place("8.8.8.8") as third:
            assert (first, second, third) == (True, False, True)
            with waits.place("7.7.7.7") as fourth:
                assert not fourth
    assert not waits._of


# --- a relay asks ---


def info_of(testbed: RunTestbed, version: int = -1) -> t.RunInfo:
    return msgspec.structs.replace(routes.StatusCache(testbed.coordinator).info(), version=version)


@dataclasses.dataclass
class Host:
    """Answers at once what it is told to answer; time passes only while the relay rests."""

    answers: list
    asked: list = dataclasses.field(default_factory=list)
    now: float = 0.0

    async def get_json(self, path, kind):
        self.asked.append((self.now, path))
        if not self.answers:
            raise asyncio.CancelledError
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def sleep(self, wait_s):
        self.now += wait_s


def follow(host: Host, info: t.RunInfo) -> VersionWatch:
    async def scenario():
        news = VersionWatch(host, info, clock=lambda: host.now, sleep=host.sleep)
        with pytest.raises(asyncio.CancelledError):
            await news.follow()
        return news

    return asyncio.run(scenario())


@pytest.mark.parametrize("versions", [[-1] * 40, list(range(40))])
def test_a_host_that_answers_at_once_makes_no_relay_spin(testbed, versions):
    """An older host does not wait, and a hostile one may tell of ever new versions."""
    host = Host([info_of(testbed, version) for version in versions])
    follow(host, info_of(testbed))
    assert [at for at, _ in host.asked] == [ASK_EVERY_S * i for i in range(41)]
    assert host.asked[-1][1] == f"/v1/run?after={versions[-1]}"


def test_a_relay_asks_again_after_a_failure_and_believes_no_other_run(testbed):
    other = msgspec.structs.replace(info_of(testbed, 9), run="ab" * 16)
    host = Host([PeerError("refused"), other, info_of(testbed, 3)])
    news = follow(host, info_of(testbed))
    assert news.info.version == 3
    assert host.asked == [(0.0, "/v1/run?after=-1"), (10.0, "/v1/run?after=-1"), (20.0, "/v1/run?after=-1"),
                          (22.0, "/v1/run?after=3")]  # fmt: skip


def test_a_manifest_that_is_refused_is_asked_for_seldom(testbed, tmp_path):
    """Also while another version is being fetched: a hostile host tells of a version that nobody can read."""
    asked = []

    class Refusing:
        async def get(self, path, cap):
            asked.append(path)
            await asyncio.sleep(0)
            raise PeerError("refused")

    async def scenario():
        filler = ChunkFetcher(Refusing(), info_of(testbed), ChunkStore(tmp_path, 1 << 30, 0), None, time.time)
        filler._news._take(info_of(testbed, 0))
        looking = asyncio.create_task(filler._until_new())
        await asyncio.sleep(0.2)
        looking.cancel()
        assert asked == ["/v1/manifests/0"]

    asyncio.run(scenario())


@pytest.mark.parametrize("knows_after", [True, False])
def test_a_relay_has_a_version_as_soon_as_it_is_published(testbed, tmp_path, monkeypatch, knows_after):
    """With a coordinator that holds questions it asks once; with an older one it asks again and again."""
    monkeypatch.setattr(news_module, "ASK_EVERY_S", 0.1)
    asked = []

    async def app(scope, receive, send):
        if scope["type"] == "http" and scope["path"] == "/v1/run":
            asked.append(scope["query_string"])
            scope = scope if knows_after else scope | {"query_string": b""}
        await testbed.app(scope, receive, send)

    async def scenario():
        async with (
            serving(app, ServerLimits()) as port,
            Client(f"http://127.0.0.1:{port}", load_or_make_key(tmp_path / "node.key")) as client,
        ):
            store = ChunkStore(tmp_path / "relay", 1 << 30, 0)
            filler = ChunkFetcher(client, info_of(testbed), store, Relays(client), time.time)
            filling = asyncio.create_task(filler.run())
            await asyncio.sleep(1.0)
            before, chunk = len(asked), await publish(testbed)
            async with asyncio.timeout(1.5):  # it looks at what is missing every 2 s
                while chunk not in store.held:
                    await asyncio.sleep(0.01)
            filling.cancel()
            await asyncio.gather(filling, return_exceptions=True)
            return before

    before = asyncio.run(asyncio.wait_for(scenario(), 20))
    assert (before == 1) == knows_after and before < 12
