"""Our side of the training measurements of `benchmarks/real_models.py`: steps on a batch, in a process of its own.

    python benchmarks/real/one_side.py POLICY '{"groups": 2, ...}'

Prints the JSON line of `report_steps`, as the other side does, which is `peers/trl_steps.py`.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.real.resident import report_steps, resident_mb
from benchmarks.real.rows import Batch
from shoal.config import TinyPolicy, TrainConfig
from shoal.models.checkpoint import load_policy
from shoal.models.random_model import initialise, tiny_spec
from shoal.models.transformer import Transformer
from shoal.train.learner import Learner
from shoal.train.rows import TrainingRow


def main() -> None:
    asked = json.loads(sys.argv[2])
    recompute, steps = asked.pop("recompute"), asked.pop("steps")
    batch, directory = Batch(**asked), Path(sys.argv[1])
    torch.set_num_threads(1)
    warm_up()
    before = resident_mb()
    model = load_policy(directory, torch.float32)
    config = TrainConfig(
        lr=1e-5, warmup_steps=0, microbatch_tokens=batch.microbatch_tokens, packing="flat",
        recompute="layers" if recompute else "none",
    )  # fmt: skip
    learner = Learner(model, config, temperature=1.0, steps=steps)
    rows = rows_of(batch, model.spec.vocab_size)
    behaviour = learner.logprobs(rows)
    rows = [replace(row, behaviour_logp_P=logp_P) for row, logp_P in zip(rows, behaviour, strict=True)]
    report_steps(lambda step: float(learner.step(rows, step)["loss"]), steps, before, model)


def warm_up() -> None:
    """Take a step with a tiny policy first, so that imports and one-time setup are not measured as the policy's memory."""
    model = Transformer(tiny_spec(TinyPolicy(width=16, layers=1, heads=2, kv_heads=1, mlp_width=16)))
    initialise(model, 0)
    rows = [replace(row, tokens_T=row.tokens_T % 64) for row in rows_of(Batch(1, 2, 8, 8, 8), 1000)]
    Learner(model, TrainConfig(packing="flat"), temperature=1.0, steps=1).step(rows, 0)


def rows_of(batch: Batch, vocabulary: int) -> list[TrainingRow]:
    """The batch as the learner takes it."""
    rows = []
    for index, ((prompt, completion), advantage) in enumerate(
        zip(batch.token_ids(vocabulary), batch.advantages(), strict=True)
    ):
        P = len(completion)
        ones_P = np.ones(P, np.float32)
        rows.append(
            TrainingRow(
                np.array([*prompt, *completion]), np.arange(len(prompt), len(prompt) + P), 0 * ones_P, advantage * ones_P,
                ones_P, advantage, 0, id=(0, index // batch.group_size, index % batch.group_size),
            )
        )  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
