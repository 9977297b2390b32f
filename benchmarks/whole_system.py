"""The whole system beside TRL's GRPOTrainer: CPU-seconds and wall time of a training step, on this machine.

    python benchmarks/whole_system.py [--repeats 3] [--steps 12]
    python benchmarks/whole_system.py --minutes 5     # and the share of CPU that is not generate, score or train

Ours is a real run (`shoal run whole_system.toml`: coordinator, trainer, one validator, one worker, each with one
thread, staleness 1, audits at the steady rate), watched from outside. The peer is `peers/trl_grpo.py` with the same
first weights, prompts, reward and objective, in a virtual environment that is made when missing, at one and at two
threads; the better counts. Runs of the two alternate, and the figures are medians over the repeats. CPU-seconds come first:
wall time says little on a machine that does other work.

The work: 0.80M parameters, 32 characters shown and exactly 64 written, reward the share of vowels, 256 completions a step
in groups of 16, advantage reward - mean, two-sided clip over the batch's tokens, AdamW, float32. TRL's defaults for GPUs
are off: no gradient checkpointing, bf16, pinned memory, logging or checkpoints; `num_iterations = 1` skips old log-probs.
It has the fused AdamW and a static cache, which takes 5 % less than its own choice; with
`use_transformers_continuous_batching` five steps were not done after two minutes.

`ratio_cpu` and `ratio_wall`: TRL's cost over ours. `steps_behind`: how many steps later we reach a reward, on average;
staleness 1 makes it about 1. `outside_share`: CPU that was not spent in `LocalEngine.extend`, `LocalEngine.score` or
`Learner.step`. The last line is JSON.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import psutil
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from benchmarks.measure import arguments, report
from shoal.config import TinyPolicy, load_run
from shoal.models.checkpoint import save_policy
from shoal.models.random_model import initialise, tiny_spec
from shoal.models.transformer import Transformer
from shoal.protocol.algorithm_config import Clip
from shoal.step_metrics import read_metrics

HERE = Path(__file__).resolve().parent
RECIPE = HERE / "whole_system.toml"
PEER_VENV = HERE.parent / ".venv-trl"
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
"""The characters that a prompt of `envs/vowels.py` is made of, in the order of their token ids."""
SHAPE = TinyPolicy(max_positions=128)
"""0.8M parameters."""
CONTROL_TOKENS = ("<|end|>", "<|pad|>")
"""Ids 64 and 65, outside the head: the policy can write neither, so every turn has exactly 64 tokens."""

WARMUP_STEPS = 8
"""A new worker is audited whole for 10 blocks, here 3 steps; the rest is for the pipeline to fill."""
PEER_WARMUP_STEPS = 3
PEER_MICROBATCH = 32
"""CPU-seconds a step: 3.09 at 16, 3.00 at 32, 2.96 at 64, 3.22 at 128, 3.33 at 256; memory grows from 0.6 to 2 GB."""
EXTRA_STEPS = 3
"""The run goes on for so long after the last step measured: towards its end workers have nothing left to do."""
POLL_S = 0.05
STEP_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Figures:
    """One run, after its warm-up."""

    cpu_s: float
    """CPU-seconds a step, of all processes."""
    wall_s: float
    """Median of the steps."""
    rewards: list[float]
    """Mean reward of the batch of every step, warm-up included."""
    peak_rss_mb: dict[str, float]
    cpu_by_role_s: dict[str, float] = dataclasses.field(default_factory=dict)
    cpu_by_job_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """Of that, generate, score and train, where they are counted."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="steps measured, after the warm-up")
    parser.add_argument("--minutes", type=float, default=0.0, help="first watch a run for so long, for outside_share")
    options = parser.parse_args()
    peer_python = ensure_peer()
    figures: dict[str, Any] = {"load_before": round(os.getloadavg()[0], 2)}
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        policy = scratch / "policy"
        make_policy(policy)
        if options.minutes:
            figures |= overhead(policy, scratch, options.minutes)
        ours, peer1, peer2 = [], [], []
        for repeat in range(options.repeats):
            ours.append(run_ours(policy, scratch / f"run-{repeat}", options.steps))
            peer1.append(run_peer(peer_python, policy, 1, options.steps))
            peer2.append(run_peer(peer_python, policy, 2, options.steps))
            for name, runs in (("shoal", ours), ("trl, 1 thread", peer1), ("trl, 2 threads", peer2)):
                last = runs[-1]
                print(
                    f"{name:15} {last.cpu_s:6.2f} CPU-s/step {last.wall_s:6.2f} s/step, reward {last.rewards[-1]:.3f}"
                )
    figures |= compare(ours, peer1, peer2)
    report("whole_system", figures)


