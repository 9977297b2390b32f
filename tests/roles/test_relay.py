"""A relay: what it serves is verified, its disk is bounded, and it forwards what it has while it still fetches."""

import asyncio
import contextlib
import dataclasses
import random
import time
from pathlib import Path

import httpx
import msgspec
import pytest

from shoal.errors import NothingYet, PeerError
from shoal.ledger.constants import RULES_VERSION
from shoal.net.blobs import blob_app
from shoal.net.client import Client
from shoal.net.connection_limits import ServerLimits
from shoal.net.key_files import load_or_make_key
from shoal.protocol import encoding
from shoal.protocol.constants import PROTOCOL_VERSION
from shoal.protocol.host_signatures import is_proof
from shoal.protocol.messages import FileEntry, Manifest, RelayEntry, RunInfo, SignedManifest
from shoal.protocol.signing import Key
from shoal.roles.coordinator.routes import application as coordinator
from shoal.roles.node.serve_chunks import application
from shoal.roles.relay import chunk_store as store_module
from shoal.roles.relay import relay
from shoal.roles.relay.chunk_store import BLOCK_BYTES, IN_HAND_BYTES, ChunkStore
from shoal.roles.relay.relay import ChunkFetcher
from shoal.weights.fetch.chunks import sized_chunks as chunks_in
from shoal.weights.fetch.fetch import fetch
from shoal.weights.fetch.relay_sources import Relays, RelaySource, expected, holdings_of
from shoal.weights.fetch.sources import Passing
from shoal.weights.fetch.version_directory import VersionFolder
from shoal.weights.manifest import ManifestTrust, content_of, open_manifest, sign_manifest
from tests.net.wires import serving
from tests.roles.test_hostile_members import chunks_of
from tests.roles.testbed import RunTestbed, tiny_run
from tests.weights.checkpoints import Chunks, make_checkpoint, published
from tests.weights.test_apply_patches import Line

