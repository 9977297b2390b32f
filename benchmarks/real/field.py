"""Policies of many architectures for `benchmarks/real_models.py`, each at two entropies and with three RL steps behind it.

The models are small and random, as `tests/engine/architectures.py` writes them, because the arithmetic of an
architecture does not depend on its size. Their head is multiplied until a token has the asked entropy: plain random
logits hide rounding. They play `recipes/vowels.py`, in which random text has a reward.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from benchmarks.detect.policies import GROUP_SIZE, Lab
from shoal.algos.regularisers import logprob_and_entropy
from shoal.chat.renderer import Renderer
from shoal.config import ACTIVATION_ERROR, BOUNDS, TrainConfig
from shoal.engine.interface import Engine, PolicyScore, ScoreRequest
from shoal.engine.open import EngineSpec, kind_for, open_engine
from shoal.envs.load import load_env
from shoal.envs.replay import replay_group
from shoal.models.checkpoint import save_policy
from shoal.models.open_model import AUTO, open_policy
from shoal.protocol.algorithm_config import Grpo
from shoal.protocol.encoding import digest, to_msgpack
from shoal.protocol.messages import BatchGroup, Bounds, Lease, Rules, Sampling
from shoal.protocol.tolerances import wire_bounds
from shoal.train.learner import Learner
from shoal.train.rows import TrainingRow, rows_of_group
from shoal.verification.context import Tools
from tests.attacks.attack_fixture import VERSION, lease_of
from tests.engine.architectures import write_any

ROOT = Path(__file__).resolve().parents[2]
SAMPLING = Sampling(temperature=1.0, max_turn_tokens=32, max_tokens=96)
STEPS, LR = 3, 2e-3
BLOCK_GROUPS = 16
VOCABULARY = 64
TARGET_TOLERANCE = 0.3
"""By how much the entropy of the last version may differ from the target, nats: the steps change it, too."""
SCALE_TOLERANCE = 0.05
"""By how much the entropy of a scale may differ from the target, as a share of it."""
SCALED_ROLLOUTS = 64
"""Rollouts by which the entropy of a scale is measured."""


def rules(dtype: str, own: dict[str, Bounds] | None = None, activation_error: float = -1.0) -> Rules:
    """A run's rules with proofs of activations, and the built-in bounds unless there are others.

    `activation_error` below 0 is the built-in one; 0 means that the run asks for no proofs.
    """
    return Rules(
        group_size=GROUP_SIZE, block_groups=BLOCK_GROUPS, batch_groups=BLOCK_GROUPS, max_staleness=0, steps=1, lease_s=60.0,
        audit_rate=1.0, dtype=dtype, bounds={pair: wire_bounds(bounds) for pair, bounds in BOUNDS.items()} | (own or {}),
        proofs="toploc" if activation_error else "none",
        activation_error=ACTIVATION_ERROR[dtype] if activation_error < 0 else activation_error,
    )  # fmt: skip


def lease(groups: int, seed: str) -> Lease:
    """Slots for so many groups, two of each task."""
    slots = [(number, "vowels", number // 2 % 256) for number in range(groups)]
    blocks = [slots[start : start + BLOCK_GROUPS] for start in range(0, groups, BLOCK_GROUPS)]
    return lease_of(blocks, seed=seed, sampling=SAMPLING)


def engine_of(directory: Path, dtype: str = "float32") -> Engine:
    """An engine of the kind that the policy needs, on one thread."""
    engine = open_engine(EngineSpec(kind_for(directory), dtype, threads=1))
    engine.load(directory, VERSION)
    return engine


class Field(Lab):
    """A world over a policy of any architecture."""

    def __post_init__(self) -> None:
        self.engine: Engine = engine_of(self.honest, self.rules.dtype)  # type: ignore[assignment]
        self.renderer = Renderer.from_directory(self.honest)
        self.envs = {"vowels": load_env(str(ROOT / "recipes" / "vowels.py"), {})}
        self.tries = {}
        self.known = {}

    def tools(self, engine: Engine | None = None) -> Tools:
        """The tools of a validator with this engine."""
        info, dtype = (
            SimpleNamespace(run="run-1", rules=self.rules),
            (engine or self.engine).facts.dtype,
        )
        return Tools(info, self.envs, self.renderer, replay_group, dtype, lambda requests: self.score(requests, engine))  # type: ignore[arg-type]


class InThrees:
    """An engine that scores three conversations at a time: another batch shape than that of its caller.

    It scores the same conversations once, with hidden states: they are judged several times, by different rules.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.facts = engine, engine.facts
        self._last: tuple[list[ScoreRequest], list[PolicyScore]] = ([], [])

    def score(self, requests: Sequence[ScoreRequest], temperature: float, hidden: bool = False) -> list[PolicyScore]:
        if self._last[0] != list(requests):
            parts = [requests[start : start + 3] for start in range(0, len(requests), 3)]
            scores = [score for part in parts for score in self.engine.score(part, temperature, hidden=True)]
            self._last = (list(requests), scores)
        return self._last[1]


