"""A held-out judge: another environment scores the conversations of an evaluation again, task by task.

Called by `evaluate`. The policy never learns from the judge, so what it found out about its own environment's mistakes
earns nothing here. The judge sees the task and the policy's turns; what it would have answered is not shown to anybody.
"""

from collections.abc import Sequence
from typing import NamedTuple

from shoal.envs.base import Env, Targeted, Task, describe_fault, source_of, step_of, success_of, task_of
from shoal.envs.conversation import Conversation
from shoal.envs.score import earned
from shoal.errors import ConfigError, Overreach


class Opinion(NamedTuple):
    """What the judge says of one episode."""

    reward: float
    success: bool | None
    fault: str = ""
    """What the judge raised. The episode then counts as its worst, as one does on which the environment itself fails."""


def demand_same_tasks(judge: Env, env: Env, num_tasks: int) -> None:
    """Raise `ShoalError` unless the judge has the tasks that an evaluation plays: a task that is an index into other data
    would be judged by another answer."""
    heldout = env.num_heldout > 0
    for index in range(num_tasks):
        if task_of(judge, index, heldout) != _plain(task_of(env, index, heldout)):  # guard: judge-of-the-same-tasks
            raise ConfigError(
                f"eval.judge: {judge.name} has another task {index} than {env.name}, so it cannot judge its answers: "
                "give it the same arguments"
            )


def opinions(judge: Env, talks: Sequence[Conversation]) -> list[Opinion]:
    """What the judge says of each conversation."""
    return [_opinion(judge, talk) for talk in talks]


def _opinion(judge: Env, talk: Conversation) -> Opinion:
    try:
        state, _ = judge.reset(_plain(talk.task))
        rewards = list[float]()
        for turn in talk.played():
            step = step_of(judge.step(state, turn.text))
            state = step.state
            rewards += [step.reward, *(reward for _, reward in step.steps)]
            if step.done:
                break
        score = getattr(judge, "truncated_score", judge.score) if talk.ending == "length" else judge.score
        return Opinion(earned(judge, [score(state)], rewards).reward, success_of(judge, state))
    except (Overreach, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001  foreign code may raise anything: it is told, with where
        decides = getattr(judge, "success", None) is not None
        return Opinion(min(judge.reward_bounds), False if decides else None, describe_fault(error, source_of(judge)))


def _plain(task: Task) -> Task:
    return task.task if isinstance(task, Targeted) else task