ROOM = 1 << 30


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run of three steps that has ended."""
    testbed = RunTestbed(tmp_path_factory.mktemp("relay") / "run", tiny_run(policy={"tiny": {
        "width": 64, "layers": 3, "heads": 2, "kv_heads": 1, "mlp_width": 192, "max_positions": 64}}))  # fmt: skip
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("honest")))
    return testbed


def signed_of(testbed: RunTestbed, version: int) -> bytes:
    return testbed.coordinator.blobs.get(testbed.coordinator.state.main.versions[version].manifest)


def fresh(testbed: RunTestbed, *versions: int):
    return [(signed_of(testbed, version), testbed.coordinator.kept.manifests[version]) for version in versions]


def give(store: ChunkStore, testbed: RunTestbed, names: list[str]) -> None:
    for name in names:
        part = store.parts / name
        part.write_bytes(testbed.coordinator.blobs.get(name))
        store.take(name, part)


def on_disk(store: ChunkStore) -> set[str]:
    return {path.name for path in store.folder.glob("??/*")}


# --- what it serves ---


def test_only_what_this_process_verified_is_served(ended, tmp_path):
    (name, *_) = chunks_of(ended, 3)
    store = ChunkStore(tmp_path, ROOM, 0)
    path = store.folder / name[:2] / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"wrong bytes that somebody put here")
    with pytest.raises(NothingYet):
        store.serve(name)
    store.verify()
    assert not path.exists() and store.held == {}
    give(store, ended, [name])
    assert store.serve(name).status_code == 200
    again = ChunkStore(tmp_path, ROOM, 0)
    again.verify()
    assert again.held == store.held


def test_a_file_that_vanished_is_not_said_to_be_here(ended, tmp_path):
    store, (name, *_) = ChunkStore(tmp_path, ROOM, 0), chunks_of(ended, 3)
    give(store, ended, [name])
    (store.folder / name[:2] / name).unlink()
    with pytest.raises(NothingYet):
        store.serve(name)
    assert store.held == {}


def test_the_disk_is_bounded_and_what_is_needed_stays(ended, tmp_path):
    one = sum(f.size for f in ended.coordinator.kept.manifests[3].files)
    store = ChunkStore(tmp_path, IN_HAND_BYTES + int(1.5 * one), 0)
    for version in (0, 1, 2, 3):
        missing = store.missing(fresh(ended, version))
        assert {piece.digest for piece in missing} <= chunks_of(ended, version)
        assert store.held_bytes + sum(piece.size for piece in missing) <= 1.5 * one
        give(store, ended, [piece.digest for piece in missing])
        assert chunks_of(ended, version) <= on_disk(store) == set(store.held)


def test_a_relay_with_little_disk_holds_another_part_than_its_neighbour(tmp_path):
    origin = Chunks()
    manifest = published(make_checkpoint(tmp_path / "checkpoint"), origin)
    half = len(chunks_in(manifest)) // 2
    held = []
    for seed in (1, 2, 3):
        store = ChunkStore(tmp_path / str(seed), IN_HAND_BYTES + (half + 1) * BLOCK_BYTES, seed)
        pieces = store.missing([(b"manifest", manifest)])
        assert len(pieces) == half
        held.append(frozenset(piece.digest for piece in pieces))
        assert {piece.digest for piece in store.missing([(b"manifest", manifest)])} == held[-1]
    assert len(set(held)) == 3


def test_the_calls_of_a_relay(ended, tmp_path):
    store, key = ChunkStore(tmp_path, ROOM, 0), Key.generate()
    manifest = ended.coordinator.kept.manifests[3]
    store.keep(manifest)
    store.missing(fresh(ended, 3))
    held = sorted(chunks_of(ended, 3))[:1]
    give(store, ended, held)

    async def scenario():
        app = application(store, key, "some run", time.time)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
            bits = (await http.get(f"/v1/holdings/{content_of(manifest)}")).content
            assert bits == holdings_of(list(dict.fromkeys(c for f in manifest.files for c in f.chunks)), held)
            assert (await http.get(f"/v1/holdings/{'0' * 64}")).content == b""
            signed = ended.coordinator.state.main.versions[3].manifest
            assert (await http.get(f"/v1/blobs/{signed}")).content == signed_of(ended, 3)
            nonce = "n" * 20
            proof = (await http.get(f"/.well-known/shoal-relay/{nonce}")).json()
            assert is_proof(key.public, "some run", nonce, proof["signature"]) and proof["key"] == key.public
            assert not is_proof(key.public, "another run", nonce, proof["signature"])
            assert not is_proof(key.public, "some run", "m" * 20, proof["signature"])
            for bad in ("short", "x" * 65, "..%2F.."):
                assert (await http.get(f"/.well-known/shoal-relay/{bad}")).status_code == 404

    asyncio.run(scenario())


# --- how it fills ---


def some_info(run: str = "some run") -> RunInfo:
    return RunInfo(run, "n", 1, "", "", "", "", (), None, None, "running", 0)


@contextlib.asynccontextmanager
async def filling(home: Path, source: str):
    """A relay's store while it fills from a coordinator, and its URL."""
    key = load_or_make_key(home / "node.key")
    async with Client(source, key) as client:
        info = await client.get_json("/v1/run", RunInfo)
        store = ChunkStore(home, ROOM, 0)
        filler = ChunkFetcher(client, info, store, Relays(client), time.time)
        task = asyncio.create_task(filler.run())
        try:
            async with serving(application(store, key, info.run, time.time), ServerLimits()) as port:
                yield store, f"http://127.0.0.1:{port}"
        finally:
            task.cancel()


@contextlib.asynccontextmanager
async def relaying(testbed: RunTestbed, home: Path, app=None):
    """A coordinator, or an application in its place, and a relay that fills from it."""
    async with (
        serving(app or coordinator(testbed.coordinator), ServerLimits()) as port,
        filling(home, f"http://127.0.0.1:{port}") as relay_and_url,
    ):
        yield relay_and_url


async def has(store: ChunkStore, names: set[str], limit_s: float = 10.0) -> None:
    async with asyncio.timeout(limit_s):
        while not names <= set(store.held):
            await asyncio.sleep(0.02)


def test_a_newcomer_gets_an_anchor_and_the_patches_after_it_from_a_relay_alone(tmp_path):
    """Their chunks are named by the manifests of several versions: the relay is asked about each of them."""
    line, store = Line(tmp_path, anchor_every=4), ChunkStore(tmp_path / "relay", ROOM, 0)
    for manifest in line.manifests:
        store.keep(manifest)
        for name in chunks_in(manifest):
            part = store.parts / name
            part.write_bytes(line.chunks.held[name])
            store.take(name, part)
    cache, asked = tmp_path / "client", []

    async def scenario():
        async with serving(application(store, Key.generate(), "run", time.time), ServerLimits()) as port:
            entry = RelayEntry(f"http://127.0.0.1:{port}", "127.0.0.1", "key")
            source = RelaySource(entry, beside=True)
            really = source.small
            source.small = lambda path, cap: asked.append(path) or really(path, cap)
            directory = await fetch(line.manifests[5], [source], VersionFolder(cache), manifest_of=line.manifest_of)
            assert line.has(directory, 5)

    asyncio.run(asyncio.wait_for(scenario(), 20))
    way = [f"../holdings/{content_of(line.manifests[version])}" for version in (4, 5)]
    assert asked == way, "the anchor's chunks alone while the anchor is fetched, and each version is asked about once"


