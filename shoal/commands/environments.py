"""`shoal env check`, `env rate` and `env list`: what an author of environments types.

Called by `cli`. It knows no environment: these are loaded when a command runs.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from shoal.commands.grammar import add_command, add_group, env_arguments, positive
from shoal.commands.process import EXIT_NO


def add_commands(commands: Any) -> None:
    p = add_group(commands, "env", "look at environments, check your own")
    q = add_command(
        p, "check", env_check, "check that an environment is sound",
        "Plays episodes with its scripted players and with random ones. Right players must score well and wrong ones "
        "badly, a replay must give the same, and rewards must keep to their bounds. Prints a line for each check; exit "
        "code 1 if one fails.",
        ("shoal env check wordle", ""), ("shoal env check ./my_env.py", "your own file"),
    )  # fmt: skip
    env_arguments(q, "env")
    q = add_command(
        p, "rate", env_rate, "rate answers that wait for a person",
        "Shows the answers of a queue one after another and asks for a number from 0 to 10 for each. Several people may "
        "rate at the same time. Each rating is kept at once. At the end it prints how many are rated, and how much the "
        "raters agree.",
        ("shoal env rate runs/essays/ratings --name anna", ""),
    )  # fmt: skip
    q.add_argument("folder", type=Path, metavar="FOLDER", help="the folder of the queue")
    q.add_argument("--name", required=True, metavar="RATER", help="who rates: nobody rates an answer twice")
    q.add_argument("--raters", type=positive, default=1, metavar="N", help="how many people rate each answer")
    add_command(p, "list", env_list, "environments that come with shoal", "", ("shoal env list", ""))


def env_check(args: argparse.Namespace) -> int:
    from shoal.envs.check import check_env
    from shoal.envs.load import load_env

    findings = check_env(load_env(args.env, args.env_args))
    for finding in findings:
        print(f"{finding.outcome:<8} {finding.check}: {finding.detail}")
    return EXIT_NO if any(finding.outcome == "failed" for finding in findings) else 0


def env_rate(args: argparse.Namespace) -> None:
    from shoal.envs.answers.ratings import TOP, Ratings
    from shoal.terminal import say

    ratings = Ratings(args.folder, args.raters)
    while (item := ratings.take(args.name)) is not None:
        say(f"--- question ---\n{item.question}\n--- answer ---\n{item.answer}\n---")
        while (said := _asked(f"0 to {TOP}, or q to stop: ")) not in ("q", None):
            if said.isdecimal() and said.isascii() and len(said) < 3 and int(said) <= TOP:
                ratings.rate(item.id, args.name, int(said))
                break
            print(f"{said[:20]!r} is not a whole number from 0 to {TOP}")
        if said in ("q", None):
            break
    standing = ratings.standing()
    agreed = "" if standing.kappa is None else f", kappa between raters {standing.kappa:.2f}"
    print(f"{standing.rated} of {standing.items} answers are rated, with {standing.ratings} ratings{agreed}")


def _asked(prompt: str) -> str | None:
    """What a person types; None at the end of the input."""
    try:
        return input(prompt).strip()
    except EOFError:
        return None


def env_list(args: argparse.Namespace) -> None:
    from shoal.envs.load import BUILT_IN, load_env

    for name in sorted(BUILT_IN):
        env = load_env(name, {})
        about = (sys.modules[type(env).__module__].__doc__ or "").split("\n", 1)[0].partition(": ")[2]
        print(f"{name:<12} {env.num_tasks:>9,} tasks, {env.num_heldout:>6,} held out   {about}")
