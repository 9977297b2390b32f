"""Training tokens a second and peak memory beside TRL, for the same batch; and one very long row.

Called by `benchmarks/real_models.py`. Each side is a process of its own, pinned to one thread, that takes the same
optimiser steps on the same rows: `benchmarks/real/one_side.py` with our learner, `benchmarks/peers/trl_steps.py` with
the loss of TRL's GRPOTrainer and AdamW. The two alternate; figures are medians of CPU-seconds.

Memory above weights and optimiser state is what a step adds to what the process had before it loaded the policy, without 12
bytes for each weight (itself and two moments, float32). Gradients are part of it, on both sides.

Both sides must also learn the same: their losses are compared step by step.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.real.kept import Kept
from benchmarks.real.rows import Batch
from benchmarks.real.shapes import ROOT
from shoal.config import child_environment

STATE_BYTES = 12

SAME_LOSSES = 0.01
"""By how much the losses of a step may differ, as a share of the largest loss: both compute the same in float32."""

LEAST_LOSS = 1e-4
"""A largest loss below this counts as this: rounding is not in proportion to a loss of almost 0."""


class Effort(NamedTuple):
    """How often both sides are timed, and with what."""

    repeats: int
    """Processes of each side."""
    steps: int = 3
    """Of each process; the first is not timed."""
    peer_tokens: int = 0
    """Padded tokens of the peer's forward pass, if as many as ours take too much memory; 0: as many as ours."""


def measure(
    peer_python: Path, directory: Path, shape: str, batch: Batch, effort: Effort, recompute: bool, kept: Kept
) -> dict[str, Any]:
    """Both sides in turn. The ratios are of medians."""
    theirs_at = dataclasses.replace(batch, microbatch_tokens=effort.peer_tokens or batch.microbatch_tokens)
    lengths = "even" if batch.shortest == batch.longest else "uneven"
    name = f"{shape.replace('.', '_')}_{lengths}{'_recomputed' * recompute}"

    def sides() -> dict[str, Any]:
        ours, theirs = [], []
        for _ in range(effort.repeats):
            ours.append(run_side(Path(sys.executable), "real/one_side.py", directory, batch, recompute, effort.steps))
            theirs.append(run_side(peer_python, "peers/trl_steps.py", directory, theirs_at, recompute, effort.steps))
        return {
            "shoal": _medians(ours), "trl": _medians(theirs),
            "losses_apart": max(losses_apart(*pair) for pair in zip(ours, theirs, strict=True)),
        }  # fmt: skip

    asked = dataclasses.asdict(batch) | effort._asdict()
    figures = kept.result(f"train {name}", asked, sides)
    shoal, trl = figures["shoal"], figures["trl"]
    found = {
        "name": name, "shape": shape, "rows": batch.rows, "tokens": batch.tokens, "recompute": recompute,
        "peer_microbatch_tokens": theirs_at.microbatch_tokens, "microbatches_are_equal": theirs_at == batch, **figures,
        "ratio_tokens_per_cpu_s": round(shoal["tokens_per_cpu_s"] / trl["tokens_per_cpu_s"], 3),
        "ratio_memory_above": round(shoal["above_mb"] / trl["above_mb"], 3),
    }  # fmt: skip
    print(
        f"training, {shape}, completions of {batch.shortest} to {batch.longest} tokens{', recomputed' * recompute}: shoal "
        f"{shoal['tokens_per_cpu_s']:.0f} tokens per CPU-second and {shoal['above_mb']:.0f} MB above "
        f"weights and state, TRL {trl['tokens_per_cpu_s']:.0f} and {trl['above_mb']:.0f} MB: ratios "
        f"{found['ratio_tokens_per_cpu_s']:.2f} and {found['ratio_memory_above']:.2f}; losses {shoal['loss']:.5g} and "
        f"{trl['loss']:.5g}, apart by {found['losses_apart']:.2%} of the largest",
        flush=True,
    )
    return found


def losses_apart(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The largest difference of a step's loss, as a share of the largest loss of the peer."""
    largest = max(abs(loss) for loss in theirs["losses"])
    apart = max(abs(one - other) for one, other in zip(ours["losses"], theirs["losses"], strict=True))
    return float(apart / max(largest, LEAST_LOSS))


def faults(found: dict[str, Any], bars: dict[str, float]) -> list[str]:
    """The bars that a measurement misses. Memory has one only where both sides had as many tokens at a time."""
    said = []
    if found["losses_apart"] > SAME_LOSSES:
        said.append(f"losses are apart by {found['losses_apart']:.2%} of the largest, limit {SAME_LOSSES:.0%}")
    if found["ratio_tokens_per_cpu_s"] < bars["train"]:
        said.append(f"{found['ratio_tokens_per_cpu_s']:.2f} times TRL's speed, asked {bars['train']}")
    if found["microbatches_are_equal"] and found["ratio_memory_above"] > bars["memory_above"]:
        said.append(f"{found['ratio_memory_above']:.2f} times TRL's memory above, limit {bars['memory_above']}")
    return said


def long_row(directory: Path, shape: str, tokens: int, kept: Kept) -> dict[str, Any]:
    """One row of so many tokens, of which the last 64 are learned from: does a step go through, and what does it take?"""
    batch = Batch(1, 1, tokens - 64, 64, 64, microbatch_tokens=tokens)

    def step() -> dict[str, Any]:
        ours = run_side(Path(sys.executable), "real/one_side.py", directory, batch, recompute=True, steps=1)
        return {name: ours[name] for name in ("cpu_s", "tokens_per_cpu_s", "above_mb", "peak_mb")}

    found = kept.result(f"long row {shape}", {"tokens": tokens}, step)
    print(
        f"one row of {tokens} tokens, {shape}: {found['cpu_s']:.0f} CPU-s, {found['above_mb']:.0f} MB above", flush=True
    )
    return {"shape": shape, "tokens": tokens} | found


def run_side(python: Path, script: str, directory: Path, batch: Batch, recompute: bool, steps: int) -> dict[str, Any]:
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
