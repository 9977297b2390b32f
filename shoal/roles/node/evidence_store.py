"""What a node keeps of a run, so that it can prove what it was given and what it sent.

Workers and validators write it; `shoal audit --evidence` reads it. Each file is named by the SHA-256 of its bytes, and
its ending says what it is. It is bounded: the oldest files make room. It does not deal with HTTP, and judges nothing.
"""

import asyncio
import contextlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal, TypeVar, get_args

from shoal.errors import DISK_FULL, PeerError, StateError, Superseded, cause_of
from shoal.net.client import LONGEST_RETRY_S, Client
from shoal.net.server_address import Stopping
from shoal.protocol.constants import MAIN_STREAM
from shoal.protocol.encoding import WireError, digest, from_json, to_json
from shoal.protocol.host_signatures import chain_flaw
from shoal.protocol.messages import Message, Publishers, Receipt, RunInfo, Status
from shoal.run_folder import write_atomically
from shoal.weights.fetch.chunks import NoSpace

log = logging.getLogger(__name__)

T = TypeVar("T")

Kind = Literal["manifest", "grant", "submission", "receipt"]
"""A signed manifest, a signed lease, the bytes of a submission, or a signed receipt."""

MOST_FILES = 2048
"""Files of one kind that are kept for one run: half a day of a busy worker. A host that hands out leases fast can push out
old evidence, but the worker must play each of these leases."""

PARTS = 9
"""Of all evidence in a node's home: one for each kind of the latest run, whose newest file always stays; one for the file
of receipts; and four for older runs, so that the run before the latest fits."""

MOST_BYTES = PARTS * (128 << 20)
"""Bytes of all evidence in a node's home."""

DISK_PART = 8
"""Of the disk that a node may take of a volunteer's machine, evidence gets at most an eighth."""

URL_FILE = "url"
"""In the folder of a run's evidence: where the run was joined last."""

MOST_RUNS = 8
"""Runs whose evidence is kept."""


