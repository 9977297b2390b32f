"""A whole verification without network: real tiny policies, the real engine, real environments, one lease."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import torch

from shoal.config import TinyPolicy
from shoal.engine.base import Engine
from shoal.engine.local import LocalEngine
from shoal.envs.arithmetic import environment as arithmetic
from shoal.envs.play import play_block
from shoal.envs.replay import replay
from shoal.envs.wordle import environment as wordle
from shoal.policy.files import load_policy, save_policy
from shoal.policy.render import Renderer
from shoal.policy.tiny import make_tiny
from shoal.proofs.context import Tools
from shoal.proofs.verify import verify_submission
from shoal.protocol.types import (
    Block,
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
from shoal.protocol.wire import digest, domain_hash, to_msgpack

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
    logprob_bound=0.01,
    gap_bound=1e-3,
    max_flipped=0.01,
    mean_gap_bound=1e-4,
)
VERSION = 3


def make_policy(directory: Path, seed: int = 0, sharpen: float = 1.0, nudge: float = 0.0, nudge_seed: int = 1) -> Path:
    """A random policy: `sharpen` multiplies the head (less entropy); `nudge` moves weights, relative to their size."""
    make_tiny(TINY, directory, seed, "float32")
    if sharpen != 1.0 or nudge:
        model = load_policy(directory, torch.float32)
        generator = torch.Generator().manual_seed(nudge_seed)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += nudge * parameter.square().mean().sqrt() * noise
            model.lm_head.weight *= sharpen
        save_policy(model, directory.with_name(directory.name + "-changed"), "float32", tokenizer_from=directory)
        return directory.with_name(directory.name + "-changed")
    return directory


def load_engine(directory: Path, version: int = VERSION, threads: int = 1, dtype: str = "float32") -> LocalEngine:
    engine = LocalEngine(threads=threads, dtype=dtype)
    engine.load(directory, version)
    return engine


def lease_of(blocks: list[list[tuple[int, str, int]]], lease: str = "lease-1", seed: str = "") -> Lease:
    """A lease from (slot, environment, task) triples."""
    slots = [
        [Slot(s, domain_hash("test", seed.encode(), bytes([s % 256])).hex(), env, task) for s, env, task in b]
        for b in blocks
    ]
    return Lease(lease, "worker", VERSION, tuple(Block(i, tuple(b)) for i, b in enumerate(slots)), SAMPLING, 0.0, 60.0)


LEASE = lease_of(
    [
        [(0, "wordle", 3), (1, "arithmetic", 11), (2, "wordle", 3), (3, "arithmetic", 12)],
        [(4, "wordle", 5), (5, "arithmetic", 13), (6, "wordle", 6), (7, "arithmetic", 14)],
    ]
)
"""Slots 0 and 2 hold the same task under different seeds."""


@dataclass
class World:
    """What an attacker has and what a validator has. `other` and `stale` are not the policy that the lease asks for."""

    honest: Path
    other: Path
    stale: Path
    lease: Lease = LEASE
    rules: Rules = RULES
    engine: LocalEngine = field(init=False)

    def __post_init__(self) -> None:
        self.engine = load_engine(self.honest)
        self.renderer = Renderer.from_directory(self.honest)
        self.envs = {"wordle": wordle(num_words=64, heldout=16), "arithmetic": arithmetic()}

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

    def encode(
        self, groups: list[Group], encoded: tuple[bytes, ...] = (), run: str = "run-1", lease: str = ""
    ) -> bytes:
        """A submission of any groups, or of bytes in their place, past the prover's own refusals."""
        return to_msgpack(
            Submission(
                run=run,
                lease=lease or self.lease.id,
                version=self.lease.version,
                groups=encoded or tuple(to_msgpack(group) for group in groups),
                proofs=(),
                engine=EngineFacts("shoal-local", "float32", "cpu"),
            )
        )

    def judge(self, body: bytes, engine: Engine | None = None, audit: bool = True) -> list[GroupVerdict]:
        """A validator's verdicts on the lease."""
        slots = [slot.slot for block in self.lease.blocks for slot in block.slots]
        info = SimpleNamespace(run="run-1", rules=self.rules)
        judge = engine or self.engine

        def score(requests):
            return judge.score(requests, self.lease.sampling.temperature)

        tools = Tools(info, self.envs, self.renderer, replay, score)
        check = Check(digest(body), self.lease, tuple(slots) if audit else (), 60.0)
        verdict = verify_submission(body, check, tools)
        assert [group.slot for group in verdict.groups] == slots
        return list(verdict.groups)
