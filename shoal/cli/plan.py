"""`shoal plan`: what a run would take, before anybody starts it.

The forecast is in `plan`, and imported when the command runs; `plan/simulation_input` has the defaults.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from shoal.cli.options import add_command, number, positive, random_policy_argument, set_argument, whole
from shoal.plan.machines import Machines
from shoal.terminal import say

MOST_RELAYS = 1000

MOST_S, MIN_SIGNAL_SHARE = 1e6, 0.001

NUMBER = number(0.0, 1e14)


def add_commands(commands: Any) -> None:
    p = add_command(
        commands, "plan", plan, "what a run would take, before you start it",
        "Predicts memory, disk, bytes, how long a version takes to reach the workers, how stale rollouts are, how much "
        "the trainer waits, and how many workers keep it busy. It simulates the run's own rules with the machines "
        "and links that you give. What you leave out is assumed: the last lines say what. Links are in megabits per "
        "second, 0 is no limit.",
        ("shoal plan recipes/wordle.toml --workers 8", ""),
        ("shoal plan RECIPE --workers 50 --uplink 1000 --downlink 50 --tokens-per-s 900 --train-s 200",
         "speed= in a worker's log, and train_s in metrics.jsonl"),
        ("shoal plan RECIPE --workers 50 --parameters 7e9 --relays 3", "another model than the run file's; with relays"),
        ("shoal plan RECIPE --workers 8 --also 20:10:200", "and 20 slower ones: 10 Mb/s, 200 tokens/s"),
    )  # fmt: skip
    p.add_argument("recipe", type=Path, metavar="RECIPE", help="a run file, such as recipes/wordle.toml")
    p.add_argument(
        "--workers", type=positive, metavar="N",
        help="number of workers (default: workers.count of the run file, or 1 where that is 0)",
    )  # fmt: skip
    p.add_argument(
        "--also", type=_kind, action="append", default=[], metavar="N:MBPS:RATE",
        help="N further workers with this downlink and these tokens per second; may be repeated",
    )  # fmt: skip
    for name, text in (
        ("uplink", "of the host"),
        ("downlink", "of each worker"),
        ("worker-uplink", "of each worker, for its rollouts"),
        ("relay-uplink", "of each relay"),
    ):
        default = getattr(Machines, name.replace("-", "_"))
        help_text = f"{text}, Mb/s (default: {default:g})"
        p.add_argument(f"--{name}", type=NUMBER, default=default, metavar="MBPS", help=help_text)
    p.add_argument("--relays", type=whole(0, MOST_RELAYS), default=0, metavar="N", help="number of relays (default: 0)")
    for name, meta, kind, text in (
        ("tokens-per-s", "RATE", NUMBER, "tokens that a worker generates in a second"),
        ("rollout-tokens", "N", NUMBER, "tokens that the policy writes in a rollout, on average"),
        ("train-s", "S", number(0.0, MOST_S), "seconds that the trainer computes for a step"),
        ("check-s", "S", number(0.0, MOST_S), "seconds that a validator needs for a block"),
    ):
        p.add_argument(f"--{name}", type=kind, default=0.0, metavar=meta, help=f"{text} (default: assumed)")
    p.add_argument(
        "--parameters", type=NUMBER, default=0.0, metavar="N", help="plan for a model of this size, such as 7e9"
    )
    p.add_argument(
        "--patch-share", type=number(0.0, 1.0), default=Machines.patch_share, metavar="SHARE",
        help="size of a patch as a part of a whole version; 0: no patches (default: assumed in bfloat16, else 0)",
    )  # fmt: skip
    p.add_argument(
        "--signal-share", type=number(MIN_SIGNAL_SHARE, 1.0), default=Machines.signal_share, metavar="SHARE",
        help="part of the groups that teach anything (default: 1)",
    )  # fmt: skip
    random_policy_argument(p)
    set_argument(p)


def plan(args: argparse.Namespace) -> None:
    from shoal.config import load_run
    from shoal.plan.forecast import forecast, report
    from shoal.roles.coordinator.main import rules_of

    config = load_run(args.recipe, args.set, random_policy=args.random_policy)
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(Machines)}
    workers = args.workers or max(1, config.workers.count)
    machines = Machines(**given | {"also": tuple(args.also), "workers": workers})
    found = forecast(config, rules_of(config), args.recipe.parent, machines)
    if not args.workers:
        found = dataclasses.replace(found, assumed=(f"workers: {workers} (--workers)", *found.assumed))
    say(report(found, machines))


def _kind(text: str) -> tuple[int, float, float]:
    parts = text.split(":")
    if len(parts) != 3:
        raise argparse.ArgumentTypeError(f"{text} is not N:MBPS:RATE, such as 20:10:200")
    return positive(parts[0]), NUMBER(parts[1]), float(positive(parts[2]))
