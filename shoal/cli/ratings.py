"""`shoal env rate`: a person rates answers that wait in a queue.

`env` adds the command. `graders/human_ratings` is the queue; it is imported when the command runs.
"""

import argparse
from pathlib import Path
from typing import Any

from shoal.cli.options import add_command, positive
from shoal.errors import ConfigError


def add_rate(p: Any) -> None:
    q = add_command(
        p, "rate", env_rate, "rate answers that wait for a person",
        "Shows the answers of a queue one after another and asks for a number from 0 to 10 for each. Several people may "
        "rate at the same time. Each rating is saved at once. At the end it prints how many answers are rated, and how "
        "much the raters agree.",
        ("shoal env rate runs/essays/ratings --name anna", ""),
    )  # fmt: skip
    q.add_argument("folder", type=Path, metavar="FOLDER", help="the folder of the queue")
    q.add_argument("--name", required=True, metavar="RATER", help="your name, so that you rate no answer twice")
    q.add_argument("--raters", type=positive, default=1, metavar="N", help="how many people rate each answer")


def env_rate(args: argparse.Namespace) -> None:
    from shoal.graders.human_ratings import TOP, Ratings
    from shoal.terminal import say

    if not args.folder.is_dir():
        raise ConfigError(f"{args.folder} is not a folder of answers to rate: give the one that your environment fills")
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
