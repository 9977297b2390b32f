"""Measure a policy on held-out tasks: sampled episodes, means with 95 % confidence intervals, transcripts.

The intervals describe the sampling noise of episodes on these tasks. They treat episodes as independent, which several
episodes on one task are not quite.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from shoal.chat.renderer import Renderer
from shoal.engine.interface import Engine
from shoal.env import Env, Task
from shoal.envs.concurrent_episodes import together
from shoal.envs.episode import Calling, EnvCall, Episode
from shoal.envs.exceptions import REPRODUCIBLE_ERRORS
from shoal.envs.interface import describe_fault, is_decided, label_of, source_of, task_of, unshaped
from shoal.envs.isolated.pool import TaskHandle, digest_of
from shoal.envs.play_episodes import EpisodeAttempt, NoTask, converse, why_task_cannot_begin
from shoal.envs.replay import judge_talks
from shoal.envs.rollout_rules import Conversation
from shoal.errors import ConfigError, Interrupted, ShoalError, Undecided
from shoal.evaluation_files import Evaluation, Interval, JudgeResult, Transcript, interval_of
from shoal.protocol.encoding import domain_hash
from shoal.protocol.messages import Sampling
from shoal.protocol.rollout_validation import unbegun_remedy
from shoal.protocol.seed_chain import sample_seed
from shoal.terminal import printable

BATCH = 128
"""Episodes played in lockstep, unless a run has no memory for so many. Fixed, because the engine's last bits depend on
it."""

Z95 = 1.959964
"""Two-sided 95 % quantile of the normal distribution."""


MAX_EVAL_TOKENS = 512
"""Most tokens of an evaluated episode, unless the caller or a run gives another number."""


def eval_sampling(temperature: float, max_turn_tokens: int, max_tokens: int, max_positions: int) -> Sampling:
    """How an episode is sampled outside of a run: `max_tokens` 0 means the default, or less for a short policy."""
    most = max_tokens or min(MAX_EVAL_TOKENS, max_positions)
    return Sampling(temperature, min(max_turn_tokens, most), most)


def evaluate(
    engine: Engine,
    renderer: Renderer,
    env: Env,
    episodes: int,
    seed: int,
    sampling: Sampling,
    samples: int = 2,
    progress: Callable[[int], None] = lambda done: None,
    rows: int = BATCH,
    judge: Env | None = None,
) -> Evaluation:
    """Play `episodes` sampled episodes, `rows` at a time, going through the held-out tasks in turn, and keep `samples`
    transcripts.

    The same seed gives the same tasks and sampling noise, so two policies can be compared episode by episode.
    `progress` receives the number of episodes done. `judge` is an environment with the same tasks that scores the episodes
    once more. An episode on which the environment fails has no score; a call that takes too long, or that ends its process,
    fails like any other. Raises `ShoalError` if no episode can begin, or if the judge has other tasks.
    """
    if episodes < 1:
        raise ConfigError(f"{episodes} episodes: evaluation needs at least 1")
    planned = _plan(env, episodes, seed)
    judged = [] if judge is None else tasks_of_judge(judge, env, [e.task for e in planned[: _num_tasks(env, episodes)]])
    talks: list[Conversation] = []
    for start in range(0, episodes, rows):
        talks += converse(engine, renderer, planned[start : start + rows], sampling, faults_end=True)
        progress(len(talks))
    _require_room(env, talks, sampling)
    if not any(talk.tokens for talk in talks):
        raise ShoalError(talks[0].fault)
    _compare(env, talks, _num_tasks(env, episodes))
    found = _figures(env, talks, samples, _num_tasks(env, episodes))
    return found if judge is None else msgspec.structs.replace(found, judge=_judged(judge, talks, judged))


def mixed(envs: dict[str, Evaluation], weights: Sequence[float]) -> Evaluation:
    """Combine the evaluations of several environments, by label; `weights` are in the same order.

    MOVER (Zou and Donner, Stat. Med. 27, 2008) gives the interval of the weighted mean: the distances from each mean to
    its limits are added by their squares, like independent errors.
    """
    judge = next((part.judge for part in envs.values() if part.judge), None)
    episodes, faults = (
        sum(counts) for counts in zip(*((one.episodes, one.faults) for one in envs.values()), strict=True)
    )
    drawn = [(weight, interval_of(one)) for weight, one in zip(weights, envs.values(), strict=True) if weight]
    parts = [(weight, figures) for weight, figures in drawn if figures is not None]
    if not parts or len(parts) < len(drawn):
        return Evaluation(None, None, None, episodes, envs, judge=judge, faults=faults)
    total = math.fsum(weight for weight, _ in parts)
    parts = [(weight / total, figures) for weight, figures in parts]
    mean = math.fsum(share * middle for share, (middle, _, _) in parts)
    below = math.sqrt(math.fsum((share * (middle - low)) ** 2 for share, (middle, low, _) in parts))
    above = math.sqrt(math.fsum((share * (high - middle)) ** 2 for share, (middle, _, high) in parts))
    return Evaluation(mean, mean - below, mean + above, episodes, envs, judge=judge, faults=faults)


def as_text(transcript: Transcript) -> str:
    """A transcript to print. Nothing that the policy wrote can control the terminal."""
    verdict = {None: "", True: "won, ", False: "lost, "}[transcript.success]
    score = "no score" if transcript.score is None else f"reward {transcript.score:.2f}"
    head = f"task {printable(transcript.task)} · {verdict}{score} · ended by {transcript.ending}"
    head += f" · the environment failed: {printable(transcript.fault)}" if transcript.fault else ""
    names = {"user": "env"}
    return "\n".join([head, *(f"  {names.get(who, who):>6} | {_indented(text)}" for who, text in transcript.turns)])


def _indented(text: str) -> str:
    return printable(text, keep="\n").replace("\n", "\n         | ")


def interval(values: Sequence[float], bounds: tuple[float, float]) -> Interval:
    """Mean and 95 % interval, clipped to the possible values.

    Wilson's score interval (J. Am. Stat. Assoc. 22, 1927) if all values are 0 or 1, otherwise the normal interval. One
    value that is neither 0 nor 1 says nothing about the spread, so the interval is then `bounds`.
    """
    n, mean = len(values), math.fsum(values) / len(values)
    if all(value in (0.0, 1.0) for value in values):
        centre = (mean + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
        half = Z95 / (1 + Z95**2 / n) * math.sqrt(mean * (1 - mean) / n + Z95**2 / (4 * n**2))
        return Interval(mean, max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)))
    if n == 1:
        return Interval(mean, *bounds)
    half = Z95 * math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)
    return Interval(mean, max(bounds[0], mean - half), min(bounds[1], mean + half))


def _plan(env: Env, episodes: int, seed: int) -> list[EpisodeAttempt]:
    root = domain_hash("evaluation", seed.to_bytes(8, "big", signed=True))
    heldout = env.num_heldout > 0
    tasks = [_task(env, i, heldout) for i in range(_num_tasks(env, episodes))]
    return [EpisodeAttempt(env, tasks[i % len(tasks)], sample_seed(root, i)) for i in range(episodes)]


def _task(env: Env, index: int, heldout: bool) -> Task:
    """A task; a `NoTask` if the environment fails to give it."""
    try:
        return task_of(env, index, heldout)
    except Interrupted:
        raise
    except ShoalError as error:
        return NoTask(f"{'held-out task' if heldout else 'task'} {index}", str(error))


def _num_tasks(env: Env, episodes: int) -> int:
    return min(env.num_heldout or env.num_tasks, episodes)


def _compare(env: Env, talks: Sequence[Conversation], num_tasks: int) -> None:
    """Judge the episodes of each task beside each other, if the environment does so."""
    for first in range(num_tasks):
        group = talks[first::num_tasks]
        try:
            compared = judge_talks(group, env)
        except Undecided as error:
            for talk in group:
                talk.fail(error, "group_scores")
            continue
        for talk, found in zip(group, compared, strict=True):
            talk.reward, talk.parts, talk.metrics = found


def _judged(judge: Env, talks: Sequence[Conversation], tasks: Sequence[Task]) -> JudgeResult:
    """The judge's figures, by the same rule as the environment's own."""
    found = opinions(judge, talks, tasks)
    whole = [one for one in found if not one.fault]
    fault, faults = next((one.fault for one in found if one.fault), ""), len(talks) - len(whole)
    if not whole:
        return JudgeResult(None, None, None, fault, len(talks), faults)
    if is_decided(judge):
        figures = interval([float(bool(one.success)) for one in whole], (0.0, 1.0))
    else:
        figures = interval([one.reward for one in whole], judge.reward_bounds)
    return JudgeResult(figures.mean, figures.low95, figures.high95, fault, len(talks), faults)


def _means(named: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean of each name, over the episodes that have it."""
    names = sorted({name for values in named for name in values})
    lists = {name: [values[name] for values in named if name in values] for name in names}
    return {name: math.fsum(values) / len(values) for name, values in lists.items()}


