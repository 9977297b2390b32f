"""What the papers of our algorithms claim, tested exactly or by runs.

    OMP_NUM_THREADS=1 python benchmarks/shelf.py [--only exact] [--quick]
    OMP_NUM_THREADS=1 python benchmarks/shelf.py --only runs --keep runs/shelf --pictures docs/pictures

Each part measures something and says what it has missed: `claims/exact.py` counts, without sampling; `claims/curves` trains
small policies by a grid that was committed before its first run. With --keep, each run is kept in a file of that folder, so
a command that was stopped goes on, and nothing is run twice. The last line is JSON; the exit code is 1 if something was
missed. That a claim is not reproduced by runs is a result: it misses nothing.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # started as a file, as benchmarks are

from benchmarks.claims import exact  # noqa: E402
from benchmarks.claims.curves import part as runs  # noqa: E402


class Part(NamedTuple):
    """A part of the benchmark."""

    measure: Callable[[argparse.Namespace], dict[str, Any]]
    """Its figures, given the arguments; `missed` lists what did not come out."""
    told: Callable[[dict[str, Any]], str]
    """The figures for people."""


def _runs(asked: argparse.Namespace) -> dict[str, Any]:
    return runs.measure(asked.quick, asked.keep, asked.pictures, [name for name in asked.claims.split(",") if name])


PARTS = {
    "exact": Part(lambda asked: exact.measure(asked.quick), exact.told),
    "runs": Part(_runs, runs.told),
}


def main() -> int:
    """Measure the parts, print what they found, and all figures as JSON at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="as little as proves that it runs")
    parser.add_argument("--keep", default="", metavar="FOLDER", help="where runs are kept (default: nowhere)")
    parser.add_argument("--claims", default="", help="of the part runs: which claims (default: all)")
    parser.add_argument("--pictures", default="", metavar="FOLDER", help="where their pictures go (default: nowhere)")
    asked = parser.parse_args()
    names = asked.only.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--only {','.join(unknown)}: known are {', '.join(PARTS)}")
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    tables: dict[str, str] = {}
    for name in names:
        figures[name] = PARTS[name].measure(asked)
        tables |= figures[name].pop("tables", {})
        print(f"{name}\n{PARTS[name].told(figures[name])}", flush=True)
    print(json.dumps({"benchmark": "shelf", **figures, "tables": tables}))
    return int(any(figures[name]["missed"] for name in names))


if __name__ == "__main__":
    sys.exit(main())
