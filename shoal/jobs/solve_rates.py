"""How many of its rollouts a policy solves, task by task: what an offline filter keeps tasks by.

It plays as an evaluation does, on training tasks; the same policy, run file and number of threads give the same rates. It
knows neither stages nor what is learned later.
"""

import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from shoal.chat.renderer import Renderer
from shoal.config import RunConfig, sampling_of
from shoal.engine.open import EngineSpec, kind_for, open_engine
from shoal.envs.evaluate import BATCH
from shoal.envs.interface import task_of
from shoal.envs.load import env_digest, env_of
from shoal.envs.play_episodes import EpisodeAttempt, converse
from shoal.envs.replay import judge_talks
from shoal.errors import StateError
from shoal.ledger.task_difficulty import solve_rate
from shoal.protocol.encoding import domain_hash
from shoal.protocol.seed_chain import sample_seed
from shoal.protocol.task_draws import MAX_LISTED, TaskList

log = logging.getLogger("filter")


@dataclass(frozen=True)
class TaskRates:
    """Solve rates of the first tasks of an environment."""

    rates: list[float]
    """By task, from 0. NaN, which is in no band, where the environment failed on all rollouts."""
    tokens: int
    """That the policy wrote."""
    everything: TaskList
    """All tasks that were measured."""

    def between(self, low: float, high: float) -> TaskList:
        """The tasks whose rate is in this band. Raises `StateError` if there are none, or too many for a list."""
        kept = tuple(task for task, rate in enumerate(self.rates) if low <= rate <= high)
        if not kept or len(kept) > MAX_LISTED:
            raise StateError(
                f"{len(kept)} of {len(self.rates)} tasks have a solve rate from {low} to {high}; on average it is "
                f"{self.figures()['rate']:.3f}. A list has 1 to {MAX_LISTED}: change `low`, `high` or `most`, or the policy"
            )
        one = self.everything
        return TaskList(one.source, one.args, one.num_tasks, kept)

    def figures(self) -> dict[str, float]:
        """For a report."""
        known = [rate for rate in self.rates if not math.isnan(rate)]
        return {
            "measured": len(self.rates), "rate": math.fsum(known) / max(1, len(known)),
            "never": sum(rate == 0 for rate in self.rates), "always": sum(rate == 1 for rate in self.rates),
        }  # fmt: skip


def measure(config: RunConfig, policy: Path, label: str, rollouts: int, most: int) -> TaskRates:
    """Let a policy play the first `most` tasks (0: all) of the environment with this label (empty: the only one), each
    `rollouts` times. Raises `ShoalError`."""
    torch.set_num_threads(config.workers.threads)
    spec = next(env for env in config.envs if label in ("", env.label))
    env, sampling = env_of(spec), sampling_of(config)
    count = min(env.num_tasks, most or env.num_tasks)
    renderer = Renderer.from_directory(policy)
    engine = open_engine(EngineSpec(kind_for(policy), config.sampled_dtype, threads=config.workers.threads))
    engine.load(policy, 0)
    root = domain_hash("solve rates", max(0, config.seed).to_bytes(8, "big"))
    rates, tokens, at_once = list[float](), 0, max(1, BATCH // rollouts)
    measured = TaskRates(rates, tokens, TaskList(env_digest(spec.name), spec.args, env.num_tasks, tuple(range(count))))
    for first in range(0, count, at_once):
        tasks = range(first, min(count, first + at_once))
        seeds = [domain_hash("solve rate", root, task.to_bytes(8, "big")) for task in tasks]
        episodes = [
            EpisodeAttempt(env, task_of(env, task), sample_seed(seed, i))
            for task, seed in zip(tasks, seeds, strict=True)
            for i in range(rollouts)
        ]
        talks = converse(engine, renderer, episodes, sampling)
        tokens += sum(len(talk.logprobs) for talk in talks)
        for place in range(0, len(talks), rollouts):
            group = talks[place : place + rollouts]
            left = [one.reward for one, talk in zip(judge_talks(group, env), group, strict=True) if not talk.left_out]
            rates.append(solve_rate(left, spec.solved) if left else math.nan)
        if tasks[-1] + 1 == count or first // at_once % 50 == 0:
            log.info(
                "measured tasks=%d/%d rate=%.3f tokens=%d", tasks[-1] + 1, count, measured.figures()["rate"], tokens
            )
    return replace(measured, tokens=tokens)
