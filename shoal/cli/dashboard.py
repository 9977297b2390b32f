"""`shoal dashboard`: serves the page of one or several runs.

It changes no run: the page is in `views/web`, imported when the command runs.
"""

import argparse
from pathlib import Path
from typing import Any

from shoal.cli.options import add_command, port, run_source
from shoal.terminal import say

PORT = 8480


def add_commands(commands: Any) -> None:
    p = add_command(
        commands, "dashboard", dashboard, "serve a page that shows one or several runs",
        "Serves a page for browsers: rewards, nodes, refusals, versions, the log, and all rollouts of a prompt side by "
        "side. From a run's folder it also prints an address for the host alone, which shows what is still private. It "
        "never changes a run, and answers only GET and HEAD. Listens on 127.0.0.1 unless --bind gives another address.",
        ("shoal dashboard runs/wordle", "a run of this machine, hosted or ended"),
        ("shoal dashboard https://shoal.example.org", "somebody else's run, as anyone may see it"),
        ("shoal dashboard runs/one runs/two", "several runs, compared"),
        ("shoal dashboard runs/guess-number --own-files", "your own environment: the page can name the parts of rewards"),
        ("shoal dashboard runs/wordle --bind 0.0.0.0 --index wordle.index", "for your network; keeps its index"),
    )  # fmt: skip
    p.add_argument("sources", metavar="RUN_DIR_OR_URL", type=run_source, nargs="+", help="a run's folder, or its URL")
    p.add_argument("--bind", metavar="ADDRESS", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    p.add_argument("--port", type=port, metavar="N", default=PORT, help=f"0 takes a free one (default: {PORT})")
    p.add_argument(
        "--index", type=Path, metavar="FILE", help="keep the page's index here (default: made anew each time)"
    )
    p.add_argument(
        "--own-files", action="store_true",
        help="when you ask for the parts of rewards or for an answer, run environment files that the runs name: their "
        "hosts' code, so read it first",
    )  # fmt: skip


def dashboard(args: argparse.Namespace) -> None:
    from shoal.views.web.serve import serve

    serve(args.sources, args.bind, args.port, args.index, say, args.own_files)
