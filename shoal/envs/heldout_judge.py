"""A held-out judge: another environment scores the conversations of an evaluation again, task by task.

The policy never learns from the judge, so what it found out about its own environment's mistakes earns nothing here. The
judge sees the task and the policy's turns; what it would have answered is not shown to anybody.
"""

from collections.abc import Sequence
from typing import NamedTuple

from shoal.env import Env, Task
from shoal.envs.concurrent_episodes import Calling, EnvCall, together
from shoal.envs.exceptions import REPRODUCIBLE_ERRORS
from shoal.envs.interface import ShapedTask, describe_fault, earned, is_decided, source_of, step_of, task_of
from shoal.envs.isolated.pool import TaskHandle, digest_of
from shoal.envs.play import NoTask
from shoal.envs.rollout import Conversation
from shoal.errors import ConfigError, Interrupted


class JudgeScore(NamedTuple):
    """What the judge says of one episode."""

    reward: float
    success: bool | None
    fault: str = ""
    """What the judge raised. The episode then has no part in its mean, as one on which the environment itself fails."""


def tasks_of_judge(judge: Env, env: Env, own: Sequence[Task]) -> list[Task]:
    """The tasks that an evaluation plays, `own`, as the judge has them. Raises `ShoalError` unless they are the same: a
    task that is an index into other data would be judged by another answer."""
    heldout, tasks = env.num_heldout > 0, list[Task]()
    for index, task in enumerate(own):
        tasks.append(task_of(judge, index, heldout) if not isinstance(task, NoTask) else task)
        if not _are_same(tasks[-1], _plain(task)):  # guard: judge-of-the-same-tasks
            raise ConfigError(
                f"eval.judge: {judge.name} has another task {index} than {env.name}, so it cannot judge its answers: "
                "give it the same arguments"
            )
    return tasks


def _are_same(one: Task, other: Task) -> bool:
    """Whether two tasks are the same. Of one that another process holds, only a digest of its text is here."""
    if isinstance(one, TaskHandle) or isinstance(other, TaskHandle):
        return digest_of(one) == digest_of(other)
    return bool(one == other)


def opinions(judge: Env, talks: Sequence[Conversation], tasks: Sequence[Task]) -> list[JudgeScore]:
    """What the judge says of each conversation that has a score, or that counts as lost. Conversation n is on task n, and
    once more from the first on after the last. Of a task that the environment could not give there is nothing to say."""
    judged = [(talk, tasks[n % len(tasks)]) for n, talk in enumerate(talks) if not talk.left_out]
    return together([_opinion(judge, talk, task) for talk, task in judged if not isinstance(task, NoTask)])


def _opinion(judge: Env, talk: Conversation, task: Task) -> Calling[JudgeScore]:
    try:
        state, _ = yield EnvCall(judge, "reset", (task,))
        rewards = list[float]()
        for turn in talk.played():
            step = step_of((yield EnvCall(judge, "step", (state, turn.text))))
            state = step.state
            rewards += [step.reward, *(reward for _, reward in step.steps)]
            if step.done:
                break
        cut_short = talk.ending == "length" and getattr(judge, "truncated_score", None) is not None
        score = yield EnvCall(judge, "truncated_score" if cut_short else "score", (state,))
        success = bool((yield EnvCall(judge, "success", (state,)))) if is_decided(judge) else None
        return JudgeScore(earned(judge, [score], rewards).reward, success)
    except (Interrupted, MemoryError):
        raise
    except REPRODUCIBLE_ERRORS as error:  # of the judge, whose code may raise anything
        won = False if is_decided(judge) else None
        return JudgeScore(min(judge.reward_bounds), won, describe_fault(error, source_of(judge)))


def _plain(task: Task) -> Task:
    return task.task if isinstance(task, ShapedTask) else task
