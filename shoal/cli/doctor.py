"""`shoal doctor`: what this machine can do.

The examination itself is in `launch/doctor`, and imported when the command runs.
"""

import argparse
from pathlib import Path
from typing import Any

from shoal.cli.options import add_command, positive, random_policy_argument, set_argument
from shoal.errors import ConfigError


def add_commands(commands: Any) -> None:
    p = add_command(
        commands, "doctor", doctor, "what this machine can do, and what is missing",
        "Looks at Python, cores, memory, disk, torch (with measured speed), clock, limits and folders. Prints a line for "
        "each, with what to do; exit code 1 if something that a run needs is missing.",
        ("shoal doctor", ""), ("shoal doctor --url http://host:8470", "compare this clock with a host's, too"),
        ("shoal doctor --recipe recipes/wordle.toml", "does this run fit into memory and disk?"),
    )  # fmt: skip
    p.add_argument(
        "other", nargs="?", metavar="MODEL",
        help="not taken: to examine a model, give --recipe a run file whose policy.path names it",
    )  # fmt: skip
    p.add_argument("--url", default="", help="a run's coordinator")
    p.add_argument(
        "--recipe", type=Path, metavar="RUN_FILE",
        help="instead, what each role of this run takes of the memory, and what to change if it does not fit",
    )  # fmt: skip
    p.add_argument(
        "--memory", type=positive, default=0, metavar="GB",
        help="with --recipe: as if so much were free where the trainer computes",
    )  # fmt: skip
    random_policy_argument(p)
    set_argument(p)


def doctor(args: argparse.Namespace) -> int:
    from shoal.launch import doctor as examination

    if args.other is not None:
        raise ConfigError(
            f"shoal doctor takes no {args.other!r}. To see whether a run fits: --recipe RUN_FILE, whose policy.path names "
            "the model"
        )
    return examination.run(
        args.url, recipe=args.recipe, changes=args.set, memory_gb=args.memory, random_policy=args.random_policy
    )
