"""A node as a process that fetches versions as a worker does, and plays nothing.

python -m tests.roles.follower URL HOME VERSION... [--share PORT URL]

It prints a line for each version that is here, whole. With `--share` it then shares until it is killed.
"""

import argparse
import asyncio
import contextlib
import logging
import time
from pathlib import Path

from shoal.net.client import Client
from shoal.net.key_files import load_or_make_key
from shoal.protocol.messages import RunInfo
from shoal.roles.node import share_weights
from shoal.roles.node.evidence_store import EvidenceStore
from shoal.roles.node.session import Session
from shoal.weights.manifest import weights_root


async def scenario(url: str, home: Path, versions: list[int], port: int, public_url: str) -> None:
    key = load_or_make_key(home / "node.key")
    async with Client(url, key) as client, contextlib.AsyncExitStack() as stack:
        info = await client.get_json("/v1/run", RunInfo)
        client.run = info.run
        evidence = EvidenceStore(home, info.run)
        seat = Session(client, home, info, {}, None, None, time.time, evidence, 2_000_000_000)  # type: ignore[arg-type]
        if port:  # behind a link: at another URL than its own port
            share = share_weights.WeightSharing(key, port, "127.0.0.1", public_url)
            await stack.enter_async_context(share_weights.sharing(share, client, seat.shared))
        for version in versions:
            brought = await seat.bring(version)
            assert weights_root(brought.directory) == brought.manifest.root
            print(f"version={version} is here", flush=True)
        if port:
            await asyncio.Event().wait()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("home", type=Path)
    parser.add_argument("versions", type=int, nargs="+")
    parser.add_argument("--share", nargs=2, default=["0", ""])
    asked = parser.parse_args()
    asyncio.run(scenario(asked.url, asked.home, asked.versions, int(asked.share[0]), asked.share[1]))
