"""`shoal plot` and `shoal report`: make pictures and reports of runs, to show to others.

What they make is in `watch`, imported when a command runs.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from shoal.cli.options import add_command, positive, run_source, source_argument
from shoal.errors import ConfigError

FORMS = (".png", ".svg")


def add_commands(commands: Any) -> None:
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


def plot(args: argparse.Namespace) -> None:
    from shoal.run_folder import write_atomically
    from shoal.runs.replay import open_run
    from shoal.terminal import brief, say
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
    from shoal.runs.replay import open_run
    from shoal.terminal import say
    from shoal.views.report.html import report_of

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
