"""Settings of an environment in the run file: system prompt, examples, weights of rewards, and shaped rewards."""

import itertools
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import msgspec

from shoal.algos.reward_shaping import length_penalty, overlong, repeated_share
from shoal.chat.messages import normal, template_arguments
from shoal.chat.tool_calls import NOTATIONS
from shoal.config.env_settings import EnvConfig
from shoal.env import Env, Message, Score, State, Task
from shoal.envs.interface import ShapedTask, describe, make_task, unshaped
from shoal.errors import ConfigError
from shoal.protocol.audit_and_pay import MAX_REWARD
from shoal.protocol.constants import MAX_ROLLOUT_TOKENS
from shoal.protocol.encoding import domain_hash
from shoal.protocol.messages import EnvSpec, Sampling
from shoal.protocol.messages.run import Shaping

# --- What a run adds to rewards: a length to aim at, a penalty near the limit, and one for repetition ---
#
# It sees the tokens that the policy wrote, and no text, so every replay of a rollout gives the same terms. The formulas
# are in `algos`.
#
# The length that a prompt asks for follows from the task's index alone. So all rollouts of a group have the same, and a
# worker cannot choose it.


LENGTH, OVERLONG, REPETITION = "shaping.length", "shaping.overlong", "shaping.repetition"
"""Names of the parts."""

MAX_TARGETS = 64
"""Limit on the lengths that a run draws from."""

MAX_SAY_CHARS = 500
"""Limit on the sentence that asks for a length. Every prompt contains it."""

MAX_WEIGHT = 1000.0
"""Limit on a weight: far above what any reward needs, so that sums stay finite."""

MAX_SIZE = 64
"""Limit on the tokens of a sequence whose repetition counts: every node that judges holds each sequence of a rollout."""

PLACE = "{target}"
"""What stands for the number in that sentence."""


class Shaper:
    """The terms of one environment."""

    def __init__(self, asked: Shaping, where: str) -> None:
        """Raises a one-line `ConfigError` if something cannot be used; `where` names the environment."""
        for holds, message in _demands(asked):
            if not holds:
                raise ConfigError(f"{where}: shaping.{message}")
        self._asked = asked
        terms = {LENGTH: asked.length, OVERLONG: asked.overlong, REPETITION: asked.repetition}
        self.weights = {name: term.weight for name, term in terms.items() if term is not None}
        """Of the parts, by name."""
        self._most = (asked.length.most or max(asked.length.targets)) if asked.length else 0

    def lowest(self, low: float) -> float:
        """The lowest reward, given the environment's: added up as `earned` does, so that rounding puts no rollout below."""
        worst = {LENGTH: -float(self._most), OVERLONG: -1.0, REPETITION: -1.0}
        return math.fsum([low, *(worst[name] * weight for name, weight in self.weights.items())])

    def targeted(self, task: Task, index: int, heldout: bool) -> Task:
        """The task with the length that its prompt asks for, if the run asks for any."""
        if self._asked.length is None:
            return task
        return ShapedTask(task, target_of(index, heldout, self._asked.length.targets))

    def told(self, messages: Sequence[Message], task: Task) -> list[Message]:
        """The opening with the sentence that asks for a length, at the end of the user's last message."""
        if self._asked.length is None:
            return list(messages)
        said = self._asked.length.say.replace(PLACE, str(_target(task)))
        last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
        if last < 0:
            return [*messages, {"role": "user", "content": said.strip()}]
        content = messages[last]["content"]
        more = content + said if isinstance(content, str) else [*content, {"type": "text", "text": said}]
        return [*messages[:last], {**messages[last], "content": more}, *messages[last + 1 :]]

    def score(self, task: Task, turns: Sequence[Sequence[int]]) -> Score:
        """The terms of an episode, before their weights, given the token ids of the policy's turns."""
        asked, length, parts = self._asked, sum(map(len, turns)), {}
        if asked.length is not None:
            parts[LENGTH] = length_penalty(length, _target(task), alpha=1.0, most=self._most)
        if asked.overlong is not None:
            parts[OVERLONG] = overlong(length, asked.overlong.limit, asked.overlong.buffer)
        if asked.repetition is not None:
            parts[REPETITION] = -repeated_share(turns, asked.repetition.size)
        return Score(parts)


