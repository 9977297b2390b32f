"""The log of a run, replayed as it grows, and all that can be looked up beside it: a run as its readers see it.

It reads a folder or a URL through `log_source`, verifies what it can, and changes nothing. A run may be starting, live,
dead or replaced by another one. `Marks` has the numbers of the events behind a state, which remembers none.
"""

import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeVar

import httpx
from anyio.from_thread import start_blocking_portal
from msgspec import UNSET

from shoal.alarms import AlarmLine, read_alarms
from shoal.chat.renderer import Renderer
from shoal.env import Env
from shoal.envs.load import files_needed
from shoal.errors import ConfigError, NothingYet, Overreach, ShoalError, StateError
from shoal.evaluation_files import Evaluation, evaluations_of
from shoal.ledger.batches import BatchFormed, GroupAccepted, SlotVoid
from shoal.ledger.errors import FAULTS
from shoal.ledger.event import GENESIS, Entry, event_hash
from shoal.ledger.event_types import apply, read_entry
from shoal.ledger.log.writer import BrokenLog, checked_entry
from shoal.ledger.state import State
from shoal.ledger.state_records import LeaseRecord
from shoal.ledger.status import node_state, status_of
from shoal.ledger.verdict_decisions import is_final
from shoal.ledger.verdicts import Decision
from shoal.ledger.versions import CheckpointPublished
from shoal.net.client import Client
from shoal.net.key_files import load_key
from shoal.protocol import messages as t
from shoal.protocol.encoding import WireError, digest, from_msgpack
from shoal.run_folder import RunFolder, is_locked, is_url
from shoal.runs.log_source import EVENT_BYTES, EVENT_COPIES, FolderRun, UrlRun, is_full
from shoal.runs.rollouts import (
    ReadGroup,
    ReplayedEpisode,
    Standing,
    answer_of,
    decoded,
    open_envs,
    read_rollouts,
    replay,
    with_faults,
)
from shoal.step_metrics import MetricsLine, step_of
from shoal.weights.manifest import ManifestTrust, open_manifest
from shoal.weights.memory_limit import share_of_free_mb

T = TypeVar("T")


@dataclass
class Marks:
    """Numbers of events."""

    finals: dict[tuple[int, int], int] = field(default_factory=dict)
    """By (version, slot): what made the slot final."""
    batches: dict[int, int] = field(default_factory=dict)
    """By step."""
    versions: dict[int, tuple[int, float]] = field(default_factory=dict)
    """By version: the event that published it first, and its time."""
    decisions: dict[str, tuple[int, Decision]] = field(default_factory=dict)
    """By submission."""
    faults: dict[tuple[int, int], t.Faults] = field(default_factory=dict)
    """By (version, slot): where the environment failed on the accepted group, if it did."""

    def see(self, entry: Entry) -> None:
        """Note one event."""
        match entry.body:
            case GroupAccepted(version=version, slot=slot, faults=faults):
                self.finals[version, slot] = entry.seq
                if faults is not UNSET:
                    self.faults[version, slot] = faults
            case SlotVoid(version=version, slots=slots):
                self.finals.update({(version, slot): entry.seq for slot in slots})
            case BatchFormed(step=step):
                self.batches[step] = entry.seq
            case CheckpointPublished(version=version):
                self.versions.setdefault(version, (entry.seq, entry.time))
            case Decision(submission=submission):
                self.decisions[submission] = entry.seq, entry.body
            case _:
                pass


