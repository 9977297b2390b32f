"""Weights of a hub's model, fetched by a process of its own, which can be ended at any time and is watched meanwhile.

huggingface_hub cannot be interrupted, and stores whatever a server sends. The process ends with ours.
"""

import logging
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from shoal.config.process_environment import child_environment
from shoal.errors import ShoalError, StateError, cause_of
from shoal.ipc import Child, ChildExited, end_with, read_message, spawn, take_pipes, write_message
from shoal.models.hub_download import Hub
from shoal.run_folder import held_below

SLACK_BYTES = 64 << 20
"""What a fetch may take beside the weights: the library's own files, and what it holds twice for a moment."""

TOLD_S = 10.0
"""The log says how far a fetch is once in this time."""

MAX_ANSWER_BYTES = 1 << 20

_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2:]; from shoal.models.hub_subprocess import serve; serve(int(sys.argv[1]))"
)

log = logging.getLogger(__name__)


class _Asked(msgspec.Struct):
    endpoint: str | None
    cache: str | None
    source: str
    sizes: dict[str, int]
    into: str


class _Told(msgspec.Struct):
    files: dict[str, str] = {}
    error: str = ""


def fetch_apart(
    hub: Hub, source: str, sizes: Mapping[str, int], into: Path, stopped: threading.Event
) -> dict[str, Path]:
    """Weights of a model at a commit, by name: from the hub's cache on this machine, or fetched into a folder of their own.

    Raises `StateError` as `Hub.files`; also once `stopped` is set, or if more bytes come than `sizes` names. Unfinished
    files are deleted when a fetch ends; finished ones stay.
    """
    into.mkdir(parents=True, exist_ok=True)
    _drop_others(into, sizes)
    cache = None if hub.cache is None else str(hub.cache)
    asked = msgspec.json.encode(_Asked(hub.endpoint, cache, source, dict(sizes), str(into)))
    watch = _Watch(source, sum(sizes.values()), into, stopped)
    try:
        child = Child(_start(into))
    except OSError as error:
        raise StateError(f"{source}: no process can be started to fetch it: {cause_of(error)}. Try again") from None
    child.watch(watch.look)
    try:
        told = child.decoded(child.ask(asked, math.inf, MAX_ANSWER_BYTES), msgspec.json.Decoder(_Told).decode)
        watch.look()  # a small model may have come between two looks
    except ChildExited as gone:
        raise StateError(f"{source}: the process that fetched it {gone}: try again") from None
    finally:
        child.end()
        if watch.is_too_much:
            shutil.rmtree(into, ignore_errors=True)
        _drop_parts(into)
    if told.error:
        raise StateError(told.error)
    return {name: Path(path) for name, path in told.files.items()}


class _Watch:
    """What is looked at while a fetch goes on."""

    def __init__(self, source: str, wanted_bytes: int, into: Path, stopped: threading.Event) -> None:
        self._source, self._wanted_bytes, self._into, self._stopped = source, wanted_bytes, into, stopped
        self._told_at = time.monotonic()
        self.is_too_much = False
        """Whether more came than was named."""

    def look(self) -> None:
        """Raise `StateError` if the fetch is to end."""
        if self._stopped.is_set():  # guard: hub-fetch-ends-when-told
            raise StateError(f"{self._source}: stopped while its weights were fetched")
        held = held_below(self._into)
        if held > self._wanted_bytes + SLACK_BYTES:  # guard: hub-sends-no-more-than-it-names
            self.is_too_much = True  # what came is deleted when nobody writes there any more
            raise StateError(
                f"{self._source}: the hub sent more than the {self._wanted_bytes} bytes that the run's manifest names: "
                "what came was deleted. Check HF_ENDPOINT, or leave the run"
            )
        if time.monotonic() - self._told_at > TOLD_S:
            self._told_at = time.monotonic()
            log.info("source=%s fetched_mb=%.0f of_mb=%.0f", self._source, held / 1e6, self._wanted_bytes / 1e6)


def _start(into: Path) -> "subprocess.Popen[bytes]":
    own = {"HF_XET_CACHE": str(into / "xet"), "HF_XET_CHUNK_CACHE_SIZE_BYTES": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, "-I", "-c", _PROGRAM, str(os.getpid()), *sys.path]
    return spawn(command, child_environment(1) | own, stderr=subprocess.DEVNULL)


def _drop_others(into: Path, names: Collection[str]) -> None:
    """Delete all files but those of these names. What former fetches left would count as sent by this one."""
    named = [path for path in into.rglob("*") if path.name in names]
    kept = {*named, *(path.resolve() for path in named)}
    for path in into.resolve().rglob("*"):
        if path.name not in names and path not in kept and not path.is_dir():
            path.unlink(missing_ok=True)  # guard: only-files-of-this-fetch


def _drop_parts(into: Path) -> None:
    """Delete files that are not whole. huggingface_hub gives each a new name, so it never goes on with one."""
    for path in into.rglob("*.incomplete"):
        path.unlink(missing_ok=True)  # guard: no-part-of-a-hubs-file-stays


# --- the child's end ---


def serve(parent: int) -> None:
    """Fetch what standard input asks for, and say where it is."""
    end_with(parent)
    requests, answers = take_pipes()
    if (request := read_message(requests)) is None:
        return
    threading.Thread(target=_end_with, args=(requests,), daemon=True).start()
    asked = msgspec.json.decode(request, type=_Asked)
    try:
        hub = Hub(asked.endpoint, None if asked.cache is None else Path(asked.cache))
        found = hub.files(asked.source, asked.sizes, Path(asked.into))
        told = _Told({name: str(path) for name, path in found.items()})
    except ShoalError as error:
        told = _Told(error=str(error))
    except Exception as error:  # noqa: BLE001 - the end of this process: nobody reads its standard error
        said = next(iter(str(error).splitlines()), "")[:200]
        what = f"{type(error).__name__}: {said}" if said else type(error).__name__
        told = _Told(error=f"{asked.source}: the process that fetched it failed ({what}): try again")
    write_message(answers, msgspec.json.encode(told))


def _end_with(requests: int) -> None:
    """Not only Linux closes the pipe of a parent that was killed."""
    read_message(requests)
    os._exit(0)
