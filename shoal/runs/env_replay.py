"""A group with what only its environment can say: the named parts of each reward, the metrics beside them, the chat roles.

It plays the group again with `envs/replay`, without any model. Code of the environment is executed: that of built-in
environments, of packages in the sandbox, and of the host's files only on request.
"""

from dataclasses import replace
from typing import NamedTuple

from shoal.chat.renderer import Renderer
from shoal.env import Env
from shoal.envs.interface import describe_fault, players_of, solution_of, source_of, task_of
from shoal.envs.lint.scripted_episode import played, scripted_player
from shoal.envs.load import files_needed, load_run_envs
from shoal.envs.replay import replay_group
from shoal.errors import ConfigError, ShoalError
from shoal.ledger.state import State
from shoal.protocol import messages as t
from shoal.protocol.constants import EPISODES
from shoal.runs.rollouts import ReadGroup, ReadRollout

ANSWER_TURNS = 32
"""Of an answer, so many turns at most."""


class ReplayedEpisode(NamedTuple):
    group: ReadGroup
    """With parts, metrics and problems of its rollouts."""
    texts: tuple[tuple[tuple[str, str], ...], ...]
    """Of each rollout, the author and text of each message; empty where the replay differs from the claim."""


def open_envs(state: State, own_files: bool) -> dict[str, Env]:
    """The environments of a run by label. Raises `ConfigError` if its host alone can play them, `ShoalError` if one is not
    here."""
    for spec in state.envs:
        if spec.kind != EPISODES or not spec.reproducible:  # guard: replays-ask-no-judge
            raise ConfigError(
                f"environment {spec.label} is played by the host alone: its rollouts are not played again"
            )
    needed = files_needed(state.envs)
    if needed and not own_files:
        raise ConfigError(
            f"environment {needed[0]} is a file of the run's host: read it, then allow this machine to run it, with "
            "shoal dashboard --own-files, or with own_files=True in shoal.open"
        )
    return load_run_envs(state.envs, own_files)


def replay(state: State, envs: dict[str, Env], renderer: Renderer, group: ReadGroup, sent: t.Group) -> ReplayedEpisode:
    """Play a group again. Raises `ShoalError` if its environment cannot begin the task."""
    env = _env_of(envs, group)
    whole = [rollout for rollout in group.rollouts if not rollout.flaw]
    claims = [sent.rollouts[rollout.index] for rollout in whole]
    found = replay_group(env, renderer, task_of(env, group.task), claims, state.sampling)
    told, texts = dict[int, ReadRollout](), dict[int, tuple[tuple[str, str], ...]]()
    for rollout, replayed in zip(whole, found, strict=True):
        earned, talk = replayed.earned, replayed.talk
        told[rollout.index] = replace(
            rollout,
            parts=earned.parts if earned else {},
            metrics=earned.metrics if earned else {},
            problem=replayed.problem,
            fault=replayed.fault or rollout.fault,
        )
        texts[rollout.index] = tuple(talk.texts) if talk else ()
    rollouts = tuple(told.get(rollout.index, rollout) for rollout in group.rollouts)
    return ReplayedEpisode(replace(group, rollouts=rollouts), tuple(texts.get(r.index, ()) for r in group.rollouts))


def answer_of(envs: dict[str, Env], group: ReadGroup) -> tuple[str, ...]:
    """The turns that solve a group's task by its environment: its solution, or else what its right player plays; empty if
    it knows none. Raises `ShoalError`."""
    env = _env_of(envs, group)
    task = task_of(env, group.task)
    try:
        told = solution_of(env, task)
        right = players_of(env).get("right") if told is None else None
        if right is None:
            return told or ()
        walk = played(env, task, scripted_player(right, 0, group.task), turns=ANSWER_TURNS)
    except (MemoryError, ShoalError):
        raise
    except Exception as error:  # noqa: BLE001  foreign code may raise anything: its user gets one line
        raise ConfigError(f"environment {group.env} gives no answer: {describe_fault(error, source_of(env))}") from None
    return walk.actions if walk.done and walk.success is not False else ()


def _env_of(envs: dict[str, Env], group: ReadGroup) -> Env:
    if group.env not in envs or not 0 <= group.task < envs[group.env].num_tasks:
        raise ConfigError(
            f"the group names task {group.task} of environment {group.env!r:.80}, which the run does not have"
        )
    return envs[group.env]