def slot_of(state: State, lease: LeaseRecord, index: int) -> int:
    """The slot of a group by its place in the submission that fills the lease."""
    size = state.rules.block_groups
    return lease.blocks[index // size] * size + index % size


def standing_of(state: State, marks: Marks, submission: str, index: int) -> tuple[Standing, int]:
    """What became of a group of a submission, and the number of the event that says so; -1 before there is one."""
    if submission not in marks.decisions:
        return "pending", -1
    seq, decision = marks.decisions[submission]
    lease = state.leases[state.submissions[submission].lease]
    block, slot = lease.blocks[index // state.rules.block_groups], slot_of(state, lease, index)
    if block in decision.disputed:
        return "disputed", seq
    if block in decision.refused:
        return "refused", seq
    if block in decision.copied:
        return "copied", seq
    record = state.main.versions[lease.version].slots.get(slot)
    if record is None or (record.submission != submission and record.status != "void"):
        return "copied", seq
    status: Standing = record.status  # type: ignore[assignment]
    return status, marks.finals.get((lease.version, slot), seq)


class Replaced(StateError):
    """The log is not the one that was read before: another run, or another history of this one. Open the run again."""


class Condition(NamedTuple):
    status: t.Status
    is_live: bool
    """Whether the coordinator said so just now; if not, it follows from the log, and `waiting_s` counts from its end."""
    is_stopped: bool = False
    """Whether nobody hosts the run now, though it has begun and not ended; of a URL nobody knows."""


class Version(NamedTuple):
    """A published policy version."""

    version: int
    root: str
    manifest: str
    seq: int
    """Number of the event that published it first."""
    time: float
    """Of that event, seconds since the epoch."""
    is_retired: bool
    """Whether its secret link is revealed: nothing of it can be submitted any more."""


@dataclass(frozen=True, order=True)
class GroupRef:
    """Where a group is: its submission, and its place in it."""

    submission: str
    index: int


def open_run(
    where: str | Path,
    *,
    private: bool = False,
    own_files: bool = False,
    max_memory_mb: int = 0,
    clock: Callable[[], float] = time.time,
    transport: httpx.AsyncBaseTransport | None = None,
) -> "RunReader":
    """Read the run in a folder or at a URL. Nothing is read yet: call `refresh`, or `catch_up`.

    `private` also shows bodies that are still private and held-out tasks. That takes the host's folder with its run key.
    `own_files` lets `RunReader.replayed` execute environment files that the run names, its host's code: whoever made a
    folder made its key, too, so a key proves nothing. `max_memory_mb` limits the log of a URL, because its length is the
    host's choice; 0 is half of what is free. `transport` replaces the network, in tests.

    Raises `ConfigError` for a folder without a run, `PeerError` for a bad URL.
    """
    if private and is_url(where):
        raise ConfigError(f"{where} is a URL: what is private is read from the host's folder, which has its run key")
    if not is_url(where):
        return RunReader(FolderRun(Path(where), transport), private, max_memory_mb, clock, own_files)
    client = Client(str(where), transport=transport, on_wait=lambda line: None)
    return RunReader(UrlRun(client), private, max_memory_mb, clock, own_files)


class RunReader:
    """A run that is being read. Calls block, and one thread makes them at a time. Use as `with open_run(where) as run`.

    Methods raise `ShoalError`: `PeerError` if a URL does not answer, `StateError` if what it says cannot be true.
    """

    def __init__(
        self, source: FolderRun | UrlRun, private: bool, max_memory_mb: int, clock: Callable[[], float],
        own_files: bool,
    ) -> None:  # fmt: skip
        self.source, self._private, self._clock, self._own_files = source, private, clock, own_files
        threads = ExitStack()
        self._portal = threads.enter_context(start_blocking_portal(name="shoal reading"))
        self._end = weakref.finalize(self, threads.close)
        self.state = State()
        """After the events that were read."""
        self.marks = Marks()
        self._limit_bytes = 0 if self.folder else 1_000_000 * (max_memory_mb or share_of_free_mb())
        self._read_bytes = 0
        self._reaches_end = False
        """Whether the page read last was the last one then."""
        self._broken: StateError | None = None
        self._has_key: bool | None = None
        """Whether the host's run key is here, once that was asked."""
        self._renderer: Renderer | None = None
        self._envs: dict[str, Env] | None = None
        self._body: tuple[str, tuple[bytes, ...]] = ("", ())
        """Name and groups of the submission that was read last."""

    def __enter__(self) -> "RunReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of connections and temporary files."""
        self._wait(self.source.close)
        self._end()

    def _wait(self, ask: Callable[..., Awaitable[T]], *values: object) -> T:
        """What the source answers. An event loop in another thread awaits it, because a notebook has one in this thread."""
        return self._portal.call(ask, *values)

    @property
    def name(self) -> str:
        """Folder or URL."""
        return self.source.name

    @property
    def folder(self) -> RunFolder | None:
        """The folder, unless the run is read at a URL."""
        return self.source.folder if isinstance(self.source, FolderRun) else None

    @property
    def run(self) -> str:
        """The run's id; empty before its first event was read."""
        return self.state.run

    # --- the log ---

    def refresh(self) -> list[Entry]:
        """Read the next page of events and apply them to the state; empty if there are no more now.

        Raises `Replaced` if the log is another one, `StateError` if it is damaged or of a newer shoal, `Overreach` if it
        does not fit into memory.
        """
        if self._broken is not None:
            raise self._broken
        known = self.state.seq >= 0
        rows = self._wait(self.source.page, self.state.seq - known)
        if known and not (rows and event_hash(rows[0][0]) == self.state.head):  # guard: replaced-log-is-noticed
            raise Replaced(
                f"{self.name} holds another log than before: the run was replaced or set back. Open it again"
            )
        self._reaches_end = not is_full(rows)
        self._read_bytes += sum(len(data) + EVENT_BYTES for data, _ in rows[known:])
        if self._limit_bytes and EVENT_COPIES * self._read_bytes > self._limit_bytes:  # guard: watched-log-fits-memory
            raise Overreach(
                f"the log of {self.name} does not fit into the {self._limit_bytes // 1_000_000} MB that it may take, by "
                "default half of what is free: allow more"
            )
        entries: list[Entry] = []
        try:
            for data, stored_hash in rows[known:]:
                entries.append(self._take(data, stored_hash))
        except StateError as error:
            self._broken = error
            if not entries:
                raise
        return entries

    def _take(self, data: bytes, stored_hash: str) -> Entry:
        entry = checked_entry(self.state, data, stored_hash)
        try:
            apply(self.state, entry)
        except FAULTS as fault:
            raise BrokenLog(
                f"the log of {self.name} is broken at event {entry.seq}: {entry.kind} speaks of something that the log "
                f"does not hold ({type(fault).__name__}). No coordinator wrote this; ask for the log elsewhere"
            ) from None
        self.marks.see(entry)
        return entry

    @property
    def is_at_end(self) -> bool:
        """Whether the page read last was the last one then, and whole."""
        return self._reaches_end and self._broken is None

    @property
    def fault(self) -> str:
        """Why the log cannot be read beyond the state; empty as far as is known."""
        return str(self._broken or "")

    def catch_up(self) -> int:
        """Read all events that there are; returns how many were new."""
        news = 0
        while entries := self.refresh():
            news += len(entries)
            if self.is_at_end:  # guard: watched-log-ends
                break
        return news

    def events(self, after: int = -1) -> Iterator[Entry]:
        """Events again, those after this number, up to the newest that `refresh` gave. Raises `StateError`: of a URL that
        gives others now, at the newest one at the latest."""
        head = GENESIS if after < 0 else ""
        while after < self.state.seq:
            rows = self._wait(self.source.page, after)
            if not rows:
                raise StateError(f"{self.name} has no event {after + 1} any more: open the run again")
            for data, _ in rows[: self.state.seq - after]:
                try:
                    entry, before = read_entry(data)
                except WireError as error:
                    raise StateError(f"the log of {self.name} is damaged after event {after}: {error}") from None
                if entry.seq != after + 1 or head not in ("", before):
                    raise StateError(f"the log of {self.name} is broken at event {after + 1}: it was edited or damaged")
                after, head = entry.seq, entry.hash
                if after == self.state.seq and head != self.state.head:  # guard: same-events-again
                    raise Replaced(f"{self.name} gives other events than it gave before: open it again")
                yield entry

    # --- beside the log ---

    def newest(self) -> int:
        """The number of the newest event that there is, as far as anyone says; -1 if nobody does."""
        return self._wait(self.source.newest)

    def new_metrics(self) -> list[MetricsLine]:
        """Lines of metrics that are new since the last call, or repeat a step after a kill: the later line counts."""
        return self._wait(self.source.new_metrics)

    def metrics(self, after: int = -1) -> list[MetricsLine]:
        """One line of metrics for each step above `after`, in order."""
        return [line for line in self._wait(self.source.all_metrics) if step_of(line) > after]

    def condition(self) -> Condition:
        """How the run does: as its coordinator says it, or as it follows from what was read of the log."""
        said = self._wait(self.source.status)
        if said is not None:
            return Condition(said, True)
        state = self.state
        if state.seq < 0:
            return Condition(
                t.Status("", "starting", -1, 0, 0, {}, 0, 0, "the coordinator: it has no log yet", 0.0), False
            )
        is_stopped = state.phase != "ended" and self.folder is not None and not is_locked(self.folder.root)
        return Condition(status_of(state, self._clock()), False, is_stopped)

    def alarms(self) -> list[AlarmLine] | None:
        """What monitors raised and cleared, oldest first; None of a URL: `condition` says what stands."""
        return read_alarms(self.folder.alarms) if self.folder else None

    def nodes(self) -> list[t.NodeState]:
        """All nodes in the order in which they joined, with what was refused and why."""
        return [node_state(member) for member in self.state.members.values()]

    def versions(self) -> list[Version]:
        """All published versions."""
        return [
            Version(number, record.root, record.manifest, *self.marks.versions[number], record.revealed)
            for number, record in self.state.main.versions.items()
        ]

    def manifest(self, version: int) -> t.Manifest:
        """A version's manifest, verified. Raises `NothingYet` if it is not kept any more, `PeerError` if it is wrong."""
        record = self.state.main.versions[version]
        data = self._wait(self.source.manifest, version, record.manifest)
        keys = self.state.publishers
        return open_manifest(data, ManifestTrust(self.run, keys), now=None, version=version, root=record.root)

    def evaluations(self) -> list[Evaluation]:
        """Evaluations so far, by version; that of the final one once the run's end was read. Transcripts of held-out tasks
        come only with what is private."""
        newest = self.state.main.version if self.state.phase == "ended" else None
        return evaluations_of(self.evaluation_files(), newest, self.shows_private())

    def evaluation_files(self) -> dict[str, bytes]:
        """Evaluations by name, as they were written; none of a URL."""
        found = {}
        for path in sorted(self.folder.evaluations.glob("*.json")) if self.folder else ():
            with suppress(OSError):
                found[path.stem] = path.read_bytes()
        return found

    # --- bodies ---

    def blob(self, name: str) -> bytes:
        """Bytes by their hash, verified. Raises `NothingYet` if they are not here or are private, else `ShoalError`."""
        return self._wait(self.source.blob, name)

    def shows_private(self) -> bool:
        """Whether bodies are read before they are public."""
        if not self._private or not self.state.run_key or self.folder is None:
            return False
        if self._has_key is None:
            self._has_key = False
            with suppress(ShoalError, OSError):
                self._has_key = load_key(self.folder.keys / "run.key").public == self.state.run_key
        return self._has_key  # guard: private-needs-the-run-key

    def is_public(self, submission: str) -> bool:
        """Whether anyone may read the body of a submission."""
        return is_final(self.state, self.state.submissions[submission])

    def places(self) -> Iterator[GroupRef]:
        """All groups that were submitted, in the order of the log."""
        for name, submission in self.state.submissions.items():
            yield from (GroupRef(name, index) for index in range(len(submission.groups)))

    def place_of(self, version: int, slot: int) -> GroupRef:
        """The group that was accepted for a slot. Raises `NothingYet`."""
        versions = self.state.main.versions
        record = versions[version].slots.get(slot) if version in versions else None
        if record is None or not record.submission:
            raise NothingYet(f"no group was accepted for slot {slot} of version {version}")
        return GroupRef(record.submission, record.index)

    def place_named(self, digest: str) -> GroupRef:
        """The group whose bytes have this digest. Raises `NothingYet`."""
        for place in self.places():
            if self.state.submissions[place.submission].groups[place.index] == digest:
                return place
        raise NothingYet(f"no group of this log has the digest {digest[:16]}")

    def group(self, place: GroupRef, with_pieces: bool = False) -> ReadGroup:
        """A group, decoded; `with_pieces` also gives the text of each token, which takes longer.

        Raises `NothingYet` if its body is private or not kept any more, `StateError` if it is not what the log names.
        """
        state, name = self.state, place.submission
        booked = state.submissions[name]
        group = decoded(self.bytes_of(place))
        lease = state.lease_of(booked)
        slot = slot_of(state, lease, place.index)
        if group.slot != slot:
            raise StateError(f"group {place.index} of submission {name[:12]} is of slot {group.slot}, not {slot}")
        status, seq = standing_of(state, self.marks, name, place.index)
        record, named = state.main.versions[lease.version].slots.get(slot), booked.groups[place.index]
        taken = record.step if record is not None and record.digest == named else -1
        faults = self.marks.faults.get((lease.version, slot)) if record is not None and record.digest == named else None
        read = read_rollouts(state, group, lease.version, named, self.renderer(), with_pieces)
        rollouts = with_faults(read, faults)
        return ReadGroup(
            lease.version, slot, name, place.index, named, lease.worker, group.env, group.task, status,
            self.is_public(name), taken, booked.seq, seq, rollouts, bool(files_needed(state.envs)),
        )  # fmt: skip

    @property
    def runs_files(self) -> bool:
        """Whether environment files that the run names may be executed here."""
        return self._own_files

    def replayed(self, place: GroupRef) -> ReplayedEpisode:
        """A group played again by its environment, without the model: named parts of rewards, metrics, chat roles.

        Raises as `group`, and `ShoalError` if the environment is not here or its host alone plays it.
        """
        return replay(self.state, self._opened(), self.renderer(), self.group(place), decoded(self.bytes_of(place)))

    def answer(self, place: GroupRef) -> tuple[str, ...]:
        """The turns that solve a group's task by its environment; empty if it knows none. Raises as `replayed`, and
        `NothingYet` if what is private is not shown: an answer is the host's to tell."""
        if not self.shows_private():  # guard: answers-need-the-run-key
            raise NothingYet("the answer to a task is shown to the run's host alone")
        return answer_of(self._opened(), self.group(place))

    def _opened(self) -> dict[str, Env]:
        if self._envs is None:
            self._envs = open_envs(self.state, self._own_files)  # guard: own-files-on-request
        return self._envs

    def bytes_of(self, place: GroupRef) -> bytes:
        """The bytes of a group as its worker sent them. Raises as `group`."""
        name = place.submission
        if not (self.is_public(name) or self.shows_private()):  # guard: private-bodies-stay-private
            raise NothingYet(
                f"submission {name[:12]} is private until its slots are final; the host can read it before"
            )
        if self._body[0] != name:
            try:
                self._body = name, from_msgpack(self.blob(name), t.Submission).groups
            except WireError as error:
                raise StateError(f"submission {name[:12]} cannot be read: {error}") from None
        groups, booked = self._body[1], self.state.submissions[name]
        # guard: group-of-its-digest
        if place.index >= len(groups) or digest(groups[place.index]) != booked.groups[place.index]:
            raise StateError(f"group {place.index} of submission {name[:12]} is not the one that the log names")
        return groups[place.index]

    def renderer(self) -> Renderer:
        """The run's tokenizer: opened once, because all versions have the same. Raises `NothingYet` before there is one."""
        if self._renderer is None:
            self._renderer = self._wait(self.source.renderer, self.state)
        return self._renderer