def test_a_relay_fetches_the_patches_of_versions_before_their_weights(tmp_path, monkeypatch):
    """Where each version is published both ways, nodes that have the one before wait for the patch alone."""
    line, store = Line(tmp_path, count=3), ChunkStore(tmp_path / "relay", ROOM, 0)
    monkeypatch.setattr(relay, "sources_of", lambda *args, **options: [line.chunks])

    class Host:
        base_url, may_be_inside = "http://127.0.0.1:1", True

        async def get_json(self, path, kind, deadline_s):
            return []

    async def scenario():
        filler = ChunkFetcher(Host(), some_info(), store, Relays(Host()), time.time)
        for version, manifest in enumerate(line.manifests):
            signed = encoding.to_json(sign_manifest(manifest, Key.generate(), now=0.0))
            filler._manifests[version] = relay._Known(signed, manifest, 0.0)
        while not await filler._fill():
            pass

    asyncio.run(asyncio.wait_for(scenario(), 20))
    of_patches = {chunk for manifest in line.manifests for patch in manifest.patches for chunk in patch.file.chunks}
    assert of_patches and set(line.chunks.asked[: len(of_patches)]) == of_patches
    assert all(set(chunks_in(manifest)) <= set(store.held) for manifest in line.manifests)


def test_a_relay_serves_nothing_that_its_source_spoiled(ended, tmp_path, caplog, monkeypatch):
    """It names the source, and goes on with what is right."""
    monkeypatch.setattr(relay, "REST_S", 0.05)
    victim = sorted(chunks_of(ended, 3))[0]

    async def scenario():
        app = coordinator(ended.coordinator)

        async def lying(scope, receive, send):
            spoils = scope["type"] == "http" and scope["path"].endswith(victim)

            async def spoiled(message):
                if spoils and message["type"] == "http.response.body" and message.get("body"):
                    message = message | {"body": b"\0" * len(message["body"])}
                await send(message)

            await app(scope, receive, spoiled)

        async with relaying(ended, tmp_path / "relay", lying) as (store, url):
            await has(store, chunks_of(ended, 3) - {victim})
            await asyncio.sleep(0.5)
            async with httpx.AsyncClient() as http:
                assert (await http.get(f"{url}/v1/blobs/{victim}")).status_code == 404
            assert victim not in store.held and victim not in on_disk(store)
            assert "sent wrong bytes" in caplog.text

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_manifest_that_the_trainer_did_not_sign_fills_nothing(ended, tmp_path, caplog):
    async def scenario():
        forged = signed_of(ended, 3).replace(ended.coordinator.state.trainer_key.encode(), b"0" * 64)

        async def lying(scope, receive, send):
            async def forging(message):
                if scope["type"] == "http" and "/v1/manifests/" in scope["path"]:
                    if message["type"] == "http.response.start":
                        message = message | {"headers": [h for h in message["headers"] if h[0] != b"content-digest"]}
                    elif message.get("body"):
                        message = message | {"body": forged}
                await send(message)

            await coordinator(ended.coordinator)(scope, receive, forging)

        async with relaying(ended, tmp_path / "relay", lying) as (store, _):
            await asyncio.sleep(0.5)
            assert store.held == {} and "may not publish for this run" in caplog.text

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_full_disk_is_told_and_what_is_here_is_served(ended, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(relay, "REST_S", 0.05)

    async def scenario():
        async with relaying(ended, tmp_path / "relay") as (store, url):

            def full(name: str, part: Path) -> None:
                raise OSError(28, "No space left on device")

            store.take, really = full, store.take
            async with asyncio.timeout(10):
                while "cannot store chunks" not in caplog.text:
                    await asyncio.sleep(0.02)
            async with httpx.AsyncClient() as http:
                signed = ended.coordinator.state.main.versions[3].manifest
                assert (await http.get(f"{url}/v1/blobs/{signed}")).status_code == 200
            store.take = really
            await has(store, chunks_of(ended, 3))

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_the_folder_of_another_run_is_deleted_and_no_run_names_a_path(tmp_path):
    runs = tmp_path / "runs"
    (runs / ("a" * 32)).mkdir(parents=True)
    assert relay._only(runs, "b" * 32) == runs / ("b" * 32)
    assert [path.name for path in runs.iterdir()] == ["b" * 32]

    @dataclasses.dataclass
    class Host:
        info: RunInfo

        async def demand_versions(self, rules_version):
            if self.info.protocol != PROTOCOL_VERSION or rules_version != RULES_VERSION:
                raise PeerError("another version")

        async def get_json(self, path, kind):
            return self.info

    for bad in ("../../home", "", "b" * 31, "b" * 32 + "\n"):
        info = some_info(bad)
        with pytest.raises(PeerError, match="not 32 hex digits"):
            asyncio.run(relay._info(Host(info)))
    with pytest.raises(PeerError, match="another version"):
        asyncio.run(relay._info(Host(msgspec.structs.replace(some_info("b" * 32), protocol=PROTOCOL_VERSION + 1))))


def test_a_plain_web_server_with_the_chunks_is_a_relay_too(ended, tmp_path):
    """Such as nginx or a bucket: it does not say what it has, so it is asked for everything."""

    async def scenario():
        async with serving(blob_app(ended.folder.chunks, time.time), ServerLimits()) as port:
            manifest = ended.coordinator.kept.manifests[3]
            entry = RelayEntry(f"http://127.0.0.1:{port}", "127.0.0.1", "key")
            source = RelaySource(entry, beside=True)
            assert (await fetch(manifest, [source], VersionFolder(tmp_path / "cache"))).is_dir()

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_relay_that_says_without_end_what_it_has_is_left(ended):
    async def endless(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(100):
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})

    async def scenario():
        async with serving(endless, ServerLimits()) as port:
            entry = RelayEntry(f"http://127.0.0.1:{port}", "127.0.0.1", "key")
            manifest = ended.coordinator.kept.manifests[3]
            source = RelaySource(entry, beside=True)
            source.expect(expected([manifest]))
            with pytest.raises(Passing, match="answered more than 1 bytes"):
                await source.holds()
            await source.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))


