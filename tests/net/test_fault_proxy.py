"""The lines of tests and benchmarks: they count what they send, and send nothing to a client that is gone."""

import asyncio
import random

from tests.net.fault_proxy import FaultProxy

CLIENTS, BLOCK = 10, 64 << 10


def test_a_client_that_is_gone_is_sent_nothing_more():
    """Each waiting answer was counted once more: 1.4 MB for each kill of a client with 18 connections."""

    async def serve(reader, writer):
        writer.write(b"x" * (1 << 20))
        await writer.drain()

    async def scenario() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, FaultProxy(port, random.Random(0), bytes_per_s=BLOCK / 0.2, block_bytes=BLOCK) as proxy:
            clients = [await asyncio.open_connection("127.0.0.1", proxy.port) for _ in range(CLIENTS)]
            await asyncio.sleep(0.1)
            for _, writer in clients:
                writer.transport.abort()
            await asyncio.sleep(0.1)
            before = proxy.passed_bytes
            await asyncio.sleep(0.5)
            assert proxy.passed_bytes <= before + BLOCK
            server.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))
