"""A run with what is beside its log: metrics, status, evaluations, alarms and the tokenizer, from its folder or its URL.

What comes from a URL is a stranger's: the client limits each answer, and this file decodes it strictly.
"""

import contextlib
import logging
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec

from shoal.chat.isolated import RendererLimits
from shoal.chat.renderer import FILES, Renderer
from shoal.errors import NothingYet, PeerError, ShoalError, StateError
from shoal.ledger.state import State
from shoal.metrics import MAX_LINE_BYTES, MetricsTail
from shoal.net.client import Client, PeerRefused
from shoal.net.server_process import reader_url
from shoal.protocol import messages as t
from shoal.protocol.constants import CHAIN_LENGTH
from shoal.protocol.encoding import digest
from shoal.runs.log import newest_event
from shoal.runs.public_run import ANSWER_S, FolderRun, UrlRun
from shoal.weights.engine_loader import contained
from shoal.weights.manifest import open_manifest

log = logging.getLogger(__name__)

STATUS_S = 2.0
"""How long to wait for a coordinator's status; it is asked for often."""

OVERLAP_STEPS = 16
"""Newest steps whose metrics are asked for again: a trainer that was killed repeats some."""

MAX_METRICS, MAX_NAME_CHARS, MAX_TEXT_CHARS = 2000, 200, 200
"""Of one line of metrics: names, and the characters of a name and of a text. A line with more is dropped."""

MOST_METRICS_BYTES = 1 << 27
"""Of all metrics that a URL serves: 16 kB a step of the longest run."""

MAX_STEP = 1 << 31

Value = int | float | str | None | dict[str, int | float]
"""Of a metric."""


