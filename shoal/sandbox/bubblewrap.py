"""A sandbox that bubblewrap makes from namespaces.

Every namespace is new. The root holds only what `sandbox/filesystem` shows, read-only except for scratch directories of
limited size. There is no network, no capability and no variable of our environment.
"""

import json
import os
import select
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import StateError
from shoal.sandbox.cgroups import Cgroup
from shoal.sandbox.filesystem import ENVIRONMENT, OUTSIDE, USER, SandboxPath, links
from shoal.sandbox.limits import Limits

PROGRAM = "bwrap"
INSTALL = "apt install bubblewrap"
DEVICES = ("null", "zero", "full", "random", "urandom")

START_S = 30.0
"""Time to start a sandbox and do its imports, on a busy machine."""

FIRST_USER, NUM_USERS = 60600, 512
"""User ids for foreign code that root starts. No distribution assigns these numbers."""


class Started(NamedTuple):
    """A sandbox. The pipes of `process` are those of the first program inside."""

    process: "subprocess.Popen[bytes]"
    init: int
    """The id, on this machine, of the process whose end ends all others."""


def start(
    shown: Sequence[SandboxPath],
    limits: Limits,
    program: Sequence[str],
    group: Cgroup,
    filter_program: bytes,
    first: bool,
) -> Started:
    """Raises `StateError`, with bubblewrap's message, if bubblewrap is not installed or does not work here.

    With `first`, the program is process 1 of its namespace: no signal from within can end it, and it must reap orphans.
    Otherwise bubblewrap is process 1.
    """
    for source in unreadable(source for source, place in shown if place.is_relative_to(OUTSIDE)):
        raise StateError(f"the sandbox's user cannot read {source}: chmod -R a+rX {source}")
    told, tells = os.pipe()
    filtered, filters = os.pipe()
    os.write(filters, filter_program)  # far less than a pipe holds
    os.close(filters)
    with open(told, "rb", buffering=0) as info:
        try:
            task = {
                "groups": group.entries, "sources": [str(source) for source, _ in shown],
                "command": command(shown, limits.scratch_mb, filtered, tells, ["--as-pid-1"] if first else [], program),
                "user": FIRST_USER + os.getpid() % NUM_USERS if is_root() else None,
            }  # fmt: skip
            process = launch(task, (tells, filtered))
        finally:
            os.close(tells)
            os.close(filtered)
        return Started(process, _first_process(info.fileno(), process))


def launch(task: dict[str, Any], pass_fds: Sequence[int] = ()) -> "subprocess.Popen[bytes]":
    """Start `sandbox/drop_root` in a new session, with an empty environment."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__).with_name("drop_root.py")), json.dumps(task)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
        env={}, pass_fds=pass_fds, start_new_session=True, cwd="/",
    )  # fmt: skip


def unreadable(paths: Iterable[Path]) -> list[Path]:
    """The paths that the sandbox's user cannot read. That user differs from ours only if we are root."""
    modes = {path: path.stat().st_mode for path in paths} if is_root() else {}
    needed = {path: 0o5 if stat.S_ISDIR(mode) else 0o4 for path, mode in modes.items()}
    return [path for path, mode in modes.items() if mode & needed[path] != needed[path]]


def is_root() -> bool:
    """Whether we are root of the machine. Root of an unprivileged container is an ordinary user outside it."""
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]


def _first_process(told: int, process: "subprocess.Popen[bytes]") -> int:
    """The process id of bubblewrap's child: bubblewrap writes it as JSON and closes the pipe."""
    text, until = b"", time.monotonic() + START_S
    ready = select.poll()
    ready.register(told, select.POLLIN)
    while ready.poll(1000 * max(0.0, until - time.monotonic())):
        piece = os.read(told, 4096)
        text += piece
        if not piece:
            break
    if not text:
        process.kill()
        _, said = process.communicate()
        raise StateError(f"the sandbox does not start: {' '.join(said.decode('utf-8', 'replace').split())[:600]}")
    return int(json.loads(text)["child-pid"])


def command(
    shown: Sequence[SandboxPath],
    scratch_mb: int,
    filter_fd: int,
    info_fd: int,
    options: Sequence[str],
    program: Sequence[str],
) -> list[str]:
    """Bubblewrap's command line. `sandbox/drop_root` puts the source of `shown[N]` in the place of `@N@`.

    Raises `StateError` if bubblewrap is not installed.
    """
    path = shutil.which(PROGRAM)
    if path is None:
        raise StateError(f"bubblewrap is not installed: {INSTALL}")
    words = [
        path, "--unshare-all", "--unshare-user", "--uid", str(USER), "--gid", str(USER), "--hostname", "sandbox",
        "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL", *options,
        "--info-fd", str(info_fd), "--seccomp", str(filter_fd),
    ]  # fmt: skip
    for name, value in ENVIRONMENT.items():
        words += ["--setenv", name, value]
    for number, (_, place) in enumerate(shown):
        words += ["--ro-bind", f"@{number}@", str(place)]
    for target, link in links():
        words += ["--symlink", target, link]
    words += ["--proc", "/proc", *tmpfs("/dev", 1)]
    for device in DEVICES:
        words += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        words += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    words += ["--symlink", "/proc/self/fd", "/dev/fd"]
    words += [*tmpfs("/dev/shm", scratch_mb), *tmpfs("/tmp", scratch_mb)]
    return [*words, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--", *program]


def tmpfs(place: str, size_mb: int) -> list[str]:
    """An empty file system in memory."""
    return ["--perms", "0755", "--size", str(size_mb << 20), "--tmpfs", place]
