"""`shoal stages`: a run of stages, such as a cold start, RL, and imitation of what RL found.

It reads the options and hands over to `launch/pipeline/pipeline`.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from shoal.cli.options import add_command, demand_torch
from shoal.terminal import say


def add_commands(commands: Any) -> None:
    p = add_command(
        commands, "stages", stages, "several stages, each from what earlier ones made",
        "Does the stages that a file lists, in order: sft (supervised fine-tuning), rl (a whole run on this machine), "
        "filter (keep the tasks that a policy solves sometimes), reject (choose the best rollouts of a run, to imitate "
        "them), dpo (learn from pairs of better and worse), reward_model (learn to score from such pairs), merge (a whole "
        "model from an adapter), eval. Each goes by a recipe of its own and takes what earlier stages made (policy = "
        "\"stage:NAME\"). A stage's folder is "
        "named by its settings and inputs, so the same command continues after Ctrl-C or a kill, and skips what is done; "
        "after a change it does that stage again, and those after it. You get report.json: held-out reward before and "
        "after each stage, seconds, CPU-seconds and tokens.",
        ("shoal stages recipes/stages/sums.toml", "cold start, RL, imitation of the best rollouts: sums of digits"),
        ("shoal stages recipes/stages/sums.toml --quick", "the file's [quick] values: a minute"),
        ("shoal stages recipes/stages/sums.toml --set rl.steps=5", "another value of a key in the recipe of stage rl"),
    )  # fmt: skip
    p.add_argument("recipe", type=Path, metavar="FILE", help="a stages file, such as recipes/stages/sums.toml")
    p.add_argument("--quick", action="store_true", help="use the file's [quick] values, for a short version")
    p.add_argument("--out", type=Path, metavar="DIR", help="where stages and report are written (default: runs/NAME)")
    help_text = "override a key of a stage's recipe, such as rl.steps=5; may be repeated"
    p.add_argument("--set", action="append", default=[], metavar="STAGE.KEY=VALUE", help=help_text)


def stages(args: argparse.Namespace) -> int:
    from shoal.config.stages import load_stages

    config = load_stages(args.recipe, args.set, args.quick)
    demand_torch()
    from shoal.launch.pipeline.pipeline import run_stages

    return run_stages(config, args.recipe.parent, args.out or Path("runs") / config.name, _tell)


def _tell(text: str) -> None:
    """At once, also into a file: a stage may take hours."""
    say(text)
    sys.stdout.flush()
