"""Training tokens a second and peak memory beside TRL, for the same batch; and one very long row.

Called by `benchmarks/real_models.py`. Each side is a process of its own, pinned to one thread, that takes the same
optimiser steps on the same rows: `benchmarks/real/one_side.py` with our learner, `benchmarks/peers/trl_steps.py` with
the loss of TRL's GRPOTrainer and AdamW. The two alternate; figures are medians of CPU-seconds.

Memory above weights and optimiser state is what a step adds to what the process had before it loaded the policy, without 12
bytes for each weight (itself and two moments, float32). Gradients are part of it, on both sides.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.real.rows import Batch
from benchmarks.real.shapes import ROOT
from shoal.config import child_environment

STATE_BYTES = 12


def measure(
    peer_python: Path, directory: Path, shape: str, batch: Batch, repeats: int, recompute: bool
) -> dict[str, Any]:
    """Both sides in turn, `repeats` times. The ratios are of medians."""
    ours, theirs = [], []
    for _ in range(repeats):
        ours.append(run_side(Path(sys.executable), "real/one_side.py", directory, batch, recompute))
        theirs.append(run_side(peer_python, "peers/trl_steps.py", directory, batch, recompute))
    figures = {name: _medians(sides) for name, sides in (("shoal", ours), ("trl", theirs))}
    found = {
        "shape": shape, "rows": batch.rows, "tokens": batch.tokens, "recompute": recompute, **figures,
        "ratio_tokens_per_cpu_s": round(figures["shoal"]["tokens_per_cpu_s"] / figures["trl"]["tokens_per_cpu_s"], 3),
        "ratio_memory_above": round(figures["shoal"]["above_mb"] / figures["trl"]["above_mb"], 3),
    }  # fmt: skip
    print(
        f"training, {shape}, completions of {batch.shortest} to {batch.longest} tokens{', recomputed' * recompute}: shoal "
        f"{figures['shoal']['tokens_per_cpu_s']:.0f} tokens per CPU-second and {figures['shoal']['above_mb']:.0f} MB above "
        f"weights and state, TRL {figures['trl']['tokens_per_cpu_s']:.0f} and {figures['trl']['above_mb']:.0f} MB: ratios "
        f"{found['ratio_tokens_per_cpu_s']:.2f} and {found['ratio_memory_above']:.2f}",
        flush=True,
    )
    return found


def long_row(directory: Path, shape: str, tokens: int) -> dict[str, Any]:
    """One row of so many tokens, of which the last 64 are learned from: does a step go through, and what does it take?"""
    batch = Batch(1, 1, tokens - 64, 64, 64, microbatch_tokens=tokens)
    found = _with_rates(
        run_side(Path(sys.executable), "real/one_side.py", directory, batch, recompute=True, steps=1), batch
    )
    print(
        f"one row of {tokens} tokens, {shape}: {found['cpu_s']:.0f} CPU-s, {found['above_mb']:.0f} MB above", flush=True
    )
    return {"shape": shape, "tokens": tokens} | found


def run_side(
    python: Path, script: str, directory: Path, batch: Batch, recompute: bool, steps: int = 3
) -> dict[str, Any]:
    """What one process measured: CPU-seconds of each step after the first, and memory."""
    asked = json.dumps(dataclasses.asdict(batch) | {"recompute": recompute, "steps": steps})
    command = [str(python), str(ROOT / "benchmarks" / script), str(directory), asked]
    environment = os.environ | child_environment(threads=1) | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return _with_rates(found, batch)


def _with_rates(found: dict[str, Any], batch: Batch) -> dict[str, Any]:
    cpu_s = statistics.median(found["cpu_s"]) if isinstance(found["cpu_s"], list) else found["cpu_s"]
    above = found["peak_mb"] - found["before_mb"] - found["parameters"] * STATE_BYTES / 2**20
    return found | {"cpu_s": cpu_s, "tokens_per_cpu_s": batch.tokens / cpu_s, "above_mb": above}


def _medians(sides: list[dict[str, Any]]) -> dict[str, float]:
    return {
        name: round(statistics.median(side[name] for side in sides), 2)
        for name in ("tokens_per_cpu_s", "cpu_s", "above_mb", "peak_mb", "loss")
    }
