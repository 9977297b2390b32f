"""A run as its coordinator tells it anyone, at a URL or on this machine: its status, its nodes and its metrics.

All of it is a stranger's: each answer is limited and parsed, and what is kept of it is numbers of known names and short
texts.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from shoal.errors import NothingYet, PeerError
from shoal.net.client import Client, PeerRefused, Timing
from shoal.net.safe_http import HardenedTransport
from shoal.net.server_address import local_url, reader_url, told_address
from shoal.protocol.constants import CHAIN_LENGTH, MAX_NODES
from shoal.protocol.messages import NodeState, Status
from shoal.runs.redact import alarm_of
from shoal.runs.run_status import NO_STATUS, RunStatus
from shoal.step_metrics import (
    FIGURES,
    MAX_LINE_BYTES,
    MAX_NAMES,
    MAX_NUMBER,
    MetricsLine,
    clean_metrics,
    is_figure,
    step_of,
)

ENDED = "the run has ended, and its host no longer answers"

ANSWER_S = 5.0
"""How long to wait for one answer."""

LOCAL_ANSWER_S = 2.0
"""The same for one on this machine, which is asked once."""

MOST_NODES = 20_000

PAGING_SHARE = 0.1
"""Largest fraction of time spent on asking for nodes, if a run has more than fit into one answer."""

PAGES_AT_ONCE = 8
"""Pages of metrics that are asked for in one look: a long run is read in several."""

MOST_VALUES, MOST_NAMES = 400_000, 120
"""Of all steps that are kept: figures (about 40 MB), and different names of them."""

SHOWN = {
    *FIGURES, "step", "time_s", "step_s", "policy_tokens", "reward_mean", "draw_weight", "staleness_rollouts",
    "fault_rollouts",
}  # fmt: skip
"""Figures that a view shows, by the part of their names before a slash: no others are kept."""

MAX_LABEL_CHARS = 100
"""Of a check, as the reason of refusals."""

OVERLAP_STEPS = 16
"""Newest steps whose metrics are asked for again: a trainer that was killed repeats some."""

MOST_METRICS_BYTES = 1 << 27
"""Of all metrics that a URL serves: 16 kB a step of the longest run."""


class MetricsPages:
    """The metrics that a URL serves, page by page. Of a step that comes again with other figures, the later line counts."""

    def __init__(self, client: Client, overlap_steps: int = OVERLAP_STEPS, deadline_s: float = ANSWER_S) -> None:
        """`overlap_steps`: so many of the newest steps are asked for again each time."""
        self._client, self._overlap_steps, self._deadline_s = client, overlap_steps, deadline_s
        self._newest = -1
        self._recent: dict[int, bytes] = {}
        """The lines that came last, by step."""
        self._steps, self._bytes, self._names = set[int](), 0, set[str]()

    async def new(self) -> list[MetricsLine]:
        """The lines of the next page, in order of step; empty at the end. Raises `PeerError`."""
        lines, size = await self._page(self._newest - self._overlap_steps)
        if lines and max(lines) < self._newest:  # the page ended within what is known
            more, more_size = await self._page(self._newest)
            lines, size = lines | more, size + more_size
        news = [line for step, (raw, line) in lines.items() if self._recent.get(step) != raw]
        if news:
            known = (len(raw) for step, (raw, _) in lines.items() if self._recent.get(step) == raw)
            self._count(news, size - sum(known))
        self._recent |= {step: raw for step, (raw, _) in lines.items()}
        self._newest = max([self._newest, *self._recent])
        oldest = self._newest - 2 * self._overlap_steps
        self._recent = {step: raw for step, raw in self._recent.items() if step > oldest}
        return news

    async def all(self) -> list[MetricsLine]:
        """The lines of all pages, in order of step. Raises `PeerError`."""
        lines = list[MetricsLine]()
        while new := await self.new():
            lines += new
        return lines

    async def _page(self, after: int) -> tuple[dict[int, tuple[bytes, MetricsLine]], int]:
        """A page in order of step, each as it came and cleaned; and how many bytes it came in."""
        path = f"/v1/metrics?after={max(-1, after)}"
        page = await self._client.get(path, cap=MAX_LINE_BYTES, deadline_s=self._deadline_s)
        lines = {step_of(line): (raw, line) for raw in page.splitlines() if (line := decoded_line(raw)) is not None}
        return {step: lines[step] for step in sorted(lines) if step > after}, len(page)  # guard: metrics-go-forward

    def _count(self, lines: Sequence[MetricsLine], size: int) -> None:
        """Count lines, and the bytes in which they came, so that no stranger fills memory or disk with them."""
        self._steps.update(map(step_of, lines))
        self._bytes += size
        self._names.update(name for line in lines for name in line)
        url = self._client.base_url
        if self._bytes > MOST_METRICS_BYTES or len(self._names) > MAX_NAMES:  # guard: metrics-of-a-url-fit
            raise PeerError(f"{url} serves more metrics than a run has: {len(self._names)} names, {self._bytes} bytes")
        if len(self._steps) > 2 * CHAIN_LENGTH:  # guard: metrics-of-a-url-end
            raise PeerError(f"{url} serves metrics of more steps than a run can have ({CHAIN_LENGTH})")


def decoded_line(text: bytes) -> MetricsLine | None:
    """A line of a stranger, cleaned; None if it names no step."""
    try:
        return clean_metrics(msgspec.json.decode(text, type=dict[str, Any]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class StatusReader:
    """The status and the nodes of a run, as its coordinator told them last."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic, nodes_every_s: float = 0.0) -> None:
        """Nodes are asked for at most so often."""
        self.monotonic, self._nodes_every_s, self._nodes_again_at = monotonic, nodes_every_s, 0.0
        self.status, self.nodes = NO_STATUS, tuple[NodeState, ...]()
        self.answered_at: float | None = None
        """When it last told its status; None if never."""

    async def read_status(self, client: Client, deadline_s: float = ANSWER_S) -> None:
        """Ask for the status. Raises `PeerError`, and the last one stays."""
        self.status = cleaned_status(await client.get_json("/v1/status", Status, deadline_s=deadline_s))
        self.answered_at = self.monotonic()

    async def read_nodes(self, client: Client, deadline_s: float = ANSWER_S) -> None:
        """Ask for all nodes, page by page, if it is time. Raises `PeerError`, and those of before stay."""
        began = self.monotonic()
        if began < self._nodes_again_at:
            return
        nodes, after = dict[str, NodeState](), ""
        while len(nodes) < MOST_NODES:
            path = f"/v1/nodes?after={after}" if after else "/v1/nodes"
            page = await client.get_json(path, tuple[NodeState, ...], deadline_s=deadline_s)
            known = len(nodes)
            nodes |= {node.key: cleaned_node(node) for node in page[:MAX_NODES]}
            if len(page) < MAX_NODES or len(nodes) == known or not _is_key(page[-1].key):
                break
            after = page[-1].key
        self.nodes = tuple(nodes.values())
        paging_s = (self.monotonic() - began) / PAGING_SHARE if len(nodes) >= MAX_NODES else 0.0
        every_s = self._nodes_every_s if nodes else 0.0  # the first node to look is not in the list yet
        self._nodes_again_at = began + max(paging_s, every_s)