@pytest.mark.parametrize("count", [2, 9])
def test_few_relays_spare_each_other_and_many_do_not(ended, tmp_path, count):
    """The lines of few relays are for clients. Many fetch rare chunks from the origin, and others from each other."""

    @dataclasses.dataclass
    class Host:
        base_url: str = "http://127.0.0.1:1"
        may_be_inside: bool = True

        async def get_json(self, path, kind, deadline_s):
            entries = [RelayEntry(f"http://127.0.0.1:{9000 + i}", "127.0.0.1", str(i)) for i in range(count)]
            return [*entries, RelayEntry("http://127.0.0.1:8999", "127.0.0.1", "own")]

    sources = asyncio.run(Relays(Host(), but="own").sources(rank_of_few=1))
    assert [source.rank for source in sources] == ([1, 1] if count == 2 else [0] * 9)


def test_a_relay_follows_no_other_run_and_no_version_without_end(ended, tmp_path):
    asked = []

    async def scenario():
        async with (
            serving(coordinator(ended.coordinator), ServerLimits()) as port,
            Client(f"http://127.0.0.1:{port}", load_or_make_key(tmp_path / "node.key")) as client,
        ):
            run = await client.get_json("/v1/run", RunInfo)
            filler = ChunkFetcher(client, run, ChunkStore(tmp_path / "relay", ROOM, 0), Relays(client), time.time)

            async def get(path, **more):
                asked.append(path)
                raise NothingYet("no such version")

            async def says(told):
                client.get = get
                filler._news._take(told)
                await filler._look()

            endless = msgspec.structs.replace(run.rules, max_staleness=10**9)
            await says(msgspec.structs.replace(run, version=10**9, rules=endless))
            assert 0 < len(asked) < 200
            with pytest.raises(PeerError, match="another run"):
                await says(msgspec.structs.replace(run, run="ab" * 16))

    asyncio.run(asyncio.wait_for(scenario(), 30))


# --- a host that would fill the disk ---