def target_of(index: int, heldout: bool, targets: Sequence[int]) -> int:
    """The length that the prompt of a task asks for. Changing breaks: replay of every run that asks for lengths."""
    bits = domain_hash("length-target", b"heldout" if heldout else b"training", index.to_bytes(8, "big"))
    return targets[int.from_bytes(bits[:8], "big") % len(targets)]


def _target(task: Task) -> int:
    assert isinstance(task, ShapedTask), "a task comes from the environment under the run's settings"
    return task.tokens


def _demands(asked: Shaping) -> list[tuple[bool, str]]:
    """What must hold, each with the end of a sentence for a run file in which it does not."""
    demands: list[tuple[bool, str]] = []
    for name, term in (("length", asked.length), ("overlong", asked.overlong), ("repetition", asked.repetition)):
        if term is not None:
            fits = 0 <= term.weight <= MAX_WEIGHT  # guard: shaping-is-finite
            demands.append((fits, f"{name}.weight = {term.weight}: must be 0 to {MAX_WEIGHT:g}"))
    if asked.length is not None:
        targets, most, say = asked.length.targets, asked.length.most, asked.length.say
        known = 0 < len(targets) <= MAX_TARGETS and all(0 < target <= MAX_ROLLOUT_TOKENS for target in targets)
        demands += [
            (known, f"length.targets: give 1 to {MAX_TARGETS} lengths of 1 to {MAX_ROLLOUT_TOKENS} tokens"),
            (0 <= most <= MAX_ROLLOUT_TOKENS, f"length.most = {most}: must be 0 to {MAX_ROLLOUT_TOKENS}"),
            (
                say.count(PLACE) == 1 and len(say) <= MAX_SAY_CHARS,
                f"length.say: give at most {MAX_SAY_CHARS} characters with {PLACE} once, where the number goes",
            ),
        ]
    if asked.overlong is not None:
        limit, buffer = asked.overlong.limit, asked.overlong.buffer
        demands += [
            (0 < limit <= MAX_ROLLOUT_TOKENS, f"overlong.limit = {limit}: must be 1 to {MAX_ROLLOUT_TOKENS}"),
            (0 <= buffer <= limit, f"overlong.buffer = {buffer}: must be 0 to the limit, {limit}"),
        ]
    if asked.repetition is not None:
        size = asked.repetition.size
        demands.append((1 <= size <= MAX_SIZE, f"repetition.size = {size}: must be 1 to {MAX_SIZE}"))
    return demands


# --- What a run file adds to an environment ---
# A system prompt, examples, template arguments, weights, shaping, token limits.


HISTORIES = ("append", "template")
"""What the policy reads of its earlier turns: all tokens so far, or what the chat template shows of them."""

LOWEST = "lowest"
"""As `on_fault`: a rollout on which the environment fails has the lowest reward, and counts as any other."""

MAX_EXAMPLES = 64
"""Limit on the messages in `examples`. Every prompt contains them."""


Settings: TypeAlias = EnvConfig | EnvSpec
"""An item of `[[envs]]`, as the run file or the log has it."""


