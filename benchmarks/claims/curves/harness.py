"""One run of a grid: a small policy learns in this process from rollouts that are a fixed number of versions old.

Called by `kept`, in a process of its own for each run. Its parts are those of recipes/one_file.py: the engine samples
published versions, and the learner takes the rows of a batch's groups. What differs:

- The rollouts of step t come from version max(0, t - s), where s is `rollouts.max_staleness`. In a real run s is a bound.
- A step samples `batch_groups` groups and leaves out those without signal, without asking for others in their place. So
  all steps of all arms cost the same.
- Tasks and the noise of sampling follow from the seed, the step and the slot alone. So arms with the same seed meet the
  same tasks.
- All roles are this process, in float32. So the log-probs of the engine are the denominators of importance ratios.

Axes: G rollouts of a group.
"""

import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from shoal.config import RunConfig, check_run, sampling_of
from shoal.config.algorithms import filled
from shoal.engine.open import EngineSpec, open_engine
from shoal.envs.base import Targeted, task_of
from shoal.envs.conversation import Conversation
from shoal.envs.load import env_of
from shoal.envs.play import Episode, converse
from shoal.policy.files import load_policy, save_policy
from shoal.policy.render import Renderer
from shoal.protocol.draws import EnvDraw, draw_task
from shoal.protocol.randomness import sample_seed, slot_seed
from shoal.protocol.types import BatchGroup, Group
from shoal.protocol.wire import digest, to_msgpack
from shoal.train.filter import select
from shoal.train.rows import rows_of_group
from shoal.train.step import Learner
from shoal.tree import from_tree, merge
from shoal.weights.manifest import weights_root

ROOT = Path(__file__).resolve().parents[3]

TESTS = 8
"""Measurements of a run after its first policy, at equal distances; the last is of the last policy."""

LEARNED = ("clip_share", "truncated_share", "log_ratio_abs_mean_nats", "grad_norm", "rollouts", "updates")
"""What a curve keeps of a step's metrics, where the algorithm has them."""

Tree = dict[str, Any]
Column = dict[str, list[float]]


class Curve(msgspec.Struct):
    """What is kept of a run."""

    key: str
    run: Tree
    """Its run file, and the name of the policy that it began with."""
    sampled: Column
    """Of the rollouts of each step, those without signal included: means, and the number of tokens."""
    learned: Column
    """Of each step's updates."""
    tested: Column
    """Of further rollouts, by version."""
    first: list[tuple[int, int, float]]
    """The episodes of the first test: length asked for (0: none), length, and whether it was solved."""
    last: list[tuple[int, int, float]]
    """Those of the last test."""
    weights: str
    """Root of the last version: the same run gives the same bytes."""
    cpu_s: float


class _Batch(NamedTuple):
    """Rollouts of a step, before it learns from them."""

    members: list[BatchGroup]
    bodies: list[bytes]


def trained(tree: Tree, start: Path, *, key: str = "", begun: str = "") -> Curve:
    """Train one run, from the policy in `start`, which the curve calls `begun`."""
    torch.set_num_threads(1)
    before = time.process_time()
    with tempfile.TemporaryDirectory(prefix="shoal-shelf-") as scratch:
        run = _Run(config_of(tree, start), start, Path(scratch) / "published")
        run.train()
        weights = weights_root(run.published)
    return Curve(
        key, {"start": begun, **tree}, run.sampled, run.learned, run.tested, run.first, run.last, weights,
        round(time.process_time() - before, 2),
    )  # fmt: skip


def config_of(tree: Tree, start: Path) -> RunConfig:
    """The run file of a run: checked as every other, with the paths of this machine."""
    envs = [
        {**env, "name": str(ROOT / env["name"]) if env["name"].endswith(".py") else env["name"]} for env in tree["envs"]
    ]
    config = from_tree(
        filled(merge(tree, {"envs": envs, "policy": {"path": str(start)}})),
        RunConfig,
        "benchmarks/claims/curves/grid.py",
    )
    check_run(config)
    return config


def steps_made_by(version: int, lag: int, steps: int) -> range:
    """The steps that learn from this version's rollouts."""
    first = 0 if version == 0 else version + lag
    return range(first, min(version + lag + 1, steps))


