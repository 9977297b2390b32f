"""`shoal key new` and `shoal key show`: key files for those who sign on a machine that runs nothing else.

Roles make their own keys. This is for a root key, or a publisher's, that is made before a run needs it.
"""

import argparse
from pathlib import Path
from typing import Any

from shoal.cli.options import add_command, add_group
from shoal.errors import StateError
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
