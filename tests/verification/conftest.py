"""Work made by hand: scripted players play real environments, and the test writes the engine's scores."""

import random
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from shoal.chat.renderer import Renderer
from shoal.config import TinyPolicy
from shoal.engine.interface import PolicyScore
from shoal.env import Env
from shoal.envs.builtin.arithmetic import environment as arithmetic
from shoal.envs.builtin.wordle import environment as wordle
from shoal.envs.play_episodes import play_scripted
from shoal.envs.replay import replay_group
from shoal.models.random_model import make_tiny
from shoal.protocol import messages
from shoal.protocol.encoding import digest, from_msgpack, to_msgpack
from shoal.verification.check_context import Context, Tools
from shoal.verification.verify import verify_submission

GROUP_SIZE = 4
SAMPLING = messages.Sampling(temperature=1.0, max_turn_tokens=12, max_tokens=160)
RULES = messages.Rules(
    group_size=GROUP_SIZE,
    block_groups=2,
    batch_groups=2,
    max_staleness=0,
    steps=1,
    lease_s=60.0,
    audit_rate=1.0,
    dtype="float32",
    bounds={
        "float32/float32": messages.Bounds(gap=1e-3, flipped=1e-5, mean_gap=1e-7, logprob=0.01),
        "float32/bfloat16": messages.Bounds(gap=0.2, flipped=1e-3, mean_gap=5e-4, logprob=0.5),
    },
)
ENGINE = messages.EngineFacts("by hand", "float32", "cpu")


@pytest.fixture(scope="session")
def renderer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("policy")
    make_tiny(TinyPolicy(width=16, layers=1, heads=2, kv_heads=1, mlp_width=16), directory, 0, "float32")
    return Renderer.from_directory(directory)


class SubmissionCase:
    """A lease of four slots over two environments, the work that fills it, and its judgement."""

    def __init__(self, renderer: Renderer, envs: dict[str, Env] | None = None, groups=None) -> None:
        self.envs = envs or {"wordle": wordle(num_words=16, heldout=4), "arithmetic": arithmetic()}
        slots = [messages.Slot(i, f"{i:064x}", list(self.envs)[i % 2], task=i + 1) for i in range(4)]
        self.lease = messages.Lease(
            "lease-1",
            "worker",
            3,
            tuple(messages.Block(b, tuple(slots[2 * b : 2 * b + 2])) for b in (0, 1)),
            SAMPLING,
            0,
            60,
        )
        info = SimpleNamespace(run="run-1", rules=RULES)
        self.prefills: list[int] = []
        self.gaps = lambda request: np.zeros(len(request.policy_positions), dtype=np.float32)
        self.logprobs = lambda request: np.full(len(request.policy_positions), -1.0, dtype=np.float32)
        self.tools = Tools(info, self.envs, renderer, replay_group, "float32", self._score)
        self.slots = slots
        self.groups = list(groups or map(self._play, slots))

    def _play(self, slot: messages.Slot) -> messages.Group:
        env, rollouts = self.envs[slot.env], []
        for index in range(GROUP_SIZE):
            player = env.players()[("right", "wrong")[index % 2]]
            talk = play_scripted(env, self.tools.renderer, env.task(slot.task), player, random.Random(index), SAMPLING)
            for row in talk.rows:
                row.logprobs = [-1.0] * sum(author > 0 for author in row.author)
            rollouts.append(talk.rollout(self.lease.version))
        return messages.Group(slot.slot, slot.task, slot.env, tuple(rollouts))

    def _score(self, requests):
        self.prefills.append(len(requests))
        return [PolicyScore(self.logprobs(request), self.gaps(request), None) for request in requests]

    def body(self, groups=None) -> bytes:
        """A submission of any groups, even those that the prover would refuse to send."""
        encoded = tuple(to_msgpack(group) for group in (self.groups if groups is None else groups))
        return to_msgpack(messages.Submission("run-1", self.lease.id, self.lease.version, encoded, (), ENGINE))

    def judge(self, body: bytes, audited=()) -> list[messages.GroupVerdict]:
        verdict = verify_submission(body, messages.Check(digest(body), self.lease, tuple(audited), 60.0), self.tools)
        assert [v.slot for v in verdict.groups] == [0, 1, 2, 3]
        return list(verdict.groups)

    def context(self, place: int = 0) -> Context:
        return Context(self.tools, self.lease, self.slots[place], from_msgpack(self.body(), messages.Submission))

    def edit(self, place: int, rollout: int, **fields) -> list[messages.Group]:
        """The work with some fields of one rollout replaced."""
        group = self.groups[place]
        rollouts = list(group.rollouts)
        rollouts[rollout] = msgspec.structs.replace(rollouts[rollout], **fields)
        return self.replace(place, rollouts=tuple(rollouts))

    def replace(self, place: int, **fields) -> list[messages.Group]:
        """The work with some fields of one group replaced."""
        groups = list(self.groups)
        groups[place] = msgspec.structs.replace(groups[place], **fields)
        return groups

    def encoded_groups(self) -> list[bytes]:
        return [to_msgpack(group) for group in self.groups]

    def resubmit(self, **fields) -> bytes:
        """The body with some fields of the submission replaced."""
        return to_msgpack(msgspec.structs.replace(from_msgpack(self.body(), messages.Submission), **fields))


@pytest.fixture(scope="session")
def played(renderer):
    return SubmissionCase(renderer).groups


@pytest.fixture
def case(renderer, played):
    return SubmissionCase(renderer, groups=played)