class _Run:
    """The state of one run."""

    def __init__(self, config: RunConfig, start: Path, published: Path) -> None:
        self.config, self.start, self.published = config, start, published
        self.env, self.label = env_of(config.envs[0]), config.envs[0].label
        self.sampling, self.renderer = sampling_of(config), Renderer.from_directory(start)
        self.table = [EnvDraw(self.label, 1.0, self.env.num_tasks)]
        self.model = load_policy(start, torch.float32)
        self.learner = Learner(
            self.model, config.train, temperature=self.sampling.temperature, steps=config.steps,
            max_tokens=config.sampling.all_tokens,
        )  # fmt: skip
        self.engine = open_engine(EngineSpec(threads=1, noise=self.sampling.noise))
        self.waiting: deque[_Batch] = deque()
        self.sampled: Column = {}
        self.learned: Column = {}
        self.tested: Column = {}
        self.first: list[tuple[int, int, float]] = []
        self.last: list[tuple[int, int, float]] = []

    def train(self) -> None:
        """All steps."""
        steps, lag = self.config.steps, self.config.rollouts.max_staleness
        for version in range(steps):
            self._publish(version)
            for step in steps_made_by(version, lag, steps):
                self.waiting.append(self._sample(step, version))
            self._learn(self.waiting.popleft(), version)
        self._publish(steps)

    def _publish(self, version: int) -> None:
        """Give the engine the policy as it is now; test it if its turn has come."""
        save_policy(self.model, self.published, "float32", tokenizer_from=self.start)
        self.engine.load(self.published, version)
        steps = self.config.steps
        if version == steps or version % max(1, steps // TESTS) == 0:
            talks = self._play(self._episodes("test", 0, self.config.eval.episodes, 1))
            _book(self.tested, {"version": float(version), **_means(talks)})
            self.last = [_ended(talk) for talk in talks]
            self.first = self.first or self.last

    def _sample(self, step: int, version: int) -> _Batch:
        """The groups of a step, written by the present version."""
        rollouts = self.config.rollouts
        episodes = self._episodes("train", step, rollouts.batch_groups, rollouts.group_size)
        talks = self._play(episodes)
        _book(self.sampled, {"version": float(version), **_means(talks)})
        batch = _Batch([], [])
        for at in range(rollouts.batch_groups):
            group = talks[at * rollouts.group_size : (at + 1) * rollouts.group_size]
            slot = step * rollouts.batch_groups + at
            body = to_msgpack(Group(slot, 0, self.label, tuple(talk.rollout(version) for talk in group)))
            rewards = tuple(talk.reward for talk in group)
            batch.members.append(BatchGroup(version, slot, "", 0, digest(body), rewards))
            batch.bodies.append(body)
        return batch

    def _learn(self, batch: _Batch, version: int) -> None:
        """Turn this version into the next."""
        algorithm = self.config.train.algorithm
        rows_G = [
            rows_of_group(
                member, body, algorithm=algorithm, vocabulary=self.model.spec.vocab_size,
                max_tokens=self.sampling.max_tokens,
            )
            for member, body in zip(batch.members, batch.bodies, strict=True)
        ]  # fmt: skip
        chosen = select(
            batch.members, rows_G, algorithm=algorithm, version=version,
            max_staleness=self.config.rollouts.max_staleness,
        )  # fmt: skip
        metrics = self.learner.step(chosen.rows, version)
        _book(self.learned, {name: float(metrics.get(name, 0.0)) for name in LEARNED})

    def _episodes(self, purpose: str, step: int, groups: int, size: int) -> list[Episode]:
        """Episodes of so many tasks, drawn by the seed, the purpose and the step."""
        found = []
        for slot in range(groups):
            seed = slot_seed(f"shelf/{purpose}/{self.config.seed}", step, "", b"", slot)
            task = task_of(self.env, draw_task(seed, self.table)[1])
            found += [Episode(self.env, task, sample_seed(seed, i)) for i in range(size)]
        return found

    def _play(self, episodes: Sequence[Episode]) -> list[Conversation]:
        """Play in blocks of the run's size."""
        rows = self.config.rollouts.block_rollouts
        talks: list[Conversation] = []
        for first in range(0, len(episodes), rows):
            talks += converse(self.engine, self.renderer, episodes[first : first + rows], self.sampling)
        return talks


def _means(talks: Sequence[Conversation]) -> dict[str, float]:
    """Means over episodes; the entropy is that of a token, estimated by the log-probs of those that were written."""
    logprobs = [logprob for talk in talks for logprob in talk.logprobs]
    return {
        "reward": sum(talk.reward for talk in talks) / len(talks),
        "solved": sum(bool(talk.success) for talk in talks) / len(talks),
        "entropy_nats": -sum(logprobs) / len(logprobs),
        "length": len(logprobs) / len(talks),
        "tokens": float(len(logprobs)),
    }


def _ended(talk: Conversation) -> tuple[int, int, float]:
    asked = talk.task.tokens if isinstance(talk.task, Targeted) else 0
    return asked, len(talk.logprobs), float(bool(talk.success))


def _book(columns: Column, row: dict[str, float]) -> None:
    """Add a row; six digits are more than any figure needs."""
    for name, value in row.items():
        columns.setdefault(name, []).append(float(f"{value:.6g}"))
