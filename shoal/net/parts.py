"""The body of a stranger's answer, part by part as it comes, unless its parts are very small.

Called by those who read from servers that strangers named. Each part costs CPU time, and all that are in one read are
handled before any other task runs. So a server that sends chunks of one byte at the full rate of its line would keep a
process from everything else. A slow line brings small parts, too, but few in a second.
"""

import time
from collections.abc import AsyncGenerator, Callable

import httpx

from shoal.net.trouble import Trouble

FEW_PARTS, PARTS_PER_S, LEAST_BYTES = 64, 200.0, 512
"""An answer may have so many parts, so many more in each second, and one more for each so many bytes."""


async def raw_parts(
    response: httpx.Response, clock: Callable[[], float] = time.monotonic
) -> AsyncGenerator[bytes, None]:
    """The parts of an answer's body, not decoded. Raises `Trouble` if they are small and come fast."""
    began, count, num_bytes = clock(), 0, 0
    async for part in response.aiter_raw():
        count, num_bytes = count + 1, num_bytes + len(part)
        most = FEW_PARTS + PARTS_PER_S * (clock() - began) + num_bytes / LEAST_BYTES
        if count > most:  # guard: parts-of-an-answer
            raise Trouble(f"sends its answer in parts of {num_bytes / count:.0f} bytes")
        yield part


async def read_capped(response: httpx.Response, cap: int) -> bytes | None:
    """The body, or None if it has more than `cap` bytes. Raises `Trouble` if it ends early, or comes in tiny parts."""
    declared = response.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > cap:
        return None
    body = bytearray()
    async for part in raw_parts(response):
        body += part
        if len(body) > cap:
            return None
    if declared.isdecimal() and len(body) != int(declared):
        raise Trouble(f"the answer ended after {len(body)} of {declared} bytes. Check the connection")
    return bytes(body)
