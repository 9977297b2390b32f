"""What a base in NF4 costs and saves beside one in float32 or bfloat16: bytes, memory and CPU time of an adapter's step and
of sampling.

`python -m benchmarks.adapted.coded 100m` ends with one line of JSON. Each base is measured in a process of its own, which
takes a step and writes a turn once before it is measured.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.real.resident import peak_mb
from benchmarks.real.shapes import SHAPES
from shoal.config import TrainConfig
from shoal.engine.interface import EngineRequest
from shoal.engine.native import LocalEngine
from shoal.models.checkpoint import load_policy, write_nf4
from shoal.models.lora import begin_adapter
from shoal.models.lora_config import AdapterSpec
from shoal.models.random_model import make_shaped
from shoal.train.learner import Learner
from shoal.train.rows import TrainingRow

BASES = (("float32", "float32"), ("bfloat16", "bfloat16"), ("nf4", "float32"), ("nf4", "bfloat16"))
"""How the base is kept, and what it is computed in."""

ROWS, TOKENS, WRITTEN, REPEATS = 8, 128, 16, 3
"""Rows of a step, their tokens, tokens of a turn, and how often each is measured."""


def prepare(shape: str, folder: Path) -> dict[str, int]:
    """Write the same random policy with each base; returns the bytes of their weights."""
    (folder / "shape").mkdir()
    (folder / "shape" / "config.json").write_text(json.dumps(SHAPES[shape]))
    for dtype in ("float32", "bfloat16"):
        make_shaped(folder / "shape", folder / dtype, 0, dtype)
    write_nf4(folder / "bfloat16", folder / "nf4")
    return {base: sum(path.stat().st_size for path in (folder / base).glob("*.safetensors")) for base, _ in BASES}


def step(directory: Path, dtype: str) -> dict[str, float]:
    """The CPU-seconds of a step over a base, and the most memory that the process took."""
    model = load_policy(directory, getattr(torch, dtype))
    begin_adapter(model, AdapterSpec(8, 16.0), 1)
    config = TrainConfig(
        microbatch_tokens=ROWS * TOKENS,
        recompute="layers",
        warmup_steps=0,
        dtype="bfloat16" if dtype == "bfloat16" else "",
    )
    learner, rng = Learner(model, config, temperature=1.0, steps=10), np.random.default_rng(0)
    one, own = np.ones(TOKENS // 2, np.float32), np.arange(TOKENS // 2, TOKENS)
    said = rng.integers(0, model.spec.vocab_size, (ROWS, TOKENS))
    rows = [TrainingRow(said[i], own, -one, one, one, 1.0, 0, "", (0, i, 0)) for i in range(ROWS)]
    return {"s": _cpu_s(lambda: learner.step(rows, 0)), "mb": peak_mb()}


def turn(directory: Path, dtype: str) -> dict[str, float]:
    """The CPU-seconds of a turn of 16 conversations, and the most memory that the process took."""
    engine = LocalEngine(1, dtype)
    engine.load(directory, 0)
    asked = [EngineRequest(str(i), [5 + i, 9, 2, 7], bytes([i]) * 32, WRITTEN, frozenset()) for i in range(16)]

    def write() -> None:
        engine.extend(asked, 1.0)
        engine.forget(request.rollout for request in asked)

    return {"s": _cpu_s(write), "mb": peak_mb()}


def _cpu_s(work: object) -> float:
    work()  # type: ignore[operator]
    taken = []
    for _ in range(REPEATS):
        began = time.process_time()
        work()  # type: ignore[operator]
        taken.append(time.process_time() - began)
    return statistics.median(taken)


def main() -> None:
    """Measure every base, each kind of work in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--alone", nargs=3, metavar=("WORK", "DIRECTORY", "DTYPE"), help="measure in this process")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.alone:
        print(json.dumps({"step": step, "turn": turn}[asked.alone[0]](Path(asked.alone[1]), asked.alone[2])))
        return
    with tempfile.TemporaryDirectory() as scratch:
        found: dict[str, object] = {"bytes": prepare(asked.shape, Path(scratch))}
        for work in ("step", "turn"):
            for base, dtype in BASES:
                command = [sys.executable, "-m", "benchmarks.adapted.coded", asked.shape, "--alone", work]
                done = subprocess.run(
                    [*command, f"{scratch}/{base}", dtype], capture_output=True, text=True, check=True
                )
                name = f"{work}, {base} in {dtype}"
                found[name] = json.loads(done.stdout.splitlines()[-1])
                print(name, found[name], flush=True)
        print(json.dumps(found))


if __name__ == "__main__":
    main()
