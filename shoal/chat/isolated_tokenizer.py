"""Starts the child of a contained renderer in a sandbox: a stranger's tokenizer reaches no network and few files.

Roles pass this to `chat/isolated`, which does not import this room. The child still limits its own memory and time,
as it does without a sandbox, and gives the same tokens. It sees the installed packages, the code of `shoal` and the
files of the tokenizer, and nothing else.
"""

import logging
import sysconfig
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from shoal.errors import Overreach, StateError
from shoal.ipc import Child
from shoal.sandbox.bubblewrap import unreadable
from shoal.sandbox.filesystem import OUTSIDE, SandboxPath, interpreter, outside, standard_paths
from shoal.sandbox.limits import NO_LIMIT, Limits
from shoal.sandbox.sandbox import Resident
from shoal.sandbox.selftest import examine

LIMITS = Limits(cpu_s=NO_LIMIT, memory_mb=4096, processes=256, open_files=256, scratch_mb=4)
"""Above the limits that the child sets for itself. A tokenizer has a thread for each core."""

PLACE = OUTSIDE / "policy"
"""Where the sandbox shows the files of the checkpoint."""

log = logging.getLogger("sandbox")
_tried: "list[Future[bool]]" = []
_tried_lock = threading.Lock()


def tried() -> "Future[bool]":
    """Whether the sandbox passes its self-test here. Each process runs it once, in a thread; it takes about a second,
    mostly waiting."""
    with _tried_lock:
        if not _tried:
            thread = ThreadPoolExecutor(1, thread_name_prefix="self-test")
            _tried.append(thread.submit(lambda: examine().works))
            thread.shutdown(wait=False)  # when it is done
        return _tried[0]


def can_show(files: Iterable[Path]) -> bool:
    """Whether the sandbox's user can read these files and our packages. If root starts it, file modes may forbid that."""
    hidden = unreadable([*_code(), *_there(files)])
    if hidden:
        log.warning(
            "tokenizer sandboxed=false reason='its user cannot read %s: chmod -R a+rX %s'", hidden[0], hidden[0]
        )
    return not hidden


def start(program: str, arguments: Sequence[str], files: Sequence[Path]) -> tuple[Child, str]:
    """Start a Python program in a sandbox. Returns it, and the directory in which it finds the files.

    Raises `Overreach`. Any other `StateError` would mean that the tokenizer refuses a text.
    """
    package, *packages = _code()
    paths = [*standard_paths(), *(str(outside(path)) for path in (package.parent, *packages))]
    command = [str(interpreter()), "-I", "-S", "-B", "-c", program, *arguments, *paths]
    checkpoint = [SandboxPath(file.resolve(), PLACE / file.name) for file in _there(files)]
    try:
        return Resident(command, LIMITS, [package, *packages, *checkpoint]), str(PLACE)
    except StateError as error:
        # guard: unstarted-refuses-no-text
        raise Overreach(f"the tokenizer of the policy cannot be opened: {error}") from None


def _code() -> list[Path]:
    """The code of `shoal`, and then the installed packages."""
    return [Path(__file__).parents[1], *sorted({Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")})]


def _there(files: Iterable[Path]) -> list[Path]:
    return [file for file in files if file.exists()]
