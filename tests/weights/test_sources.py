"""Sources over real sockets: ordinary web servers will do, and what is not a chunk is refused by name."""

import asyncio
import contextlib
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file
from starlette.routing import Route

from shoal.errors import NothingYet, PeerError
from shoal.net import server
from shoal.net.blobs import FolderBlobs
from shoal.net.connection_limits import ServerLimits
from shoal.protocol import encoding
from shoal.weights.fetch import sources, transfer
from shoal.weights.fetch.fetch import fetch
from shoal.weights.fetch.sources import STRANGERS, TRUSTED, ChunkSource, HttpSource, Passing, WrongBytes
from shoal.weights.fetch.transfer import TransferEvents
from shoal.weights.fetch.version_directory import VersionFolder
from shoal.weights.publish import PublishSettings, publish
from tests.net.fault_proxy import FaultProxy, LineFault
from tests.net.wires import serving
from tests.weights.checkpoints import Chunks, make_checkpoint, published
from tests.weights.web import Answer, head, plain_web_server, web_server

CHUNK = bytes(range(256)) * 40
NAME = encoding.digest(CHUNK)


async def read(source: HttpSource, start: int = 0, size: int = len(CHUNK)) -> bytes:
    try:
        return b"".join([part async for part in source.parts(NAME, start, size)])
    finally:
        await source.close()


def ask(answer: Answer, start: int = 0, size: int = len(CHUNK), **options: object) -> bytes:
    """What a source reads of a server's answer."""

    async def scenario() -> bytes:
        async with web_server(answer) as url:
            return await read(HttpSource(url, **({"address": TRUSTED} | options)), start, size)  # type: ignore[arg-type]

    return asyncio.run(asyncio.wait_for(scenario(), 20))


