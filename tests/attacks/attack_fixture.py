"""A whole verification without network: real tiny policies, the real engine, real environments, one lease.

Used by the zoo's stories and by `benchmarks/detection.py`. It has what an attacker may use: the policy and its
engine, altered copies of it, prefills, rewards, and which tokens were nearly taken.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.algos.noise.philox import gumbel, seed_words
from shoal.chat.renderer import Renderer
from shoal.config import TinyPolicy
from shoal.engine.interface import Engine, PolicyScore, ScoreRequest
from shoal.engine.native import LocalEngine
from shoal.env import Env
from shoal.envs.builtin.arithmetic import environment as arithmetic
from shoal.envs.builtin.wordle import environment as wordle
from shoal.envs.play_episodes import play_block
from shoal.envs.replay import replay_group
from shoal.models.checkpoint import load_policy, save_policy
from shoal.models.random_model import make_tiny
from shoal.models.transformer import Transformer
from shoal.protocol.encoding import digest, domain_hash, to_msgpack
from shoal.protocol.messages import (
    Block,
    Bounds,
    Check,
    EngineFacts,
    Group,
    GroupVerdict,
    Lease,
    Rules,
    Sampling,
    Slot,
    Submission,
)
from shoal.verification.check_context import Tools, score_requests
from shoal.verification.encode_submission import prove_activations
from shoal.verification.verify import verify_submission

TINY = TinyPolicy(width=48, layers=2, heads=2, kv_heads=1, mlp_width=96, max_positions=256)
SAMPLING = Sampling(temperature=1.0, max_turn_tokens=12, max_tokens=120)
RULES = Rules(
    group_size=8,
    block_groups=4,
    batch_groups=4,
    max_staleness=0,
    steps=1,
    lease_s=60.0,
    audit_rate=1.0,
    dtype="float32",
    bounds={"float32/float32": Bounds(gap=1e-3, flipped=1e-5, mean_gap=1e-7, logprob=0.01)},
)
VERSION = 3


def make_policy(directory: Path, seed: int = 0, sharpen: float = 1.0, nudge: float = 0.0, nudge_seed: int = 1) -> Path:
    """A random policy: `sharpen` multiplies the head (less entropy); `nudge` moves weights, relative to their size."""
    make_tiny(TINY, directory, seed, "float32")
    if sharpen == 1.0 and not nudge:
        return directory

    def change(model: Transformer) -> None:
        generator = torch.Generator().manual_seed(nudge_seed)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += nudge * parameter.square().mean().sqrt() * noise
        model.lm_head.weight *= sharpen

    return altered(directory, "changed", change)


def altered(directory: Path, name: str, change: Callable[[Transformer], None]) -> Path:
    """A copy of a policy beside it, changed in place by `change`; made once."""
    copy = directory.with_name(f"{directory.name}-{name}")
    if not copy.exists():
        model = load_policy(directory, torch.float32)
        with torch.no_grad():
            change(model)
        save_policy(model, copy, "float32", tokenizer_from=directory)
    return copy


def round_to_int4(model: Transformer) -> None:
    """Round the matrices of every layer: symmetric, 15 values, one scale for each 16 inputs of an output."""
    for weight in model.model.layers.parameters():
        if weight.dim() == 2:
            parts = weight.view(weight.shape[0], -1, 16)
            scale = parts.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 7
            parts.copy_((parts / scale).round() * scale)


def halve(model: Transformer) -> None:
    """Leave out the upper half of the layers: they add nothing to the stream any more."""
    layers = list(model.model.layers)
    for layer in layers[len(layers) // 2 :]:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()


def load_engine(directory: Path, version: int = VERSION, threads: int = 1, dtype: str = "float32") -> LocalEngine:
    engine = LocalEngine(threads=threads, dtype=dtype)
    engine.load(directory, version)
    return engine


def lease_of(
    blocks: list[list[tuple[int, str, int]]], lease: str = "lease-1", seed: str = "", sampling: Sampling = SAMPLING
) -> Lease:
    """A lease from (slot, environment, task) triples."""
    slots = [
        [Slot(s, domain_hash("test", seed.encode(), bytes([s % 256])).hex(), env, task) for s, env, task in b]
        for b in blocks
    ]
    return Lease(lease, "worker", VERSION, tuple(Block(i, tuple(b)) for i, b in enumerate(slots)), sampling, 0.0, 60.0)


LEASE = lease_of(
    [
        [(0, "wordle", 3), (1, "arithmetic", 11), (2, "wordle", 3), (3, "arithmetic", 12)],
        [(4, "wordle", 5), (5, "arithmetic", 13), (6, "wordle", 6), (7, "arithmetic", 14)],
    ]
)
"""Slots 0 and 2 hold the same task under different seeds."""


class NearlyTaken(NamedTuple):
    """For each policy token of a rollout, what the seed would have chosen without it: arrays over P."""

    token_P: NDArray[np.int64]
    gap_P: NDArray[np.float32]
    """By how much the policy's token was better, nats."""