class WithSettings:
    """An environment under a run's settings. Everything else is passed on to the environment."""

    def __init__(self, env: Env, settings: Settings) -> None:
        self.env, self.on_fault, own = env, settings.on_fault, describe(env)
        self._system = [{"role": "system", "content": settings.system}] if settings.system else []
        self._examples = [dict(message) for message in settings.examples]
        self.shaper = Shaper(settings.shaping, f"environment {settings.label}") if settings.shaping else None
        (low, high), weights = own.reward_bounds, {**own.weights, **settings.weights}
        if self.shaper is not None:
            low, weights = self.shaper.lowest(low), weights | self.shaper.weights
        self.facts = msgspec.structs.replace(
            own, name=settings.label if settings.label != settings.name else own.name, reward_bounds=(low, high),
            template={**own.template, **settings.template}, parser=settings.parser or own.parser,
            history=settings.history or own.history, weights=weights,
            max_turn_tokens=settings.max_turn_tokens or own.max_turn_tokens,
            max_tokens=settings.max_tokens or own.max_tokens, reproducible=own.reproducible and settings.reproducible,
        )  # fmt: skip
        self.reward_bounds, self.template, self.max_tokens = (low, high), self.facts.template, self.facts.max_tokens

    @property
    def run_settings(self) -> "WithSettings":
        """This object, also where another wrapper passes attributes on."""
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def task(self, index: int, heldout: bool = False) -> Task:
        task = make_task(self.env, index, heldout)
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
    if not settings.reproducible:
        with suppress(AttributeError):  # a built-in without such an attribute plays in this process
            env.reproducible = False  # type: ignore[attr-defined]
    named = settings.system, settings.examples, settings.template, settings.parser, settings.weights, settings.shaping
    limits = settings.max_turn_tokens, settings.max_tokens, settings.history, settings.on_fault
    if settings.label == settings.name and settings.reproducible and not any((*named, *limits)):
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
    own = describe(env).weights
    for name, weight in settings.weights.items():
        if own and name not in own:
            raise ConfigError(f"{where}: weights.{name}: the reward has no such part; its parts are {', '.join(own)}")
        if not math.isfinite(weight):
            raise ConfigError(f"{where}: weights.{name} = {weight}: give a finite number")
    if settings.parser not in ("", *NOTATIONS, "none"):
        raise ConfigError(f"{where}: parser = {settings.parser!r}; known are {', '.join(NOTATIONS)}, none")
    found = WithSettings(env, settings)
    if -min(found.reward_bounds) > MAX_REWARD:  # guard: promised-shaped-rewards
        raise ConfigError(f"{where}: shaping may lower a reward to {min(found.reward_bounds):g}, and no run takes rewards "
                          f"above {MAX_REWARD:g} by size: lower its weights")  # fmt: skip
    return found


def plain_task(env: Env, task: Task) -> Task:
    """A task as the environment under the settings knows it."""
    return unshaped(task) if isinstance(env, WithSettings) else task


def opening_of(env: Env, messages: Sequence[Message], task: Task) -> Sequence[Message]:
    """The opening of a seat that acts for the first time, with the environment's settings applied."""
    return env.opened(messages, task) if isinstance(env, WithSettings) else messages


def _settings_of(env: Env) -> WithSettings | None:
    found = getattr(env, "run_settings", None)
    return found if isinstance(found, WithSettings) else None


def shaped(env: Env, task: Task, turns: Sequence[Sequence[int]]) -> tuple[Score, ...]:
    """What the run adds to the environment's score, given the token ids of the policy's turns; nothing in most runs."""
    found = _settings_of(env)
    return () if found is None or found.shaper is None else (found.shaper.score(task, turns),)


def learns_from_faults(env: Env) -> bool:
    """Whether a rollout on which the environment fails counts as any other, with the lowest reward."""
    found = _settings_of(env)
    return found is not None and found.on_fault == LOWEST


def limits_of(env: Env, sampling: Sampling) -> Sampling:
    """The run's sampling with the environment's token limits, where these are lower than the run's."""
    facts = describe(env)
    turn, whole = facts.max_turn_tokens, facts.max_tokens
    if not (turn or whole):
        return sampling
    return msgspec.structs.replace(
        sampling,
        max_turn_tokens=min(turn or sampling.max_turn_tokens, sampling.max_turn_tokens),
        max_tokens=min(whole or sampling.max_tokens, sampling.max_tokens),
    )
