"""Pages of the log for anyone who asks.

A page may have megabytes, and strangers may ask for many at once and read slowly. So a page is read twice: once for its
size and digest, one page at a time, and once more while it is sent, in parts. The log only grows, so both readings give the
same bytes.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import closing

from starlette.responses import StreamingResponse

from shoal.ledger.log.sqlite_store import Store
from shoal.protocol.constants import MAX_EVENTS, MAX_EVENTS_BYTES
from shoal.protocol.signing import content_digest

PART_BYTES = 1 << 16
"""A part ends with the event that brings it to this size. It is what a page takes in memory, and without a pause."""


ROWS = 16
"""Events that are read at a time: some have a megabyte."""


class Pages:
    """The log of one run, page by page."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._turn = asyncio.Semaphore(1)

    async def after(self, seq: int) -> StreamingResponse:
        """The stored bytes of the events after `seq`, a line each: these bytes are hashed."""
        async with self._turn:  # guard: one-page-at-a-time
            parts, size_bytes, digest = await self._measured(seq)
        headers = {"content-length": str(size_bytes), "content-digest": content_digest(digest)}
        return StreamingResponse(self._sent(seq, parts), headers=headers, media_type="application/x-ndjson")

    async def _measured(self, seq: int) -> tuple[list[int], int, str]:
        """Numbers of events in the parts of a page, and the page's size and digest."""
        parts, events, part_bytes, size_bytes, hashed = list[int](), 0, 0, 0, hashlib.sha256()
        with closing(self._store.read(seq, MAX_EVENTS, ROWS)) as rows:
            for data, _ in rows:
                hashed.update(data + b"\n")
                events, part_bytes, size_bytes = events + 1, part_bytes + len(data) + 1, size_bytes + len(data) + 1
                if part_bytes >= PART_BYTES:
                    parts.append(events)
                    events = part_bytes = 0
                    await asyncio.sleep(0)  # others come first  # guard: pages-give-way
                if size_bytes > MAX_EVENTS_BYTES:  # guard: page-of-the-log
                    break
        return [*parts, events] if events else parts, size_bytes, hashed.hexdigest()

    async def _sent(self, seq: int, parts: Sequence[int]) -> AsyncIterator[bytes]:
        """The parts, each read when the one before it has gone out."""
        for events in parts:
            yield b"".join(data + b"\n" for data, _ in self._store.read(seq, events))
            seq += events