@dataclass
class World:
    """What an attacker has and what a validator has. `other` and `stale` are not the policy that the lease asks for."""

    honest: Path
    other: Path
    stale: Path
    lease: Lease = LEASE
    rules: Rules = RULES
    engine: LocalEngine = field(init=False)
    envs: dict[str, Env] = field(init=False)

    def __post_init__(self) -> None:
        self.engine = load_engine(self.honest, dtype=self.rules.dtype)
        self.renderer = Renderer.from_directory(self.honest)
        self.envs = {"wordle": wordle(num_words=64, heldout=16), "arithmetic": arithmetic()}
        self.tries: dict[bytes, list[Group]] = {}
        """The lease with other seeds, from the attacker's salt."""

    # --- what an attacker can do ---

    def play(
        self, engine: Engine | None = None, lease: Lease | None = None, sampling: Sampling | None = None
    ) -> list[Group]:
        """Play the lease as the worker does; with another engine or other slots as a cheat would."""
        lease, sampling = lease or self.lease, sampling or (lease or self.lease).sampling
        return [
            group
            for block in lease.blocks
            for group in play_block(
                engine or self.engine, self.renderer, self.envs, block, self.rules.group_size, sampling
            )
        ]

    @cached_property
    def honest_groups(self) -> list[Group]:
        return self.play()

    @property
    def slots(self) -> list[Slot]:
        return [slot for block in self.lease.blocks for slot in block.slots]

    def requests(self, groups: Iterable[Group]) -> list[ScoreRequest]:
        """What to prefill for groups that fill the lease."""
        return [r for slot, group in zip(self.slots, groups, strict=False) for r in score_requests(slot, group)]

    def score(self, requests: Sequence[ScoreRequest], engine: Engine | None = None) -> list[PolicyScore]:
        """One prefill, with hidden states where the run asks for proofs."""
        asked = {"hidden": True} if self.rules.proofs != "none" else {}
        return (engine or self.engine).score(requests, self.lease.sampling.temperature, **asked)

    def prove(self, groups: Sequence[Group], engine: Engine | None = None) -> tuple[bytes, ...]:
        """A proof for each group by an engine's activations; none where the run asks for none."""
        if self.rules.proofs == "none":
            return ()
        return prove_activations(groups, self.score(self.requests(groups), engine))

    def rewards(self, groups: Iterable[Group]) -> list[list[float]]:
        """Reward of each rollout, by the environment."""
        return [
            [f.reward for f in replay_group(env, self.renderer, env.task(g.task), g.rollouts, self.lease.sampling)]
            for g in groups
            for env in [self.envs[g.env]]
        ]  # fmt: skip

    def nearly_taken(self, groups: Sequence[Group]) -> list[NearlyTaken]:
        """The runner-up at each policy token of each rollout, under the lease's seeds."""
        requests, head = self.requests(groups), load_policy(self.honest, torch.float32)
        found = []
        scores = self.engine.score(requests, self.lease.sampling.temperature, hidden=True)
        for request, score in zip(requests, scores, strict=True):
            assert score.hidden_PD is not None
            positions_P = torch.tensor(request.policy_positions)
            with torch.inference_mode():
                noisy_PV = head.logits(torch.from_numpy(score.hidden_PD)).float() / self.lease.sampling.temperature
                noisy_PV += gumbel(
                    seed_words([request.seed]).repeat(len(positions_P), 1), positions_P, noisy_PV.shape[1]
                )
                taken_P1 = torch.tensor(request.token_ids)[positions_P][:, None]
                best_P = noisy_PV.gather(1, taken_P1).squeeze(1)
                second_P, token_P = noisy_PV.scatter(1, taken_P1, float("-inf")).max(-1)
            found.append(NearlyTaken(token_P.numpy(), (best_P - second_P).numpy()))
        return found

    def encode(
        self,
        groups: Sequence[Group],
        encoded: tuple[bytes, ...] = (),
        run: str = "run-1",
        lease: str = "",
        proofs: tuple[bytes, ...] | None = None,
    ) -> bytes:
        """A submission of any groups, or of bytes in their place, past the prover's own refusals."""
        if proofs is None:
            proofs = self.prove(groups) if not encoded else (b"",) * (len(encoded) * (self.rules.proofs != "none"))
        return to_msgpack(
            Submission(
                run=run,
                lease=lease or self.lease.id,
                version=self.lease.version,
                groups=encoded or tuple(to_msgpack(group) for group in groups),
                proofs=proofs,
                engine=EngineFacts("shoal-local", self.rules.dtype, "cpu"),
            )
        )

    # --- what a validator does ---

    def tools(self, engine: Engine | None = None) -> Tools:
        """The tools of a validator."""
        dtype = engine.facts.dtype if isinstance(engine, LocalEngine) else self.engine.facts.dtype
        info = SimpleNamespace(run="run-1", rules=self.rules)
        return Tools(info, self.envs, self.renderer, replay_group, dtype, lambda requests: self.score(requests, engine))  # type: ignore[arg-type]

    def judge(self, body: bytes, engine: Engine | None = None, audit: bool = True) -> list[GroupVerdict]:
        """A validator's verdicts on the lease."""
        numbers = [slot.slot for slot in self.slots]
        check = Check(digest(body), self.lease, tuple(numbers) if audit else (), 60.0)
        verdict = verify_submission(body, check, self.tools(engine))
        assert [group.slot for group in verdict.groups] == numbers
        return list(verdict.groups)
