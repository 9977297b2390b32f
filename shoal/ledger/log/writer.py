"""The log's only writer: takes commands, decides, applies, commits, and answers after the commit.

It deals with neither HTTP nor secrets. Commands that arrive together share one commit (group commit). If a commit fails,
the state is built again from what is stored, so memory never runs ahead of disk.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from shoal.errors import ShoalError, StateError
from shoal.ledger.constants import RULES_VERSION
from shoal.ledger.event import Body, Entry, RawEvent, read_stored
from shoal.ledger.event_types import apply, decide, make_entry, typed
from shoal.ledger.log.sqlite_store import Store
from shoal.ledger.run_decisions import consequent_events
from shoal.ledger.run_events import RunCreated
from shoal.ledger.state import State
from shoal.ledger.versions import CheckpointPublished
from shoal.protocol.continuations import NO_FIT, groups_fit
from shoal.protocol.encoding import WireError, from_json


class BrokenLog(StateError):
    """A log was read, and its events do not follow each other."""


def replay(rows: Iterable[tuple[bytes, str]], see: Callable[[Entry], None] = lambda entry: None) -> State:
    """State of a log from its stored bytes; `see` is given each entry.

    Raises `StateError` if the chain of hashes breaks, or if this code lacks the rules that wrote the log.
    """
    state = State()
    for data, stored_hash in rows:
        entry = checked_entry(state, data, stored_hash)
        apply(state, entry)
        see(entry)
    return state


def checked_entry(state: State, data: bytes, stored_hash: str) -> Entry:
    """The next entry of a log, if its number, its `prev` and its hash fit, and a run of its rules can be. Raises
    `StateError`."""
    try:
        stored = read_stored(data)
        if stored.seq == 0:
            _refuse_unknown_rules(stored)
        entry = typed(stored)
    except WireError as error:
        raise broken_after(state.seq, error) from None
    follows(stored, stored_hash, state.seq, state.head)
    if isinstance(entry.body, RunCreated) and not groups_fit(entry.body.rules):  # guard: group-size-of-the-log
        raise StateError(f"the log's rules have {NO_FIT}. No coordinator wrote this; ask for the log elsewhere")
    return entry


def follows(stored: RawEvent, stored_hash: str, seq: int, head: str) -> None:
    """An event must have its stored hash and follow the event with this number and hash. Raises `BrokenLog`."""
    if stored.seq != seq + 1 or stored.prev != head or stored.hash != stored_hash:  # guard: event-hash, event-prev
        raise BrokenLog(
            f"the log is broken at event {seq + 1}: it does not follow the event before by number and hash. "
            "It was edited or damaged; restore it from a copy"
        )


def broken_after(seq: int, error: WireError) -> BrokenLog:
    """The error for a log whose bytes after this event are not an event."""
    return BrokenLog(f"the log is broken after event {seq}: {error}. Restore it from a copy")


class UnknownRules(StateError):
    """A log was written by rules that this code lacks."""


def _refuse_unknown_rules(first: RawEvent) -> None:
    """Another law may have other fields, so its version is read before the rest is typed."""
    version = from_json(bytes(first.body), _FirstBody).law.version
    if version != RULES_VERSION:
        raise UnknownRules(
            f"the log was written by version {version} of the rules, and this shoal knows {RULES_VERSION}: install the "
            "version of shoal that wrote it"
        )


class _NamedVersion(msgspec.Struct, frozen=True):
    version: int = 0


class _FirstBody(msgspec.Struct):
    law: _NamedVersion = _NamedVersion()


class Command(Protocol):
    """Something asked of the run."""

    @property
    def now(self) -> float:
        """When, seconds since the epoch: the rules have no clock."""


@dataclass
class _Waiting:
    command: Command
    done: "asyncio.Future[list[Entry]]"


class LogWriter:
    """An open log and its state."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._heads: set[bytes] = set()
        self._manifests: set[str] = set()
        self.state = self._replay()
        self._queue: list[_Waiting] = []
        self._bells: dict[type[Body], set[asyncio.Future[None]]] = {}
        self._watchers: list[Callable[[list[Entry]], None]] = []

    def write(self, command: Command, now: float) -> list[Entry]:
        """Handle one command at once; returns its entries after they are stored.

        Raises `Refused` or `Wait` from the rules, `StateError` if the entries could not be stored.
        """
        entries = self._handle(command, now)
        self._store(entries)
        return entries

    async def submit(self, command: Command) -> list[Entry]:
        """Handle a command together with all that arrive in the same turn of the event loop."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(command, loop.create_future())
        self._queue.append(waiting)
        if len(self._queue) == 1:
            loop.call_soon(self._commit_queue)
        return await waiting.done

    def knows(self, head: str) -> bool:
        """Whether a hash is that of one of this log's events: a head that somebody saw must be."""
        return head[:_HEAD_DIGITS].encode() in self._heads

    def knows_manifest(self, digest: str) -> bool:
        """Whether an event of this log names a signed manifest, also one that was renewed since."""
        return digest in self._manifests

    def watch(self, watcher: Callable[[list[Entry]], None]) -> None:
        """Call `watcher` with the entries of each commit, before the commands that led to them are answered."""
        self._watchers.append(watcher)

    async def changed(self, timeout_s: float, *kinds: type[Body]) -> None:
        """Return when the next event of one of these kinds is stored, or after the timeout."""
        bell = asyncio.get_running_loop().create_future()
        for kind in kinds:
            self._bells.setdefault(kind, set()).add(bell)
        try:
            async with asyncio.timeout(timeout_s):
                await bell
        except TimeoutError:
            pass
        finally:
            for kind in kinds:
                self._bells[kind].discard(bell)

    def _commit_queue(self) -> None:
        queue, self._queue = self._queue, []
        entries: list[Entry] = []
        answers: list[tuple[_Waiting, list[Entry]]] = []
        bug: Exception | None = None
        while queue and bug is None:
            waiting = queue.pop(0)
            try:
                made = self._handle(waiting.command, waiting.command.now)
            except ShoalError as refusal:
                _settle(waiting, refusal)
                continue
            except Exception as fault:  # noqa: BLE001 - see tests/test_architecture.py
                bug = fault
                _settle(waiting, fault)
                continue
            entries += made
            answers.append((waiting, made))
        try:
            self._store(entries)
        except StateError as error:
            for waiting, _ in answers:
                _settle(waiting, error)
        else:
            for waiting, made in answers:
                _settle(waiting, made)
        if bug is not None:
            self._recover(queue)

    def _recover(self, queue: "list[_Waiting]") -> None:
        """After a bug that may have changed half of the state: build it again, then handle who still waits."""
        try:
            self.state = self._replay()  # guard: bug-replays
        except StateError as error:
            for waiting in queue:
                _settle(waiting, error)
            raise
        self._queue = queue + self._queue  # guard: bug-keeps-the-queue
        self._commit_queue()

    def _handle(self, command: Command, now: float) -> list[Entry]:
        """Events of a command and of what follows, applied but not stored.

        If the clock was set back, they get the time of the newest event: times do not fall.
        """
        entries: list[Entry] = []
        if now < self.state.time:  # guard: times-do-not-fall
            now, command = self.state.time, replace(command, now=self.state.time)  # type: ignore[type-var]
        bodies = decide(command, self.state)
        while bodies:
            for body in bodies:
                entry = make_entry(self.state.seq + 1, now, body, self.state.head)
                apply(self.state, entry)
                entries.append(entry)
            bodies = consequent_events(self.state)
        return entries

    def _replay(self) -> State:
        self._heads, self._manifests = set(), set()
        return replay(self.store.read(), self._remember)

    def _remember(self, entry: Entry) -> None:
        self._heads.add(entry.hash[:_HEAD_DIGITS].encode())
        if isinstance(entry.body, CheckpointPublished):
            self._manifests.add(entry.body.manifest)

    def _store(self, entries: list[Entry]) -> None:
        if not entries:
            return
        try:
            self.store.append(entries)
        except StateError:
            self.state = self._replay()  # guard: memory-behind-disk
            raise
        for entry in entries:
            self._remember(entry)
        for kind in {type(entry.body) for entry in entries}:
            for bell in self._bells.get(kind, ()):
                if not bell.done():
                    bell.set_result(None)
        for watcher in self._watchers:
            watcher(entries)


_HEAD_DIGITS = 16
"""Of each head, kept to recognise it: 64 bits."""


def _settle(waiting: _Waiting, outcome: "list[Entry] | Exception") -> None:
    if waiting.done.cancelled():
        return
    if isinstance(outcome, Exception):
        waiting.done.set_exception(outcome)
    else:
        waiting.done.set_result(outcome)
