"""Opens environments in processes of their own: packages of others in the sandbox, files of this user in plain children.

Used by `load`, and by `shoal env install`, which tries whether the code of a package loads. The sandbox is tried on this
machine first.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from shoal.env import Env
from shoal.envs.contained.client import ContainedEnv
from shoal.envs.contained.line import CODE, LIMITS, OWN_LIMITS, Line, OwnFile, Source, gone_of, our_code
from shoal.envs.contained.pool import Processes
from shoal.errors import ConfigError, ShoalError
from shoal.hub.store import Installed
from shoal.sandbox.layout import INTERPRETER_FLAGS, OUTSIDE, Shown, interpreter, standard_paths
from shoal.sandbox.limits import Limits
from shoal.sandbox.resident import Resident
from shoal.sandbox.selftest import examined
from shoal.terminal import printable

REMEDY = (
    f". If that happens again, let the method return or raise in {OWN_LIMITS.wall_s:g} s; `shoal env check` tries it"
)
"""What the author of a file may do about a call that was stopped."""


def in_sandbox(
    package: Installed, paths: Sequence[Path], args: Mapping[str, Any], *, processes: Processes = Processes(),
    tell: Callable[[str], None] | None = None, limits: Limits = LIMITS,
) -> Env:  # fmt: skip
    """The environment of an installed package. `tell` gets the tracebacks of its code; without it they are dropped, because
    they are the author's. `limits` are those of each sandbox.

    Raises `ConfigError` if the sandbox does not work here, `ShoalError` if the package does not load in it.
    """
    title = f"{package.name} {package.version}"
    demand_sandbox(title)
    file, _, function = package.entry.partition(":")
    source = Source(paths[0], paths[1], file, function, args, title)
    env = ContainedEnv(lambda: Line(source, limits, tell or (lambda _: None)), processes)
    env.reproducible &= package.reproducible
    return cast("Env", env)


def in_process(path: Path, args: Mapping[str, Any], function: str, processes: Processes = Processes()) -> Env:
    """The environment of a file of this user. Raises `ShoalError` if it does not load."""
    source = OwnFile(path, function, args)
    env = ContainedEnv(lambda: Line(source, OWN_LIMITS, lambda _: None), processes, "its process was ended", REMEDY)
    env.source, env.pool.has_network = path, True
    return cast("Env", env)


def show(trace: str) -> None:
    """A `tell` for who may be the author: on standard error."""
    sys.stderr.write(printable(trace, keep="\n") + "\n")  # at once: other processes write into the same log


def demand_sandbox(what: str) -> None:
    """Raise `ConfigError`, with the remedy, unless foreign code may run here."""
    report = examined()
    if not report.works:  # guard: no-package-without-a-sandbox
        raise ConfigError(
            f"{what} runs only inside the sandbox, which does not work here ({report.found}): {report.remedy}"
        )


def try_code(code: str, paths: Sequence[Path], timeout_s: float) -> str:
    """What a Python program prints in a sandbox that has these paths first in its `sys.path`: see `Start` of
    `shoal.hub.install`. Raises `ShoalError` if it fails, is stopped or cannot be started."""
    demand_sandbox("the package")
    shown = [Shown(path, OUTSIDE / path.name) for path in paths]
    places = [*(str(place) for _, place in shown), str(CODE), *standard_paths()]
    resident = Resident([str(interpreter()), *INTERPRETER_FLAGS, "-c", _TRY, *places], LIMITS, [*shown, *our_code()])
    told = resident.ask(code.encode(), timeout_s, 1 << 16)
    resident.close()
    if not isinstance(told, bytes):
        raise ShoalError("it " + gone_of(told, timeout_s, LIMITS))
    text = " ".join(told[1:].decode("utf-8", "replace").split())[:500]
    if told[:1] != b"+":
        raise ShoalError(text)
    return text


_TRY = """
import contextlib, io, os, sys
size = int.from_bytes(os.read(0, 4), "big")
program = b""
while len(program) < size: program += os.read(0, size - len(program))
answers = os.dup(1)
os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
sys.path[:] = sys.argv[1:]
sys.argv[1:] = []
said = io.StringIO()
try:
    with contextlib.redirect_stdout(said): exec(compile(program, "probe", "exec"), {})
    answer = "+" + said.getvalue()
except Exception as error:
    answer = f"-{type(error).__name__}: {error}"
data = answer.encode("utf-8", "replace")[:60000]
os.write(answers, len(data).to_bytes(4, "big") + data)
"""
