"""The relay: serves the weights of somebody's run to others, while it fetches them and after.

It trusts nobody and earns nothing. It needs no torch, and runs nothing of the run's.
"""

import asyncio
import logging
import re
import shutil
import time
from pathlib import Path

import uvloop

from shoal.errors import PeerError
from shoal.ledger.constants import RULES_VERSION
from shoal.net.client import Client
from shoal.net.connection_limits import ServerLimits, connections_that_fit
from shoal.net.key_files import load_or_make_key
from shoal.net.server_process import Stopping, listen
from shoal.protocol.messages import RunInfo
from shoal.protocol.signing import Key
from shoal.roles.node.serve_chunks import application, serving
from shoal.roles.relay.chunk_store import ChunkStore
from shoal.roles.relay.fetcher import ChunkFetcher
from shoal.weights.fetch.relay_sources import Relays
from shoal.weights.fetch.version_directory import disk_limit

log = logging.getLogger("relay")

LOCAL_PROXIES = ("127.0.0.1", "::1")
"""A proxy with TLS on this machine: its X-Forwarded-For is believed."""

RUN = re.compile(r"[0-9a-f]{32}", re.ASCII)


def main(url: str, home: Path, bind: str, port: int, public_url: str = "", max_disk_mb: int = 0) -> None:
    """Relay the run at `url` until told to stop. Raises `PeerError`, `StateError`."""
    key = load_or_make_key(home / "node.key")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(url, key, home, bind, port, public_url, max_disk_mb))


async def _run(url: str, key: Key, home: Path, bind: str, port: int, public_url: str, max_disk_mb: int) -> None:
    stopping = Stopping()
    async with Client(url, key) as client:
        with stopping.at_signals(), listen(bind, port) as listener:
            log.info("asking %s for its run", client.base_url)
            info = await stopping.unless(_info(client))
            if info is None:
                log.info("stopped before the host answered")
                return
            client.run = info.run
            folder = _only(home / "runs", info.run)
            seed = int.from_bytes(bytes.fromhex(key.public)[:8], "big")
            store = ChunkStore(folder, disk_limit(home, max_disk_mb), seed)
            await asyncio.to_thread(store.verify)
            log.info(
                "relaying run=%s port=%d held_mb=%.0f", info.name, listener.getsockname()[1], store.held_bytes / 1e6
            )
            limits = ServerLimits(total=connections_that_fit(), trusted=LOCAL_PROXIES)
            app = application(store, key, info.run, time.time)
            filler = ChunkFetcher(client, info, store, Relays(client, but=key.public), time.time)
            async with serving(app, listener, client, public_url=public_url, limits=limits):
                await stopping.unless(filler.run())


async def _info(client: Client) -> RunInfo:
    await client.demand_versions(RULES_VERSION)
    info = await client.get_json("/v1/run", RunInfo)
    if not RUN.fullmatch(info.run):  # guard: run-names-a-folder
        raise PeerError(f"the run has the id {info.run[:40]!r}, which is not 32 hex digits: tell the host")
    return info


def _only(folder: Path, run: str) -> Path:
    """The folder of a run. Those of other runs are deleted: a relay's disk is bounded."""
    if folder.is_dir():
        for other in folder.iterdir():
            if other.name != run:
                log.info("deleting the chunks of another run=%s", other.name)
                shutil.rmtree(other, ignore_errors=True)
    path = folder / run
    path.mkdir(parents=True, exist_ok=True)
    return path
