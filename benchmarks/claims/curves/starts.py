"""The policies that the runs begin with: each is made once, by imitation of a scripted player, in a few seconds.

Called by `kept`. A start is a recipe of `shoal sft`, in a grid. The same recipe gives the same bytes on one kind of
machine.
"""

from pathlib import Path
from typing import Any

from benchmarks.claims.curves.harness import ROOT
from shoal.config import SftConfig
from shoal.jobs import sft
from shoal.tree import from_tree, merge


def make_start(recipe: dict[str, Any], out: Path) -> None:
    """Write the policy of a recipe to the folder `out`, whole or not at all."""
    env = recipe["env"]
    name = str(ROOT / env["name"]) if env["name"].endswith(".py") else env["name"]
    tree = merge(recipe, {"env": {"name": name}, "publish_dtype": "float32", "threads": 1})
    sft.make(from_tree(tree, SftConfig, "benchmarks/claims/curves/grid.py"), ROOT, out)