def _require_room(env: Env, talks: Sequence[Conversation], sampling: Sampling) -> None:
    """Leave out episodes in which the policy could not write, as a run does. Raises `ShoalError` if there are no others."""
    begun = [talk for talk in talks if talk.tokens]
    unbegun = [talk for talk in begun if not talk.logprobs and not talk.fault]
    for talk in unbegun:
        talk.fault = why_task_cannot_begin(talk, sampling)
    if unbegun and len(unbegun) == len(begun):
        why = unbegun[0].fault
        raise ShoalError(
            f"no episode of environment {label_of(env)} can begin: of the first, {why}. {unbegun_remedy(why)}"
        )


def _solve_rate(env: Env, talks: Sequence[Conversation]) -> float | None:
    """Of the episodes of one task on which the environment did not fail; None if it failed on all."""
    low, high = env.reward_bounds
    talks = [talk for talk in talks if not talk.left_out]
    if not talks:
        return None
    if is_decided(env):
        return sum(bool(talk.success) for talk in talks) / len(talks)
    return min(1.0, max(0.0, math.fsum((talk.reward - low) / (high - low) for talk in talks) / len(talks)))


def _figures(env: Env, talks: Sequence[Conversation], samples: int, num_tasks: int) -> Evaluation:
    scored = [talk for talk in talks if not talk.left_out]
    reward = interval([talk.reward for talk in scored], env.reward_bounds) if scored else None
    success = None
    if scored and is_decided(env):
        success = interval([float(bool(talk.success)) for talk in scored], (0.0, 1.0))
    headline = success or reward
    rates = [_solve_rate(env, talks[first::num_tasks]) for first in range(num_tasks)]
    return Evaluation(
        mean=headline.mean if headline else None,
        low95=headline.low95 if headline else None,
        high95=headline.high95 if headline else None,
        episodes=len(talks),
        faults=len(talks) - len(scored),
        measure="success" if is_decided(env) else "reward",
        tasks="heldout" if env.num_heldout > 0 else "training",
        reward=reward,
        success=success,
        tokens=sum(len(talk.logprobs) for talk in talks),
        endings=dict(sorted(Counter(str(talk.ending) for talk in talks).items())),
        fault=next((talk.fault for talk in talks if talk.fault), ""),
        transcripts=tuple(transcript_of(talk) for talk in talks[:samples]),
        parts=_means([talk.parts for talk in scored]),
        metrics=_means([talk.metrics for talk in scored]),
        solve_rates=tuple(rate for rate in rates if rate is not None),
    )