def compare(ours: list[Figures], peer1: list[Figures], peer2: list[Figures]) -> dict[str, Any]:
    """Medians over the repeats. Ratios are of neighbours in time, TRL's better thread count against ours."""
    completions = load_run(RECIPE).rollouts.batch_groups * load_run(RECIPE).rollouts.group_size
    cpu, wall = median(f.cpu_s for f in ours), median(f.wall_s for f in ours)
    ratio_cpu = median(min(a.cpu_s, b.cpu_s) / f.cpu_s for f, a, b in zip(ours, peer1, peer2, strict=True))
    ratio_wall = median(min(a.wall_s, b.wall_s) / f.wall_s for f, a, b in zip(ours, peer1, peer2, strict=True))
    curve, peer_curve = (
        [mean(step) for step in zip(*(f.rewards for f in runs), strict=False)] for runs in (ours, peer1)
    )
    steps = min(len(curve), len(peer_curve))
    behind = steps_behind(curve[:steps], peer_curve[:steps])
    print(f"TRL takes {ratio_cpu:.2f} times our CPU-seconds and {ratio_wall:.2f} times our wall time")
    print(f"reward at step {steps}: {curve[steps - 1]:.3f}, TRL {peer_curve[steps - 1]:.3f}; {behind:.1f} steps behind")
    return {
        "ratio_cpu": round(ratio_cpu, 3),
        "ratio_wall": round(ratio_wall, 3),
        "completions_per_cpu_s": round(completions / cpu, 1),
        "trl_completions_per_cpu_s": round(
            completions / min(median(f.cpu_s for f in runs) for runs in (peer1, peer2)), 1
        ),
        "cpu_s_per_step": round(cpu, 3),
        "trl_cpu_s_per_step": {t: round(median(f.cpu_s for f in runs), 3) for t, runs in (("1", peer1), ("2", peer2))},
        "wall_s_per_step": round(wall, 3),
        "trl_wall_s_per_step": {
            t: round(median(f.wall_s for f in runs), 3) for t, runs in (("1", peer1), ("2", peer2))
        },
        "cpu_s_per_step_by_role": _medians([f.cpu_by_role_s for f in ours], 3),
        "peak_rss_mb": _medians([f.peak_rss_mb for f in ours], 0),
        "trl_peak_rss_mb": round(median(f.peak_rss_mb["trl"] for f in peer1)),
        "rewards": [round(reward, 3) for reward in curve[:steps]],
        "trl_rewards": [round(reward, 3) for reward in peer_curve[:steps]],
        "steps_behind": round(behind, 2),
        "load_after": round(os.getloadavg()[0], 2),
    }


