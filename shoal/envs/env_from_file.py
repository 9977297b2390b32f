"""Make an environment from the Python file that defines it, in the process that calls this."""

import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from shoal.env import Env
from shoal.envs.interface import describe_fault
from shoal.errors import ConfigError, ShoalError, cause_of

MEMBERS = ("name", "num_tasks", "num_heldout", "reward_bounds", "task", "reset", "step", "score")
"""Members that an environment must have; inheriting from `shoal.env.Env` gives defaults for some."""


def make_env(path: Path, args: Mapping[str, Any], function: str = "environment") -> Env:
    """Execute the file, and call its function. Raises a one-line `ShoalError`, with the line of the file."""
    source = read_source(path)
    module = ModuleType(f"shoal_env_{hashlib.sha256(source).hexdigest()[:16]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look up their module here
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
        make = getattr(module, function, None)
        if not callable(make):
            raise ShoalError(f"{path} defines no function {function}(**args): add one that returns your environment")
        _demand_arguments(make, args, path, function)
        env: Env = make(**args)
    except (ShoalError, MemoryError):
        raise
    except SyntaxError as error:
        raise ShoalError(f"{error.filename} line {error.lineno}: {error.msg}. Fix it and try again") from None
    except (Exception, SystemExit) as error:  # noqa: BLE001  a user's file may raise anything: report it in one line
        place = describe_fault(error, path)
        raise ShoalError(f"cannot load environment {path}: {place}. Fix it and try again") from None
    missing = [member for member in MEMBERS if not hasattr(env, member)]
    if missing:
        raise ShoalError(
            f"{path}: environment() returned a {type(env).__name__} without {', '.join(missing)}. "
            "Add them, or let its class inherit from shoal.env.Env"
        )
    return env


def _demand_arguments(make: Callable[..., Any], args: Mapping[str, Any], path: Path, function: str) -> None:
    """Raise `ShoalError` for arguments that the function does not take, or lacks. They come from a run file or a command,
    so no line of the file is at fault."""
    try:
        taken = inspect.signature(make)
    except (TypeError, ValueError):  # of what says nothing of its arguments
        return
    try:
        taken.bind(**args)
    except TypeError as error:
        called = re.sub(r"<.*? at 0x[0-9a-f]+>", "...", f"{getattr(make, '__name__', function)}{taken}")
        raise ShoalError(
            f"{path}: {error}: {called} is given {', '.join(args) or 'no arguments'}. Change args of the [[envs]], or "
            "--env-args; `shoal env check RUN.toml` takes those of the run file"
        ) from None


def read_source(path: Path) -> bytes:
    """Raises `ConfigError`."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read environment {path}: {cause_of(error)}. Give the path of a .py file") from None
