"""Real models at real speed: architectures, router flips, decoding and training at real shapes, and what is refused.

    python benchmarks/real_models.py [--only architectures,flips,refusals,decode,train,long_row] [--shapes 25m,100m,0.6b]
    python benchmarks/real_models.py --keep FOLDER --only architectures --names "llama;olmoe"
    python benchmarks/real_models.py --quick

Each part prints a line for each measurement; the last line is JSON with the figures of all parts that ran. The exit code
is 1 if a bar is missed. `--names` takes some of the architectures. With `--keep`, what was measured is kept in that folder
and not measured again, so that a long run can be made in pieces, and the last one asks for all. Policies are random and
nothing is downloaded; TRL is installed into `.venv-trl` when it is missing, or give its interpreter with --peer.
CPU-seconds of one thread; medians.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the zoo lies outside the package

from benchmarks.pages.real_models import tables
from benchmarks.real import architectures, decoding, flips, training
from benchmarks.real.kept import Kept
from benchmarks.real.refusals import refusals
from benchmarks.real.rows import Batch
from benchmarks.real.shapes import SHAPES, make_shape
from shoal.config import child_environment

FULL_SHAPES = ("25m", "100m", "0.6b")
BARS = {"decode_grouped": 1.5, "decode_distinct": 1.0, "train": 1.0, "memory_above": 0.4, "logits_off": 1e-4,
        "rollouts": 0.95, "submissions": 0.999, "honest_groups": 500}  # fmt: skip
"""What the issue asks: ratios to the peer, distance from `transformers`, shares of cheats that are caught, and the least
number of honest groups of each architecture."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--names", default=";".join(architectures.NAMES), help="architectures, with semicolons between")
    parser.add_argument("--shapes", default=",".join(FULL_SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--batches", default="16,64", help="rows that decode together; the shape 0.6b has 16 alone")
    parser.add_argument("--groups", type=int, default=0, help="honest groups of each architecture, entropy and dtype")
    parser.add_argument("--repeats", type=int, default=3, help="of each timing")
    parser.add_argument("--peer", type=Path, default=None, help="interpreter that has TRL")
    parser.add_argument("--keep", type=Path, default=None, help="folder for what was measured, policies included")
    parser.add_argument("--quick", action="store_true", help="small and few: it shows that all parts work")
    options = parser.parse_args()
    if options.quick:
        options.groups, options.repeats, options.shapes = options.groups or 8, 1, "tiny"
    began, load = time.process_time(), round(os.getloadavg()[0], 2)
    with tempfile.TemporaryDirectory() as scratch:
        policies = options.keep / "policies" if options.keep else Path(scratch)
        found = {part: PARTS[part](options, policies, Kept(options.keep)) for part in options.only.split(",")}
    missed = [one for part in found.values() for one in part.pop("missed", [])]
    for one in missed:
        print(f"missed: {one}", flush=True)
    rows = {part: figures.pop("rows", []) for part, figures in found.items()}
    figures = {"benchmark": "real_models", "load_before": load, **found, "missed": len(missed)}
    figures["cpu_minutes"] = round((time.process_time() - began) / 60, 1)
    print(json.dumps(figures | {"tables": tables(rows)}))
    return int(bool(missed) and not options.quick)


def run_architectures(options: argparse.Namespace, policies: Path, kept: Kept) -> dict[str, Any]:
    """Honest work and cheats of each architecture."""
    groups, train_groups = (options.groups or 84), (4 if options.quick else 32)
    found = list(architectures.measure(options.names.split(";"), policies, groups, train_groups, kept))
    summary = architectures.summary(found)
    print(f"architectures: {summary}", flush=True)
    return summary | {"rows": found, "missed": architectures.faults(summary, BARS)}


def run_flips(options: argparse.Namespace, policies: Path, kept: Kept) -> dict[str, Any]:
    """Router flips of mixtures of experts."""
    groups, targets = (options.groups or 128), (architectures.TARGETS[:1] if options.quick else architectures.TARGETS)
    return {"rows": list(flips.measure(policies, groups, 4 if options.quick else 32, targets, kept))}


def run_refusals(options: argparse.Namespace, policies: Path, kept: Kept) -> dict[str, Any]:
    """What no run starts from."""
    with tempfile.TemporaryDirectory() as scratch:
        rows = list(refusals(Path(scratch)))
    assert all(row["line"] and "\n" not in row["line"] for row in rows), "each is refused, in one line"
    return {"cases": len(rows), "rows": rows}


def run_decode(options: argparse.Namespace, policies: Path, kept: Kept) -> dict[str, Any]:
    """Decoding beside `transformers.generate`."""
    rows = []
    for shape in options.shapes.split(","):
        load = LOADS[shape]._replace(repeats=options.repeats)
        print(f"{shape}: prompts of {load.prompt} tokens, {load.new} new", flush=True)
        batches = [int(batch) for batch in options.batches.split(",")] if shape != "0.6b" else [16]
        rows += decoding.measure(make_shape(shape, policies), shape, batches, load, kept)
    least = {
        f"least_{kind}": min(row["ratio"] for row in rows if row["load"] == kind) for kind in ("grouped", "distinct")
    }
    missed = [
        f"decode, {row['shape']}, {row['load']} at {row['batch']}: {row['ratio']:.2f}, asked {asked}"
        for row in rows
        if row["ratio"] < (asked := BARS[f"decode_{row['load']}"])
    ]
    by_name = {f"{row['shape'].replace('.', '_')}_{row['load']}_b{row['batch']}": row for row in rows}
    return least | by_name | {"rows": rows, "missed": missed}


LOADS = {
    "tiny": decoding.Load(16, 4, 1),
    "25m": decoding.Load(128, 64, 3),
    "100m": decoding.Load(128, 32, 3),
    "0.6b": decoding.Load(64, 8, 1),
}
"""Prompt and new tokens: as many as a core computes in minutes."""


def run_train(options: argparse.Namespace, policies: Path, kept: Kept) -> dict[str, Any]:
    """Training beside TRL: completions of one length, and of many."""
    peer, rows = options.peer or _installed_peer(), []
    for shape in options.shapes.split(","):
        directory = make_shape(shape, policies)
        for batch in BATCHES[shape]:
            for recompute in RECOMPUTE.get(shape, (False, True)):
                effort = EFFORTS.get(shape, training.Effort(options.repeats))
                rows.append(training.measure(peer, directory, shape, batch, effort, recompute, kept))
    missed = [f"training, {row['name']}: {fault}" for row in rows for fault in training.faults(row, BARS)]
    return {
        "least_ratio": min(row["ratio_tokens_per_cpu_s"] for row in rows),
        "most_memory_above": max((r["ratio_memory_above"] for r in rows if r["microbatches_are_equal"]), default=None),
        "most_losses_apart": max(row["losses_apart"] for row in rows),
        **{row["name"]: row for row in rows}, "rows": rows, "missed": missed,
    }  # fmt: skip


BATCHES = {
    "tiny": (Batch(1, 4, 16, 8, 16, 64),),
    "25m": (Batch(2, 8, 128, 384, 384), Batch(2, 8, 128, 64, 384)),
    "100m": (Batch(2, 8, 128, 384, 384), Batch(2, 8, 128, 64, 384)),
    "0.6b": (Batch(1, 8, 128, 384, 384),),
}
"""Groups of rows: 4,096 padded tokens a micro-batch."""

RECOMPUTE = {"100m": (False,), "0.6b": (True,)}
"""Whether activations are computed again, where a step takes many minutes. 0.6B would need 22 GB if they were kept."""

EFFORTS = {"0.6b": training.Effort(repeats=1, steps=2, peer_tokens=1024)}
"""With 4,096 tokens, TRL would need more than 24 GB for this shape."""


def run_long_row(options: argparse.Namespace, policies: Path, kept: Kept) -> dict[str, Any]:
    """One row of 32k tokens."""
    shape, tokens = ("tiny", 512) if options.quick else ("25m", 32_768)
    return training.long_row(make_shape(shape, policies), shape, tokens, kept)


def _installed_peer() -> Path:
    from benchmarks.whole_system import ensure_peer

    return ensure_peer()


PARTS: dict[str, Callable[[argparse.Namespace, Path, Kept], dict[str, Any]]] = {
    "architectures": run_architectures, "flips": run_flips, "refusals": run_refusals, "decode": run_decode,
    "train": run_train, "long_row": run_long_row,
}  # fmt: skip


if __name__ == "__main__":
    if os.environ.get("OMP_WAIT_POLICY") != "PASSIVE":  # threads and memory are settled when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], child_environment(threads=1))
    sys.exit(main())
