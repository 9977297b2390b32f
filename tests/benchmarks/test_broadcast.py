"""The bound that a broadcast is measured against, and the links that carry it."""

import asyncio
import random
import time

import pytest

from benchmarks.broadcast import bound_s
from shoal.net.fault_proxy import FaultProxy


def test_the_bound_is_what_all_links_carry_together_or_one_copy_of_the_origin():
    size, rate = 1e9, 25e6
    assert bound_s(size, rate, clients=8, relays=3, sharing=False) == pytest.approx(11 * 40 / 4)
    assert bound_s(size, rate, clients=8, relays=3, sharing=True) == 40  # 11 copies over 12 links take less
    assert bound_s(size, rate, clients=1, relays=0, sharing=False) == 40


def test_a_link_is_held_and_released_and_its_rate_changed():
    async def story():
        async def answer(reader, writer):
            await reader.read(1)
            writer.write(bytes(200_000))
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server, FaultProxy(server.sockets[0].getsockname()[1], random.Random(0), bytes_per_s=1e5) as link:
            link.line.hold()
            reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
            writer.write(b"x")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(1), 0.2)
            link.line.rate(1e6)
            link.line.release()
            began = time.monotonic()
            assert len(await reader.read()) == 200_000 == link.passed_bytes
            assert 0.15 < time.monotonic() - began < 1.9
            writer.close()

    asyncio.run(asyncio.wait_for(story(), 20))
