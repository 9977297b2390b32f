"""Tokens that a run generates until it solves a share of held-out tasks: a curriculum beside uniform draws.

    python benchmarks/curriculum.py [--seeds 1,2,3] [--jobs 1] [--quick]

Three difficulties of sums, 512 tasks of each: one-digit numbers, which the policy soon masters; two-digit numbers, which it
learns; three two-digit numbers, which stay out of its reach. Only exact answers earn anything. The policy starts from
recipes/arithmetic-start. The two sides of a seed have the same run file but for `[difficulty]`: curriculum and pools, with
their defaults. They run recipes/one_file.py, which gives the bytes of the distributed run.

Tokens are those that the policy wrote in all rollouts that were made, also of groups without signal. The solve rate is that
of held-out tasks of all three difficulties, in equal parts, measured every four steps. Tokens to a target are read off
between the two measurements around it, each the mean with the one before. Other targets than the main one are given, too:
early in a run most draws still teach, so a curriculum saves less. The last line is JSON.
"""

import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.measure import ROOT, arguments, numbers, report
from recipes import one_file
from shoal.chat.renderer import Renderer
from shoal.config import RunConfig, check_run, sampling_of
from shoal.envs.evaluate import evaluate
from shoal.envs.load import env_of
from shoal.protocol.messages import Block, Group
from shoal.typed_toml import from_tree

LEVELS = ({"digits": 1}, {"digits": 2}, {"digits": 2, "operands": 3})
"""Arguments of the three difficulties, easiest first."""
ENVIRONMENT = ROOT / "benchmarks" / "envs" / "exact_sums.py"
STEPS, EVERY = 60, 4
"""Training steps, and steps between measurements."""
NUM_TASKS, EPISODES = 512, 512
"""Tasks of each difficulty, and held-out episodes of each in a measurement."""
TARGETS = (0.50, 0.53, 0.55, 0.56, 0.57, 0.58)
TARGET, BAR = 0.57, 0.7
"""The main target, and the largest share of the tokens that the curriculum may need to it."""
SIDES = ("uniform", "curriculum")

Curve = list[tuple[int, list[float]]]
"""Tokens so far, and the solve rate of each difficulty, for each measurement."""


