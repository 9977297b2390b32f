"""One run of a grid: a small policy learns in this process from rollouts that are a fixed number of versions old.

Called by `kept`, in a process of its own for each run. Its parts are those of recipes/one_file.py: the engine samples
published versions, and the learner takes the rows of a batch's groups. What differs:

- The rollouts of step t come from version max(0, t - s), where s is `rollouts.max_staleness`. In a real run s is a bound.
- A step samples `batch_groups` groups and leaves out those without signal, without asking for others in their place. So
  all steps of all arms cost the same, but for continuations, which are asked for where there is signal.
- Tasks and the noise of sampling follow from the seed, the step and the slot alone. So arms with the same seed meet the
  same tasks.
- All roles are this process, in float32. So the log-probs of the engine are the denominators of importance ratios.
- A run may have a teacher, a task list or probes beside its run file: see `Beside`.

Axes: G rollouts of a group.
"""

import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from benchmarks.claims.curves.beside import Beside
from benchmarks.claims.curves.distances import divergences
from benchmarks.claims.curves.values import errors_of
from shoal.chat.renderer import Renderer
from shoal.config import RunConfig, check_run, sampling_of
from shoal.config.validate_algorithm import filled
from shoal.engine.interface import Engine
from shoal.engine.open import EngineSpec, open_engine
from shoal.env import Task
from shoal.envs.branching import opened
from shoal.envs.interface import ShapedTask, task_of
from shoal.envs.load import env_of
from shoal.envs.play import EpisodeAttempt, converse
from shoal.envs.rollout import Conversation
from shoal.envs.step_credit import step_rewards
from shoal.jobs import solve_rates
from shoal.ledger.group_signal import teaches
from shoal.models.checkpoint import load_policy, save_policy
from shoal.models.value_head import begin_valued
from shoal.protocol.algorithm_config import Vine, needs_reference, step_credit_of, vine_of
from shoal.protocol.branching import branches
from shoal.protocol.encoding import digest, to_msgpack
from shoal.protocol.messages import BatchGroup, Group, StepRewards
from shoal.protocol.seed_chain import sample_seed, slot_seed
from shoal.protocol.task_draws import EnvDraw, draw_task
from shoal.train.batch_filter import select
from shoal.train.critic import critic_of
from shoal.train.frozen_models import judge_of, reference_of
from shoal.train.learner import Learner
from shoal.train.loss import sft_objective
from shoal.train.rows import TrainingRow, rows_of_group
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
    probed: Column = {}
    """What a run measures beside its tests."""


class _Batch(NamedTuple):
    """Rollouts of a step, before it learns from them."""

    members: list[BatchGroup]
    bodies: list[bytes]


def trained(
    tree: Tree, start: Path, beside: Beside = Beside(), teacher: Path | None = None, *, key: str = "", begun: str = ""
) -> Curve:  # fmt: skip
    """Train one run, from the policy in `start`, which the curve calls `begun`."""
    torch.set_num_threads(1)
    before = time.process_time()
    models = {"teacher": teacher} if teacher and not beside.imitates else {}
    with tempfile.TemporaryDirectory(prefix="shoal-shelf-") as scratch:
        run = TrainedRun(config_of(tree, start, models), start, Path(scratch) / "published", beside, teacher)
        run.train()
        weights = weights_root(run.published)
    return Curve(
        key, {"start": begun, **tree}, run.sampled, run.learned, run.tested, run.first, run.last, weights,
        round(time.process_time() - before, 2), run.probed,
    )  # fmt: skip


def config_of(tree: Tree, start: Path, models: Mapping[str, Path] = {}) -> RunConfig:
    """The run file of a run: checked as every other, with the paths of this machine; `models` by their keys of [train]."""
    envs = [
        {**env, "name": str(ROOT / env["name"]) if env["name"].endswith(".py") else env["name"]} for env in tree["envs"]
    ]
    own = {"envs": envs, "policy": {"path": str(start)}, "train": {name: str(path) for name, path in models.items()}}
    config = from_tree(filled(merge(tree, own)), RunConfig, "benchmarks/claims/curves/grid.py")
    check_run(config)
    return config


def steps_made_by(version: int, lag: int, steps: int) -> range:
    """The steps that learn from this version's rollouts."""
    first = 0 if version == 0 else version + lag
    return range(first, min(version + lag + 1, steps))