class CoordinatorWatch:
    """The coordinator of a run's folder: the last answers while it restarts. It blocks, and needs no event loop."""

    def __init__(self, address_file: Path, bind: str, is_reader: bool = False) -> None:
        """`is_reader`: whether the folder may be a stranger's, which then leads to no other machine."""
        self._file, self._bind, self._url_of = address_file, bind, reader_url if is_reader else local_url
        self._reader = StatusReader()
        self.answers = False
        """Whether it answered when it was last asked for its status."""

    def url(self) -> str:
        """Its URL for roles on this machine, or "" if it has not written its address yet."""
        return self._url_of(self._file, self._bind)

    def public_url(self) -> str:
        """What others type."""
        return told_address(self._file).url

    def healthy(self, pid: int) -> bool:
        """Whether this process answers: the address file may still be that of the previous one."""
        if told_address(self._file).pid != pid:
            return False
        self.status()
        return self.answers

    def status(self) -> Status:
        """The newest status; the last one if it does not answer now. It asks for the nodes, too."""
        self.answers = False
        if url := self.url():
            with contextlib.suppress(PeerError):
                asyncio.run(self._ask(url))
        return self._reader.status

    @property
    def nodes(self) -> tuple[NodeState, ...]:
        """As of the last status. If the list takes several answers, it may be a little older."""
        return self._reader.nodes

    async def _ask(self, url: str) -> None:
        direct = HardenedTransport(verify=False, limits=httpx.Limits(), proxy=None)  # it is on this machine
        async with Client(url, transport=direct, timing=Timing(sleep=_once), on_wait=lambda line: None) as client:
            await self._reader.read_status(client, LOCAL_ANSWER_S)
            self.answers = True
            await self._reader.read_nodes(client, LOCAL_ANSWER_S)


async def _once(_: float) -> None:
    """In the place of the pause before another attempt."""
    raise PeerError("the coordinator does not answer now")