def transcript_of(talk: Conversation) -> Transcript:
    """A conversation that has ended, for people to read."""
    return Transcript(
        task=str(talk.task)[:200],
        turns=tuple(talk.texts),
        score=None if talk.left_out else talk.reward,
        success=None if talk.left_out else talk.success,
        ending=str(talk.ending),
        tokens=len(talk.logprobs),
        fault=talk.public_fault,
    )


# --- a held-out judge ---
#
# Another environment scores the conversations again, task by task. The policy never learns from it, so what it found out
# about its own environment's mistakes earns nothing here. The judge sees the task and the policy's turns; what it would
# have answered is not shown to anybody.


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
        if not _are_same(tasks[-1], unshaped(task)):  # guard: judge-of-the-same-tasks
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
    episode = Episode(judge)
    try:
        episode.state, _ = yield EnvCall(judge, "reset", (task,))
        for turn in talk.played():
            told = yield EnvCall(judge, "step", (episode.state, turn.text))
            if episode.answer(told, turn.text).done:
                break
        end = yield from episode.end(talk.ending == "length")
        return JudgeScore(end.earned.reward, end.success)
    except (Interrupted, MemoryError):
        raise
    except REPRODUCIBLE_ERRORS as error:  # of the judge, whose code may raise anything
        won = False if is_decided(judge) else None
        return JudgeScore(min(judge.reward_bounds), won, describe_fault(error, source_of(judge)))
