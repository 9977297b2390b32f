"""The command line: what people type, and the one place where errors become a line and an exit code.

It parses, then imports what the command needs, so that help is quick on a machine without torch. Exit codes: 0 done,
1 the answer is no (a log or an environment has a fault), 2 the user must fix something, 3 and 4 of audits,
130 stopped by Ctrl-C, 75 (roles only) another node could not be reached. What each command does is in the other files of
this folder.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from shoal import __version__
from shoal.cli import env, host, ledger, machine, nodes, plan, policy, role, stages, views
from shoal.cli.options import Parser, told
from shoal.errors import EXIT_INTERRUPTED, EXIT_TRY_AGAIN, EXIT_USER_ERROR, PeerError, ShoalError, fault_of_user
from shoal.terminal import as_called, say

GROUPS = (host, views, stages, plan, nodes, policy, env, ledger, machine, role)
"""In the order in which help shows them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = parser().parse_args(argv)
    try:
        if getattr(args, "proxy", ""):
            from shoal.net.outbound_proxy import use_proxy

            use_proxy(args.proxy)
        return int(args.act(args) or 0)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # after `shoal ledger show | head`
        return 0
    except (ShoalError, OSError, MemoryError, ModuleNotFoundError, ExceptionGroup) as error:
        fault = fault_of_user(error)
        if fault is None:
            raise
        say(f"error: {as_called(' '.join(str(fault).split()))}", sys.stderr)
        return EXIT_TRY_AGAIN if args.command == "role" and isinstance(fault, PeerError) else EXIT_USER_ERROR


def parser() -> argparse.ArgumentParser:
    """The whole grammar."""
    top = Parser(
        prog="shoal",
        description="Train language models by reinforcement learning on computers that do not trust each other.",
        epilog=told(
            ("shoal run recipes/wordle.toml --quick", "two minutes: a whole run on this machine"),
            ("shoal host recipes/wordle.toml", "host a run; prints the command that others type"),
            ("shoal join http://host:8470", "work for somebody's run"),
            ("shoal watch http://host:8470", "look at it"),
            ("shoal doctor", "what can this machine do?"),
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"shoal {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for group in GROUPS:
        group.add_commands(commands)
    return top


if __name__ == "__main__":
    sys.exit(main())
