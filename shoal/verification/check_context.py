"""Context of a check: what it can read, computed once when it is first needed, and what it can answer.

Environments, replay and model are in other rooms: a role passes them in as `Tools`.

Axes: G rollouts of a group, T tokens of a rollout, P tokens of a rollout that the policy wrote.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from numpy.typing import NDArray

from shoal.chat.messages import arguments_of
from shoal.chat.renderer import Renderer
from shoal.engine.interface import PolicyScore, ScoreRequest
from shoal.env import Message
from shoal.errors import MessagesRefused, Overreach, StateError
from shoal.ledger.group_advantages import advantages, advantages_by_step
from shoal.protocol.algorithm_config import StepCredit, needs_critic, step_credit_of, vine_of
from shoal.protocol.audit_and_pay import MAX_REWARD
from shoal.protocol.continuations import (
    Branch,
    branches,
    continued_rollouts,
    is_continued_slot,
    other_prefix,
    seeds_of,
    whole_author,
)
from shoal.protocol.messages import (
    ENVIRONMENT,
    POLICY,
    Bounds,
    Ending,
    Faults,
    Group,
    GroupRecord,
    Lease,
    Rollout,
    Rules,
    RunInfo,
    Sampling,
    Slot,
    StepRewards,
    Submission,
)
from shoal.protocol.messages.host_environments import differs
from shoal.protocol.reward_rules import FaultReport, fault_indices, faults_of, step_of_tokens
from shoal.protocol.rollout_validation import no_room
from shoal.protocol.seed_chain import row_seed
from shoal.protocol.tolerances import bounds_for
from shoal.terminal import printable

MAX_REFUSAL_CHARS = 200
"""Of a chat template's words that a verdict holds."""

Severity = Literal["soft", "hard"]
"""Soft: the group is not paid. Hard: an honest worker never sends this, on any hardware; two validators who agree may
slash."""


class CheckFailure(NamedTuple):
    """What a check found wrong, and the evidence: where it is, the measured figure, and the bound that it exceeds."""

    rollout: int
    """Index in the group; -1 for the whole group."""
    position: int
    """Absolute token index; -1 for the whole rollout."""
    figure: float
    bound: float
    detail: str
    """One line in our own words and numbers. It never repeats text that a stranger wrote."""
    mild: bool = False
    """True if the figure is near the bound: a hard check then refuses pay but does not slash."""


def gravest(failures: Iterable[CheckFailure | None]) -> CheckFailure | None:
    """The first failure that is not mild, or else the first one, so that a token near its bound cannot hide a forgery."""
    found = [failure for failure in failures if failure is not None]
    return next((failure for failure in found if not failure.mild), found[0] if found else None)


class Environment(Protocol):
    """The part of `env.Env` that checks need."""

    reward_bounds: tuple[float, float]

    def task(self, index: int) -> Any: ...

    def reset(self, task: Any) -> tuple[Any, Sequence[Message]]: ...


class ReplayedRollout(FaultReport, Protocol):
    """What `envs.replay.replay_group` found for one rollout."""

    @property
    def reward(self) -> float: ...

    @property
    def ending(self) -> Ending: ...

    @property
    def problem(self) -> str: ...

    @property
    def position(self) -> int: ...

    def steps(self, credit: StepCredit) -> StepRewards:
        """What its turns or steps earn, as the run's credit asks."""
        ...


@dataclass(frozen=True)
class Tools:
    """What a role provides for judging submissions of one run at one policy version."""

    info: RunInfo
    envs: Mapping[str, Environment]
    """The environments, by the labels in `info.envs`."""
    renderer: Renderer
    replay: Callable[..., Sequence[ReplayedRollout]]
    """`shoal.envs.replay.replay_group`."""
    dtype: str
    """Dtype of the engine that scores."""
    score: Callable[[list[ScoreRequest]], list[PolicyScore]]
    """One prefill with the policy of the lease's version at the run's temperature. Called once a submission, and only
    if a group is audited. With hidden states where the rules ask for proofs."""
    implementation: str = ""
    """Of the engine that scores, as it names itself."""
    on_accept: Callable[[str, Sequence[ReplayedRollout]], None] = lambda label, replays: None
    """Gets the label and the replays of each group that is accepted, in the end."""


