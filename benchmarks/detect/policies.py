"""The policies of `benchmarks/detection.py`: the demo's start at three entropies, each with eight real train steps.

A family is one policy's versions. Its start is `recipes/wordle-start` with the logits multiplied until it has the asked
entropy, which is sampling it at another temperature. Then the learner of the product takes eight GRPO steps on honest
rollouts of each version, at the demo's learning rate divided by that factor: logits move as much as the demo's do.

The task is Wordle that goes on to the eleventh guess whatever was found, so that a rollout has some 66 policy tokens.
"""

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from shoal.algos.regularisers import logprob_and_entropy
from shoal.config import ACTIVATION_ERROR, BOUNDS, SamplingConfig, TrainConfig
from shoal.engine.interface import Engine, PolicyScore, ScoreRequest
from shoal.env import Step
from shoal.envs.builtin.wordle import Wordle, WordleArgs, WordleState
from shoal.models.checkpoint import load_policy, save_policy
from shoal.models.transformer import Transformer
from shoal.protocol.algorithm_config import Grpo
from shoal.protocol.encoding import digest, to_msgpack
from shoal.protocol.messages import BatchGroup, Group, Lease, Rules, Sampling
from shoal.protocol.tolerances import wire_bounds
from shoal.train.learner import Learner
from shoal.train.rows import TrainingRow, rows_of_group
from tests.attacks.attack_fixture import VERSION, World, altered, lease_of

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SAMPLING = Sampling(temperature=1.0, max_turn_tokens=8, max_tokens=192)
ROUNDS, STEPS, LR, SMALL_LR = 11, 8, 2e-4, 1e-6
SHARPENED = 1.15
"""What the train steps divide the entropy by, about."""
GROUP_SIZE, BLOCK_GROUPS = 4, 16
ARGS = WordleArgs(num_words=320, heldout=48, guesses=ROUNDS, not_words=ROUNDS)


class Rounds(Wordle):
    """Wordle of so many guesses, found or not."""

    def step(self, state: WordleState, action: str) -> Step:
        after = super().step(state, action)
        return after._replace(done=len(after.state.guesses) + after.state.not_words >= ROUNDS)


def rules(dtype: str = "float32") -> Rules:
    """A run's rules with proofs of activations and the built-in bounds."""
    return Rules(
        group_size=GROUP_SIZE,
        block_groups=BLOCK_GROUPS,
        batch_groups=BLOCK_GROUPS,
        max_staleness=0,
        steps=1,
        lease_s=60.0,
        audit_rate=1.0,
        dtype=dtype,
        bounds={pair: wire_bounds(bounds) for pair, bounds in BOUNDS.items()},
        proofs="toploc",
        activation_error=ACTIVATION_ERROR[dtype],
    )


