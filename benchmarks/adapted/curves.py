"""The reward of runs that learn an adapter, beside TRL's GRPOTrainer with PEFT: same policy, adapter, task and settings.

Called by `benchmarks/adapters.py`. Ours is a whole run (`shoal run adapters.toml`), synchronous, as TRL is. TRL begins with
the adapter that our run of the seed published as version 0. Only the noise of the sampling and the order of the tasks
differ.
"""

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.real.kept import Kept
from benchmarks.whole_system import SHARED_SETTINGS, make_policy
from shoal.config import RunConfig, TinyPolicy, load_run
from shoal.metrics import read_metrics
from shoal.models.lora_config import CONFIG, WEIGHTS
from shoal.protocol.algorithm_config import Clip
from shoal.run_folder import RunFolder
from shoal.tree import to_tree

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "benchmarks" / "adapters.toml"
PEER = ROOT / "benchmarks" / "peers" / "trl_grpo.py"

SHAPE = TinyPolicy(width=512, layers=8, heads=8, kv_heads=4, mlp_width=1536, max_positions=64)
"""25M parameters."""
SMALL = TinyPolicy(width=64, layers=2, heads=2, kv_heads=1, mlp_width=128, max_positions=64)
"""For --quick."""

SIDES = ("shoal", "trl")
PEER_MICROBATCH = 32

T_95 = {2: 4.303, 4: 2.776, 6: 2.447, 8: 2.306}
"""Student's t, two-sided 95 %, by degrees of freedom."""

Result = dict[str, Any]
"""Of one side of a seed: `rewards`, one a step, and `cpu_s` of all its processes."""


def result_of(side: str, seed: int, steps: int, shape: TinyPolicy, peer: Path, folder: Path) -> Result:
    """What the folder has of a run, or the run itself."""

    def make() -> Result:
        policy = folder / f"policy-{shape.width}"
        if not policy.exists():
            make_policy(policy, shape=shape)
        config = load_run(RECIPE, [f"policy.path={policy}", f"seed={seed}", f"steps={steps}"])
        found = _ours(config, policy, folder) if side == "shoal" else _theirs(config, policy, peer, folder)
        print(f"{side}, seed {seed}: reward {_quarters(found['rewards'])}, {found['cpu_s']:.0f} CPU-s", flush=True)
        return found

    asked = {"shape": to_tree(shape), "recipe": RECIPE.read_text()}
    return Kept(folder).result(f"{side}-{seed}-{steps}", asked, make)


def demand_seeds(count: int) -> None:
    """Raise `SystemExit` for more seeds than `T_95` knows, before hours are spent on them."""
    most = max(T_95) // 2 + 1
    if count > most:
        raise SystemExit(f"error: --seeds names {count} seeds, at most {most} can be compared: leave some out")


def _ours(config: RunConfig, policy: Path, folder: Path) -> Result:
    """A whole run. Its first adapter stays in the folder."""
    out = folder / f"run-{config.seed}-{config.steps}"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "shoal.cli.main", "run", str(RECIPE), "--out", str(out)]
    sets = (f"policy.path={policy}", f"seed={config.seed}", f"steps={config.steps}")
    command += [word for one in sets for word in ("--set", one)]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, check=True)
    run, first = RunFolder(out), _first_adapter(config, folder)
    first.mkdir(exist_ok=True)
    for name in (CONFIG, WEIGHTS):
        shutil.copyfile(run.checkpoints / "v000000" / name, first / name)
    lines, summary = read_metrics(run.metrics), json.loads(run.summary.read_text())
    shutil.rmtree(out)
    rewards = [line.get("reward_all_mean", line["reward_mean"]) for line in lines]
    return {"rewards": rewards, "cpu_s": sum(summary["cpu_s"].values())}


def _theirs(config: RunConfig, policy: Path, peer: Path, folder: Path) -> Result:
    """TRL, from the first adapter of our run of the seed."""
    first, args = _first_adapter(config, folder), config.envs[0].args
    if not first.exists():
        raise SystemExit(f"error: TRL begins with the adapter of our run of seed {config.seed}: make that side first")
    completions = config.rollouts.batch_groups * config.rollouts.group_size
    settings = {
        "warmup": 0, "steps": config.steps, "group": config.rollouts.group_size, "completions": completions,
        "microbatch": min(PEER_MICROBATCH, completions), "seed": config.seed, "adapter": str(first), **args,
    }  # fmt: skip
    settings |= {name: getattr(config.train, name) for name in SHARED_SETTINGS}
    loss = config.train.algorithm.loss
    assert isinstance(loss, Clip)
    settings |= {"epsilon": loss.eps_low, "delta": loss.delta}
    command = [str(peer), str(PEER), str(policy), json.dumps(settings)]
    pinned = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, env=os.environ | pinned, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return {"rewards": found["rewards"], "cpu_s": sum(found["cpu_s"])}


def _first_adapter(config: RunConfig, folder: Path) -> Path:
    return folder / f"adapter-{config.seed}-{config.steps}"


def compared(found: dict[str, Sequence[Result]]) -> dict[str, Any]:
    """Both sides' curves, and by how much their ends differ.

    An end is the mean reward of the last quarter of a run's steps, a rise is an end less the mean of the first quarter. By
    Student's t of two samples, ends of equal methods differ by less than `noise` in 95 of 100 such comparisons.
    """
    sides = {side: side_of(results) for side, results in found.items()}
    ours, theirs = (sides[side] for side in SIDES)
    variances = [statistics.variance(one["ends"]) / len(one["ends"]) for one in (ours, theirs) if len(one["ends"]) > 1]
    freedom = len(ours["ends"]) + len(theirs["ends"]) - 2
    noise = T_95[freedom] * math.sqrt(sum(variances)) if len(variances) == 2 else math.nan
    rise = statistics.fmean([ours["rise"], theirs["rise"]])
    difference = ours["end"] - theirs["end"]
    return sides | {"difference": difference, "noise": noise, "difference_over_rise": abs(difference) / abs(rise)}


def side_of(results: Sequence[Result]) -> dict[str, Any]:
    """The curve of one side: mean rewards of the quarters of its steps, the end of each seed, and the rise."""
    quarters = [_quarters(result["rewards"]) for result in results]
    ends = [last for *_, last in quarters]
    return {
        "quarters": [statistics.fmean(of) for of in zip(*quarters, strict=True)],
        "ends": ends, "end": statistics.fmean(ends), "rise": statistics.fmean(last - first for first, *_, last in quarters),
        "cpu_s": statistics.fmean(result["cpu_s"] for result in results),
    }  # fmt: skip


def _quarters(rewards: Sequence[float]) -> list[float]:
    """The mean of each quarter of a curve."""
    cuts = [round(len(rewards) * part / 4) for part in range(5)]
    return [round(statistics.fmean(rewards[cuts[part] : cuts[part + 1]]), 4) for part in range(4)]
