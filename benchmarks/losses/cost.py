"""What a training step costs with each algorithm, beside GRPO: CPU-seconds of a learner alone.

    python benchmarks/losses/cost.py [--steps 6] [--rounds 5]

A policy of shoal's own architecture with random weights learns from one made-up batch of 8 groups of 8 rollouts. All
algorithms take turns, so that a busy machine slows all alike, and each round begins elsewhere. The figure of an algorithm
is the median over rounds of its CPU-seconds divided by GRPO's of the same round. Prints a table, and ends with one line of
JSON. The bar is 1.1; the exit code is 1 if it is missed.

Reported apart, as `ratio_beside`, and without a bar: a critic, which learns in the step; a teacher of the policy's size,
which judges before it; and one forward pass before the step, as for log-probs under a reference, or where the trainer
computes the ratio's denominators itself (docs/explanation/algorithms.md).
"""

import re
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from benchmarks.measure import arguments, report
from shoal.config import SamplingConfig, TinyPolicy, TrainConfig
from shoal.models.random_model import tiny_spec
from shoal.models.transformer import Transformer
from shoal.models.value_head import TransformerWithValueHead
from shoal.protocol import algorithm_config as c
from shoal.protocol.algorithm_config import Algorithm
from shoal.train.critic import critic_of
from shoal.train.frozen_models import Teacher
from shoal.train.learner import Learner
from shoal.train.rows import TrainingRow

BAR = 1.1
GROUPS, SIZE, PROMPT, ANSWER, VOCABULARY = 8, 8, 24, 40, 64
BASE = "grpo"
SPEC = tiny_spec(TinyPolicy(width=128, layers=4, heads=4, kv_heads=2, mlp_width=384, max_positions=128))
M = TypeVar("M", bound=Transformer)

ALGORITHMS: dict[str, Algorithm] = {
    **{kind.__struct_config__.tag: kind() for kind in c.NAMED},  # type: ignore[dict-item]
    "ppo, icepop and masks": c.Ppo(corrections=(c.IcePop(), c.SequenceMask(), c.GeometricMask())),
    "ppo, kl k3": c.Ppo(kl=c.Kl(0.01)),
    "rloo, kl in the advantage": c.Rloo(kl=c.Kl(0.01, "k1", "advantage")),
}


CRITIC, TEACHER, PASS = "ppo, critic", "cispo, teacher", "a pass before the step"
COMPANIONS: dict[str, Algorithm] = {CRITIC: c.Ppo(advantage="gae"), TEACHER: c.CispoNamed(advantage="teacher")}


def main() -> int:
    """Time all algorithms in turn."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = made_up_rows()
    learners = {name: learner_of(algorithm) for name, algorithm in (ALGORITHMS | COMPANIONS).items()}
    for learner in learners.values():
        learner.step(rows, 0)
    works = {name: work_of(name, learner, rows) for name, learner in learners.items()}
    works[PASS] = partial(learners[BASE].logprobs, rows)
    ratios: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for turn in range(options.rounds):
        spent = {name: cpu_seconds(works[name], options.steps) for name in names[turn:] + names[:turn]}
        for name, seconds in spent.items():
            ratios[name].append(seconds / spent[BASE])
    found = {name: statistics.median(values) for name, values in ratios.items()}
    for name, ratio in found.items():
        print(f"{name:<28} {ratio:6.3f}")
    beside = {name: found.pop(name) for name in (*COMPANIONS, PASS)}
    dearest = max(found, key=lambda name: found[name])
    figures = {"bar": BAR, "dearest": dearest, "ratio_of_dearest": round(found[dearest], 4)}
    ratios = {"ratios": keyed(found), "ratio_beside": keyed(beside)}
    report("losses_cost", {**figures, **ratios})
    return int(found[dearest] > BAR)


def keyed(ratios: dict[str, float]) -> dict[str, float]:
    """The same by words that can be parts of an identifier."""
    return {re.sub(r"\W+", "_", name): round(ratio, 4) for name, ratio in ratios.items()}


def learner_of(algorithm: Algorithm) -> Learner:
    """A learner of about 1M parameters."""
    config = TrainConfig(lr=1e-5, algorithm=algorithm)
    critic = critic_of(config, lambda: drawn(TransformerWithValueHead(SPEC)))
    return Learner(
        drawn(Transformer(SPEC)), config, SamplingConfig(max_tokens=PROMPT + ANSWER), steps=100, critic=critic
    )


def drawn(model: M) -> M:
    """The same model with random weights."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.05)
    return model


def made_up_rows() -> list[TrainingRow]:
    """Rows whose log-probs are those of a policy that knows nothing."""
    rng = np.random.default_rng(0)
    rows = []
    for group in range(GROUPS):
        prompt = rng.integers(0, VOCABULARY, PROMPT)
        for i in range(SIZE):
            length = int(rng.integers(ANSWER // 2, ANSWER + 1))
            logp_P = rng.normal(-np.log(VOCABULARY), 0.1, length).astype(np.float32)
            rows.append(
                TrainingRow(
                    tokens_T=np.concatenate([prompt, rng.integers(0, VOCABULARY, length)]),
                    positions_P=np.arange(PROMPT, PROMPT + length), behaviour_logp_P=logp_P,
                    advantage_P=np.full(length, 0.5 - i % 2, dtype=np.float32),
                    weight_P=np.ones(length, dtype=np.float32), reward=float(i % 2), version=0, id=(0, group, i),
                    reference_logp_P=logp_P,
                )
            )  # fmt: skip
    return rows


def work_of(name: str, learner: Learner, rows: list[TrainingRow]) -> Callable[[], object]:
    """A step, after the judgement of a teacher if the learner has one."""
    if name != TEACHER:
        return partial(learner.step, rows, 0)
    teacher = Teacher(drawn(Transformer(SPEC)), 1.0, learner.config.microbatch_tokens)
    return lambda: learner.step(teacher(rows, learner.logprobs)[0], 0)


def cpu_seconds(work: Callable[[], object], times: int) -> float:
    """CPU-seconds of doing something so many times."""
    began = time.process_time()
    for _ in range(times):
        work()
    return time.process_time() - began


if __name__ == "__main__":
    sys.exit(main())
