"""`shoal policy merge`: a whole model from an adapter.

It reads the options and hands over to a role, which is imported when its command runs.
"""

import argparse
from pathlib import Path
from typing import Any

from shoal.cli.options import add_command, add_group, positive
from shoal.cli.process_setup import cores
from shoal.terminal import say


def add_commands(commands: Any) -> None:
    p = add_group(commands, "policy", "make a whole model of an adapter")
    q = add_command(
        p, "merge", merge, "a whole model from an adapter and its base",
        "Adds the adapter's products to the matrices, writes a model that everything opens, and says how it differs from "
        "the adapter over its base: bfloat16 rounds small changes away.",
        ("shoal policy merge runs/wordle/checkpoints/final --out merged", "a checkpoint of a run, with its base"),
        ("shoal policy merge ADAPTER --base MODEL --out merged --dtype float32", "an adapter alone"),
    )  # fmt: skip
    q.add_argument("adapter", type=Path, metavar="ADAPTER", help="a directory with adapter_config.json")
    q.add_argument("--base", type=Path, metavar="DIR", help="its base, if that is not in the same directory")
    q.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write the model; must not exist")
    q.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="", help="precision of the files (default: the base's)"
    )
    q.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: all)")


def merge(args: argparse.Namespace) -> None:
    from shoal.jobs import merge_adapter as role

    say(role.main(args.adapter, args.base, args.out, args.dtype, args.threads or cores()))
