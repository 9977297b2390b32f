"""`shoal watch`, `dashboard`, `plot` and `report`: what people see of runs.

They change no run. What they show and make is in `views`, imported when a command runs.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from shoal.cli.options import add_command, port, positive, run_source, source_argument
from shoal.errors import ConfigError
from shoal.terminal import say

PORT = 8480

FORMS = (".png", ".svg")


def add_commands(commands: Any) -> None:
    _add_watch(commands)
    _add_dashboard(commands)
    _add_plot(commands)
    _add_report(commands)


def _add_watch(commands: Any) -> None:
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


def _add_dashboard(commands: Any) -> None:
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


def _add_plot(commands: Any) -> None:
    p = add_command(
        commands, "plot", plot, "draw the curves of one or more runs",
        "Draws metrics and held-out results of runs, one small picture for each metric and one line for each run. Runs "
        "that differ in their seed alone become one line, their mean, with a band from the lowest to the highest. "
        "The same runs give the same bytes. It needs matplotlib, which `make demo` installs.",
        ("shoal plot runs/wordle", "how a run goes, as plot.png"),
        ("shoal plot runs/a runs/b --metric reward_all_mean --metric heldout --out compared.svg", "two runs, two metrics"),
        ("shoal plot https://shoal.example.org --x tokens --smooth 10", "somebody else's run, against tokens"),
    )  # fmt: skip
    p.add_argument(
        "runs",
        nargs="+",
        metavar="RUN_DIR_OR_URL",
        type=run_source,
        help="folders of runs, or URLs such as http://host:8470",
    )
    help_text = (
        "what to draw: a name of metrics.jsonl, heldout or heldout_judge; may be repeated (default: the usual curves)"
    )
    p.add_argument("--metric", action="append", default=[], metavar="NAME", help=help_text)
    p.add_argument(
        "--out", type=_picture, default=Path("plot.png"), metavar="FILE", help="a .png or .svg (default: plot.png)"
    )
    help_text = "draw means of the last N steps (default: 1)"
    p.add_argument("--smooth", type=positive, default=1, metavar="N", help=help_text)
    help_text = "the horizontal axis: training steps, tokens learned from, or hours since the start (default: step)"
    p.add_argument("--x", choices=("step", "tokens", "time"), default="step", help=help_text)
    help_text = "draw runs that differ in their seed alone as a line each, without a band"
    p.add_argument("--apart", action="store_true", help=help_text)


def _add_report(commands: Any) -> None:
    p = add_command(
        commands, "report", report, "write a report on a run, to send to somebody",
        "Writes one HTML file without scripts that opens without a network: what the run was, its curves, held-out results "
        "before and after, credits, refusals with their reasons, alarms, versions, time, conversations of the first and "
        "the newest policy, and how to verify the log. What is still private stays out, held-out tasks too, unless "
        "--private asks for it in the host's folder. It needs matplotlib, which `make demo` installs.",
        ("shoal report runs/wordle", "report.html, from the host's folder"),
        ("shoal report https://shoal.example.org --out theirs.html", "what anyone may see"),
    )  # fmt: skip
    source_argument(p)
    p.add_argument(
        "--out", type=Path, default=Path("report.html"), metavar="FILE", help="the file (default: report.html)"
    )
    help_text = "with private bodies and held-out tasks; needs the host's folder with its run key"
    p.add_argument("--private", action="store_true", help=help_text)


def watch(args: argparse.Namespace) -> int:
    from rich.console import Console

    from shoal.views.terminal import watch_command

    return watch_command.watch(args.source, Console(), args.once)


def dashboard(args: argparse.Namespace) -> None:
    from shoal.views.web.page_server import serve

    serve(args.sources, args.bind, args.port, args.index, say, args.own_files)


def plot(args: argparse.Namespace) -> None:
    from shoal.run_folder import write_atomically
    from shoal.runs.run_reader import open_run
    from shoal.terminal import brief
    from shoal.views.plots.render import draw
    from shoal.views.plots.series import picture_of, read_run

    runs = []
    for where in args.runs:
        with open_run(where) as run:
            runs.append(read_run(run))
            if run.fault:
                say(f"{where}: {run.fault}. What is beside its log is drawn", sys.stderr)
    picture = picture_of(runs, args.metric, args.x, args.smooth, args.apart)
    names = {run.name for run in runs}
    write_atomically(args.out, draw(picture, args.out.suffix[1:], brief(runs[0].name) if len(names) == 1 else ""))
    silent = [run.where for run in runs if not (run.lines or run.heldout)]
    if silent:
        say(f"not drawn, because they have no metrics yet: {', '.join(silent)}")
    say(f"{args.out}: {', '.join(panel.metric for panel in picture.panels)}")


def report(args: argparse.Namespace) -> None:
    import time

    from shoal.run_folder import write_atomically
    from shoal.runs.run_reader import open_run
    from shoal.views.report.report import report_of

    with open_run(args.source, private=args.private) as run:
        run.catch_up()
        if args.private and not run.shows_private():
            raise ConfigError(f"{args.source} lacks the run key: --private takes the folder of the host")
        written = report_of(run, time.time()).encode()
    write_atomically(args.out, written)
    say(f"{args.out}: {len(written) / 1e6:.2f} MB, without scripts; any browser opens it")


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in FORMS:
        raise argparse.ArgumentTypeError(f"{text[:80]} must end in .png or .svg")
    return path
