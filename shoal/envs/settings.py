"""What a run file adds to an environment: a system prompt, examples, template arguments, weights, shaping, token limits.

Called by `load` for every environment of a run, on the host and on every other node, so that all see the same messages.
It does not deal with tokens.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from shoal.env import Env, Message, Score, State, Task
from shoal.envs.interface import ShapedTask, weights_of
from shoal.envs.parse.turn import NOTATIONS
from shoal.envs.shaping import Shaper
from shoal.errors import ConfigError
from shoal.policy.messages import normal, template_arguments
from shoal.protocol.audits import MAX_REWARD
from shoal.protocol.shaping import Shaping
from shoal.protocol.types import Sampling

HISTORIES = ("append", "template")
"""What the policy reads of its earlier turns: all tokens so far, or what the chat template shows of them."""

LOWEST = "lowest"
"""As `on_fault`: a rollout on which the environment fails has the lowest reward, and counts as any other."""

MAX_EXAMPLES = 64
"""Limit on the messages in `examples`. Every prompt contains them."""


class Settings(Protocol):
    """An item of `[[envs]]`, as the run file or the log has it."""

    @property
    def name(self) -> str: ...
    @property
    def label(self) -> str: ...
    @property
    def args(self) -> Mapping[str, Any]: ...
    @property
    def system(self) -> str: ...
    @property
    def examples(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def template(self) -> Mapping[str, Any]: ...
    @property
    def parser(self) -> str: ...
    @property
    def weights(self) -> Mapping[str, float]: ...
    @property
    def max_turn_tokens(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def history(self) -> str: ...
    @property
    def shaping(self) -> Shaping | None: ...
    @property
    def reproducible(self) -> bool: ...
    @property
    def on_fault(self) -> str: ...


class WithSettings:
    """An environment under a run's settings. Everything else is passed on to the environment."""

    def __init__(self, env: Env, settings: Settings) -> None:
        self.env = env
        self._system = [{"role": "system", "content": settings.system}] if settings.system else []
        self._examples = [dict(message) for message in settings.examples]
        self.template = {**getattr(env, "template", {}), **settings.template}
        self.parser = settings.parser or getattr(env, "parser", "")
        self.weights = {**weights_of(env), **settings.weights}
        self.max_turn_tokens, self.max_tokens = settings.max_turn_tokens, settings.max_tokens
        self.history = settings.history or getattr(env, "history", "append")
        self.on_fault = settings.on_fault
        self.shaper: Shaper | None = None
        self.reward_bounds = env.reward_bounds
        if settings.shaping is not None:
            self.shaper = Shaper(settings.shaping, f"environment {settings.label}")
            low, high = env.reward_bounds
            self.reward_bounds = (self.shaper.lowest(low), high)
            self.weights |= self.shaper.weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def task(self, index: int, heldout: bool = False) -> Task:
        task = self.env.task(index, heldout=True) if heldout else self.env.task(index)
        return task if self.shaper is None else self.shaper.targeted(task, index, heldout)

    def reset(self, task: Task) -> tuple[State, list[Message]]:
        state, messages = self.env.reset(plain_task(self, task))
        return state, self.opened(messages, task)

    def opened(self, messages: Sequence[Message], task: Task) -> list[Message]:
        """The opening of a seat. The run's system prompt replaces the environment's; the examples follow it."""
        own = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
        rest = messages[len(own) :] if self.shaper is None else self.shaper.told(messages[len(own) :], task)
        return [*(self._system or own), *self._examples, *rest]


def with_settings(env: Env, settings: Settings) -> Env:
    """The environment under its settings, or the environment itself if it has none. Raises `ShoalError` if a setting
    cannot be used."""
    if settings.label != settings.name:
        with suppress(AttributeError):
            env.run_label = settings.label  # type: ignore[attr-defined]
    if not settings.reproducible:
        with suppress(AttributeError):  # a built-in without such an attribute plays in this process
            env.reproducible = False  # type: ignore[attr-defined]
    named = settings.system, settings.examples, settings.template, settings.parser, settings.weights
    if not any(
        (*named, settings.max_turn_tokens, settings.max_tokens, settings.history, settings.shaping, settings.on_fault)
    ):
        return env
    where = f"environment {settings.label}"
    if len(settings.examples) > MAX_EXAMPLES:
        raise ConfigError(f"{where}: {len(settings.examples)} messages in examples, limit {MAX_EXAMPLES}")
    if any(message["role"] in ("system", "tool") for message in normal(settings.examples)[:1]):
        raise ConfigError(
            f"{where}: examples begin with a {settings.examples[0]['role']} message: begin with one of the user"
        )
    if settings.examples and normal(settings.examples)[-1]["role"] != "assistant":
        raise ConfigError(
            f"{where}: examples do not end with a message of the assistant, so a question would precede the task"
        )
    template_arguments(settings.template)
    own = weights_of(env)
    for name, weight in settings.weights.items():
        if own and name not in own:
            raise ConfigError(f"{where}: weights.{name}: the reward has no such part; its parts are {', '.join(own)}")
        if not math.isfinite(weight):
            raise ConfigError(f"{where}: weights.{name} = {weight}: give a finite number")
    if settings.parser not in ("", *NOTATIONS, "none"):
        raise ConfigError(f"{where}: parser = {settings.parser!r}; known are {', '.join(NOTATIONS)}, none")
    if settings.on_fault not in ("", LOWEST):
        raise ConfigError(f"{where}: on_fault = {settings.on_fault!r}; known is {LOWEST}, or leave it out")
    if settings.history not in ("", *HISTORIES):
        raise ConfigError(f"{where}: history = {settings.history!r}; known are {', '.join(HISTORIES)}")
    found = WithSettings(env, settings)
    if -min(found.reward_bounds) > MAX_REWARD:  # guard: promised-shaped-rewards
        raise ConfigError(f"{where}: shaping may lower a reward to {min(found.reward_bounds):g}, and no run takes rewards "
                          f"above {MAX_REWARD:g} by size: lower its weights")  # fmt: skip
    return found


def plain_task(env: Env, task: Task) -> Task:
    """A task as the environment under the settings knows it."""
    return task.task if isinstance(env, WithSettings) and isinstance(task, ShapedTask) else task


def opening_of(env: Env, messages: Sequence[Message], task: Task) -> Sequence[Message]:
    """The opening of a seat that acts for the first time, with the environment's settings applied."""
    return env.opened(messages, task) if isinstance(env, WithSettings) else messages


def shaped(env: Env, task: Task, turns: Sequence[Sequence[int]]) -> tuple[Score, ...]:
    """What the run adds to the environment's score, given the token ids of the policy's turns; nothing in most runs."""
    shaper = env.shaper if isinstance(env, WithSettings) else None
    return () if shaper is None else (shaper.score(task, turns),)


def limits_of(env: Env, sampling: Sampling) -> Sampling:
    """The run's sampling with the environment's token limits, where these are lower than the run's."""
    turn, whole = (getattr(env, name, 0) for name in ("max_turn_tokens", "max_tokens"))
    if not (turn or whole):
        return sampling
    return msgspec.structs.replace(
        sampling,
        max_turn_tokens=min(turn or sampling.max_turn_tokens, sampling.max_turn_tokens),
        max_tokens=min(whole or sampling.max_tokens, sampling.max_tokens),
    )
