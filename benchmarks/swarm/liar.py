"""A relay that lies to clients and not to probes: it spoils each answer to a request without Range.

python -m benchmarks.swarm.liar URL HOME PORT PUBLIC_URL
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

from shoal.roles.relay import relay
from shoal.roles.relay.chunk_store import ChunkStore

really = relay.application


def lying(store: ChunkStore, *args: Any) -> Any:
    """The calls of a relay, with the first byte of each whole chunk changed."""
    app = really(store, *args)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        spoils = scope["type"] == "http" and scope["path"].startswith("/v1/blobs/")
        spoils = spoils and not any(name == b"range" for name, _ in scope["headers"])

        async def spoiled(message: Any) -> None:
            nonlocal spoils
            if spoils and message["type"] == "http.response.body" and message.get("body"):
                spoils = False
                message = message | {"body": bytes([message["body"][0] ^ 1]) + message["body"][1:]}
            await send(message)

        await app(scope, receive, spoiled)

    return answer


if __name__ == "__main__":
    from shoal.cli.options import log_to_stderr

    log_to_stderr()
    relay.application = lying  # type: ignore[assignment]
    url, home, port, public = sys.argv[1:]
    relay.main(url, Path(home), "127.0.0.1", int(port), public)
    asyncio.set_event_loop(None)
