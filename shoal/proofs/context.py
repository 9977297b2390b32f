"""What a check may look at and what it may say. Every check gets one `Context`; a role lends the tools in it.

Called by `verify`. The environments, their replay and the model belong to other rooms: a role passes them in, and a
check sees only what stands here. Nothing is computed before a check asks for it, and nothing twice.

Axes: G rollouts of a group, T tokens of a rollout, P tokens of it that the policy wrote.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.engine.base import Score, ScoreRequest
from shoal.policy.render import Renderer
from shoal.protocol.randomness import sample_seed
from shoal.protocol.types import (
    POLICY,
    Bounds,
    Ending,
    Group,
    Lease,
    Rollout,
    Rules,
    RunInfo,
    Sampling,
    Slot,
    Submission,
)

Severity = Literal["soft", "hard"]
"""Soft: no pay. Hard: no honest worker sends this, whatever its hardware; two validators who agree may slash."""


class Failure(NamedTuple):
    """What a check found wrong, with the evidence: where, the figure, and the bound that it passed."""

    rollout: int
    """Index in the group; -1 when the whole group is meant."""
    position: int
    """Absolute token index; -1 when the whole rollout is meant."""
    figure: float
    bound: float
    detail: str
    """One line, made of our own words and of numbers: nothing that a stranger wrote is repeated."""
    mild: bool = False
    """So near the bound that only no pay follows, although the check is hard."""


def gravest(failures: Iterable[Failure | None]) -> Failure | None:
    """The first that is not mild, or else the first: a token near its bound must not shield the forgery behind it."""
    found = [failure for failure in failures if failure is not None]
    return next((failure for failure in found if not failure.mild), found[0] if found else None)


class Environment(Protocol):
    """As much of `envs.base.Env` as checks need."""

    reward_bounds: tuple[float, float]

    def task(self, index: int) -> Any: ...

    def reset(self, task: Any) -> tuple[Any, Sequence[Mapping[str, str]]]: ...


class Replayed(Protocol):
    """What `envs.replay.replay` found of one rollout."""

    @property
    def reward(self) -> float: ...

    @property
    def ending(self) -> Ending: ...

    @property
    def problem(self) -> str: ...

    @property
    def position(self) -> int: ...


class CheckModule(Protocol):
    """A file in `checks/`."""

    NAME: str
    SEVERITY: Severity

    def check(self, group: Group, ctx: "Context") -> Failure | None: ...


@dataclass(frozen=True)
class Tools:
    """What a role lends for judging submissions of one run at one policy version."""

    info: RunInfo
    envs: Mapping[str, Environment]
    """By the labels of `info.envs`."""
    renderer: Renderer
    replay: Callable[..., Replayed]
    """`shoal.envs.replay.replay`."""
    dtype: str
    """Of the engine that scores."""
    score: Callable[[list[ScoreRequest]], list[Score]]
    """One prefill with the policy of the lease's version at the run's temperature. Called once a submission, and only
    if a group is audited. With hidden states where the rules ask for proofs."""


@dataclass
class Context:
    """One group's surroundings: what was asked for, under which rules, and the tools to look with."""

    tools: Tools
    lease: Lease
    slot: Slot
    """What is due at this place of the lease."""
    submission: Submission
    """What was said around the groups: run, lease, version."""
    scores: Sequence[Score] = ()
    """One a rollout; set before the audit checks run."""
    proof: bytes = b""
    """Of the group's activations; empty where the rules ask for none."""
    _replays: list[Replayed] | None = None

    @property
    def rules(self) -> Rules:
        return self.tools.info.rules

    @property
    def bounds(self) -> Bounds:
        """What honest work may differ by: sampled in the dtype that the run declares, replayed in ours."""
        return self.rules.bounds[f"{self.rules.dtype}/{self.tools.dtype}"]

    @property
    def sampling(self) -> Sampling:
        return self.lease.sampling

    @property
    def env(self) -> Environment:
        return self.tools.envs[self.slot.env]

    def replays(self, group: Group) -> list[Replayed]:
        """Every rollout of the group walked through the environment again, once for all checks; those alike once."""
        if self._replays is None:
            replay, renderer = self.tools.replay, self.tools.renderer
            names = [(r.token_ids, r.author, r.ending) for r in group.rollouts]
            found = {
                name: replay(self.env, renderer, self._task, r.tokens_T(), r.author_T(), r.ending, self.sampling)
                for name, r in dict(zip(names, group.rollouts, strict=True)).items()
            }
            self._replays = [found[name] for name in names]
        return self._replays

    def playable(self) -> bool:
        """Whether the environment can begin the slot's task, with room for a turn: where not, nobody can fill it."""
        assert self.slot.env in self.tools.envs, f"environment {self.slot.env} is not loaded"
        try:
            _, messages = self.env.reset(self._task)
            opening = self.tools.renderer.start(messages)
        except Exception:  # noqa: BLE001  foreign code: whatever it raises, the slot is void and the validator goes on
            return False
        return len(opening) < self.sampling.max_tokens

    @cached_property
    def _task(self) -> Any:
        return self.env.task(self.slot.task)

    def requests(self, group: Group) -> list[ScoreRequest]:
        """What the engine must prefill to replay the group's sampling: each rollout under the seed of its index."""
        return score_requests(self.slot, group)


def score_requests(slot: Slot, group: Group) -> list[ScoreRequest]:
    """What to prefill for a slot's group: each rollout under the seed of its index."""
    seed = bytes.fromhex(slot.seed)
    return [
        ScoreRequest(
            token_ids=rollout.tokens_T().tolist(),
            policy_positions=policy_positions(rollout).tolist(),
            seed=sample_seed(seed, index),
        )
        for index, rollout in enumerate(group.rollouts)
    ]


def policy_positions(rollout: Rollout) -> NDArray[np.int64]:
    """Absolute indices of the tokens that the policy wrote, int64[P]."""
    return np.flatnonzero(rollout.author_T() == POLICY)
