"""A run whose versions are published, sampled and replayed in int8, beside the same run in float32: reward, bytes and CPU.

    OMP_NUM_THREADS=1 python benchmarks/quantised.py [--seeds 1,2,3] [--sides float32,int8] [--keep FOLDER] [--quick]

The run of recipes/arithmetic.toml in recipes/one_file.py, which gives the bytes of the distributed run: a policy that adds
learns which answers pay. `int8` has policy.dtype = "int8" and the weights that come with it; `int8-plain` is the same
without them (ratio_to = "behaviour"). Every ten steps, both sides are measured on the same held-out tasks with the same
noise: what actors sample, and at the end also what the trainer keeps in float32. Bytes are those of a version's weights.
CPU-seconds are those of this process: of sampling, learning, writing a version and loading it; measurements are not
counted.

With `--keep`, each side of a seed is kept in a file of that folder and not run again, so a benchmark can be made in pieces.
The last line is JSON. The exit code is 1 if the mean reward at the end differs by more than 2 points.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]  # started as a file, as benchmarks are

import one_file  # noqa: E402

from shoal.chat.renderer import Renderer  # noqa: E402
from shoal.config import RunConfig, load_run, sampling_of  # noqa: E402
from shoal.engine.interface import Engine  # noqa: E402
from shoal.engine.open import EngineSpec, open_engine  # noqa: E402
from shoal.envs.evaluate import evaluate  # noqa: E402
from shoal.envs.load import env_of  # noqa: E402
from shoal.models.checkpoint import save_policy  # noqa: E402

STEPS, EVERY, EPISODES = 40, 10, 2048
"""Training steps, steps between measurements, and held-out episodes of one."""
BAR = 0.02
"""Largest difference of the mean rewards at the end."""
SIDES = {
    "float32": [],
    "int8": ['policy.dtype="int8"'],
    "int8-plain": ['policy.dtype="int8"', 'train.algorithm.ratio_to="behaviour"'],
}
"""What each side sets in the run file."""
PARTS = ("sample", "learn", "write", "load")

Result = dict[str, Any]
"""Of one side of a seed: `rewards` by step, `kept_reward`, `bytes` of a version by dtype, CPU-seconds by part."""


def main() -> int:
    """Run what is asked for, print the curves, and all figures as JSON at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--sides", default="float32,int8", help=f"of {', '.join(SIDES)}")
    parser.add_argument("--keep", type=Path, default=None, metavar="FOLDER", help="where the results of runs stay")
    parser.add_argument("--quick", action="store_true", help="2 steps of one seed: proves only that it runs")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    seeds = [int(seed) for seed in asked.seeds.split(",")][: 1 if asked.quick else None]
    sides, steps = asked.sides.split(","), 2 if asked.quick else STEPS
    found = {(side, seed): result_of(side, seed, steps, asked.keep) for seed in seeds for side in sides}
    figures: dict[str, Any] = {"seeds": seeds, "steps": steps}
    for side in sides:
        results = [found[side, seed] for seed in seeds]
        ends = [result["rewards"][-1][1] for result in results]
        figures[side] = {
            "rewards": ends,
            "reward": statistics.fmean(ends),
            "kept_rewards": [result["kept_reward"] for result in results],
            "curve": [statistics.fmean(at) for at in zip(*rewards_of(results), strict=True)],
            "cpu_s": {part: statistics.fmean(result["cpu_s"][part] for result in results) for part in PARTS},
            "version_bytes": results[0]["bytes"]["published"],
            "of_bfloat16": results[0]["bytes"]["published"] / results[0]["bytes"]["bfloat16"],
        }
        one = figures[side]
        said = " ".join(f"{reward:.3f}" for reward in one["curve"])
        cpu = " ".join(f"{part} {seconds:.1f}" for part, seconds in one["cpu_s"].items())
        print(f"{side:>10}: reward {said}; {one['version_bytes']:,} bytes; CPU-seconds {cpu}")
    differences = {side: figures[side]["reward"] - figures[sides[0]]["reward"] for side in sides[1:]}
    print(json.dumps({"benchmark": "quantised", **figures, "differences": differences}))
    return 0 if asked.quick or all(abs(difference) <= BAR for difference in differences.values()) else 1


def rewards_of(results: Sequence[Result]) -> list[list[float]]:
    """The curve of each seed."""
    return [[reward for _, reward in result["rewards"]] for result in results]


def result_of(side: str, seed: int, steps: int, keep: Path | None) -> Result:
    """What was kept of a run, or the run itself."""
    kept = None if keep is None else keep / f"{side}-{seed}-{steps}.json"
    if kept is not None and kept.exists():
        found: Result = json.loads(kept.read_text())
        return found
    found = measured(config_of(side, seed, steps))
    print(f"{side} seed {seed}: {found}", flush=True)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(found))
    return found


def config_of(side: str, seed: int, steps: int) -> RunConfig:
    """The run file of one side."""
    same = [f"steps={steps}", f"seed={seed}", "rollouts.max_staleness=0", "verify.audit_rate=1.0"]
    return load_run(ROOT / "recipes" / "arithmetic.toml", [*same, *SIDES[side]])


def measured(config: RunConfig) -> Result:
    """One run, measured every few steps and at its end."""
    rewards: list[tuple[int, float]] = []
    cpu_s: Counter[str] = Counter()
    learners: list[Any] = []

    def timed(part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def do(*args: Any, **options: Any) -> Any:
            began = time.process_time()
            try:
                return work(*args, **options)
            finally:
                cpu_s[part] += time.process_time() - began

        return do

    class Measuring:
        """An engine that is measured when it has loaded a version."""

        def __init__(self, spec: EngineSpec) -> None:
            self.engine = open_engine(spec)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.engine, name)

        def load(self, directory: Path, version: int) -> None:
            timed("load", self.engine.load)(directory, version)
            if version % EVERY == 0:
                rewards.append((version, reward_of(self.engine, config, directory)))

    def learner(*args: Any, **options: Any) -> Any:
        learners.append(one_file_learner(*args, **options))
        learners[-1].step = timed("learn", learners[-1].step)
        return learners[-1]

    one_file_learner = one_file.Learner
    hooks = {
        "open_engine": Measuring,
        "Learner": learner,
        "save_policy": timed("write", save_policy),
        "play_block": timed("sample", one_file.play_block),
    }
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        with patch.multiple(one_file, **hooks):
            one_file.train(config, out, ROOT / "recipes")
        actor = open_engine(EngineSpec(dtype=config.sampled_dtype, threads=1))
        actor.load(out / "published", config.steps)
        rewards.append((config.steps, reward_of(actor, config, out / "published")))
        sizes = {"published": weights_bytes(out / "published")}
        for dtype in ("float32", "bfloat16"):
            save_policy(learners[0].model, out / dtype, dtype, tokenizer_from=out / "published")
            sizes[dtype] = weights_bytes(out / dtype)
        kept = open_engine(EngineSpec(threads=1))
        kept.load(out / "float32", config.steps)
        kept_reward = reward_of(kept, config, out / "float32")
    return {"rewards": rewards, "kept_reward": kept_reward, "bytes": sizes, "cpu_s": dict(cpu_s)}


def reward_of(engine: Engine, config: RunConfig, directory: Path) -> float:
    """Mean reward on held-out tasks."""
    renderer, sampling = Renderer.from_directory(directory), sampling_of(config)
    return evaluate(engine, renderer, env_of(config.envs[0]), EPISODES, 0, sampling, 0).mean


def weights_bytes(directory: Path) -> int:
    """Bytes of a version's weights."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


if __name__ == "__main__":
    sys.exit(main())
