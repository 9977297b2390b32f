"""`shoal doctor`: what this machine can do.

Called by `cli`. The examination itself is in `launch/doctor`, and imported when the command runs.
"""

import argparse
from typing import Any

from shoal.commands.grammar import add_command


def add_commands(commands: Any) -> None:
    p = add_command(
        commands, "doctor", doctor, "what this machine can do, and what is missing",
        "Looks at Python, cores, memory, disk, torch (with measured speed), clock, limits and folders. Prints a line for "
        "each, with what to do; exit code 1 if something that a run needs is missing.",
        ("shoal doctor", ""), ("shoal doctor --url http://host:8470", "compare this clock with a host's, too"),
    )  # fmt: skip
    p.add_argument("--url", default="", help="a run's coordinator")


def doctor(args: argparse.Namespace) -> int:
    from shoal.launch import doctor as examination

    return examination.run(args.url)