class TrainedRun:
    """The state of one run."""

    def __init__(self, config: RunConfig, start: Path, published: Path, beside: Beside, teacher: Path | None) -> None:
        self.config, self.start, self.published, self.beside = config, start, published, beside
        self.env, self.label = env_of(config.envs[0]), config.envs[0].label
        self.sampling, self.renderer = sampling_of(config), Renderer.from_directory(start)
        self.spent = 0
        """Tokens that were generated to learn from them, or to decide what is learned from."""
        self.probed: Column = {}
        self.table = [EnvDraw(self.label, 1.0, self.env.num_tasks)]
        self.drawn = self._kept_tasks() if beside.filtered else self.table
        self.model = load_policy(start, torch.float32)
        self.frozen = load_policy(teacher, torch.float32) if teacher else None
        self.critic = critic_of(config.train, partial(begin_valued, start, torch.float32))
        self.learner = Learner(
            self.model, config.train, temperature=self.sampling.temperature, steps=config.steps,
            max_tokens=config.sampling.all_tokens, critic=self.critic,
            objective=sft_objective if beside.imitates else None,
        )  # fmt: skip
        self.judge = judge_of(config, start)
        load = partial(load_policy, start, torch.float32)
        self.refer = (
            reference_of(self.model, load, self.sampling.temperature, config.train.microbatch_tokens)
            if needs_reference(config.train.algorithm)
            else None
        )
        self.engine = open_engine(EngineSpec(threads=1, noise=self.sampling.noise))
        self.writer = self.engine
        """Whose rollouts are learned from."""
        if beside.imitates and teacher:
            self.writer = open_engine(EngineSpec(threads=1, noise=self.sampling.noise))
            self.writer.load(teacher, 0)
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

    def _kept_tasks(self) -> list[EnvDraw]:
        """What an offline filter leaves, by the first policy."""
        wanted = self.beside.filtered
        assert wanted is not None
        found = solve_rates.measure(self.config, self.start, self.label, wanted.rollouts, 0)
        tasks = found.between(wanted.low, wanted.high).tasks
        self.spent = found.tokens
        self.probed = {"measured_tokens": [float(found.tokens)], "tasks": [float(len(tasks))]}
        return [EnvDraw(self.label, 1.0, len(tasks), listed=tasks)]

    def _publish(self, version: int) -> None:
        """Give the engine the policy as it is now; test it if its turn has come."""
        save_policy(self.model, self.published, "float32", tokenizer_from=self.start)
        self.engine.load(self.published, version)
        steps = self.config.steps
        if version == steps or version % max(1, steps // TESTS) == 0:
            talks = self._play(self.engine, self._episodes("test", 0, self.config.eval.episodes, 1))
            book(self.tested, {"version": float(version), "spent": float(self.spent), **_means(talks)})
            if self.frozen is not None:
                book(self.tested, divergences(self.model, self.frozen, talks, self.sampling.temperature))
            self.last = [_ended(talk) for talk in talks]
            self.first = self.first or self.last

    def _sample(self, step: int, version: int) -> _Batch:
        """The groups of a step, written by the present version."""
        rollouts, vine = self.config.rollouts, vine_of(self.config.train.algorithm)
        episodes = self._episodes("train", step, rollouts.batch_groups, rollouts.group_size)
        talks = self._play(self.writer, episodes)
        batch, groups, tokens = _Batch([], []), [], 0
        for at in range(rollouts.batch_groups):
            group = talks[at * rollouts.group_size : (at + 1) * rollouts.group_size]
            slot = step * rollouts.batch_groups + at
            groups.append(Group(slot, 0, self.label, tuple(talk.rollout(version) for talk in group)))
            body, rewards = to_msgpack(groups[-1]), tuple(talk.reward for talk in group)
            steps = tuple(map(self._steps_of, group)) if step_credit_of(self.config.train.algorithm) else ()
            signal = teaches(rewards, self.config.train.algorithm, steps)
            continued = self.continued(groups[-1], group[0].task, step, at, vine) if vine and signal else []
            tokens += sum(len(talk.logprobs) for talk in continued)
            fresh = tuple(talk.reward for talk in continued)
            batch.members.append(
                BatchGroup(version, slot, "", 0, digest(body), rewards, continuations=fresh, steps=steps)
            )
            batch.bodies.append(body)
        means = _means(talks)
        book(self.sampled, {"version": float(version), **means, "tokens": means["tokens"] + tokens})
        self.spent += int(means["tokens"]) + tokens
        probe = self.beside.probe
        if probe and step % probe.every == 0:
            for at, group in enumerate(groups[: probe.groups]):
                own = talks[at * rollouts.group_size : (at + 1) * rollouts.group_size]
                continued = self.continued(group, own[0].task, step, at, probe.vine)
                for row in errors_of(self, own, group, continued, probe.vine):
                    book(self.probed, {"version": float(version), **row})
        return batch

    def written(self, purpose: str, step: int, groups: int, size: int) -> list[Conversation]:
        """What the engine's version writes for so many tasks, which the purpose and the step draw."""
        return self._play(self.engine, self._episodes(purpose, step, groups, size))

    def continued(self, group: Group, task: Task, step: int, at: int, vine: Vine) -> list[Conversation]:
        """Continuations of a group, in the order of `branches`."""
        seed = self._seed("train", step, at)
        episodes, begun = [], []
        for branch in branches(group, vine):
            tokens = group.rollouts[branch.rollout].tokens_T()[: branch.position].tolist()
            episodes.append(EpisodeAttempt(self.env, task, branch.seed(seed)))
            begun.append(opened(episodes[-1], self.renderer, self.sampling, tokens))
        return converse(self.engine, self.renderer, episodes, self.sampling, begun) if episodes else []

    def _steps_of(self, talk: Conversation) -> StepRewards:
        """What its turns or steps earn, if the run credits them."""
        credit = step_credit_of(self.config.train.algorithm)
        return (
            step_rewards(talk.played(), talk.reward, bool(talk.fault), credit, self.renderer.decode) if credit else ()
        )

    def _learn(self, batch: _Batch, version: int) -> None:
        """Turn this version into the next."""
        metrics = self.learner.step(self._rows(batch, version), version)
        book(self.learned, {name: float(metrics.get(name, 0.0)) for name in LEARNED})

    def _rows(self, batch: _Batch, version: int) -> list[TrainingRow]:
        """What a step learns from."""
        algorithm = self.config.train.algorithm
        rows_G = [
            rows_of_group(
                member, body, algorithm=algorithm, vocabulary=self.model.spec.vocab_size,
                max_tokens=self.sampling.max_tokens,
            )
            for member, body in zip(batch.members, batch.bodies, strict=True)
        ]  # fmt: skip
        if self.beside.imitates:
            return [row for rows in rows_G for row in rows]
        rows = select(
            batch.members, rows_G, algorithm=algorithm, version=version,
            max_staleness=self.config.rollouts.max_staleness,
        ).rows  # fmt: skip
        if self.refer is not None:
            rows = self.refer(rows)
        if self.judge is not None and rows:
            rows, _ = self.judge(rows, self.learner.logprobs)
        return rows

    def _seed(self, purpose: str, step: int, slot: int) -> bytes:
        return slot_seed(f"shelf/{purpose}/{self.config.seed}", step, "", b"", slot)

    def _episodes(self, purpose: str, step: int, groups: int, size: int) -> list[EpisodeAttempt]:
        """Episodes of so many tasks, drawn by the seed, the purpose and the step."""
        found = []
        heldout = self.beside.heldout and purpose == "test"
        table = [EnvDraw(self.label, 1.0, self.env.num_heldout)] if heldout else self.table
        for slot in range(groups):
            seed = self._seed(purpose, step, slot)
            task = task_of(self.env, draw_task(seed, self.drawn if purpose == "train" else table)[1], heldout)
            found += [EpisodeAttempt(self.env, task, sample_seed(seed, i)) for i in range(size)]
        return found

    def _play(self, engine: Engine, episodes: Sequence[EpisodeAttempt]) -> list[Conversation]:
        """Play in blocks of the run's size."""
        rows = self.config.rollouts.block_rollouts
        talks: list[Conversation] = []
        for first in range(0, len(episodes), rows):
            talks += converse(engine, self.renderer, episodes[first : first + rows], self.sampling)
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
    asked = talk.task.tokens if isinstance(talk.task, ShapedTask) else 0
    return asked, len(talk.logprobs), float(bool(talk.success))


def book(columns: Column, row: dict[str, float]) -> None:
    """Add a row; six digits are more than any figure needs."""
    for name, value in row.items():
        columns.setdefault(name, []).append(float(f"{value:.6g}"))
