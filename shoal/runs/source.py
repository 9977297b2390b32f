"""A run with what is beside its log: metrics, status, evaluations, alarms and the tokenizer, from its folder or its URL.

What comes from a URL is a stranger's: the client limits each answer, and this file decodes it strictly.
"""

import contextlib
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import httpx

from shoal.chat.isolated import RendererLimits
from shoal.chat.renderer import FILES, Renderer
from shoal.errors import NothingYet, PeerError, ShoalError, StateError
from shoal.ledger.state import State
from shoal.metrics import MetricsFollower, MetricsLine, clean_metrics
from shoal.net.client import Client
from shoal.net.server_process import reader_url
from shoal.protocol import messages as t
from shoal.protocol.encoding import digest
from shoal.runs.log import newest_event
from shoal.runs.public_run import ANSWER_S, FolderRun, UrlRun
from shoal.runs.url_status import MetricsPages
from shoal.weights.engine_loader import contained
from shoal.weights.manifest import open_manifest

S = TypeVar("S")

log = logging.getLogger(__name__)

STATUS_S = 2.0
"""How long to wait for a coordinator's status; it is asked for often."""


class FolderSource(FolderRun):
    """A run's folder on this machine. The run may be starting, live, dead or ended."""

    def __init__(self, root: Path, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """`transport` replaces the network to the folder's coordinator, in tests. Raises `ConfigError` without a run."""
        super().__init__(root)
        self._tail, self._whole = (MetricsFollower(self.folder.metrics, clean_metrics) for _ in range(2))
        self._told_unread = False
        self._transport = transport

    async def newest(self) -> int:
        """The number of the newest event that there is, as far as anyone says; -1 if nobody does."""
        with contextlib.suppress(ShoalError):
            return newest_event(self.folder.log)
        return -1

    async def new_metrics(self) -> list[MetricsLine]:
        """Lines of metrics that are new since the last call, or repeat a step. Raises `ShoalError`."""
        return self._metrics_of(self._tail, self._tail.read)

    async def all_metrics(self) -> list[MetricsLine]:
        """One line for each step, in order. Raises `ShoalError`."""
        return list(self._metrics_of(self._whole, self._whole.lines))

    def _metrics_of(self, tail: MetricsFollower, read: Callable[[], S]) -> S:
        try:
            lines = read()
        except OSError as error:
            raise StateError(f"{self.folder.metrics} cannot be read: {error}. Check the disk") from None
        if tail.unread and not self._told_unread:
            self._told_unread = True
            log.warning("not shown: %d lines of %s that cannot be read", tail.unread, self.folder.metrics)
        return lines

    async def status(self) -> t.Status | None:
        """What the coordinator says now; None if none answers."""
        with contextlib.suppress(ShoalError):
            if url := reader_url(self.folder.address, self.folder.config().host.bind):
                async with Client(url, transport=self._transport, on_wait=lambda line: None) as client:
                    return await client.get_json("/v1/status", t.Status, deadline_s=STATUS_S)
        return None

    async def renderer(self, state: State) -> Renderer:
        """The tokenizer of the run. Raises `ShoalError`, `NothingYet` if there is none yet."""
        if not self.folder.policy.is_dir():
            raise NothingYet(f"{self.folder.policy} is not there yet: the trainer makes it when it starts")
        return Renderer.from_directory(self.folder.policy, state.sampling.stops)

    async def close(self) -> None:
        """Let go of connections and temporary files."""


class UrlSource(UrlRun):
    """The server at a URL: a coordinator, or a stranger that poses as one."""

    def __init__(self, url: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """`transport` replaces the network, in tests."""
        super().__init__(Client(url, transport=transport, on_wait=lambda line: None))
        self._pages = MetricsPages(self.client, deadline_s=ANSWER_S)
        self._home: tempfile.TemporaryDirectory[str] | None = None

    async def newest(self) -> int:
        with contextlib.suppress(PeerError):
            return (await self.client.get_json("/v1/state", t.StateHash, deadline_s=STATUS_S)).seq
        return -1

    async def new_metrics(self) -> list[MetricsLine]:
        return await self._pages.new()

    async def all_metrics(self) -> list[MetricsLine]:
        return await MetricsPages(self.client, overlap_steps=0, deadline_s=ANSWER_S).all()

    async def status(self) -> t.Status | None:
        with contextlib.suppress(PeerError):
            return await self.client.get_json("/v1/status", t.Status, deadline_s=STATUS_S)
        return None

    async def renderer(self, state: State) -> Renderer:
        """Fetch the files that the tokenizer is made of, without any weights, and open them in a child process."""
        if state.main.version < 0:
            raise NothingYet(f"{self.name} has published no version yet")
        version, record = state.main.version, state.main.versions[state.main.version]
        data = await self.manifest(version, record.manifest)
        manifest = open_manifest(
            data, run=state.run, keys=state.publishers, now=None, version=version, root=record.root
        )
        self._home = home = tempfile.TemporaryDirectory(prefix="shoal-watch-")
        await fetch_tokenizer(self, manifest, state.sampling.stops, Path(home.name))
        return contained(RendererLimits(), state.sampling.stops)(
            Path(home.name)
        )  # guard: watched-tokenizer-is-contained

    async def close(self) -> None:
        await self.client.close()
        if self._home is not None:
            self._home.cleanup()


async def fetch_tokenizer(run: UrlRun, manifest: t.Manifest, stops: str, home: Path) -> None:
    """Fetch the files of a version that its tokenizer is made of into a folder. Raises `ShoalError`."""
    for entry in manifest.files:
        if entry.path not in FILES[stops]:
            continue
        file = b"".join([await run.blob(chunk) for chunk in entry.chunks])
        if digest(file) != entry.digest:
            raise PeerError(f"{run.name} serves another {entry.path} than its manifest names: do not trust it")
        (home / entry.path).write_bytes(file)
        (home / entry.path).chmod(0o644)  # the sandbox's user reads it, whatever the umask