def main() -> int:
    """Run both sides of each seed, print their curves, and all figures as JSON at the end."""
    parser = arguments(__doc__, "8 steps of one seed: proves only that it runs")
    parser.add_argument("--seeds", type=numbers, default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    asked = parser.parse_args()
    seeds = asked.seeds[: 1 if asked.quick else None]
    runs = [(seed, 8 if asked.quick else STEPS, side) for seed in seeds for side in SIDES]
    with ProcessPoolExecutor(asked.jobs, get_context("spawn")) as pool:
        curves = dict(zip([(seed, side) for seed, _, side in runs], pool.map(measured, runs), strict=True))
    figures: dict[str, Any] = {}
    for target in TARGETS:
        tokens = {side: [tokens_to(curves[seed, side], target) for seed in seeds] for side in SIDES}
        ratios = [ours / theirs for ours, theirs in zip(tokens["curriculum"], tokens["uniform"], strict=True)]
        print(f"to {target:.0%}: {' '.join(f'{ratio:.2f}' for ratio in ratios)} of the tokens of uniform draws")
        name = f"{100 * target:.0f}"
        figures |= {
            f"ratios_to_{name}": ratios,
            f"worst_to_{name}": max(ratios),
            f"median_to_{name}": statistics.median(ratios),
        }
        figures |= {f"tokens_to_{name}_{side}": found for side, found in tokens.items()}
    worst = figures[f"worst_to_{100 * TARGET:.0f}"]
    print(table(seeds, curves))
    report("curriculum", figures)
    return 0 if asked.quick or worst <= BAR else 1


def table(seeds: Sequence[int], curves: dict[tuple[int, str], Curve]) -> str:
    """Tokens and solve rates by step, means of the seeds."""
    lines = ["| Step | Tokens, uniform | solved | Tokens, curriculum | solved |", "|---|---|---|---|---|"]
    for index in range(len(curves[seeds[0], SIDES[0]])):
        cells = [f"{index * EVERY}"]
        for side in SIDES:
            points = [curves[seed, side][index] for seed in seeds]
            cells.append(f"{statistics.fmean(tokens for tokens, _ in points):,.0f}")
            cells.append(f"{statistics.fmean(map(mean_of, points)):.1%}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def config_of(seed: int, steps: int, side: str) -> RunConfig:
    """The run file of one side."""
    tree = {
        "name": side, "steps": steps, "seed": seed,
        "policy": {"path": str(ROOT / "recipes" / "arithmetic-start")},
        "envs": [
            {"name": str(ENVIRONMENT), "label": f"level-{n}", "args": {"operations": "+", "num_tasks": NUM_TASKS, **args}}
            for n, args in enumerate(LEVELS)
        ],
        "sampling": {"max_turn_tokens": 6, "max_tokens": 24},
        "rollouts": {"group_size": 4, "block_rollouts": 64, "batch_groups": 48, "max_staleness": 0},
        "train": {"lr": 1e-4, "warmup_steps": 3},
        "difficulty": {"curriculum": True, "pools": True} if side == "curriculum" else {},
    }  # fmt: skip
    config = from_tree(tree, RunConfig, "benchmarks/curriculum.py")
    check_run(config)
    return config


def measured(run: tuple[int, int, str]) -> Curve:
    """One side of a seed, with a measurement every few steps."""
    torch.set_num_threads(1)
    config, curve = config_of(*run), Curve()
    tokens = 0
    open_engine, play_block = one_file.open_engine, one_file.play_block

    def counting(engine: Any, renderer: Renderer, envs: Any, slots: Block, *how: Any) -> list[Group]:
        nonlocal tokens
        groups = play_block(engine, renderer, envs, slots, *how)
        tokens += sum(rollout.num_policy_tokens() for group in groups for rollout in group.rollouts)
        return groups

    class Measuring:
        """An engine that is measured when it loads a version."""

        def __init__(self, spec: Any) -> None:
            self.engine = open_engine(spec)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.engine, name)

        def load(self, directory: Path, version: int) -> None:
            self.engine.load(directory, version)
            if version % EVERY == 0:
                curve.append((tokens, solve_rates(self.engine, config, directory)))
                said = " ".join(f"{rate:.3f}" for rate in curve[-1][1])
                print(f"{config.name} seed {config.seed} step {version}: {tokens} tokens, {said}", flush=True)

    with tempfile.TemporaryDirectory() as scratch, patch.multiple(one_file, open_engine=Measuring, play_block=counting):
        one_file.train(config, Path(scratch) / "run", ROOT / "recipes")
    return curve


def solve_rates(engine: Any, config: RunConfig, directory: Path) -> list[float]:
    """Of each difficulty, on held-out tasks."""
    renderer, sampling = Renderer.from_directory(directory), sampling_of(config)
    found = [evaluate(engine, renderer, env_of(env), EPISODES, 0, sampling, 0) for env in config.envs]
    return [one.success.mean if one.success else 0.0 for one in found]


def mean_of(point: tuple[int, list[float]]) -> float:
    """Solve rate of all tasks: each difficulty counts alike."""
    return statistics.fmean(point[1])


def tokens_to(curve: Curve, target: float) -> float:
    """Tokens until the smoothed curve reaches the target; infinite if it does not."""
    rates = [mean_of(point) for point in curve]
    smooth = [(rate + rates[max(0, i - 1)]) / 2 for i, rate in enumerate(rates)]
    for before, after in zip(range(len(curve)), range(1, len(curve)), strict=False):
        if smooth[after] >= target:
            share = (target - smooth[before]) / (smooth[after] - smooth[before])
            return curve[before][0] + share * (curve[after][0] - curve[before][0])
    return float("inf")


if __name__ == "__main__":
    sys.exit(main())