class EvidenceStore:
    """The evidence of one run in a node's home. One process uses it."""

    def __init__(self, home: Path, run: str, most_bytes: int | None = None) -> None:
        """Make the run's folder, and delete those of the oldest runs. `most_bytes`, if given, is less than `MOST_BYTES`.
        Raises `PeerError` if the run's id is not one."""
        if not re.fullmatch("[0-9a-f]{32}", run, re.ASCII):  # guard: run-id-is-no-path
            raise PeerError(f"the run calls itself {run[:40]!r}, which is not a run id: check the URL")
        self.folder = home / "evidence" / run
        self.publishers = self.folder / "publishers.json"
        """What the node pinned of the run's root and publishers."""
        self.most_bytes = MOST_BYTES if most_bytes is None else min(most_bytes, MOST_BYTES)
        self._receipts = home / "receipts.jsonl"
        self._sizes: dict[Kind, dict[Path, int]]
        """The files of each kind with their sizes, the oldest first. There may be thousands, so they are listed once."""
        self._counting = threading.Lock()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            os.utime(self.folder)
            for unfinished in self.folder.glob(".*"):
                unfinished.unlink()
            older = [path for path in _oldest_first(self.folder.parent) if path.is_dir() and path != self.folder]
            left, room = MOST_RUNS - 1, 4 * self._part
            for old in reversed(older):
                left, room = left - 1, room - sum(path.stat().st_size for path in old.iterdir())
                if left < 0 or room < 0:  # guard: old-runs-make-room
                    shutil.rmtree(old)
            listed = {kind: _oldest_first(self.folder, f"*.{kind}") for kind in _KINDS}
            self._sizes = {kind: {path: path.stat().st_size for path in paths} for kind, paths in listed.items()}
        except OSError as error:
            raise self._cannot_write(error) from None

    def demand_same_host(self, run_key: str) -> None:
        """Refuse a run whose key is another than when this node first joined it. Raises `PeerError`.

        All that a node signs names the run and not the host, so another host could pass it on to the run, as wrong work.
        """
        path = self.folder / "run.key"
        try:
            if not path.exists():
                write_atomically(path, run_key.encode())
            known = path.read_text()
        except OSError as error:
            raise self._cannot_write(error) from None
        if known != run_key:  # guard: one-host-a-run
            raise PeerError(
                f"the run has another run key than before: {run_key[:16]!r}, not {known[:16]!r}. Either this host pretends "
                "to be that of a run that you joined, or the one before did: ask both. To begin anew, delete "
                f"{self.folder}"
            )

    def note_url(self, url: str) -> None:
        """Remember where the run was joined, for `joined_before`. Raises `StateError`."""
        try:
            write_atomically(self.folder / URL_FILE, url.encode())
        except OSError as error:
            raise self._cannot_write(error) from None

    def keep(self, kind: Kind, data: bytes) -> None:
        """Keep some bytes, durable on return. Raises `StateError` if that fails."""
        path = self.folder / f"{digest(data)}.{kind}"
        try:
            if path.exists():
                os.utime(path)
            else:
                write_atomically(path, data)
            sizes = self._sizes[kind]
            with self._counting:
                sizes.pop(path, None)
                sizes[path] = len(data)
                # guard: evidence-is-bounded
                while len(sizes) > MOST_FILES or (len(sizes) > 1 and sum(sizes.values()) > self._part):
                    oldest = next(iter(sizes))
                    oldest.unlink(missing_ok=True)
                    del sizes[oldest]
        except OSError as error:
            raise self._cannot_write(error) from None

    def note_receipt(self, receipt: bytes) -> None:
        """Keep a receipt, and add it to the file of all runs' receipts, which drops its older half when it is full. Raises
        `StateError`."""
        self.keep("receipt", receipt)
        try:
            with self._counting:  # one that comes while the older half is dropped would be lost
                with self._receipts.open("a+b") as file:
                    end = file.seek(0, os.SEEK_END)
                    file.seek(max(0, end - 1))
                    cut_off = file.read() not in (b"", b"\n")  # the disk was full
                    file.write(b"\n" * cut_off + receipt + b"\n")
                if self._receipts.stat().st_size > self._part:  # guard: receipts-are-bounded
                    lines = self._receipts.read_bytes().splitlines(keepends=True)
                    write_atomically(self._receipts, b"".join(lines[len(lines) // 2 :]))
        except OSError as error:
            raise self._cannot_write(error) from None

    def last_seen_head(self) -> str:
        """The log's head in the newest receipt of this run that can be read; empty if there is none."""
        for path in reversed(self._sizes["receipt"]):
            with contextlib.suppress(OSError, WireError):
                return from_json(path.read_bytes(), Receipt).head
        return ""

    @property
    def _part(self) -> int:
        """Bytes of one kind in this run, and of the file of receipts."""
        return self.most_bytes // PARTS

    def _cannot_write(self, error: OSError) -> StateError:
        kind = NoSpace if error.errno in DISK_FULL else StateError
        return kind(f"cannot keep evidence in {self.folder}: {cause_of(error)}. Free some space")


async def retry_while_disk_full(
    client: Client, write: Callable[[], Awaitable[T]], stopping: Stopping | None = None
) -> T:
    """Write to the disk, and while it is full try again. Raises `Superseded` if the run ends meanwhile, and `NoSpace` once
    `stopping` is set: without it, the caller cancels the wait."""
    is_told = False
    while True:
        try:
            return await write()
        except NoSpace as error:
            if not is_told:
                log.warning("waiting for space on the disk, and trying again by itself: %s", error)
            is_told = True
            later = asyncio.sleep(LONGEST_RETRY_S)
            await (later if stopping is None else stopping.unless(later))
            if stopping:
                raise
            if (await client.get_json("/v1/status", Status)).phase == "ended":
                raise Superseded(str(error)) from None


def joined_before(home: Path, url: str) -> bool:
    """Whether the node of a home has joined a run at a URL, as far as its evidence says."""
    with contextlib.suppress(OSError):
        return any(path.read_text(errors="replace") == url for path in home.glob(f"evidence/*/{URL_FILE}"))
    return False


def _oldest_first(folder: Path, pattern: str = "*") -> list[Path]:
    return sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns)


def kept_in(given: Path, run: str) -> list[tuple[Kind, Path]]:
    """The files of a run's evidence: in the folder that is given, or below it if that is a node's home. Nothing else is
    followed or opened."""
    for folder in (given / "evidence" / run, given / run, given):
        found = [(kind, path) for kind in _KINDS for path in sorted(folder.glob(f"*.{kind}"))]
        if found:
            return [(kind, path) for kind, path in found if path.is_file() and not path.is_symlink()]
    return []


_KINDS: tuple[Kind, ...] = get_args(Kind)


# --- the keys behind a run's weights: the root, and each publisher that it named so far ---
#
# The node trusts what it saw first, and after that only what the root signed: a coordinator can neither name a publisher
# itself nor take a rotation back.


class Pinned(Message, frozen=True):
    """The file: what this node knows of a run's publishers."""

    root: str
    publishers: Publishers


def take_publishers(path: Path, info: RunInfo) -> Publishers:
    """The run's publishers, if they go on from those in the file, which then holds them. Raises `PeerError`, `StateError`.

    Without a file, they are only compared with the root that the run names.
    """
    told = info.all_publishers
    if told.newest != info.trainer_key:  # guard: newest-publishes
        raise PeerError(
            f"the run says that {info.trainer_key[:16]!r} publishes, but its root named {told.newest[:16]!r} last: tell "
            "its host"
        )
    if flaw := chain_flaw(told, info.root, info.run, MAIN_STREAM):  # guard: publishers-by-the-root
        raise PeerError(
            f"the run names a publisher that its root key did not: {flaw}. Leave this run, and tell its host"
        )
    try:
        known = from_json(path.read_bytes(), Pinned) if path.exists() else None
        if known is not None:
            _demand_goes_on(known, info.root, told, path)
        new = Pinned(info.root, told)
        if new != known:
            write_atomically(path, to_json(new))
    except OSError as error:
        kind = NoSpace if error.errno in DISK_FULL else StateError
        raise kind(f"cannot keep the run's publishers in {path}: {cause_of(error)}. Free some space") from None
    except WireError as error:
        raise StateError(f"{path} is damaged ({error}): restore it, or delete {path.parent} to begin anew") from None
    return told


def _demand_goes_on(known: Pinned, root: str, told: Publishers, path: Path) -> None:
    """Refuse another root, another first publisher, and publishers that lack a rotation that this node has seen."""
    end = (
        f"Either this host is another than before, or its keys were stolen: ask it. To begin anew, delete {path.parent}"
    )
    if root != known.root:  # guard: one-root-a-run
        raise PeerError(f"the run has another root key than before: {root[:16]!r}, not {known.root[:16]!r}. {end}")
    seen = known.publishers
    if told.first != seen.first:  # guard: one-first-publisher
        raise PeerError(
            f"the run names another publisher than before, without its root: {told.first[:16]!r}, not {seen.first[:16]!r}. "
            + end
        )
    if told.rotations[: len(seen.rotations)] != seen.rotations:  # guard: no-rotation-taken-back
        raise PeerError(
            f"rollback: the run lacks a rotation of its publisher that this node has seen ({len(seen.rotations)} of them, "
            f"the run tells {len(told.rotations)}). {end}"
        )
