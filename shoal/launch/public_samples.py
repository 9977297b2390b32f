"""A conversation of a run at a URL, from what anyone may read: the newest group whose body is public.

Called by `launch/watching` through `Samples`, at most once a minute. It replays no log, because that of a long run takes
minutes: it reads the newest events, and fetches one body. So the body has the hash that these events name, but whether
the events are of the true log is not checked: `shoal dashboard URL` and `shoal audit` check that. Texts follow from the
tokens alone, and no environment is played. All of it is a stranger's: each answer is limited, and the tokenizer is opened
in a process of its own.
"""

import asyncio
import tempfile
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import httpx

from shoal.errors import NothingYet, PeerError, StateError
from shoal.launch.samples import sample_of
from shoal.launch.snapshot import Sample
from shoal.ledger.facts.batches import GroupAccepted
from shoal.ledger.table import read_entry
from shoal.net.client import Client, PeerRefused
from shoal.policy.contained import Limits
from shoal.policy.render import Renderer
from shoal.protocol import types as t
from shoal.protocol.constants import MAX_MANIFEST_BYTES
from shoal.protocol.wire import WireError, digest, from_msgpack
from shoal.roles.auditor.source import verified
from shoal.roles.loading import contained
from shoal.watch.reading.groups import conversation
from shoal.watch.reading.source import fetch_tokenizer
from shoal.weights.manifest import open_manifest

ANSWER_S = 5.0
"""How long to wait for one answer."""

EVERY_S = 60.0
"""Between two conversations."""

LOOKED_BACK = 500
"""Newest events in which a group is looked for: a few hundred kB. The rest of a log is never read."""

MOST_PAGE_BYTES, MOST_BODY_BYTES = 4 << 20, 8 << 20
"""Of an answer with events, and of a submission. A larger one is not shown."""

MOST_TRIES = 4
"""Bodies that are asked for in one look: the newest ones are often still private, and the answer then is short."""

MOST_KNOWN = 200
"""Accepted groups that are remembered."""


class PublicSample:
    """The newest conversation that anyone may read at a URL."""

    def __init__(self, url: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """`transport` replaces the network, in tests."""
        self._url, self._transport = url, transport
        self._seq: int | None = None
        self._accepted: deque[GroupAccepted] = deque(maxlen=MOST_KNOWN)
        self._shown = ""
        """Digest of the group that was shown last."""
        self._info: t.RunInfo | None = None
        self._renderer: Renderer | None = None
        self._home = tempfile.TemporaryDirectory(prefix="shoal-watch-")

    def read(self) -> Sample | None:
        """A conversation that was not shown before, if there is one. Raises `ShoalError`."""
        return asyncio.run(self._look())

    async def _look(self) -> Sample | None:
        async with Client(self._url, transport=self._transport, on_wait=lambda line: None) as client:
            if self._info is None:
                self._info = await client.get_json("/v1/run", t.RunInfo, deadline_s=ANSWER_S)
            await self._read_events(client)
            found = await self._newest_public(client)
            if found is None:
                return None
            accepted, group = found
            if self._renderer is None:
                self._renderer = await self._tokenizer(client, self._info)
            turns = conversation(self._info.sampling, group.rollouts[0], self._renderer)
        self._shown = accepted.digest
        reward = f" · reward {accepted.rewards[0]:.2f}" if accepted.rewards else ""
        title = f"one rollout of version {accepted.version} · {group.env} · task {group.task}{reward}"
        return sample_of(title, turns) if turns else None

    async def _read_events(self, client: Client) -> None:
        """Read the events that are new, of the newest `LOOKED_BACK`."""
        head = (await client.get_json("/v1/state", t.StateHash, deadline_s=ANSWER_S)).seq
        known = -1 if self._seq is None or self._seq > head else self._seq
        self._seq = max(known, head - LOOKED_BACK)
        page = await client.get(f"/v1/events?after={self._seq}", cap=MOST_PAGE_BYTES, deadline_s=ANSWER_S)
        for line in page.split(b"\n")[:LOOKED_BACK]:
            try:
                entry, _ = read_entry(line)
            except WireError:
                break  # a host that serves such lines may serve anything after them
            self._seq += 1
            if isinstance(entry.body, GroupAccepted):
                self._accepted.append(entry.body)

    async def _newest_public(self, client: Client) -> tuple[GroupAccepted, t.Group] | None:
        for accepted in spread(self._accepted):
            if accepted.digest == self._shown:
                return None
            try:
                path = f"/v1/blobs/{accepted.submission}"
                body = await client.get(path, cap=MOST_BODY_BYTES, deadline_s=ANSWER_S)
            except (NothingYet, PeerRefused):  # it is private still, or not kept any more
                continue
            return accepted, _group(accepted, body)
        return None

    async def _tokenizer(self, client: Client, info: t.RunInfo) -> Renderer:
        """That of the newest version: all versions have the same."""
        data = await client.get(f"/v1/manifests/{info.version}", cap=MAX_MANIFEST_BYTES, deadline_s=ANSWER_S)
        manifest = open_manifest(data, run=info.run, keys=info.all_publishers, now=None, version=info.version)
        home = Path(self._home.name)
        await fetch_tokenizer(client, manifest, info.sampling.stops, home)
        return contained(Limits(), info.sampling.stops)(home)  # guard: glanced-tokenizer-is-contained


def spread(accepted: Iterable[GroupAccepted]) -> list[GroupAccepted]:
    """The groups to ask for: of the newest submissions first, then ever older ones, whose bodies are public more likely."""
    of_each = list({one.submission: one for one in accepted}.values())[::-1]
    places = sorted({0, *(len(of_each) * part // MOST_TRIES for part in range(1, MOST_TRIES))})
    return [of_each[place] for place in places if place < len(of_each)]


def _group(accepted: GroupAccepted, body: bytes) -> t.Group:
    """The group that an event names. Raises `StateError`."""
    name = accepted.submission
    try:
        data = from_msgpack(verified(body, name), t.Submission).groups[accepted.index]
        if digest(data) != accepted.digest:  # guard: glanced-group-of-its-digest
            raise StateError(f"a group of submission {name[:12]} is not the one that the log names")
        group = from_msgpack(data, t.Group)
    except (WireError, IndexError) as error:
        raise StateError(f"submission {name[:12]} cannot be read: {error}") from None
    if not group.rollouts:
        raise PeerError(f"a group of submission {name[:12]} has no rollout")
    return group