def saying(data: bytes) -> Answer:
    """A server that answers everything alike."""

    async def answer(path: str, headers: dict[str, str], writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        if not data.startswith(b"HTTP"):
            writer.close()

    return answer


@contextlib.asynccontextmanager
async def blob_server(folder: Path) -> AsyncIterator[int]:
    """The port of a server that serves blobs as the coordinator does."""
    blobs = FolderBlobs(folder)

    async def get(request):
        return blobs.serve(request.path_params["digest"])

    async with serving(server.application([Route("/v1/blobs/{digest}", get)]), ServerLimits()) as port:
        yield port


def test_an_ordinary_web_server_will_do(tmp_path):
    origin = Chunks()
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    manifest = published(checkpoint, origin)
    (tmp_path / "bucket" / "run").mkdir(parents=True)
    for digest, chunk in origin.held.items():
        (tmp_path / "bucket" / "run" / digest).write_bytes(chunk)
    with plain_web_server(tmp_path / "bucket") as url:
        source = HttpSource(f"{url}/run/", TRUSTED)
        directory = asyncio.run(fetch(manifest, [source], VersionFolder(tmp_path / "cache")))
        assert (directory / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()


def test_a_server_without_range_serves_the_rest_of_a_chunk(tmp_path):
    (tmp_path / NAME).write_bytes(CHUNK)
    with plain_web_server(tmp_path) as url:
        assert asyncio.run(read(HttpSource(url, TRUSTED), start=5000)) == CHUNK[5000:]


def test_a_server_with_range_sends_only_the_rest(tmp_path):
    async def scenario() -> None:
        FolderBlobs(tmp_path).put(CHUNK)
        async with blob_server(tmp_path) as port, FaultProxy(port, random.Random(0)) as proxy:
            source = HttpSource(f"http://127.0.0.1:{proxy.port}/v1/blobs", TRUSTED)
            assert await read(source, start=10_000) == CHUNK[10_000:]
            assert proxy.passed_bytes < 1000

    asyncio.run(scenario())


def test_no_redirect_is_followed():
    reached = []

    async def answer(path: str, headers: dict[str, str], writer: asyncio.StreamWriter) -> None:
        reached.append(path)
        if path.startswith("/inside"):
            writer.write(head(200, Content_Length=len(CHUNK)) + CHUNK)
        else:
            writer.write(head(302, Location="/inside", Content_Length=0))

    for transport in (None, httpx.AsyncHTTPTransport()):  # ours shows httpx no location
        with pytest.raises(PeerError, match="redirects to /inside"):
            ask(answer, transport=transport)
    assert reached == [f"/{NAME}"] * 2


@pytest.mark.parametrize(
    ("said", "kind", "reason"),
    [
        (head(404, Content_Length=0), NothingYet, "does not have a chunk"),
        (head(403, Content_Length=0), PeerError, "HTTP 403"),
        (head(503, Content_Length=0, Retry_After=7), Passing, "HTTP 503"),
        (head(200, Content_Length=10 << 40), WrongBytes, f"declares {10 << 40} bytes where the chunk has {len(CHUNK)}"),
        (head(200, Content_Length=9) + b"<p>Log in", WrongBytes, "declares 9 bytes"),
        (head(200, Content_Length=len(CHUNK), Content_Encoding="gzip"), PeerError, "content-encoding 'gzip'"),
        (head(206, Content_Range="bytes 7-9/10", Content_Length=3) + b"abc", WrongBytes, "answered bytes 0-10239"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", Passing, "Check that"),
    ],
)
def test_an_answer_that_is_not_the_chunk_is_refused(said, kind, reason):
    with pytest.raises(kind, match=reason) as refused:
        ask(saying(said))
    if "503" in reason:
        assert refused.value.retry_s == 7


def test_a_relay_that_is_still_filling_is_asked_again():
    with pytest.raises(Passing, match="does not have the chunk yet"):
        ask(saying(head(404, Content_Length=0)), still_filling=True)


def test_an_answer_that_breaks_off_may_come_again():
    async def answer(path: str, headers: dict[str, str], writer: asyncio.StreamWriter) -> None:
        writer.write(head(200, Content_Length=len(CHUNK)) + CHUNK[:100])
        writer.close()

    with pytest.raises(Passing):
        ask(answer)


def test_a_stranger_names_no_address_inside_a_network():
    reached = []

    async def answer(path: str, headers: dict[str, str], writer: asyncio.StreamWriter) -> None:
        reached.append(path)

    with pytest.raises(PeerError, match=r"127\.0\.0\.1, an address inside a network"):
        ask(answer, address=STRANGERS)
    assert reached == []


def test_the_address_that_was_judged_is_the_one_that_is_asked(monkeypatch):
    """A name could have another address a moment later. The server still learns which name was meant."""
    asked, hosts = [], []

    async def judged(host: str, port: int) -> str:
        asked.append(host)
        return "127.0.0.1"

    async def answer(path: str, headers: dict[str, str], writer: asyncio.StreamWriter) -> None:
        hosts.append(headers["host"])
        writer.write(head(200, Content_Length=len(CHUNK)) + CHUNK)

    async def scenario() -> bytes:
        async with web_server(answer) as url:
            return await read(HttpSource(url.replace("127.0.0.1", "bucket.invalid")))

    monkeypatch.setattr(sources, "outside_address", judged)
    assert asyncio.run(scenario()) == CHUNK
    assert asked == ["bucket.invalid"] and hosts[0].startswith("bucket.invalid:")


@pytest.mark.parametrize("url", ["ftp://host/x", "http://user:word@host/x", "http://host/x?y", "host/x", "http://"])
def test_a_url_that_is_not_of_a_source_is_refused(url):
    with pytest.raises(PeerError, match="URL"):
        HttpSource(url)


@pytest.mark.parametrize("faults", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_faults_on_the_way_load_no_wrong_weights(faults, tmp_path, monkeypatch):
    """Flips, swaps, cuts and stalls within answers, headers included. Two lines of three are bad."""
    monkeypatch.setattr(transfer, "SILENCE_S", 0.3)
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    origin = Chunks()
    manifest = published(checkpoint, origin)
    for chunk in origin.held.values():
        FolderBlobs(tmp_path / "blobs").put(chunk)

    async def scenario() -> None:
        num_faults = 0
        async with blob_server(tmp_path / "blobs") as port:
            seed = 0
            while num_faults < faults:
                seed += 1
                rng = random.Random(seed)
                kinds = [LineFault.FLIP, LineFault.SWAP, LineFault.CUT] + [LineFault.STALL] * (seed % 10 == 0)
                async with (
                    FaultProxy(port, rng, faults=kinds, every_bytes=400) as bad,
                    FaultProxy(port, rng, faults=kinds, every_bytes=10_000) as worse,
                    FaultProxy(port, rng) as good,
                ):
                    lines: list[ChunkSource] = [
                        HttpSource(f"http://127.0.0.1:{proxy.port}/v1/blobs", TRUSTED) for proxy in (bad, worse, good)
                    ]
                    directory = await fetch(
                        manifest,
                        lines,
                        VersionFolder(tmp_path / f"c{seed}"),
                        rng=rng,
                        events=TransferEvents(on_blame=lambda *told: None),
                    )
                    for name in ("config.json", "model.safetensors", "tokenizer.json"):
                        assert (directory / name).read_bytes() == (checkpoint / name).read_bytes()
                    num_faults += sum(bad.seen.values()) + sum(worse.seen.values())

    asyncio.run(scenario())


_CLIENT = """
import asyncio, resource, sys
from pathlib import Path
from shoal.protocol import encoding as wire
from shoal.protocol.messages import Manifest
from shoal.weights.fetch.fetch import fetch
from shoal.weights.fetch.sources import TRUSTED, HttpSource
from shoal.weights.fetch.version_directory import VersionFolder

home = Path(sys.argv[1])
manifest = wire.from_json((home / "manifest.json").read_bytes(), Manifest)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sources = [HttpSource(url, TRUSTED) for url in sys.argv[2:]]
directory = asyncio.run(fetch(manifest, sources, VersionFolder(home / "cache")))
print(directory.name, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_client_that_is_killed_again_and_again_fetches_few_bytes_twice(tmp_path):
    """SIGKILL in the middle of 1 MiB chunks, from two sources. No chunk is held in memory either."""
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    weights = np.random.default_rng(0).integers(0, 2**16, size=12 << 20, dtype=np.uint16).view(np.float16)
    save_file({"w": weights}, checkpoint / "model.safetensors")
    (checkpoint / "config.json").write_text("{}")
    origin = Chunks()
    scenario = publish(checkpoint, origin, PublishSettings("r", 1, "float32", 1 << 20))
    manifest = asyncio.run(scenario)
    (tmp_path / "manifest.json").write_bytes(encoding.to_json(manifest))
    for chunk in origin.held.values():
        FolderBlobs(tmp_path / "blobs").put(chunk)
    size = sum(file.size for file in manifest.files)

    async def killed_often() -> tuple[int, int, str]:
        kills, rng = 0, random.Random(0)
        async with (
            blob_server(tmp_path / "blobs") as port,
            FaultProxy(port, rng, bytes_per_s=2e6) as one,
            FaultProxy(port, rng, bytes_per_s=2e6) as two,
        ):
            urls = [f"http://127.0.0.1:{proxy.port}/v1/blobs" for proxy in (one, two)]
            while True:
                client = await asyncio.create_subprocess_exec(
                    sys.executable, "-c", _CLIENT, str(tmp_path), *urls, stdout=asyncio.subprocess.PIPE
                )
                passed, enough = one.passed_bytes + two.passed_bytes, rng.uniform(0.1, 0.3) * size
                while client.returncode is None and one.passed_bytes + two.passed_bytes - passed < enough:
                    await asyncio.sleep(0.01)
                if kills < 3 and client.returncode is None:
                    client.kill()
                    kills += 1
                    await client.wait()
                else:
                    said, _ = await client.communicate()
                    return kills, one.passed_bytes + two.passed_bytes, said.decode()

    kills, passed, said = asyncio.run(asyncio.wait_for(killed_often(), 120))
    assert kills >= 2 and said.startswith("v000001-")
    assert passed <= 1.05 * size
    assert int(said.split()[1]) < 8 << 10  # KiB
