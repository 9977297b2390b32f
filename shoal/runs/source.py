"""Where a run is read from: its folder, or a coordinator's URL. Both give the same things, and neither is ever written to.

The calls block: what goes over the network runs in a thread of its own, so they work in a notebook, too. What comes from a
URL is a stranger's: the client limits each answer, and this file decodes it strictly. It verifies the hashes of blobs;
whether events follow each other is for `run` to see.
"""

import asyncio
import contextlib
import logging
import tempfile
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx

from shoal.alarms import AlarmLine, read_alarms
from shoal.chat.isolated import RendererLimits
from shoal.chat.renderer import FILES, Renderer
from shoal.errors import ConfigError, NothingYet, PeerError, ShoalError, StateError
from shoal.ledger.state import State
from shoal.metrics import MetricsLine, MetricsTail, clean_metrics
from shoal.net.client import Client
from shoal.net.key_files import load_key
from shoal.net.server_process import reader_url
from shoal.protocol import messages as t
from shoal.protocol.encoding import digest
from shoal.run_folder import RunFolder, is_locked, is_url
from shoal.runs.public_run import ANSWER_S, FolderRun, Rows, UrlRun, demand_log
from shoal.runs.url_status import MetricsPages
from shoal.weights.engine_loader import contained
from shoal.weights.manifest import open_manifest

log = logging.getLogger(__name__)

S = TypeVar("S")
T = TypeVar("T")

STATUS_S = 2.0
"""How long to wait for a coordinator's status; it is asked for often."""


class RunFileSource(Protocol):
    """Where a run is read from."""

    name: str
    is_own: bool
    """Whether it is a folder of this machine, whose bodies are read although they are private, if the run key is there."""

    def page(self, after: int) -> Rows:
        """Events that follow the one of this number; none at the end, or if there is no log yet. Raises `ShoalError`."""
        ...

    def newest(self) -> int:
        """The number of the newest event that there is, as far as anyone says; -1 if nobody does."""
        ...

    def blob(self, name: str) -> bytes:
        """Bytes by their hash, verified. Raises `NothingYet` if they are not here or are private, else `ShoalError`."""
        ...

    def manifest(self, version: int, name: str) -> bytes:
        """A version's signed manifest; `name` is its hash. Raises as `blob`."""
        ...

    def new_metrics(self) -> list[MetricsLine]:
        """Lines of metrics that are new since the last call, or repeat a step. Raises `ShoalError`."""
        ...

    def all_metrics(self) -> list[MetricsLine]:
        """One line for each step, in order. Raises `ShoalError`."""
        ...

    def status(self) -> t.Status | None:
        """What the coordinator says now; None if none answers."""
        ...

    def is_hosted(self) -> bool | None:
        """Whether a launcher holds the run's folder; None of a URL."""
        ...

    def evaluations(self) -> dict[str, bytes]:
        """Evaluations by name, as they were written."""
        ...

    def alarms(self) -> list[AlarmLine] | None:
        """What monitors raised and cleared, oldest first; None of a URL, whose status says what stands."""
        ...

    def renderer(self, state: State) -> Renderer:
        """The tokenizer of the run. Raises `ShoalError`, `NothingYet` if there is none yet."""
        ...

    def has_key(self, run_key: str) -> bool:
        """Whether the host's private key is here."""
        ...

    def close(self) -> None:
        """Let go of connections and temporary files."""
        ...


def source_of(where: str | Path, transport: httpx.AsyncBaseTransport | None = None) -> RunFileSource:
    """The source for a URL or a folder. Raises `ConfigError` for a folder without a run."""
    if is_url(where):
        return UrlSource(str(where), transport)
    return FolderSource(Path(where), transport)


