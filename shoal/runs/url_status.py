"""A run at a URL, as anyone may see it: its status, its nodes and its metrics, asked for without a key.

All of it is a stranger's: each answer is limited and parsed, and what is kept of it is numbers of known names and short
texts. A host that serves no metrics shows less: the time of a step is then what the watcher saw.
"""

import time
from collections import deque
from collections.abc import Callable
from math import isfinite
from typing import Any

import msgspec

from shoal.errors import NothingYet, PeerError
from shoal.metrics import HEADLINE_METRICS, declared
from shoal.net.client import Client, PeerRefused
from shoal.protocol.constants import MAX_JSON_BYTES, MAX_NODES
from shoal.protocol.messages import NodeState, Status
from shoal.runs.redact import alarm_of
from shoal.runs.run_status import NO_STATUS, PAGING_SHARE, RunStatus

ENDED = "the run has ended, and its host no longer answers"

ANSWER_S = 5.0
"""How long to wait for one answer."""

MOST_STEPS, MOST_NODES = 20_000, 20_000
"""Of a run's newest steps and of its nodes, so many are kept."""

PAGES_AT_ONCE = 8
"""Pages of metrics that are asked for in one look: a run of 20,000 steps is read in several."""

MOST_VALUES, MOST_NAMES = 400_000, 120
"""Of all steps that are kept: figures (about 40 MB), and different names of them."""

SHOWN = {name for _, name, _ in HEADLINE_METRICS} | {
    "step", "time_s", "step_s", "policy_tokens", "reward_mean", "draw_weight", "staleness_rollouts",
    "fault_rollouts",
}  # fmt: skip
"""Figures that a view shows, by the part of their names before a slash: no others are kept."""

MOST_KEYS, MOST_LABEL_CHARS = 200, 100
"""Of one line of metrics."""

MOST_NUMBER = 10**15
"""Larger numbers of a stranger count as this."""


class RemoteRun:
    """A run, as its coordinator describes it."""

    def __init__(
        self, client: Client, monotonic: Callable[[], float] = time.monotonic, metrics_every_s: float = 0.0,
        nodes_every_s: float = 0.0,
    ) -> None:  # fmt: skip
        """Metrics and nodes are asked for at most so often: a thousand workers must not cost their host much."""
        self._client, self._monotonic = client, monotonic
        self._metrics_every_s, self._nodes_every_s, self._metrics_again_at = metrics_every_s, nodes_every_s, 0.0
        self._status, self._nodes = NO_STATUS, tuple[NodeState, ...]()
        self._lines: deque[dict[str, Any]] = deque()
        self._num_values = 0
        self._names = set(SHOWN)
        self._has_metrics = True
        self._nodes_again_at = 0.0
        self._version_at: tuple[int, float] | None = None
        self.trouble = ""
        """Why the newest look got no answer."""
        self.answered_at: float | None = None
        """When it last told its status; None if never."""

    async def look(self) -> RunStatus:
        """The run now, as far as the host answers; what it said before stays. Raises `PeerError` if it never answered."""
        try:
            self._status = cleaned_status(await self._client.get_json("/v1/status", Status, deadline_s=ANSWER_S))
            self.trouble, self.answered_at = "", self._monotonic()
            await self._read_metrics()
            await self._read_nodes()
        except PeerError as error:
            if self._status is NO_STATUS:
                raise
            ended = self._status.phase == "ended"
            self.trouble = ENDED if ended else str(error)
        status = self._status
        return RunStatus(
            name=status.name, out=self._client.base_url, steps=status.steps, status=status, url=self._client.base_url,
            elapsed_s=self._elapsed_s(), times_steps=True, metrics=tuple(self._lines), nodes=self._nodes,
            notice=self.trouble,
            alarms=[*map(alarm_of, status.alarms)],
        )  # fmt: skip

    async def _read_metrics(self) -> None:
        """New lines, a few pages at a time."""
        if self._monotonic() < self._metrics_again_at:
            return
        self._metrics_again_at = self._monotonic() + self._metrics_every_s
        for _ in range(PAGES_AT_ONCE if self._has_metrics else 0):
            last = self._lines[-1]["step"] if self._lines else -1
            try:
                page = await self._client.get(f"/v1/metrics?after={last}", cap=MAX_JSON_BYTES, deadline_s=ANSWER_S)
            except PeerRefused as refused:
                self._has_metrics = (
                    refused.code != "no_such_call"
                )  # an older host  # guard: refused-once-is-not-for-ever
                self.trouble = str(refused) if self._has_metrics else ""
                break
            except NothingYet:
                break
            new = [line for text in page.splitlines() if (line := cleaned_line(text)) is not None]
            for line in new:
                if line["step"] > (self._lines[-1]["step"] if self._lines else -1):  # guard: steps-only-rise
                    self._keep(line)
            if not new or self._lines[-1]["step"] == last:
                break
        if not self._has_metrics:
            self._observe_steps()

    def _keep(self, line: dict[str, Any]) -> None:
        """Keep what a view shows of a step: a hostile host must not fill the memory of all who joined it."""
        kept = {name: value for name, value in line.items() if name.partition("/")[0] in SHOWN}
        for name in kept:
            if len(self._names) < MOST_NAMES:  # guard: few-names-of-figures
                self._names.add(name)
        kept = {name: value for name, value in kept.items() if name in self._names}
        self._lines.append(kept)
        self._num_values += _size(kept)
        while len(self._lines) > MOST_STEPS or self._num_values > MOST_VALUES:  # guard: few-figures-are-kept
            self._num_values -= _size(self._lines.popleft())

    def _observe_steps(self) -> None:
        """Time the versions that come while we look."""
        version, now = self._status.version, self._monotonic()
        if self._version_at is None:
            self._version_at = (version, now)
        elif version > self._version_at[0]:
            before, since = self._version_at
            self._lines.append({"step": version - 1, "step_s": (now - since) / (version - before)})
            self._version_at = (version, now)

    async def _read_nodes(self) -> None:
        """All nodes, page by page, as seldom as in `CoordinatorWatch`."""
        began = self._monotonic()
        if began < self._nodes_again_at:
            return
        nodes = dict[str, NodeState]()
        after = ""
        while len(nodes) < MOST_NODES:
            path = f"/v1/nodes?after={after}" if after else "/v1/nodes"
            page = await self._client.get_json(path, tuple[NodeState, ...], deadline_s=ANSWER_S)
            known = len(nodes)
            nodes |= {node.key: cleaned_node(node) for node in page[:MAX_NODES]}
            if len(page) < MAX_NODES or len(nodes) == known or not _is_key(page[-1].key):
                break
            after = page[-1].key
        self._nodes = tuple(nodes.values())
        paging_s = (self._monotonic() - began) / PAGING_SHARE if len(nodes) >= MAX_NODES else 0.0
        every_s = self._nodes_every_s if nodes else 0.0  # the first node to look is not in the list yet
        self._nodes_again_at = began + max(paging_s, every_s)

    def _elapsed_s(self) -> float:
        """From the first step to the newest, if all are here."""
        first, last = (self._lines[0], self._lines[-1]) if self._lines else ({}, {})
        if first.get("step") != 0 or not {"time_s", "step_s"} <= first.keys() or "time_s" not in last:
            return 0.0
        return max(0.0, float(last["time_s"] - first["time_s"] + first["step_s"]))