def taken(folder: Path) -> int:
    """Bytes of the disk that a folder's files take."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def tiny_chunks(testbed: RunTestbed, version: int, count: int, expires: float) -> bytes:
    """A signed manifest of a version whose chunks have one byte each."""
    names = tuple(encoding.digest(f"{version} {i}".encode()) for i in range(count))
    file = FileEntry("model.safetensors", count, "0" * 64, names)
    run = testbed.coordinator.state.run
    manifest = Manifest(run, "policy", version, (), "float32", "a" * 64, (file,), 1, expires - 60.0, expires)
    body, key = encoding.to_json(manifest), load_or_make_key(testbed.folder.keys / "trainer.key")
    return encoding.to_json(SignedManifest(body=body, key=key.public, signature=key.sign("manifest", body)))


def test_chunks_of_one_byte_do_not_fill_the_disk(ended, tmp_path):
    room = 4 << 20
    store = ChunkStore(tmp_path, IN_HAND_BYTES + room, 0)
    signed = tiny_chunks(ended, 0, 3000, time.time() + 60)
    manifest = open_manifest(
        signed, ManifestTrust(ended.coordinator.state.run, (ended.coordinator.state.trainer_key,)), now=None
    )
    pieces = store.missing([(signed, manifest)])
    assert 900 < len(pieces) <= room // BLOCK_BYTES
    for piece in pieces:
        (store.parts / piece.digest).write_bytes(b"x")
        store.take(piece.digest, store.parts / piece.digest)
    assert taken(tmp_path) <= room and store.missing([(signed, manifest)]) == []


def test_manifests_without_end_do_not_fill_the_disk_or_the_memory(ended, tmp_path, monkeypatch):
    """A host whose manifests are large, expire at once, and are of ever other versions. Each here is 200 kB."""
    room, now = 2 << 20, time.time()
    monkeypatch.setattr(relay, "MANIFESTS_BYTES", 3 << 20)
    monkeypatch.setattr(store_module, "MOST_NAMES", 50_000)
    store = ChunkStore(tmp_path, IN_HAND_BYTES + room, 0)
    version, asked = 200, []

    @dataclasses.dataclass
    class Host:
        base_url: str = "http://127.0.0.1:1"

        async def get(self, path, cap):
            asked.append(path)
            return tiny_chunks(ended, int(path.rpartition("/")[2]), 2200, now + 1)

    async def scenario():
        nonlocal info, version, now
        async with ended.client(ended.folder.keys / "anyone.key") as client:
            info = await client.get_json("/v1/run", RunInfo)
        filler = ChunkFetcher(Host(), info, store, None, lambda: now)
        rules = msgspec.structs.replace(info.rules, max_staleness=10**9)
        for _ in range(4):
            filler._news._take(msgspec.structs.replace(info, version=version, rules=rules))
            await filler._look()
            assert sum(len(kept.signed) for kept in filler._manifests.values()) <= 3 << 20
            assert max(filler._manifests) == version
            pairs = [kept[:2] for _, kept in sorted(filler._manifests.items(), reverse=True)]
            store.missing(pairs)
            assert taken(tmp_path) <= room and encoding.digest(pairs[0][0]) in store.held
            now += 2
            before = taken(tmp_path), len(asked)
            await (
                filler._look()
            )  # while chunks are fetched: what expired is not read again at once, and nothing is written
            assert taken(tmp_path) == before[0] and len(asked) <= before[1] + 1
            version -= 40

    info = None
    asyncio.run(scenario())
    assert sum(map(len, store._chunks.values())) <= 50_000


# --- many relays ---


@pytest.mark.parametrize(("count", "again"), [(3, True), (40, False)])
def test_that_a_list_of_many_names_others_is_no_news(count, again):
    """The coordinator tells 20 at random. If each list began a relay's transfer anew, it would never end."""
    names = [f"http://127.0.0.1:{9000 + i}" for i in range(count)]
    rng, now = random.Random(0), 0.0

    @dataclasses.dataclass
    class Host:
        async def get_json(self, path, kind, deadline_s):
            return [RelayEntry(name, "127.0.0.1", name) for name in rng.sample(names, min(20, len(names)))]

    async def scenario():
        nonlocal now
        relays = Relays(Host(), clock=lambda: now)
        assert await relays.refresh(10.0)
        names.append("http://127.0.0.1:8999")  # an honest relay that has come since
        told = []
        for _ in range(30):
            now += 10.0
            told.append(await relays.refresh(10.0))
        return told

    told = asyncio.run(scenario())
    assert told == [again] + [False] * 29


def test_relays_that_come_and_go_begin_a_transfer_anew_less_and_less(ended, tmp_path, monkeypatch):
    monkeypatch.setattr(relay, "LOOK_EVERY_S", 0.0)
    asked, is_new = [], False

    @dataclasses.dataclass
    class Listed:
        async def refresh(self, every_s):
            asked.append(every_s)
            return True

    filler = ChunkFetcher(None, some_info(), ChunkStore(tmp_path, ROOM, 0), Listed(), time.time)

    async def look():
        return is_new

    filler._look = look

    async def scenario():
        nonlocal is_new
        for _ in range(8):
            await filler._until_new()
        assert asked == [10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0, 600.0]
        is_new = True
        await filler._until_new()
        is_new = False
        await filler._until_new()
        assert asked[-1] == 10.0

    asyncio.run(scenario())
