"""The process of a sandbox that has started, which `sandbox/bubblewrap` gives to `sandbox/sandbox`."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

START_S = 30.0
"""Time to start a sandbox and do its imports, on a busy machine."""


class Started(NamedTuple):
    """A sandbox. The pipes of `process` are those of the first program inside."""

    process: "subprocess.Popen[bytes]"
    init: int
    """The id, on this machine, of the process whose end ends all others."""


def launch(task: dict[str, Any], pass_fds: Sequence[int] = ()) -> "subprocess.Popen[bytes]":
    """Start `sandbox/launcher` in a new session, with an empty environment."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__).with_name("launcher.py")), json.dumps(task)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
        env={}, pass_fds=pass_fds, start_new_session=True, cwd="/",
    )  # fmt: skip