def cleaned_line(text: bytes) -> dict[str, Any] | None:
    """`cleaned_metrics` of a line of text."""
    try:
        return cleaned_metrics(msgspec.json.decode(text, type=dict[str, Any]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def cleaned_metrics(line: dict[str, Any]) -> dict[str, Any] | None:
    """Metrics of a step with known names and finite numbers only; None if they name no step."""
    kept: dict[str, Any] = {}
    for name, value in list(line.items())[:MOST_KEYS]:
        known = declared(name) is not None and len(name) <= MOST_LABEL_CHARS
        if known and _is_number(value):  # guard: finite-figures
            kept[name] = value
    if not isinstance(kept.get("step"), int) or kept["step"] < 0:
        return None
    ages = line.get("staleness_rollouts")
    if isinstance(ages, dict):
        good = {a: n for a, n in list(ages.items())[:32] if a.isascii() and a.isdecimal() and len(a) < 7}
        kept["staleness_rollouts"] = {age: n for age, n in good.items() if _is_number(n) and n >= 0}
    return kept


def cleaned_status(status: Status) -> Status:
    """A status with short texts and moderate numbers."""
    figures = {name: _number(getattr(status, name)) for name in ("accepted", "in_flight", "pending", "flat_groups")}
    return msgspec.structs.replace(
        status, name=status.name[:200], phase=status.phase[:40], waiting_for=status.waiting_for[:2000],
        waiting_on=status.waiting_on[:40],
        pause_cause=status.pause_cause[:200], version=max(-1, _number(status.version)), steps=_number(status.steps),
        waiting_s=status.waiting_s if _is_number(status.waiting_s) else 0.0, refused=_cleaned_counts(status.refused),
        **figures,
    )  # fmt: skip


def cleaned_node(node: NodeState) -> NodeState:
    """A node with short texts and moderate numbers."""
    counts = ("credits", "accepted", "refused", "lapsed", "vested", "leases", "stale", "given", "unfilled")
    figures = {name: max(0, _number(getattr(node, name))) for name in counts}
    return msgspec.structs.replace(
        node, key=node.key[:64], role=node.role[:40], name=node.name[:200], last_reason=node.last_reason[:1000],
        reasons=_cleaned_counts(node.reasons), influence=node.influence if _is_number(node.influence) else 0.0,
        silent_s=max(0.0, node.silent_s) if _is_number(node.silent_s) else 0.0, **figures,
    )  # fmt: skip


def _cleaned_counts(counts: dict[str, int]) -> dict[str, int]:
    """The most frequent of them."""
    ranked = sorted(counts.items(), key=lambda item: -item[1])[:20]
    return {check[:MOST_LABEL_CHARS]: max(0, _number(count)) for check, count in ranked}


def _size(line: dict[str, Any]) -> int:
    return len(line) + sum(len(value) for value in line.values() if isinstance(value, dict))


def _number(value: int) -> int:
    return max(-MOST_NUMBER, min(MOST_NUMBER, value))


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= MOST_NUMBER if isinstance(value, int) else isfinite(value) and abs(value) <= MOST_NUMBER


def _is_key(text: str) -> bool:
    return len(text) == 64 and text.isascii() and text.isalnum()