def steps_behind(curve: list[float], peer_curve: list[float]) -> float:
    """How many steps later than the peer we reach a reward, on average over the second half of our curve.

    Staleness 1 alone makes it about 1: a batch was written by the policy before the last one.
    """
    rising = np.maximum.accumulate(peer_curve)
    half = range(len(curve) // 2, len(curve))
    return mean(step - float(np.interp(curve[step], rising, np.arange(len(rising)))) for step in half)


def overhead(policy: Path, scratch: Path, minutes: float) -> dict[str, Any]:
    """CPU of all roles outside generate, score and train, over some minutes of steady work."""
    counted = scratch / "counted"
    counted.mkdir()
    # So slow a learner never solves the task: a batch without signal would be another kind of work.
    with running(policy, scratch / "long", steps=4_000, lr=1e-6, counted=counted) as watch:
        watch.until(WARMUP_STEPS)
        before, started = watch.look(), time.monotonic()
        watch.until(10**9, deadline_s=minutes * 60)
        after, lasted_s = watch.look(), time.monotonic() - started
    figures = between(before, after, watch)
    share = 1 - sum(figures.cpu_by_job_s.values()) / figures.cpu_s
    print(
        f"{100 * share:.1f} % of CPU outside generate, score and train, over {lasted_s:.0f} s, "
        f"{after.steps - before.steps} steps"
    )
    return {
        "outside_share": round(share, 4),
        "long_minutes": round(lasted_s / 60, 2),
        "long_cpu_s_per_step": round(figures.cpu_s, 3),
        "long_cpu_s_per_step_by_role": _rounded(figures.cpu_by_role_s),
        "long_cpu_s_per_step_by_job": _rounded(figures.cpu_by_job_s),
    }


def run_ours(policy: Path, out: Path, steps: int) -> Figures:
    """A run of the whole system, measured over `steps` steps after its warm-up."""
    with running(policy, out, steps=WARMUP_STEPS + steps + EXTRA_STEPS) as watch:
        before = watch.until(WARMUP_STEPS)
        after = watch.until(WARMUP_STEPS + steps)
        return between(before, after, watch)


def run_peer(python: Path, policy: Path, threads: int, steps: int) -> Figures:
    """A run of TRL: at one thread as many steps as ours for the curve, at two only what timing needs."""
    config = load_run(RECIPE)
    settings = {
        "warmup": PEER_WARMUP_STEPS,
        "steps": WARMUP_STEPS + steps if threads == 1 else PEER_WARMUP_STEPS + steps,
        "group": config.rollouts.group_size,
        "completions": config.rollouts.batch_groups * config.rollouts.group_size,
        "microbatch": PEER_MICROBATCH,
        "seed": config.seed,
    }
    settings |= {name: getattr(config.train, name) for name in SHARED_SETTINGS}
    loss = config.train.algorithm.loss
    assert isinstance(loss, Clip)
    settings |= {"epsilon": loss.eps_low, "delta": loss.delta}
    command = [str(python), str(HERE / "peers/trl_grpo.py"), str(policy), json.dumps(settings)]
    pinned = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, env=os.environ | pinned, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return Figures(mean(found["cpu_s"]), median(found["wall_s"]), found["rewards"], {"trl": found["peak_rss_mb"]})


SHARED_SETTINGS = ("lr", "beta1", "beta2", "weight_decay", "max_grad_norm")
"""Of the run file's [train], whose learning rate is constant from the first step: both optimise in the same way."""


# --- watching a run from outside ---


@dataclass(frozen=True)
class Look:
    """What the run's processes had used when so many steps were done."""

    steps: int
    cpu_by_role_s: Counter[str]
    cpu_by_job_s: Counter[str]
    """Of that, generate, score and train, where they are counted."""


class Watch:
    """A run that is under way."""

    def __init__(self, launcher: psutil.Process, out: Path, counted: Path | None) -> None:
        self.launcher, self.out, self.counted = launcher, out, counted
        self.peak_rss_mb: dict[str, float] = {}

    def until(self, steps: int, deadline_s: float = 1e9) -> Look:
        """Wait until so many steps are done, or for so long. Raises RuntimeError when the run makes no steps."""
        started = progressed = time.monotonic()
        done = -1
        while done < steps and time.monotonic() - started < deadline_s:
            time.sleep(POLL_S)
            now = self._steps()
            if now > done:
                done, progressed = now, time.monotonic()
                self._watch_memory()
            if time.monotonic() - progressed > STEP_TIMEOUT_S or not self.launcher.is_running():
                raise RuntimeError(f"the run stopped at step {done} of {steps}: see {self.out}/logs")
        return self.look()

    def look(self) -> Look:
        """The use of every process until now."""
        cpu: Counter[str] = Counter()
        jobs: Counter[str] = Counter()
        for role, process in self._processes():
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                cpu[role] += times.user + times.system + times.children_user + times.children_system
            if self.counted is not None and (self.counted / f"{process.pid}.json").exists():
                jobs.update(json.loads((self.counted / f"{process.pid}.json").read_text()))
        return Look(self._steps(), cpu, jobs)

    def _steps(self) -> int:
        try:
            return (self.out / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def _watch_memory(self) -> None:
        for role, process in self._processes():
            with suppress(psutil.NoSuchProcess):
                rss_mb = process.memory_info().rss / 2**20
                self.peak_rss_mb[role] = max(self.peak_rss_mb.get(role, 0.0), rss_mb)

    def _processes(self) -> Iterator[tuple[str, psutil.Process]]:
        """All processes of the run. One that a role has started, as for an environment, counts as the role's."""
        roles = {self.launcher.pid: "launcher"}
        yield "launcher", self.launcher
        for process in self.launcher.children(recursive=True):  # parents come before their children
            with suppress(psutil.Error):
                words = process.cmdline()
                parents = roles.get(process.ppid(), "launcher")
                roles[process.pid] = role = words[words.index("role") + 1] if "role" in words else parents
                yield role, process


@contextmanager
def running(
    policy: Path, out: Path, steps: int, lr: float | None = None, counted: Path | None = None
) -> Iterator[Watch]:
    """A run of the recipe, stopped at the end; with `counted`, its three jobs are counted there."""
    program = ["-m", "shoal.cli.main"] if counted is None else [str(HERE / "cpu_by_job.py")]
    changes = [f"policy.path={policy}", f"steps={steps}"] + ([] if lr is None else [f"train.lr={lr}"])
    command = [sys.executable, *program, "run", str(RECIPE), "--out", str(out)]
    command += [word for change in changes for word in ("--set", change)]
    environment = os.environ | ({} if counted is None else {"SHOAL_CPU_BY_JOB": str(counted)})
    said = out.with_suffix(".out")
    with said.open("w") as file:
        launcher = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    try:
        yield Watch(psutil.Process(launcher.pid), out, counted)
    finally:
        launcher.send_signal(signal.SIGINT)
        launcher.wait(timeout=120)


def between(before: Look, after: Look, watch: Watch) -> Figures:
    """What a step took between two looks."""
    steps = after.steps - before.steps
    cpu, jobs = (
        {name: (later[name] - earlier[name]) / steps for name in later}
        for earlier, later in (
            (before.cpu_by_role_s, after.cpu_by_role_s),
            (before.cpu_by_job_s, after.cpu_by_job_s),
        )
    )
    lines = read_metrics(watch.out / "metrics.jsonl")
    times = [line["time_s"] for line in lines[before.steps - 1 : after.steps]]
    return Figures(
        cpu_s=sum(cpu.values()),
        wall_s=median(later - earlier for earlier, later in pairwise(times)),
        rewards=[line["reward_mean"] for line in lines],
        peak_rss_mb=watch.peak_rss_mb,
        cpu_by_role_s=cpu,
        cpu_by_job_s=jobs,
    )


# --- what both sides start from ---


def make_policy(directory: Path, seed: int = 0, shape: TinyPolicy = SHAPE) -> None:
    """A Qwen3-style policy with a tokenizer of 64 characters and a template that adds nothing."""
    spec = dataclasses.replace(tiny_spec(shape), eos_ids=(), pad_id=None)
    assert spec.vocab_size == len(ALPHABET)
    model = Transformer(spec)
    initialise(model, seed)
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    end, pad = CONTROL_TOKENS
    config = {
        "tokenizer_class": "TokenizersBackend",
        "eos_token": end,
        "pad_token": pad,
        "model_max_length": spec.max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save(f"{scratch}/tokenizer.json")
        (Path(scratch) / "tokenizer_config.json").write_text(json.dumps(config))
        save_policy(model, directory, "float32", tokenizer_from=Path(scratch))


def ensure_peer() -> Path:
    """The interpreter of TRL's virtual environment, which is made when it is missing."""
    python, requirements = PEER_VENV / "bin" / "python", HERE / "peers" / "requirements.txt"
    made = PEER_VENV / ".made"
    probe = [str(python), "-c", "import trl; assert trl.__version__ == '1.16.0'"]
    is_made = made.exists() and made.read_text() == requirements.read_text()
    if is_made or (python.exists() and subprocess.run(probe, stderr=subprocess.DEVNULL).returncode == 0):
        return python
    print(f"installing the peer into {PEER_VENV} ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(PEER_VENV)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "-r", str(requirements)]
    subprocess.run(pip, check=True)
    made.write_text(requirements.read_text())
    return python


def _rounded(table: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in table.items()}


def _medians(tables: list[dict[str, float]], digits: int) -> dict[str, float]:
    return {name: round(median(table[name] for table in tables), digits) for name in tables[0]}


if __name__ == "__main__":
    main()
