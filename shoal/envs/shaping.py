"""What a run adds to an environment's rewards: a length to aim at, a penalty near the limit, and one for repetition.

Called by `settings`, which checks what a run file asks for, and for `conversation` when an episode ends. It sees the tokens
that the policy wrote, and no text, so every replay of a rollout gives the same terms. The formulas are in `algos`.

The length that a prompt asks for follows from the task's index alone. So all rollouts of a group have the same, and a
worker cannot choose it.
"""

import math
from collections.abc import Sequence

from shoal.algos.length_target import length_penalty
from shoal.algos.overlong import overlong
from shoal.algos.repetition import repeated_share
from shoal.env import Message, Score, Task
from shoal.envs.interface import ShapedTask
from shoal.errors import ConfigError
from shoal.protocol.constants import MAX_ROLLOUT_TOKENS
from shoal.protocol.shaping import Shaping
from shoal.protocol.wire import domain_hash

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