@dataclass(frozen=True)
class Subject:
    """One architecture at one entropy."""

    name: str
    target: float
    """Entropy asked for, nats a token."""
    entropy: float
    """Of the last version."""
    versions: list[Path]
    """From the start to the policy after three RL steps."""
    other: Path
    """Another random model of the same shape."""
    moved: float
    """Largest |change of a weight| by the three steps."""

    @property
    def policy(self) -> Path:
        return self.versions[-1]

    def field(self, the_lease: Lease, the_rules: Rules) -> Field:
        """A world in which the stale policy is one step old."""
        return Field(self.policy, self.other, self.versions[-2], the_lease, the_rules)


def make_subject(name: str, target: float, folder: Path, train_groups: int) -> Subject:
    """Scale the head, then take three RL steps on honest rollouts. All from fixed seeds; made once in a folder."""
    known = folder / "subject.json"
    if known.exists():
        found = json.loads(known.read_text())
        places = {"versions": [folder / one for one in found["versions"]], "other": folder / found["other"]}
        return Subject(**found | places)
    shutil.rmtree(folder, ignore_errors=True)  # a run that was stopped may have left half of it
    folder.mkdir(parents=True)
    scale = _find_scale(name, target, folder)
    versions = [write_any(name, folder / "v0", sharpen=scale)]
    other = write_any(name, folder / "other", seed=8, sharpen=scale)
    model = open_policy(versions[0], torch.float32, AUTO)
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    learner = Learner(model, TrainConfig(lr=LR / scale, warmup_steps=0), temperature=SAMPLING.temperature, steps=STEPS)
    for step in range(STEPS):
        learner.step(_rows_of(versions[-1], step, train_groups), step)
        versions.append(folder / f"v{step + 1}")
        save_policy(learner.model, versions[-1], "float32", tokenizer_from=versions[0])
    moved = max(float((p.detach() - before[key]).abs().max()) for key, p in model.named_parameters())
    subject = Subject(name, target, entropy_of(versions[-1]), versions, other, moved)
    names = {"versions": [version.name for version in versions], "other": other.name}
    known.write_text(json.dumps(asdict(subject) | names))
    return subject


def entropy_of(policy: Path) -> float:
    """Mean over the policy tokens of honest rollouts, nats."""
    field = Field(policy, policy, policy, lease(SCALED_ROLLOUTS // GROUP_SIZE, "entropy"), rules("float32"))
    scores, model = field.score(field.requests(field.honest_groups)), open_policy(policy, torch.float32, AUTO)
    with torch.inference_mode():
        hidden_PD = torch.from_numpy(np.concatenate([s.hidden_PD for s in scores if s.hidden_PD is not None]))
        logits_PV = model.logits(hidden_PD).float() / SAMPLING.temperature
        return float(logprob_and_entropy(logits_PV, logits_PV.argmax(-1))[1].mean())


def _find_scale(name: str, target: float, folder: Path) -> float:
    """By bisection, in the logarithm, until the entropy is near enough."""
    low, high = -3.0, 6.0
    for step in range(8):
        middle = (low + high) / 2
        found = entropy_of(write_any(name, folder / f"scale{step}", sharpen=2**middle))
        if abs(found - target) < SCALE_TOLERANCE * target:
            return float(2**middle)
        low, high = (middle, high) if found > target else (low, middle)
    return float(2 ** ((low + high) / 2))


def _rows_of(policy: Path, step: int, groups: int) -> list[TrainingRow]:
    """What the learner gets of honest rollouts of one version."""
    field = Field(policy, policy, policy, lease(groups, f"train {step}"), rules("float32"))
    rows = []
    for group, rewards in zip(field.honest_groups, field.rewards(field.honest_groups), strict=True):
        data = to_msgpack(group)
        member = BatchGroup(VERSION, group.slot, "", 0, digest(data), tuple(rewards))
        rows += rows_of_group(
            member, data, algorithm=Grpo(), vocabulary=VOCABULARY, max_tokens=SAMPLING.max_tokens
        )  # fmt: skip
    return rows
