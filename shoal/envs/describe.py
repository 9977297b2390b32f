"""What an environment says of itself, found out in a process of its own.

So a user's file is executed in a child that ends at once. It plays nothing.
"""

import os
import signal
import subprocess
import sys

import msgspec

from shoal.config.env_settings import EnvConfig
from shoal.config.process_environment import child_environment
from shoal.envs.isolated.connection import log_if_slow
from shoal.envs.load import env_of, is_file, is_package
from shoal.envs.make_env import make_env
from shoal.errors import ConfigError, ShoalError
from shoal.tree import from_tree, to_tree

LOAD_S = 120
"""Time to load an environment. The child ends itself a little later, in case nobody waits for it any more."""


class Declared(msgspec.Struct, frozen=True):
    """What a run must know of an environment before it begins."""

    num_tasks: int
    reproducible: bool
    """Whether file, class and package all promise that the same actions get the same answers."""
    compares: bool = False
    """Whether it compares the rollouts of a group with each other."""


class NotLoaded(msgspec.Struct, frozen=True):
    """What the child says instead."""

    why: str


def declared(env: EnvConfig) -> Declared:
    """What an environment of a run says of itself. Raises `ShoalError` if it does not load."""
    if not (is_file(env.name) or is_package(env.name)):  # guard: files-of-the-host-stay-outside
        return _declared(env)
    command, said = [sys.executable, "-m", "shoal.envs.describe", msgspec.json.encode(to_tree(env)).decode()], b""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=child_environment(1)
    ) as child:
        try:
            with log_if_slow(env.name, LOAD_S):
                said = child.communicate(timeout=LOAD_S)[0]
            told = msgspec.json.decode(said, type=tuple[Declared | None, NotLoaded | None])
        except subprocess.TimeoutExpired:
            child.kill()
            raise ConfigError(
                f"environment {env.label} ({env.name}) did not load within {LOAD_S} s: let it do less when it is imported "
                "and when it is made"
            ) from None
        except msgspec.MsgspecError:
            raise ConfigError(
                f"environment {env.label} ended its process with code {child.wait()} while it was loaded: `shoal env "
                "check` shows more"
            ) from None
    found, refused = told
    if refused is not None or found is None:
        raise ConfigError(refused.why if refused is not None else f"environment {env.label} does not load")
    return found


def is_repeatable(env: EnvConfig) -> bool:
    """Whether others can repeat an environment's answers, as it says itself. Raises `ShoalError` if it does not load."""
    return declared(env).reproducible


def _declared(settings: EnvConfig) -> Declared:
    env = env_of(settings, own=make_env)
    compares = getattr(env, "group_scores", None) is not None
    return Declared(env.num_tasks, settings.reproducible and getattr(env, "reproducible", True) is not False, compares)


def main() -> None:
    """The child: its argument is an item of `[[envs]]`. What the environment prints is dropped."""
    signal.alarm(LOAD_S + 30)
    answers = os.dup(1)
    os.dup2(2, 1)
    found, refused = None, None
    try:
        found = _declared(from_tree(msgspec.json.decode(sys.argv.pop()), EnvConfig, "envs"))
    except ShoalError as error:
        refused = NotLoaded(str(error))
    os.write(answers, msgspec.json.encode((found, refused)))


if __name__ == "__main__":
    main()