@dataclass
class Context:
    """All that the checks of one group need: the lease, the rules, and the tools."""

    tools: Tools
    lease: Lease
    slot: Slot
    """The slot that this group must fill."""
    submission: Submission
    """The fields around the groups: run, lease, version."""
    scores: Sequence[PolicyScore] = ()
    """One score for each rollout; set before the audit checks run."""
    proof: bytes = b""
    """Proof of the group's activations; empty if the rules ask for none."""
    record: GroupRecord | None = None
    """The group as the host's stage played it; None in a run whose workers play."""
    parent: Group | None = None
    """The accepted group that this one continues; None if it continues none."""
    _replays: list[ReplayedRollout] | None = None
    _steps: tuple[StepRewards, ...] | UnsetType = UNSET

    @property
    def rules(self) -> Rules:
        return self.tools.info.rules

    @cached_property
    def bounds(self) -> Bounds:
        """What honest work may differ by: sampled in the dtype that the run declares, replayed by our engine."""
        tools = self.tools
        bounds = bounds_for(self.rules, self.submission.engine.implementation, tools.implementation, tools.dtype)
        assert bounds is not None, f"the run has no bounds for work that is replayed in {tools.dtype}"
        return bounds

    @property
    def sampling(self) -> Sampling:
        return self.lease.sampling

    @property
    def reward_bounds(self) -> tuple[float, float]:
        """Of the environment; of all environments if the host plays this one."""
        return (-MAX_REWARD, MAX_REWARD) if self.record is not None else self.env.reward_bounds

    @property
    def env(self) -> Environment:
        return self.tools.envs[self.slot.env]

    @property
    def is_continued(self) -> bool:
        """Whether the slot is one of continuations."""
        return is_continued_slot(self.slot.slot, self.rules.block_groups)

    @cached_property
    def branches(self) -> list[Branch]:
        """The continuations that are due; empty in an ordinary slot."""
        vine = vine_of(self.rules.algorithm)
        return branches(self.parent, vine) if self.parent is not None and vine is not None else []

    @property
    def due(self) -> int:
        """Rollouts that the group must have."""
        return len(self.branches) if self.is_continued else self.rules.group_size

    def prompt(self, index: int, rollout: Rollout) -> tuple[list[int], int]:
        """What a rollout opens with, and the index before which a difference is in that."""
        if self.parent is not None:
            branch = self.branches[index]
            return self.parent.rollouts[branch.rollout].tokens_T()[: branch.position].tolist(), branch.position + 1
        return self.opening, max(int(policy_positions(rollout)[0]), len(self.opening))

    def replays(self, group: Group) -> list[ReplayedRollout]:
        """Replay the rollouts of the group through the environment, once for all checks; equal rollouts only once."""
        if self._replays is None and self.record is not None:
            self._replays = _recorded(group, self.record)
        if self._replays is None and self.parent is not None:
            self._replays = self._continued(group.rollouts, self.parent)
        if self._replays is None:
            self._replays = self._played(group.rollouts)
        return self._replays

    def _played(self, rollouts: Sequence[Rollout]) -> list[ReplayedRollout]:
        tools = self.tools
        return list(tools.replay(self.env, tools.renderer, self._task, rollouts, self.sampling)) if rollouts else []

    def _continued(self, rollouts: Sequence[Rollout], parent: Group) -> list[ReplayedRollout]:
        """Replays of continuations, each as a rollout that was played in one go. One with another prefix has a problem."""
        stops, whole = self.tools.renderer.stop_ids, dict[int, Rollout]()
        found: dict[int, ReplayedRollout] = {}
        for index, (rollout, branch) in enumerate(zip(rollouts, self.branches, strict=False)):
            before = parent.rollouts[branch.rollout]
            at = other_prefix(rollout, before, branch.position)
            if at < 0:
                author_T = whole_author(before, rollout.author_T(), branch.position, stops)
                whole[index] = replace(rollout, author=author_T.tobytes())
            else:
                found[index] = _Replay(min(self.env.reward_bounds), rollout.ending, "it continues another rollout", at)
        found |= dict(zip(whole, self._played(list(whole.values())), strict=True))
        return [found[index] for index in range(len(found))]

    def unplayable(self) -> str:
        """Why nobody can fill the slot: the environment cannot begin its task, leaves no room for a turn, or plays what is
        continued otherwise. Empty if it can be filled."""
        begins = f"task {self.slot.task} of {self.slot.env[:40]} cannot begin: "
        if self.record is not None:
            why = printable(self.record.why)[:MAX_REFUSAL_CHARS]
            return "" if self.record.rollouts else f"{begins}{why or 'the host says so'}"
        assert self.slot.env in self.tools.envs, f"environment {self.slot.env} is not loaded"
        try:
            if self.is_continued:
                return "" if self._plays_parent() else "the environment plays what is continued otherwise"
            room = no_room(getattr(self.env, "max_tokens", 0), self.sampling, len(self.opening))
            return room and begins + room
        except (Overreach, MemoryError):
            raise  # guard: overreach-is-no-verdict
        except MessagesRefused as refused:
            return f"{begins}{refused}"
        except Exception:  # noqa: BLE001  foreign code may raise anything: the slot is void, the validator continues
            return f"{begins}the environment fails" if not self.is_continued else "what is continued cannot be played"

    def _plays_parent(self) -> bool:
        """Whether the environment plays the rollouts that are continued as the parent has them, if there is one."""
        vine = vine_of(self.rules.algorithm)
        continued = continued_rollouts(self.parent, vine) if self.parent is not None and vine is not None else []
        return not any(replayed.problem for replayed in self._played(continued))  # guard: forged-parents-are-void

    @cached_property
    def opening(self) -> list[int]:
        """The prompt of the slot's task, by this machine's data. Raises what the environment raises."""
        _, messages = self.env.reset(self._task)
        try:
            return self.tools.renderer.start(messages, arguments_of(self.env))
        except Overreach:
            raise
        except StateError as refused:
            raise MessagesRefused(printable(" ".join(str(refused).split()))[:MAX_REFUSAL_CHARS]) from None

    @cached_property
    def _task(self) -> Any:
        return self.env.task(self.slot.task)

    def signs_G(self, group: Group) -> NDArray[np.float64]:
        """Of each rollout: 1 if the loss encourages it, -1 if it discourages it, 0 if neither."""
        rewards = [float(replayed.reward) for replayed in self.replays(group)]
        worth_G = advantages(rewards, self.rules.algorithm, fault_indices(self.faults(group)))
        return np.sign(np.nan_to_num(worth_G.astype(np.float64)))

    def faults(self, group: Group) -> Faults | UnsetType:
        """The rollouts on which the environment failed; unset if it failed on none."""
        return faults_of(self.replays(group))

    def steps(self, group: Group) -> tuple[StepRewards, ...] | UnsetType:
        """What the turns or steps of each rollout earn; unset in a run that credits none."""
        credit = step_credit_of(self.rules.algorithm)
        if credit is not None and self._steps is UNSET:
            self._steps = tuple(replayed.steps(credit) for replayed in self.replays(group))
        return self._steps

    def signs_of_tokens(self, group: Group) -> list[NDArray[np.float64]] | None:
        """Of each policy token of each rollout as in `signs_G`, where steps decide it; None in other runs."""
        algorithm, steps = self.rules.algorithm, self.steps(group)
        if steps is UNSET or needs_critic(algorithm):
            return None
        found = []
        credited = advantages_by_step(steps, algorithm, fault_indices(self.faults(group)))
        for rollout, steps_S, A_S in zip(group.rollouts, steps, credited, strict=True):
            author_P = rollout.author_T()[policy_positions(rollout)]
            signs_P = np.zeros(len(author_P))
            signs_P[author_P == POLICY] = np.sign(A_S[step_of_tokens(rollout, steps_S)])
            found.append(signs_P)
        return found

    def requests(self, group: Group) -> list[ScoreRequest]:
        """What the engine must prefill to replay the group's sampling: each row of each rollout with its own seed."""
        return score_requests(self.slot, group, self.branches)


