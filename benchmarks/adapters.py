"""Runs that learn an adapter: what one of the shape of Qwen3-0.6B takes, and how rewards rise beside TRL with PEFT.

    python benchmarks/adapters.py [--only size,curves] [--seeds 1,2,3] [--keep FOLDER] [--peer PYTHON]
    python benchmarks/adapters.py --quick

*size*: ten steps of `recipes/qwen3-0.6b-gsm8k.toml --random-policy` with an adapter of rank 8, on the CPU, as real
processes. Bars: at most 6 GB of memory a process, 5 GB of disk for the run's folder, 2 % of the whole model's bytes
published a step, and logits within 0.001 of what PEFT computes with the published adapter, in float32.

*curves*: a policy of 25M parameters learns to write vowels by an adapter, in runs of `adapters.toml` and with TRL's
GRPOTrainer and PEFT: same first weights, adapter, tasks, reward, batch, learning rate and steps. Bars: the mean rewards of
the last quarter differ by no more than two samples of equal methods do in 95 of 100 cases (Student's t over the seeds), and
by at most a tenth of what the reward rises; both sides rise by 0.2 or more.

TRL and PEFT are installed into `.venv-trl` when they are missing, or give their interpreter with --peer. With `--keep`,
what each run showed is kept in that folder and not run again, so a benchmark can be made in pieces. The last line is JSON.
The exit code is 1 if a bar is missed.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started as a file, as benchmarks are

from benchmarks.adapted import curves, size
from benchmarks.real.kept import Kept
from benchmarks.real.shapes import SHAPES
from benchmarks.whole_system import ensure_peer
from shoal.config import child_environment, load_run
from shoal.run_folder import RunFolder

STEPS = 10
"""Of the run that is sized."""

SIZE_BARS = {"peak_gb_most": 6.0, "disk_gb": 5.0, "step_share": 0.02, "logits_off": 1e-3}
LEAST_MOVED = 0.1
"""A logit by the adapter: else PEFT without it would agree, too."""
LEAST_RISE, MOST_OF_RISE = 0.2, 0.1

QUICK = ("policy.dtype=float32", "train.dtype=")
"""What --quick sets in the run that is sized: products of bfloat16 are slow on a CPU without them."""


def main() -> int:
    """Run what is asked for, print a line for each measurement, and all figures as JSON at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--seeds", default="1,2,3", help="of the curves")
    parser.add_argument("--keep", type=Path, default=None, metavar="FOLDER", help="where the results of runs stay")
    parser.add_argument("--peer", type=Path, default=None, metavar="PYTHON", help="interpreter that has TRL and PEFT")
    parser.add_argument(
        "--quick", action="store_true", help="small and few: proves only that it runs; no peer, no bars"
    )
    asked = parser.parse_args()
    curves.demand_seeds(len(asked.seeds.split(",")))
    peer = asked.peer if asked.peer or asked.quick else ensure_peer()
    figures: dict[str, Any] = {"benchmark": "adapters"}
    with tempfile.TemporaryDirectory() as scratch:
        folder = (asked.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for part in asked.only.split(","):
            figures[part] = PARTS[part](asked, peer, folder)
    missed = (
        [fault for part in asked.only.split(",") for fault in MISSED[part](figures[part])] if not asked.quick else []
    )
    for fault in missed:
        print(f"missed: {fault}")
    print(json.dumps(figures))
    return 1 if missed else 0


def run_size(asked: argparse.Namespace, peer: Path | None, folder: Path) -> dict[str, Any]:
    """The run that is sized. Its folder is deleted afterwards."""
    steps, changes = (2, QUICK) if asked.quick else (STEPS, ())

    def make() -> dict[str, Any]:
        shape = _small_shape(folder) if asked.quick else None
        shutil.rmtree(folder / "sized", ignore_errors=True)
        run = RunFolder(folder / "sized" / "run")
        watch = size.run(run.root, steps, shape, *changes)
        found = size.figures(watch, run)
        if peer is not None:
            found |= size.beside_peft(peer, run, folder)
        shutil.rmtree(folder / "sized")
        return found

    found = Kept(folder).result("size", {"quick": asked.quick, "steps": steps, "peer": peer is not None}, make)
    roles = ", ".join(f"{name} {gb:.2f}" for name, gb in found["peak_gb"].items())
    print(f"size, {found['steps']} steps, a base of {found['base_gb']:.2f} GB: GB of memory at most: {roles}")
    print(
        f"  {found['disk_gb']:.2f} GB of disk; {found['step_mb']:.1f} MB a step, {found['step_share']:.2%} of the base"
    )
    if "logits_off" in found:
        print(f"  PEFT: logits within {found['logits_off']:.1e}; the adapter moves them by {found['logits_moved']:.2f}")
    return found


def _small_shape(folder: Path) -> Path:
    """A directory with the config of a tiny model."""
    shape = folder / "shape"
    shape.mkdir(exist_ok=True)
    (shape / "config.json").write_text(json.dumps(SHAPES["tiny"]))
    return shape


def missed_size(found: dict[str, Any]) -> list[str]:
    """The bars that the run missed."""
    faults = [f"{name} = {found[name]:.3g}, bar {bar}" for name, bar in SIZE_BARS.items() if not found[name] <= bar]
    if not found["logits_moved"] >= LEAST_MOVED:
        faults.append(f"the adapter moves a logit by {found['logits_moved']:.3g} only, bar {LEAST_MOVED}")
    return faults


def run_curves(asked: argparse.Namespace, peer: Path | None, folder: Path) -> dict[str, Any]:
    """Both sides of each seed in turn."""
    shape, steps = (curves.SMALL, 4) if asked.quick else (curves.SHAPE, load_run(curves.RECIPE).steps)
    seeds = [int(seed) for seed in asked.seeds.split(",")][: 1 if asked.quick else None]
    found: dict[str, list[curves.Result]] = {side: [] for side in curves.SIDES if side == "shoal" or peer is not None}
    for seed in seeds:
        for side, results in found.items():
            results.append(curves.result_of(side, seed, steps, shape, peer or Path(), folder))
    figures = curves.compared(found) if len(found) == 2 else {"shoal": curves.side_of(found["shoal"])}
    for side in found:
        one = figures[side]
        print(f"{side:>6}: reward by quarters {one['quarters']}, ends {one['ends']}, {one['cpu_s']:.0f} CPU-s a run")
    if len(found) == 2:
        print(
            f"the ends differ by {figures['difference']:+.4f}; equal methods differ by less than {figures['noise']:.4f}"
        )
    return {"seeds": seeds, "steps": steps} | figures


def missed_curves(found: dict[str, Any]) -> list[str]:
    """The bars that the curves missed."""
    faults = [f"{side} rises by {found[side]['rise']:.3f} only, bar {LEAST_RISE}"
              for side in curves.SIDES if not found[side]["rise"] >= LEAST_RISE]  # fmt: skip
    if not abs(found["difference"]) <= found["noise"]:
        faults.append(f"the ends differ by {found['difference']:+.4f}, bar {found['noise']:.4f}")
    if not found["difference_over_rise"] <= MOST_OF_RISE:
        faults.append(f"the ends differ by {found['difference_over_rise']:.3f} of the rise, bar {MOST_OF_RISE}")
    return faults


PARTS: dict[str, Callable[[argparse.Namespace, Path | None, Path], dict[str, Any]]] = {
    "size": run_size, "curves": run_curves,
}  # fmt: skip
MISSED: dict[str, Callable[[dict[str, Any]], list[str]]] = {"size": missed_size, "curves": missed_curves}


if __name__ == "__main__":
    if os.environ.get("OMP_WAIT_POLICY") != "PASSIVE":  # threads and memory are settled when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], child_environment(threads=1))
    sys.exit(main())
