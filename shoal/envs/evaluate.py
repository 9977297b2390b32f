"""Measure a policy on held-out tasks: sampled episodes, means with 95 % confidence intervals, transcripts.

Called by `shoal eval`, and by a run before, during and after training. It uses neither trainer nor network.

The intervals describe the sampling noise of episodes on these tasks. They treat episodes as independent, which several
episodes on one task are not quite.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from shoal.engine.base import Engine
from shoal.envs.base import Decided, Env, task_of
from shoal.envs.conversation import Conversation
from shoal.envs.play import Episode, converse
from shoal.envs.replay import judge_talks
from shoal.envs.second_opinion import demand_same_tasks, opinions
from shoal.errors import ConfigError, ShoalError
from shoal.heldout import Judged
from shoal.policy.render import Renderer
from shoal.protocol.randomness import sample_seed
from shoal.protocol.types import Sampling
from shoal.protocol.wire import domain_hash
from shoal.terminal import printable

BATCH = 128
"""Episodes played in lockstep, unless a run has no memory for so many. Fixed, because the engine's last bits depend on
it."""

Z95 = 1.959964
"""Two-sided 95 % quantile of the normal distribution."""


class Interval(msgspec.Struct, frozen=True):
    """A mean and its 95 % confidence interval."""

    mean: float
    low95: float
    high95: float


class Transcript(msgspec.Struct, frozen=True):
    """One episode, for people to read."""

    task: str
    turns: tuple[tuple[str, str], ...]
    """Chat role and text."""
    score: float
    success: bool | None
    ending: str
    tokens: int
    """Tokens that the policy wrote."""


class Evaluation(msgspec.Struct, frozen=True):
    """The figures of one evaluation, as written to the run's folder."""

    mean: float
    """Success rate if the environment says what succeeds, otherwise mean reward: see `measure`."""
    low95: float
    high95: float
    episodes: int
    measure: Literal["success", "reward"]
    tasks: Literal["heldout", "training"]
    """Training tasks only if the environment has no held-out tasks."""
    reward: Interval
    success: Interval | None
    tokens: int
    """Tokens that the policy wrote in all episodes."""
    endings: dict[str, int]
    fault: str
    """What the environment raised first; empty if nothing."""
    transcripts: tuple[Transcript, ...]
    parts: dict[str, float] = {}
    """Mean of each part of the reward, before its weight."""
    metrics: dict[str, float] = {}
    """Mean of what the environment reports beside the reward."""
    solve_rates: tuple[float, ...] = ()
    """Of each task that was played: the share of its episodes that succeeded, or its mean reward within the range."""
    judge: Judged | None = None
    """What a held-out judge says of the same episodes, if the run file names one."""


