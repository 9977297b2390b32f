"""`shoal plan`: what a run would take, before anybody starts it.

Called by `cli`. The forecast is in `plan`, and imported when the command runs.
"""

import argparse
from pathlib import Path
from typing import Any

from shoal.commands.grammar import add_command, positive, set_argument
from shoal.terminal import say


def add_commands(commands: Any) -> None:
    p = add_command(
        commands, "plan", plan, "what a run would take, before you start it",
        "Predicts memory, disk, bytes, how long a version takes to reach the workers, how stale rollouts are, how much "
        "the trainer waits, and how many workers keep it busy. It simulates the run's own rules with the machines "
        "and links that you give. Links are in Mb/s. What you leave out is assumed, and named.",
        ("shoal plan recipes/wordle.toml --workers 8", ""),
        ("shoal plan RECIPE --workers 50 --uplink 1000 --downlink 50 --tokens-per-s 900 --step-s 200",
         "speeds as `shoal join` and the trainer's log tell them"),
        ("shoal plan RECIPE --workers 50 --parameters 7e9 --relays 3", "another model than the run file's; with relays"),
        ("shoal plan RECIPE --workers 8 --also 20:10:200", "and 20 slower ones: 10 Mb/s, 200 tokens/s"),
    )  # fmt: skip
    p.add_argument("recipe", type=Path, metavar="RECIPE", help="a run file, such as recipes/wordle.toml")
    p.add_argument("--workers", type=positive, required=True, metavar="N", help="number of workers")
    for name, default, text in (
        ("uplink", 200.0, "of the host"),
        ("downlink", 50.0, "of each worker"),
        ("worker-uplink", 20.0, "of each worker"),
        ("relay-uplink", 200.0, "of each relay"),
    ):
        help_text = f"{text}, Mb/s; 0 is no limit (default: {default:g})"
        p.add_argument(f"--{name}", type=_number, default=default, metavar="MBPS", help=help_text)
    p.add_argument("--relays", type=int, default=0, metavar="N", help="number of relays (default: 0)")
    for name, meta, text in (
        ("tokens-per-s", "RATE", "of each worker"),
        ("rollout-tokens", "N", "policy tokens of a rollout, on average"),
        ("step-s", "S", "seconds that the trainer needs for a step"),
        ("check-s", "S", "seconds that a validator needs for a block"),
        ("parameters", "N", "of another model than the run file's, such as 7e9"),
    ):
        p.add_argument(f"--{name}", type=_number, default=0.0, metavar=meta, help=text)
    p.add_argument(
        "--patch-share", type=_number, default=-1.0, metavar="SHARE",
        help="a patch's part of a whole version; 0: no patches (default: 1/150 in bfloat16, else 0)",
    )  # fmt: skip
    p.add_argument(
        "--signal-share", type=_share, default=1.0, metavar="SHARE", help="groups that teach anything (default: 1)"
    )
    p.add_argument(
        "--also", type=_kind, action="append", default=[], metavar="N:MBPS:RATE",
        help="N further workers with this downlink and these tokens/s; may be repeated",
    )  # fmt: skip
    set_argument(p)


def plan(args: argparse.Namespace) -> None:
    from shoal.config import load_run
    from shoal.plan.forecast import Machines, forecast
    from shoal.plan.report import report
    from shoal.roles.coordinator.role import rules_of

    config = load_run(args.recipe, args.set)
    machines = Machines(
        workers=args.workers, downlink=args.downlink, worker_uplink=args.worker_uplink, uplink=args.uplink,
        relays=args.relays, relay_uplink=args.relay_uplink, tokens_per_s=args.tokens_per_s, also=tuple(args.also),
        rollout_tokens=args.rollout_tokens, step_s=args.step_s, check_s=args.check_s, patch_share=args.patch_share,
        parameters=args.parameters, signal_share=args.signal_share,
    )  # fmt: skip
    say(report(forecast(config, rules_of(config), args.recipe.parent, machines), machines))


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e18:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return number


def _share(text: str) -> float:
    if not 0 < (number := _number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return number


def _kind(text: str) -> tuple[int, float, float]:
    parts = text.split(":")
    if len(parts) != 3:
        raise argparse.ArgumentTypeError(f"{text} is not N:MBPS:RATE, such as 20:10:200")
    return positive(parts[0]), _number(parts[1]), float(positive(parts[2]))
