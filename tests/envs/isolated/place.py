"""Packages for tests of environments in the sandbox: a folder with one file, opened as an installed package is."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from shoal.envs.interface import AuthorError
from shoal.envs.isolated.connection import LIMITS, EnvConnection, PackageSource
from shoal.envs.isolated.environment import ContainedEnv
from shoal.envs.isolated.pool import Processes
from shoal.sandbox.limits import Limits

QUICK = replace(LIMITS, wall_s=1.0, memory_mb=400)

HEAD = """
import os, random, socket, sys, time
from pathlib import Path
from shoal.env import Env, Score, Step, Written, require_index


class Asked(Env):
    name, num_tasks, num_heldout = "asked", 8, 4

    def task(self, index, heldout=False):
        require_index(index, self.num_heldout if heldout else self.num_tasks)
        return index + 100 * heldout

    def reset(self, task):
        return (task,), [{"role": "user", "content": f"task {task}"}]

    def step(self, state, action):
        return Step((*state, str(action)), "again", len(state) == 2)

    def score(self, state):
        return 1.0

environment = Asked
"""


def opened(
    folder: Path, code: str, limits: Limits = QUICK, tell: Callable[[str], None] | None = None,
    dependencies: Path | None = None, processes: Processes = Processes(1), **args: object,
) -> ContainedEnv:  # fmt: skip
    """The environment of HEAD and then `code`, in a sandbox."""
    folder.mkdir(exist_ok=True)
    (folder / "environment.py").write_text(HEAD + code)
    source = PackageSource(
        folder, dependencies or folder / "none", "environment.py", "environment", args, "ann/asked 0.1.0"
    )
    return ContainedEnv(lambda: EnvConnection(source, limits, tell or (lambda _: None)), processes)


def line_of(env: ContainedEnv) -> EnvConnection:
    """Of the only process."""
    (process,) = env.pool._processes
    return process.line


def acting(body: str) -> str:
    """Code of an environment whose `step` does this; `act` is what the policy wrote."""
    lines = "\n".join(f"        {line}" for line in body.splitlines())
    return f"""
class Environment(Asked):
    def step(self, state, act):
{lines}
        return Step((*state, str(act)), "again", len(state) == 2)

environment = Environment
"""


def said(folder: Path, expression: str, **more: object) -> str:
    """What an expression gives inside the sandbox, in `step`."""
    env = opened(folder, acting(f"return Step(state, repr(({expression})), False)"), **more)  # type: ignore[arg-type]
    try:
        reply = env.step(env.reset(env.task(0))[0], "x").reply
    except AuthorError as error:
        return str(error)
    assert isinstance(reply, str)
    return reply