class GroupCheck(NamedTuple):
    """A check of a group: its name in verdicts, and how grave a failure is that is not mild."""

    name: str
    severity: Severity
    run: Callable[[Group, Context], CheckFailure | None]


@dataclass(frozen=True)
class _Replay:
    """What is known of one rollout without playing it."""

    reward: float
    ending: Ending
    problem: str = ""
    position: int = -1
    fault: str = ""
    outside: float | None = None

    def steps(self, credit: StepCredit) -> StepRewards:
        """None: it was not played here."""
        return ()


def _recorded(group: Group, record: GroupRecord) -> list[ReplayedRollout]:
    """The recorded rewards of a group's rollouts. One that is not the recorded rollout has a problem."""
    found: list[ReplayedRollout] = []
    for index, rollout in enumerate(group.rollouts):
        known = record.rollouts[index] if index < len(record.rollouts) else None
        if known is None or differs(rollout, known.digest):
            found.append(_Replay(-MAX_REWARD, rollout.ending, "the host's stage recorded another rollout"))
        else:
            outside = None if known.outside is UNSET else known.outside
            found.append(_Replay(known.reward, known.ending, fault=known.fault, outside=outside))
    return found


def score_requests(slot: Slot, group: Group, continued: Sequence[Branch] = ()) -> list[ScoreRequest]:
    """What to prefill for a slot's group: each row of each rollout, with its own seed. `continued` are the branches of a
    group of continuations."""
    seeds = seeds_of(slot, len(group.rollouts), continued)
    return [
        ScoreRequest(
            token_ids=row.tokens_T.tolist(),
            policy_positions=np.flatnonzero(row.author_T != ENVIRONMENT).tolist(),
            seed=row_seed(seeds[index], number),
        )
        for index, rollout in enumerate(group.rollouts)
        for number, row in enumerate(rollout.rows())
    ]


def by_group(groups: Iterable[Group], scores: Iterable[PolicyScore]) -> list[list[PolicyScore]]:
    """For each group one score for each rollout, from the scores of all rows in the order of `score_requests`.

    A rollout's score holds those of its rows one after another, as its log-probs do. So checks need not know rows.
    """
    left = iter(scores)
    return [[_joined(list(islice(left, 1 + len(rollout.starts)))) for rollout in group.rollouts] for group in groups]


def _joined(rows: Sequence[PolicyScore]) -> PolicyScore:
    if len(rows) == 1:
        return rows[0]
    hidden = [score.hidden_PD for score in rows if score.hidden_PD is not None]
    largest = [score.largest_P for score in rows if score.largest_P is not None]
    return PolicyScore(
        np.concatenate([score.logprobs_P for score in rows]),
        np.concatenate([score.gaps_P for score in rows]),
        np.concatenate(hidden) if len(hidden) == len(rows) else None,
        np.concatenate(largest) if len(largest) == len(rows) else None,
    )


def policy_positions(rollout: Rollout) -> NDArray[np.int64]:
    """Absolute indices of the policy's tokens, int64[P]."""
    return np.flatnonzero(rollout.author_T() != ENVIRONMENT)
