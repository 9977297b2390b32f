"""`shoal key` and `shoal doctor`: key files, and what this machine can do.

Roles make their own keys: `shoal key` is for a root key, or a publisher's, that is made before a run needs it, perhaps on a
machine that runs nothing else. The examination is in `launch/doctor`, imported when the command runs.
"""

import argparse
from pathlib import Path
from typing import Any

from shoal.cli.options import add_command, add_group, positive, random_policy_argument, set_argument
from shoal.errors import ConfigError, StateError
from shoal.terminal import say


def add_commands(commands: Any) -> None:
    p = add_group(commands, "key", "make a key file, or show its public part")
    q = add_command(
        p, "new", new, "make a key",
        "Writes a new private key into a file that only you can read, and prints its public part. A file that exists is "
        "never overwritten.",
        ("shoal key new root.key", "on the machine that keeps it; then: shoal host RECIPE --root PUBLIC_PART"),
        ("shoal key new runs/wordle/keys/trainer-2.key", "for `shoal admin rotate-publisher URL --new-key`"),
    )  # fmt: skip
    q.add_argument("file", type=Path, metavar="FILE", help="where to write it")
    q = add_command(
        p, "show", show, "print the public part of a key", "", ("shoal key show ~/.shoal/node.key", "your worker's key"),
    )  # fmt: skip
    q.add_argument("file", type=Path, metavar="FILE", help="a key file")
    p = add_command(
        commands, "doctor", doctor, "what this machine can do, and what is missing",
        "Looks at Python, cores, memory, disk, torch (with measured speed), clock, limits and folders. Prints a line for "
        "each, with what to do; exit code 1 if something that a run needs is missing.",
        ("shoal doctor", ""), ("shoal doctor --url http://host:8470", "compare this clock with a host's, too"),
        ("shoal doctor --recipe recipes/wordle.toml", "does this run fit into memory and disk?"),
    )  # fmt: skip
    p.add_argument(
        "other", nargs="?", metavar="MODEL",
        help="not taken: to examine a model, give --recipe a run file whose policy.path names it",
    )  # fmt: skip
    p.add_argument("--url", default="", help="a run's coordinator")
    p.add_argument(
        "--recipe", type=Path, metavar="RUN_FILE",
        help="instead, what each role of this run takes of the memory, and what to change if it does not fit",
    )  # fmt: skip
    p.add_argument(
        "--memory", type=positive, default=0, metavar="GB",
        help="with --recipe: as if so much were free where the trainer computes",
    )  # fmt: skip
    random_policy_argument(p)
    set_argument(p)


def new(args: argparse.Namespace) -> None:
    from shoal.net.key_files import save_key
    from shoal.protocol.signing import Key

    key = Key.generate()
    try:
        save_key(args.file, key)
    except FileExistsError:
        raise StateError(
            f"{args.file} exists, and is not overwritten: give another name. `shoal key show` prints a key's public part"
        ) from None
    say(key.public)


def show(args: argparse.Namespace) -> None:
    from shoal.net.key_files import load_key

    say(load_key(args.file).public)


def doctor(args: argparse.Namespace) -> int:
    from shoal.launch import doctor as examination

    if args.other is not None:
        raise ConfigError(
            f"shoal doctor takes no {args.other!r}. To see whether a run fits: --recipe RUN_FILE, whose policy.path names "
            "the model"
        )
    return examination.run(
        args.url, recipe=args.recipe, changes=args.set, memory_gb=args.memory, random_policy=args.random_policy
    )