def lease(rollouts: int, seed: str, block_groups: int = BLOCK_GROUPS) -> Lease:
    """Slots for so many rollouts; two neighbours hold the same task."""
    slots = [(number, "wordle", number // 2) for number in range(rollouts // GROUP_SIZE)]
    blocks = [slots[start : start + block_groups] for start in range(0, len(slots), block_groups)]
    return lease_of(blocks, seed=seed, sampling=SAMPLING)


class Lab(World):
    """A world over the long game whose prefills with the right policy are made once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.envs = {"wordle": Rounds(ARGS)}
        self.known: dict[tuple[bytes, bytes], PolicyScore] = {}

    def score(self, requests: Sequence[ScoreRequest], engine: Engine | None = None) -> list[PolicyScore]:
        if engine not in (None, self.engine):
            return super().score(requests, engine)
        named = [(_name(request), request) for request in requests]
        new = {name: request for name, request in named if name not in self.known}
        if new:
            self.known |= zip(new, super().score(list(new.values())), strict=True)
        return [self.known[name] for name, _ in named]


def _name(request: ScoreRequest) -> tuple[bytes, bytes]:
    tokens = np.array([len(request.token_ids), *request.token_ids, *request.policy_positions], dtype=np.int32)
    return tokens.tobytes(), request.seed


@dataclass(frozen=True)
class Family:
    """One policy and its past."""

    target: float
    """Entropy asked for, nats a token."""
    scale: float
    """What its logits were multiplied by."""
    versions: list[Path]
    """From the start to the policy that the lease asks for."""
    other: Path
    """Trained for another task."""
    near: Path
    """One step of learning rate `SMALL_LR` from the last."""
    entropy: float
    """Of the last version, nats a policy token."""
    drift: dict[int, float]
    """Mean |difference of log-probs| to the version so many steps older, at honest tokens, nats; 0 names `near`."""

    @property
    def policy(self) -> Path:
        return self.versions[-1]

    def lab(self, the_lease: Lease, the_rules: Rules | None = None, age: int = 1) -> Lab:
        """A world in which a stale policy is `age` steps old; 0 is `near`."""
        stale = self.versions[-1 - age] if age else self.near
        return Lab(self.policy, self.other, stale, the_lease, the_rules or rules())


def make_family(target: float, folder: Path, train_rollouts: int) -> Family:
    """Scale, then train. All from fixed seeds."""
    folder.mkdir()
    base, other = copied("wordle-start", folder), copied("arithmetic-start", folder)
    scale = _find_scale(base, SHARPENED * target)
    versions = [_scaled(base, scale)]
    learner = Learner(
        load_policy(versions[0], torch.float32),
        TrainConfig(lr=LR / scale, warmup_steps=0),
        SamplingConfig(temperature=SAMPLING.temperature),
        steps=STEPS,
    )
    for step in range(STEPS):
        versions.append(_learn(learner, versions[-1], step, train_rollouts, folder / f"v{step + 1}"))
    learner.config = learner.config.__class__(lr=SMALL_LR, warmup_steps=0)
    near = _learn(learner, versions[-1], STEPS, train_rollouts, folder / "near")
    family = Family(target, scale, versions, other, near, 0.0, {})
    lab = family.lab(lease(128, "entropy"))
    honest = lab.requests(lab.honest_groups)
    drift = {}
    for age in (0, 1, 2, STEPS):
        there = family.lab(lab.lease, age=age)
        stale = Lab(there.stale, there.other, there.stale, lab.lease, lab.rules).score(honest)
        drift[age] = _mean_off(stale, lab.score(honest))
    return replace(family, entropy=_entropy(lab), drift=drift)


def copied(recipe: str, folder: Path) -> Path:
    """A committed checkpoint, with positions for the long game."""
    copy = folder / recipe
    shutil.copytree(RECIPES / recipe, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": SAMPLING.max_tokens}))
    return copy


def _find_scale(base: Path, target: float) -> float:
    """By bisection, in the logarithm."""
    low, high = 0.0, 4.0
    for _ in range(6):
        middle = (low + high) / 2
        path = _scaled(base, 2**middle)
        lab = Lab(path, path, path, lease(64, "scale"), rules())
        low, high = (middle, high) if _entropy(lab) > target else (low, middle)
    return float(2 ** ((low + high) / 2))


def _scaled(base: Path, scale: float) -> Path:
    def change(model: Transformer) -> None:
        model.model.norm.weight.mul_(scale)  # before the head, which is also the embedding

    return altered(base, f"{scale:.4f}", change)


def _entropy(lab: Lab) -> float:
    """Mean over the policy tokens of the lab's honest rollouts, nats."""
    scores = lab.score(lab.requests(lab.honest_groups))
    model = load_policy(lab.honest, torch.float32)
    with torch.inference_mode():
        hidden_PD = torch.from_numpy(np.concatenate([s.hidden_PD for s in scores if s.hidden_PD is not None]))
        logits_PV = model.logits(hidden_PD).float() / SAMPLING.temperature
        return float(logprob_and_entropy(logits_PV, logits_PV.argmax(-1))[1].mean())


def _mean_off(scores: Iterable[PolicyScore], others: Iterable[PolicyScore]) -> float:
    return float(
        np.mean(
            np.concatenate(
                [np.abs(one.logprobs_P - other.logprobs_P) for one, other in zip(scores, others, strict=True)]
            )
        )
    )


def _learn(learner: Learner, path: Path, step: int, rollouts: int, out: Path) -> Path:
    """One step on honest rollouts of the present version."""
    lab = Lab(path, path, path, lease(rollouts, f"train {step}"), rules())
    rows = []
    for group, rewards in zip(lab.honest_groups, lab.rewards(lab.honest_groups), strict=True):
        rows += _rows(group, tuple(rewards))
    learner.step(rows, step)
    save_policy(learner.model, out, "float32", tokenizer_from=path)
    return out


def _rows(group: Group, rewards: tuple[float, ...]) -> list[TrainingRow]:
    data = to_msgpack(group)
    member = BatchGroup(VERSION, group.slot, "", 0, digest(data), rewards)
    return rows_of_group(member, data, algorithm=Grpo(), vocabulary=64, max_tokens=SAMPLING.max_tokens)
