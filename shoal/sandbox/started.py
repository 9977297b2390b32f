"""A process that became a sandbox, as `sandbox/bubblewrap` and `sandbox/gvisor` hand it to `sandbox/cell`."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

START_S = 30.0
"""Time to start a sandbox and import what it was told to, on a busy machine."""


class Started(NamedTuple):
    """Its pipes are those of the first program inside."""

    process: "subprocess.Popen[bytes]"
    init: int
    """The process whose end is the end of all others, as this machine numbers it."""
    clean: Callable[[], None] = lambda: None
    """What is left to do when all of them have ended."""


def launch(task: dict[str, Any], pass_fds: Sequence[int] = ()) -> "subprocess.Popen[bytes]":
    """Start `sandbox/launch`, in a session of its own and with an empty environment."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__).with_name("launch.py")), json.dumps(task)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
        env={}, pass_fds=pass_fds, start_new_session=True, cwd="/",
    )  # fmt: skip