class RemoteRun:
    """A run at a URL, as its coordinator describes it."""

    def __init__(
        self, client: Client, monotonic: Callable[[], float] = time.monotonic, metrics_every_s: float = 0.0,
        nodes_every_s: float = 0.0,
    ) -> None:  # fmt: skip
        """Metrics and nodes are asked for at most so often: a thousand workers must not cost their host much."""
        self._client, self._reader = client, StatusReader(monotonic, nodes_every_s)
        self._metrics_every_s, self._metrics_again_at = metrics_every_s, 0.0
        self._pages = MetricsPages(client, overlap_steps=1)
        self._lines = dict[int, MetricsLine]()
        """By step, ascending."""
        self._num_values = 0
        self._names = set(SHOWN)
        self.trouble = ""
        """Why the newest look got no answer."""

    @property
    def answered_at(self) -> float | None:
        """When it last told its status; None if never."""
        return self._reader.answered_at

    async def look(self) -> RunStatus:
        """The run now, as far as the host answers; what it said before stays. Raises `PeerError` if it never answered."""
        try:
            await self._reader.read_status(self._client)
            self.trouble = ""
            await self._read_metrics()
            await self._reader.read_nodes(self._client)
        except PeerError as error:
            if self._reader.answered_at is None:
                raise
            self.trouble = ENDED if self._reader.status.phase == "ended" else str(error)
        status, url = self._reader.status, self._client.base_url
        return RunStatus(
            name=status.name, out=url, steps=status.steps, status=status, url=url,
            elapsed_s=self._elapsed_s(), times_steps=True, metrics=tuple(self._lines.values()), nodes=self._reader.nodes,
            notice=self.trouble, alarms=[*map(alarm_of, status.alarms)],
        )  # fmt: skip

    async def _read_metrics(self) -> None:
        """New lines, a few pages at a time."""
        if (now := self._reader.monotonic()) < self._metrics_again_at:
            return
        self._metrics_again_at = now + self._metrics_every_s
        for _ in range(PAGES_AT_ONCE):
            try:
                new = await self._pages.new()
            except PeerRefused as refused:
                self.trouble = str(refused)
                break
            except NothingYet:
                break
            if not new:
                break
            for line in new:
                self._keep(line)

    def _keep(self, line: MetricsLine) -> None:
        """Keep what a view shows of a step: a hostile host must not fill the memory of all who joined it."""
        kept = {name: value for name, value in line.items() if name.partition("/")[0] in SHOWN}
        for name in kept:
            if len(self._names) < MOST_NAMES:  # guard: few-names-of-figures
                self._names.add(name)
        kept = {name: value for name, value in kept.items() if name in self._names}
        step = step_of(line)
        self._num_values += _size(kept) - _size(self._lines.get(step, {}))
        self._lines[step] = kept
        while self._num_values > MOST_VALUES:  # guard: few-figures-are-kept
            self._num_values -= _size(self._lines.pop(next(iter(self._lines))))

    def _elapsed_s(self) -> float:
        """From the first step to the newest, if all are here."""
        lines = list(self._lines.values())
        if not lines or lines[0]["step"] != 0:
            return 0.0
        end_s, first_end_s, took_s = lines[-1].get("time_s"), lines[0].get("time_s"), lines[0].get("step_s")
        if not (is_figure(end_s) and is_figure(first_end_s) and is_figure(took_s)):
            return 0.0
        return max(0.0, end_s - first_end_s + took_s)


def cleaned_status(status: Status) -> Status:
    """A status with short texts and moderate numbers."""
    figures = {name: _number(getattr(status, name)) for name in ("accepted", "in_flight", "pending", "flat_groups")}
    return msgspec.structs.replace(
        status, name=status.name[:200], phase=status.phase[:40], waiting_for=status.waiting_for[:2000],
        waiting_on=status.waiting_on[:40], remedy=status.remedy[:2000],
        pause_cause=status.pause_cause[:200], version=max(-1, _number(status.version)), steps=_number(status.steps),
        waiting_s=status.waiting_s if is_figure(status.waiting_s) else 0.0, refused=_cleaned_counts(status.refused),
        **figures,
    )  # fmt: skip


def cleaned_node(node: NodeState) -> NodeState:
    """A node with short texts and moderate numbers."""
    counts = ("credits", "accepted", "refused", "lapsed", "vested", "leases", "stale", "given", "unfilled")
    figures = {name: max(0, _number(getattr(node, name))) for name in counts}
    return msgspec.structs.replace(
        node, key=node.key[:64], role=node.role[:40], name=node.name[:200], last_reason=node.last_reason[:1000],
        reasons=_cleaned_counts(node.reasons), influence=node.influence if is_figure(node.influence) else 0.0,
        silent_s=max(0.0, node.silent_s) if is_figure(node.silent_s) else 0.0, **figures,
    )  # fmt: skip


def _cleaned_counts(counts: dict[str, int]) -> dict[str, int]:
    """The most frequent of them."""
    ranked = sorted(counts.items(), key=lambda item: -item[1])[:20]
    return {check[:MAX_LABEL_CHARS]: max(0, _number(count)) for check, count in ranked}


def _size(line: MetricsLine) -> int:
    return len(line) + sum(len(value) for value in line.values() if isinstance(value, dict))


def _number(value: int) -> int:
    return max(-MAX_NUMBER, min(MAX_NUMBER, value))


def _is_key(text: str) -> bool:
    return len(text) == 64 and text.isascii() and text.isalnum()
