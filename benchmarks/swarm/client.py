"""One client as a process: fetches the newest version of a run, and writes what it took as a line of JSON.

python -m benchmarks.swarm.client URL HOME [SHARE_PORT SHARE_URL]
"""

# ruff: noqa: ASYNC110

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import uvloop

from shoal.net.client import Client
from shoal.net.connection_limits import ServerLimits, connections_that_fit, http_server
from shoal.net.key_files import load_or_make_key
from shoal.net.server_address import listen
from shoal.protocol.constants import MAX_MANIFEST_BYTES
from shoal.protocol.messages import RunInfo
from shoal.roles.node.serve_chunks import application, offer
from shoal.roles.node.share_weights import SharedVersions
from shoal.weights.fetch.fetch import fetch
from shoal.weights.fetch.relay_sources import Relays
from shoal.weights.fetch.sources import ChunkSource, sources_of
from shoal.weights.fetch.transfer import TransferEvents
from shoal.weights.fetch.version_directory import VersionFolder
from shoal.weights.manifest import ManifestTrust, open_manifest, weights_root


async def story(url: str, home: Path, port: int, public_url: str) -> None:
    """Fetch once, and go on sharing until killed, if asked to share."""
    key = load_or_make_key(home / "node.key")
    async with Client(url, key) as client:
        info = await client.get_json("/v1/run", RunInfo)
        client.run, shared = info.run, SharedVersions(home / "weights")
        async with _sharing(client, shared, port, public_url) if port else contextlib.nullcontext():
            while info.version < 0:
                await asyncio.sleep(0.5)
                info = await client.get_json("/v1/run", RunInfo)
            await _fetch(client, info, home, shared)
            while port:
                await asyncio.sleep(1)


@contextlib.asynccontextmanager
async def _sharing(client: Client, shared: SharedVersions, port: int, public_url: str) -> AsyncIterator[None]:
    """Share as a worker does, but behind a link: at another URL than its own port."""
    assert client.key is not None
    shared.is_on = True
    with listen("127.0.0.1", port) as listener:
        server = http_server(
            application(shared, client.key, client.run, time.time), ServerLimits(total=connections_that_fit())
        )
        server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]
        tasks = [
            asyncio.create_task(server.serve(sockets=[listener])),
            asyncio.create_task(offer(client, public_url, port)),
        ]
        yield  # until killed
        await asyncio.gather(*tasks)


async def _fetch(client: Client, info: RunInfo, home: Path, shared: SharedVersions) -> None:
    blamed: list[tuple[str, str]] = []
    own = load_or_make_key(home / "node.key").public
    data = await client.get("/v1/manifests/latest", cap=MAX_MANIFEST_BYTES)
    manifest = open_manifest(data, ManifestTrust(info.run, (info.trainer_key,)), now=time.time())
    relays = await Relays(client, but=own).sources()
    sources = sources_of(info, client, relays)
    got, began = {source.name: _counted(source) for source in sources}, time.time()
    directory = await fetch(
        manifest,
        sources,
        VersionFolder(shared.folder),
        shared=shared if shared.is_on else None,
        events=TransferEvents(
            on_blame=lambda *told: blamed.append(told), on_progress=lambda line: print(line, file=sys.stderr)
        ),
    )
    ended, cpu_s = time.time(), time.process_time()
    assert weights_root(directory) == manifest.root
    got_bytes = {name: count[0] for name, count in got.items()}
    said = {"began": began, "ended": ended, "got_bytes": got_bytes, "blamed": blamed, "cpu_s": cpu_s}
    (home / "said.json").write_text(json.dumps(said))
    print(json.dumps(said), flush=True)


def _counted(source: ChunkSource) -> list[int]:
    """Count the bytes that a source sends."""
    count, really = [0], source.parts

    async def parts(digest: str, start: int, size: int) -> AsyncGenerator[bytes, None]:
        async for data in really(digest, start, size):
            count[0] += len(data)
            yield data

    source.parts = parts  # type: ignore[method-assign]
    return count


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    share_port, share_url = (int(sys.argv[3]), sys.argv[4]) if len(sys.argv) > 3 else (0, "")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(story(sys.argv[1], Path(sys.argv[2]), share_port, share_url))
