"""A process in which an environment is checked: in the sandbox, or where there is none, a child with less around it.

Both are spoken to by `shoal/ipc`: requests are JSON; answers are bytes, which `lint/messages` reads.
"""

import json
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.envs.lint.messages import CALL
from shoal.ipc import Child, ChildExited, Reason, spawn
from shoal.sandbox.filesystem import INTERPRETER_FLAGS, interpreter, outside, standard_paths
from shoal.sandbox.limits import Limits
from shoal.sandbox.sandbox import Resident

LIMITS = Limits(wall_s=60, cpu_s=60, memory_mb=4096, processes=64, open_files=256, scratch_mb=64, file_mb=32)
"""Of the sandbox. The process limits its own memory below this, so that a fault names a line."""

GRACE_S = 2.0
"""A process ends what takes too long and says where. We end the process if it has not answered so much later."""

MAX_ANSWER_BYTES = 16 << 20

_BEGIN = """
import os, sys
seed, zone, *rest = sys.argv[1:]
os.environ.update(PYTHONHASHSEED=seed, TZ=zone, OMP_NUM_THREADS="1")
os.execv(sys.executable, [sys.executable, *rest])
"""
"""A hash seed counts from the start of an interpreter."""

_SERVE = """
import sys
sys.path[:] = sys.argv[1:]
from shoal.envs.lint.worker import main
main()
"""


class Failed(Exception):
    """The process gave no answer: the message says how it ended."""

    def __init__(
        self,
        why: str,
        reason: Reason | None = None,
        seen: Sequence[Sequence[str]] | None = None,
        code: int | None = None,
    ) -> None:
        """`seen`: what the environment did until then, if the process could say so, and why it ended itself. `code`: its
        exit code, negative for a signal."""
        super().__init__(why)
        self.reason, self.seen, self.code = reason, seen, code
        self.call = ""
        """The call that the environment's code was in, as it said."""
        self.doing = ""
        """What was asked of the process."""


class LintProcess:
    """One process."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self.call = ""
        """The call that the environment's code was in last, as the process says."""

    @staticmethod
    def start(
        sandboxed: bool, hash_seed: int, zone: str, shown: Sequence[Path], dependencies: Sequence[Path]
    ) -> "LintProcess":
        """Start it. The sandbox shows it the paths in `shown`; it finds modules in `dependencies`, too. Raises `StateError`
        if the sandbox does not start here."""
        code = Path(__file__).parents[2]
        if not sandboxed:
            flags, paths = [sys.executable, "-s", "-P", "-B", "-c"], [str(code.parent), *sys.path]
            command = [*flags, _BEGIN, str(hash_seed), zone, *flags[1:], _SERVE, *paths]
            return LintProcess(Child(spawn(command, stderr=subprocess.DEVNULL)))
        packages = importable()
        paths = [*standard_paths(), *(str(outside(path)) for path in (code.parent, *dependencies, *packages))]
        flags = [str(interpreter()), *INTERPRETER_FLAGS, "-c"]
        command = [*flags, _BEGIN, str(hash_seed), zone, *flags[1:], _SERVE, *paths]
        return LintProcess(Resident(command, LIMITS, sorted({code, *packages, *shown})))

    def ask(self, limit_s: float, **request: Any) -> bytes:
        """Its answer, which its code may have written. Raises `Failed`."""
        request["limit_s"] = limit_s
        until = time.monotonic() + limit_s + GRACE_S
        try:
            answer = self._child.ask(json.dumps(request).encode(), limit_s + GRACE_S, MAX_ANSWER_BYTES)
            while answer.startswith(CALL):
                self.call = answer[len(CALL) :][:200].decode("utf-8", "replace")
                answer = self._child.receive(until - time.monotonic(), MAX_ANSWER_BYTES)
            return answer
        except ChildExited as gone:
            why = "did not answer in time" if gone.reason is Reason.TIMEOUT else str(gone)
            raise Failed(f"its process {why}", gone.reason, code=gone.code) from None

    def close(self) -> None:
        self._child.end()


def importable() -> list[Path]:
    """Folders of installed packages: those of this interpreter, and what it found besides, but not the working folder."""
    found = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    found |= {Path(entry).absolute() for entry in sys.path if entry}
    own = {Path(sys.base_prefix).resolve(), Path.cwd(), Path(sys.executable).parent}
    standard = {Path(path) for path in standard_paths()}
    return sorted(path for path in found if path.is_dir() and path not in own and path not in standard)
