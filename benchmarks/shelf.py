"""What the papers of our algorithms claim, tested exactly or by runs.

    OMP_NUM_THREADS=1 python benchmarks/shelf.py [--only exact] [--quick]

Each part measures something and says what it has missed: `claims/exact.py` counts, without sampling. The last line is
JSON; the exit code is 1 if something was missed.
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


class Part(NamedTuple):
    """A part of the benchmark."""

    measure: Callable[[bool], dict[str, Any]]
    """Its figures, given whether to be quick; `missed` lists what did not come out."""
    told: Callable[[dict[str, Any]], str]
    """The figures for people."""


PARTS = {"exact": Part(exact.measure, exact.told)}


def main() -> int:
    """Measure the parts, print what they found, and all figures as JSON at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="as little as proves that it runs")
    asked = parser.parse_args()
    names = asked.only.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--only {','.join(unknown)}: known are {', '.join(PARTS)}")
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    for name in names:
        figures[name] = PARTS[name].measure(asked.quick)
        print(f"{name}\n{PARTS[name].told(figures[name])}", flush=True)
    print(json.dumps({"benchmark": "shelf", **figures}))
    return int(any(figures[name]["missed"] for name in names))


if __name__ == "__main__":
    sys.exit(main())