class MixedEvaluation(msgspec.Struct, frozen=True):
    """The figures of a run with several environments: each one's, and the mean for tasks drawn as the run draws them."""

    mean: float
    """Mean of the environments' means, by the weights of the run."""
    low95: float
    high95: float
    episodes: int
    """Episodes of all environments."""
    envs: dict[str, Evaluation]
    """Evaluations by label."""
    judge: Judged | None = None
    """Of the one environment that is judged, if any."""


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
    once more. Raises `ShoalError` if no episode can be played, or if the judge has other tasks.
    """
    if episodes < 1:
        raise ConfigError(f"{episodes} episodes: evaluation needs at least 1")
    planned = _plan(env, episodes, seed)
    if judge is not None:
        demand_same_tasks(judge, env, _num_tasks(env, episodes))
    talks: list[Conversation] = []
    for start in range(0, episodes, rows):
        batch = converse(engine, renderer, planned[start : start + rows], sampling)
        _require_room(env, batch, sampling)
        talks += batch
        progress(len(talks))
    _compare(env, talks, _num_tasks(env, episodes))
    found = _figures(env, talks, samples, _num_tasks(env, episodes))
    return found if judge is None else msgspec.structs.replace(found, judge=_judged(judge, talks))


def mixed(envs: dict[str, Evaluation], weights: Sequence[float]) -> MixedEvaluation:
    """Combine the evaluations of several environments, by label; `weights` are in the same order.

    MOVER (Zou and Donner, Stat. Med. 27, 2008) gives the interval of the weighted mean: the distances from each mean to
    its limits are added by their squares, like independent errors.
    """
    shares = [weight / math.fsum(weights) for weight in weights]
    parts = list(zip(shares, envs.values(), strict=True))
    mean = math.fsum(share * part.mean for share, part in parts)
    below = math.sqrt(math.fsum((share * (part.mean - part.low95)) ** 2 for share, part in parts))
    above = math.sqrt(math.fsum((share * (part.high95 - part.mean)) ** 2 for share, part in parts))
    judge = next((part.judge for part in envs.values() if part.judge), None)
    return MixedEvaluation(mean, mean - below, mean + above, sum(part.episodes for part in envs.values()), envs, judge)


def as_text(transcript: Transcript) -> str:
    """A transcript to print. Nothing that the policy wrote can control the terminal."""
    verdict = {None: "", True: "won, ", False: "lost, "}[transcript.success]
    head = f"task {printable(transcript.task)} · {verdict}reward {transcript.score:.2f} · ended by {transcript.ending}"
    names = {"assistant": "policy", "user": "env"}
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


def _plan(env: Env, episodes: int, seed: int) -> list[Episode]:
    root = domain_hash("evaluation", seed.to_bytes(8, "big", signed=True))
    heldout = env.num_heldout > 0
    tasks = [task_of(env, i, heldout) for i in range(_num_tasks(env, episodes))]
    return [Episode(env, tasks[i % len(tasks)], sample_seed(root, i)) for i in range(episodes)]


def _num_tasks(env: Env, episodes: int) -> int:
    return min(env.num_heldout or env.num_tasks, episodes)


def _compare(env: Env, talks: Sequence[Conversation], num_tasks: int) -> None:
    """Judge the episodes of each task beside each other, if the environment does so."""
    for first in range(num_tasks):
        group = talks[first::num_tasks]
        for talk, found in zip(group, judge_talks(group, env), strict=True):
            talk.reward, talk.parts, talk.metrics = found


def _judged(judge: Env, talks: Sequence[Conversation]) -> Judged:
    """The judge's figures, by the same rule as the environment's own."""
    found = opinions(judge, talks)
    if isinstance(judge, Decided):
        said = interval([float(bool(one.success)) for one in found], (0.0, 1.0))
    else:
        said = interval([one.reward for one in found], judge.reward_bounds)
    return Judged(said.mean, said.low95, said.high95, next((one.fault for one in found if one.fault), ""))


def _means(named: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean of each name, over the episodes that have it."""
    names = sorted({name for values in named for name in values})
    lists = {name: [values[name] for values in named if name in values] for name in names}
    return {name: math.fsum(values) / len(values) for name, values in lists.items()}


def _require_room(env: Env, talks: Sequence[Conversation], sampling: Sampling) -> None:
    if not any(talk.logprobs for talk in talks):
        raise ShoalError(
            f"the opening of environment {env.name} takes {len(talks[0].tokens)} tokens and leaves the policy no room: "
            f"raise sampling.max_tokens (now {sampling.max_tokens})"
        )


def _solve_rate(env: Env, talks: Sequence[Conversation]) -> float:
    """Of the episodes of one task."""
    low, high = env.reward_bounds
    if isinstance(env, Decided):
        return sum(bool(talk.success) for talk in talks) / len(talks)
    return min(1.0, max(0.0, math.fsum((talk.reward - low) / (high - low) for talk in talks) / len(talks)))


def _figures(env: Env, talks: Sequence[Conversation], samples: int, num_tasks: int) -> Evaluation:
    reward = interval([talk.reward for talk in talks], env.reward_bounds)
    success = None
    if isinstance(env, Decided):
        success = interval([float(bool(talk.success)) for talk in talks], (0.0, 1.0))
    headline = success or reward
    return Evaluation(
        mean=headline.mean,
        low95=headline.low95,
        high95=headline.high95,
        episodes=len(talks),
        measure="success" if success else "reward",
        tasks="heldout" if env.num_heldout > 0 else "training",
        reward=reward,
        success=success,
        tokens=sum(len(talk.logprobs) for talk in talks),
        endings=dict(sorted(Counter(str(talk.ending) for talk in talks).items())),
        fault=next((talk.fault for talk in talks if talk.fault), ""),
        transcripts=tuple(transcript_of(talk) for talk in talks[:samples]),
        parts=_means([talk.parts for talk in talks]),
        metrics=_means([talk.metrics for talk in talks]),
        solve_rates=tuple(_solve_rate(env, talks[first::num_tasks]) for first in range(num_tasks)),
    )


def transcript_of(talk: Conversation) -> Transcript:
    """A conversation that has ended, for people to read."""
    return Transcript(
        task=str(talk.task)[:200],
        turns=tuple(talk.texts),
        score=talk.reward,
        success=talk.success,
        ending=str(talk.ending),
        tokens=len(talk.logprobs),
    )