class FolderSource:
    """A run's folder on this machine. The run may be starting, live, dead or ended."""

    is_own = True

    def __init__(self, root: Path, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """`transport` replaces the network to the folder's coordinator, in tests."""
        self.name, self.folder = str(root), RunFolder(root)
        if not (self.folder.log.is_file() or self.folder.run_file.is_file()):
            raise ConfigError(f"{root} holds no run: give a run's folder, such as runs/wordle, or its URL")
        self._tail, self._whole = (MetricsTail(self.folder.metrics, clean_metrics) for _ in range(2))
        self._told_unread = False
        self._transport = transport
        self._asking = _Asking()

    def page(self, after: int) -> Rows:
        rows = self._rows(after)
        if not rows and after < 0:
            demand_log(self.folder)
        return rows

    def _rows(self, after: int) -> Rows:
        if not self.folder.log.is_file():
            return []
        return self._asking.wait(FolderRun(self.folder.root).page(after))

    def newest(self) -> int:
        with contextlib.suppress(ShoalError):
            return FolderRun(self.folder.root).newest()
        return -1

    def blob(self, name: str) -> bytes:
        return self._asking.wait(FolderRun(self.folder.root).blob(name))

    def manifest(self, version: int, name: str) -> bytes:
        return self.blob(name)

    def new_metrics(self) -> list[MetricsLine]:
        return self._read(self._tail, self._tail.read)

    def all_metrics(self) -> list[MetricsLine]:
        return list(self._read(self._whole, self._whole.lines))

    def _read(self, tail: MetricsTail, read: Callable[[], S]) -> S:
        try:
            lines = read()
        except OSError as error:
            raise StateError(f"{self.folder.metrics} cannot be read: {error}. Check the disk") from None
        if tail.unread and not self._told_unread:
            self._told_unread = True
            log.warning("not shown: %d lines of %s that cannot be read", tail.unread, self.folder.metrics)
        return lines

    def status(self) -> t.Status | None:
        with contextlib.suppress(ShoalError):
            url = reader_url(self.folder.address, self.folder.config().host.bind)
            return self._asking.wait(_status(url, self._transport)) if url else None
        return None

    def is_hosted(self) -> bool | None:
        return is_locked(self.folder.root)

    def evaluations(self) -> dict[str, bytes]:
        found = {}
        for path in sorted(self.folder.evaluations.glob("*.json")):
            with contextlib.suppress(OSError):
                found[path.stem] = path.read_bytes()
        return found

    def alarms(self) -> list[AlarmLine] | None:
        return read_alarms(self.folder.alarms)

    def renderer(self, state: State) -> Renderer:
        if not self.folder.policy.is_dir():
            raise NothingYet(f"{self.folder.policy} is not there yet: the trainer makes it when it starts")
        return Renderer.from_directory(self.folder.policy, state.sampling.stops)

    def has_key(self, run_key: str) -> bool:
        with contextlib.suppress(ShoalError, OSError):
            return load_key(self.folder.keys / "run.key").public == run_key
        return False

    def close(self) -> None:
        self._asking.close()


class UrlSource:
    """The server at a URL: a coordinator, or a stranger that poses as one."""

    is_own = False

    def __init__(self, url: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """`transport` replaces the network, in tests."""
        self._asking = _Asking()
        self._client = Client(url, transport=transport, on_wait=lambda line: None)
        self._run = UrlRun(self._client)
        self.name = self._client.base_url
        self._pages = MetricsPages(self._client, deadline_s=ANSWER_S)
        self._home: tempfile.TemporaryDirectory[str] | None = None

    def page(self, after: int) -> Rows:
        return self._asking.wait(self._run.page(after))

    def newest(self) -> int:
        with contextlib.suppress(PeerError):
            return self._asking.wait(self._client.get_json("/v1/state", t.StateHash, deadline_s=STATUS_S)).seq
        return -1

    def blob(self, name: str) -> bytes:
        return self._asking.wait(self._run.blob(name))

    def manifest(self, version: int, name: str) -> bytes:
        return self._asking.wait(self._run.manifest(version, name))

    def new_metrics(self) -> list[MetricsLine]:
        return self._asking.wait(self._pages.new())

    def all_metrics(self) -> list[MetricsLine]:
        return self._asking.wait(MetricsPages(self._client, overlap_steps=0, deadline_s=ANSWER_S).all())

    def status(self) -> t.Status | None:
        with contextlib.suppress(PeerError):
            return self._asking.wait(self._client.get_json("/v1/status", t.Status, deadline_s=STATUS_S))
        return None

    def is_hosted(self) -> bool | None:
        return None

    def evaluations(self) -> dict[str, bytes]:
        return {}

    def alarms(self) -> list[AlarmLine] | None:
        return None

    def renderer(self, state: State) -> Renderer:
        """Fetch the files that the tokenizer is made of, without any weights, and open them in a child process."""
        if state.main.version < 0:
            raise NothingYet(f"{self.name} has published no version yet")
        version, record = state.main.version, state.main.versions[state.main.version]
        data = self.manifest(version, record.manifest)
        manifest = open_manifest(
            data, run=state.run, keys=state.publishers, now=None, version=version, root=record.root
        )
        self._home = home = tempfile.TemporaryDirectory(prefix="shoal-watch-")
        self._asking.wait(fetch_tokenizer(self._client, manifest, state.sampling.stops, Path(home.name)))
        return contained(RendererLimits(), state.sampling.stops)(
            Path(home.name)
        )  # guard: watched-tokenizer-is-contained

    def has_key(self, run_key: str) -> bool:
        return False

    def close(self) -> None:
        self._asking.wait(self._client.close())
        self._asking.close()
        if self._home is not None:
            self._home.cleanup()


async def fetch_tokenizer(client: Client, manifest: t.Manifest, stops: str, home: Path) -> None:
    """Fetch the files of a version that its tokenizer is made of into a folder. Raises `ShoalError`."""
    run = UrlRun(client)
    for entry in manifest.files:
        if entry.path not in FILES[stops]:
            continue
        file = b"".join([await run.blob(chunk) for chunk in entry.chunks])
        if digest(file) != entry.digest:
            raise PeerError(f"{run.name} serves another {entry.path} than its manifest names: do not trust it")
        (home / entry.path).write_bytes(file)
        (home / entry.path).chmod(0o644)  # the sandbox's user reads it, whatever the umask


async def _status(url: str, transport: httpx.AsyncBaseTransport | None) -> t.Status:
    async with Client(url, transport=transport, on_wait=lambda line: None) as client:
        return await client.get_json("/v1/status", t.Status, deadline_s=STATUS_S)


class _Asking:
    """A thread with an event loop, in which requests are awaited."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="shoal reading", daemon=True)
        self._thread.start()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """What the work gives, or raises."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