class FolderSource(FolderRun):
    """A run's folder on this machine. The run may be starting, live, dead or ended."""

    def __init__(self, root: Path, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """`transport` replaces the network to the folder's coordinator, in tests. Raises `ConfigError` without a run."""
        super().__init__(root)
        self._tail = MetricsTail(self.folder.metrics)
        self._told_unread = False
        self._transport = transport

    async def newest(self) -> int:
        """The number of the newest event that there is, as far as anyone says; -1 if nobody does."""
        with contextlib.suppress(ShoalError):
            return newest_event(self.folder.log)
        return -1

    async def new_metrics(self) -> list[dict[str, Value]]:
        """Lines of metrics that are new since the last call, or repeat a step. Raises `ShoalError`."""
        return self._lines(self._tail, 1000)

    async def all_metrics(self) -> list[dict[str, Value]]:
        """One line for each step, in order. Raises `ShoalError`."""
        by_step = {step_of(line): line for line in self._lines(MetricsTail(self.folder.metrics), sys.maxsize)}
        return [by_step[step] for step in sorted(by_step)]

    def _lines(self, tail: MetricsTail, most: int) -> list[dict[str, Value]]:
        try:
            lines = clean(tail.read(most))
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


class _Line(NamedTuple):
    """A line of metrics as it came, and what it says."""

    step: int
    raw: bytes
    values: dict[str, Value]


class UrlSource(UrlRun):
    """The server at a URL: a coordinator, or a stranger that poses as one."""

    def __init__(self, url: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """`transport` replaces the network, in tests."""
        super().__init__(Client(url, transport=transport, on_wait=lambda line: None))
        self._newest, self._served = -1, _Served(self.name)
        self._recent: dict[int, bytes] = {}
        """The lines that came last, by step."""
        self._home: tempfile.TemporaryDirectory[str] | None = None

    async def newest(self) -> int:
        with contextlib.suppress(PeerError):
            return (await self.client.get_json("/v1/state", t.StateHash, deadline_s=STATUS_S)).seq
        return -1

    async def new_metrics(self) -> list[dict[str, Value]]:
        lines, size = await self._metrics_after(self._newest - OVERLAP_STEPS)
        if lines and lines[-1].step < self._newest:  # the page ended within what is known
            more, more_size = await self._metrics_after(self._newest)
            lines, size = lines + more, size + more_size
        known = [line for line in lines if self._recent.get(line.step) == line.raw]
        news = [line.values for line in lines if self._recent.get(line.step) != line.raw]
        if news:
            self._served.take(news, size - sum(len(line.raw) for line in known))
        self._recent |= {line.step: line.raw for line in lines}
        self._newest = max([self._newest, *self._recent])
        self._recent = {step: line for step, line in self._recent.items() if step > self._newest - 2 * OVERLAP_STEPS}
        return news

    async def all_metrics(self) -> list[dict[str, Value]]:
        lines: list[dict[str, Value]] = []
        served = _Served(self.name)
        while True:
            page, size = await self._metrics_after(step_of(lines[-1]) if lines else -1)
            if not page:
                return lines
            lines += [line.values for line in page]
            served.take(lines[-len(page) :], size)

    async def _metrics_after(self, step: int) -> tuple[list[_Line], int]:
        """A page of metrics in order of step, all above `step`; and how many bytes it came in."""
        path = f"/v1/metrics?after={max(-1, step)}"
        try:
            page = await self.client.get(path, cap=MAX_LINE_BYTES, deadline_s=ANSWER_S)
        except PeerRefused as refused:
            if refused.code == "no_such_call":  # a coordinator from before there were such answers
                return [], 0
            raise
        found = {line.step: line for line in _decoded(page.splitlines())}
        return [found[each] for each in sorted(found) if each > step], len(page)  # guard: metrics-go-forward

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


class _Served:
    """Counts the metrics that a server has sent, so that no stranger fills memory or disk with them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._steps, self._bytes, self._names = set[int](), 0, set[str]()

    def take(self, lines: Sequence[dict[str, Value]], size: int) -> None:
        """Count lines, and the bytes in which they came. Raises `PeerError` if these are more than a run has."""
        self._steps.update(map(step_of, lines))
        self._bytes += size
        self._names.update(name for line in lines for name in line)
        if self._bytes > MOST_METRICS_BYTES or len(self._names) > MAX_METRICS:  # guard: metrics-of-a-url-fit
            raise PeerError(
                f"{self._name} serves more metrics than a run has: {len(self._names)} names, {self._bytes} bytes"
            )
        if len(self._steps) > 2 * CHAIN_LENGTH:  # guard: metrics-of-a-url-end
            raise PeerError(f"{self._name} serves metrics of more steps than a run can have ({CHAIN_LENGTH})")


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


def clean(lines: Iterable[dict[str, Any]]) -> list[dict[str, Value]]:
    """The lines of metrics that are tables of short names that print and of plain values, with a step."""
    found = []
    for line in lines:
        with contextlib.suppress(msgspec.ValidationError):
            values = msgspec.convert(line, dict[str, Value])
            if _is_sound(values):  # guard: metrics-of-strangers
                found.append(values)
    return found


def step_of(line: dict[str, Value]) -> int:
    """The step of a line that `clean` gave."""
    step = line["step"]
    assert isinstance(step, int), "a line without a step is left out"
    return step


def _is_sound(values: dict[str, Value]) -> bool:
    step = values.get("step")
    names = [*values, *(name for value in values.values() if isinstance(value, dict) for name in value)]
    plain = [value for value in values.values() if not isinstance(value, dict)]
    plain += [value for table in values.values() if isinstance(table, dict) for value in table.values()]
    return (
        type(step) is int
        and 0 <= step < MAX_STEP
        and len(names) <= MAX_METRICS
        and all(len(name) <= MAX_NAME_CHARS and name.isprintable() for name in names)
        and all(len(value) <= MAX_TEXT_CHARS for value in plain if isinstance(value, str))
        and all(abs(value) < 1 << 53 for value in plain if isinstance(value, int))
    )


def _decoded(lines: Iterable[bytes]) -> Iterable[_Line]:
    for raw in lines:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            for values in clean([msgspec.json.decode(raw, type=dict[str, Any])]):
                yield _Line(step_of(values), raw, values)
