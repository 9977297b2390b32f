"""`shoal env check` and `env list`: what an author of environments types.

Called by `cli`. It knows no environment: these are loaded when a command runs.
"""

import argparse
import sys
from typing import Any

from shoal.commands.grammar import add_command, add_group, env_arguments
from shoal.commands.process import EXIT_NO


def add_commands(commands: Any) -> None:
    p = add_group(commands, "env", "look at environments, check your own")
    q = add_command(
        p, "check", env_check, "check that an environment is sound",
        "Plays episodes with its scripted players and with random ones. Right players must score well and wrong ones "
        "badly, a replay must give the same, and rewards must keep to their bounds. Prints a line for each check; exit "
        "code 1 if one fails.",
        ("shoal env check wordle", ""), ("shoal env check ./my_env.py", "your own file"),
    )  # fmt: skip
    env_arguments(q, "env")
    add_command(p, "list", env_list, "environments that come with shoal", "", ("shoal env list", ""))


def env_check(args: argparse.Namespace) -> int:
    from shoal.envs.check import check_env
    from shoal.envs.load import load_env

    findings = check_env(load_env(args.env, args.env_args))
    for finding in findings:
        print(f"{finding.outcome:<8} {finding.check}: {finding.detail}")
    return EXIT_NO if any(finding.outcome == "failed" for finding in findings) else 0


def env_list(args: argparse.Namespace) -> None:
    from shoal.envs.load import BUILT_IN, load_env

    for name in sorted(BUILT_IN):
        env = load_env(name, {})
        about = (sys.modules[type(env).__module__].__doc__ or "").split("\n", 1)[0].partition(": ")[2]
        print(f"{name:<12} {env.num_tasks:>9,} tasks, {env.num_heldout:>6,} held out   {about}")
