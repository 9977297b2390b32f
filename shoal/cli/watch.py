"""`shoal watch`: shows anyone a run.

It starts nothing: the view and its sources are in `launch`, imported when the command runs.
"""

import argparse
from typing import Any

from shoal.cli.options import add_command, source_argument


def add_commands(commands: Any) -> None:
    p = add_command(
        commands, "watch", watch, "look at a run, here or elsewhere",
        "Shows how a run goes: reward, who was refused by which check, what it waits for and how long it still takes. "
        "From the run's folder you see what its host sees, with a conversation now and then; from its URL, what anyone may "
        "see. It changes nothing: q or Ctrl-C leaves, and the run goes on. Any number may watch. Piped to a file it prints "
        "a line for each step.",
        ("shoal watch runs/wordle", "a run of this machine, hosted or ended"),
        ("shoal watch https://shoal.example.org", "somebody else's run"),
        ("shoal watch https://shoal.example.org --once", "as it is now, and no more"),
    )  # fmt: skip
    source_argument(p)
    p.add_argument(
        "--once",
        action="store_true",
        help="print the run as it is now, and end; of a run that nobody hosts, once its log is read",
    )


def watch(args: argparse.Namespace) -> int:
    from rich.console import Console

    from shoal.views.terminal import watch_command

    return watch_command.watch(args.source, Console(), args.once)
