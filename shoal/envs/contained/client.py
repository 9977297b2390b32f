"""An environment whose code runs in the sandbox: to all who play, replay or check it, one like any other.

Made by `open`. A state here is a number, the task and the actions so far: the state itself stays inside, and is made again
from the actions if it is gone. What comes out is hostile, and is checked where any environment's words are: messages by
`policy/messages`, rewards by `score`, seats by `conversation`.

If the sandbox has to be ended, a new one gets one more try with twice the time. If that ends the same way, `Undecided` is
raised, because another machine might not have ended it: a validator's verdict is void, and a worker gives the lease back.
Only a worker that gets the same work again has no doubt any more: the episode has then failed as if the environment had
raised.
"""

import hashlib
import itertools
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from shoal.envs.action import Action
from shoal.envs.base import Message, Player, Raised, Step
from shoal.envs.contained import frames as f
from shoal.envs.contained.line import Gone, Line
from shoal.envs.score import Score, Scored
from shoal.errors import Undecided
from shoal.policy.messages import Written

TRIES = 2
"""Sandboxes that may end before the episode has failed."""

_NUMBERS = ("new", "state", "states")
"""Fields of a request that differ each time that the same is asked."""

A = TypeVar("A", bound=f.Answer)


@dataclass
class Doubt:
    """Whether a stop of the sandbox decides nothing."""

    holds: bool = True


class RaisedValue(Raised, ValueError):
    """An IndexError or ValueError of the environment."""


class Posed(NamedTuple):
    """A task: the environment makes it again for each episode."""

    number: int
    heldout: bool
    shown: str
    digest: str

    def __repr__(self) -> str:
        """What it holds, so that equal tasks look equal to `shoal env check`, whatever their index."""
        return self.shown if len(self.shown) < 200 else f"{self.shown}… {self.digest}"


class Held:
    """A state of an episode. It never changes."""

    def __init__(self, number: int, task: Posed, actions: tuple[str, ...], told: bytes, drop: Callable[[int], None]):
        self.number, self.task, self.actions, self.told = number, task, actions, told
        """`told` is a hash of all that the environment said so far."""
        self.points: list[tuple[str, Scored | bool | None]] = []
        """What came with the last answer and is asked for next."""
        self._drop = drop

    def __del__(self) -> None:
        self._drop(self.number)


class ContainedEnv:
    """The environment of a package, in a sandbox of its own. Several threads may use it, one after another."""

    def __init__(self, line: Line, doubt: Doubt) -> None:
        """While `doubt` holds, a stop of the sandbox raises `Undecided`."""
        self._line, self._doubt = line, doubt
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._ends: dict[tuple[object, ...], str] = {}
        """Questions that ended two sandboxes while there was no doubt, and how: they are not asked again."""
        facts = line.facts
        self.name = facts.name[:200]
        self.num_tasks, self.num_heldout, self.num_seats = facts.num_tasks, facts.num_heldout, facts.num_seats
        self.reward_bounds, self.weights = facts.reward_bounds, facts.weights
        self.tools, self.template, self.parser, self.history = facts.tools, facts.template, facts.parser, facts.history
        self.max_turn_tokens, self.max_tokens = facts.max_turn_tokens, facts.max_tokens
        self.reproducible = facts.reproducible
        optional = {"truncated_score": self._truncated_score, "group_scores": self._group_scores,
                    "success": self._success, "players": self._players}  # fmt: skip
        for name in facts.members:
            if name in optional:
                setattr(self, name, optional[name])

    def task(self, index: int, heldout: bool = False) -> Posed:
        answer = self._ask(f.Posed, f.Pose, {"index": index, "heldout": heldout})[0]
        return Posed(index, heldout, answer.shown[:200], answer.digest.hex()[:32])

    def reset(self, task: Posed) -> tuple[Held, list[Message]]:
        with self._lock:
            answer, held = self._begin(task, next(self._numbers))
            return held, _messages(answer.messages)

    def step(self, state: Held, action: str) -> Step:
        with self._lock:
            answer, held = self._act(state, action, next(self._numbers))
        if answer.points is not None:
            held.points = [("score", _scored(answer.points)), ("success", answer.success)]
        reply = _unmarked(answer.reply)
        return Step(held, reply, answer.done, answer.reward, answer.learn, answer.seat, answer.restart, answer.steps)

    def score(self, state: Held) -> Scored:
        return self._judge(state, "score")

    def _truncated_score(self, state: Held) -> Scored:
        return self._judge(state, "truncated_score")

    def _success(self, state: Held) -> bool:
        return bool(self._judge(state, "success"))

    def _group_scores(self, states: Sequence[Held]) -> list[Scored]:
        answer = self._ask(f.Compared, f.Compare, {"states": [state.number for state in states]}, states)[0]
        return [_scored(points) for points in answer.points]

    def _players(self) -> Mapping[str, Player]:
        return {name: partial(self._play, name) for name in self._line.facts.players[:64]}

    def _play(self, player: str, state: Held, rng: random.Random) -> str:
        fields = {"state": state.number, "player": player, "seed": rng.getrandbits(64) >> 1}
        return self._ask(f.Said, f.Play, fields, [state])[0].text

    def _judge(self, state: Held, how: str) -> Any:
        for known in [known for known in state.points if known[0] == how]:
            state.points.remove(known)  # once: `shoal env check` asks again to compare
            if known[1] is not None:
                return known[1]
        return _scored(self._ask(f.Judged, f.Judge, {"state": state.number, "how": how}, [state])[0].points)

    # --- asking ---

    def _begin(self, task: Posed, number: int) -> tuple[f.Begun, Held]:
        fields = {"new": number, "index": task.number, "heldout": task.heldout}
        answer, data = self._ask(f.Begun, f.Begin, fields)
        return answer, Held(number, task, (), _hash(b"", data), self._line.forget)

    def _act(self, state: Held, action: str, number: int) -> tuple[f.Acted, Held]:
        answer, data = self._ask(f.Acted, f.Act, self._acting(state.number, number, action), [state])
        actions = (*state.actions, action)
        return answer, Held(number, state.task, actions, _hash(state.told, data), self._line.forget)

    def _acting(self, state: int, new: int, action: str) -> dict[str, Any]:
        fields: dict[str, Any] = {"state": state, "new": new, "text": str(action)}
        if isinstance(action, Action):
            own = list(action._tools) == self.tools
            fields |= {"notation": action._notation, "thinking": action._thinking}
            fields |= {"tools": None if own else list(action._tools)}
        return fields

    def _ask(
        self, wanted: type[A], kind: type[f.Request], fields: Mapping[str, Any], states: Sequence[Held] = ()
    ) -> tuple[A, bytes]:
        """One answer, from a second sandbox if the first one has to be ended. Raises `Raised` or `Undecided`."""
        told = repr([(name, value) for name, value in fields.items() if name not in _NUMBERS])
        question = (kind, told, *((state.task.number, state.task.heldout, state.actions) for state in states))
        with self._lock:
            if not self._doubt.holds and question in self._ends:
                raise self._stopped(self._ends[question])
            for tries in range(TRIES):
                try:
                    return self._answer(wanted, kind, fields, states, 1.0 + tries)
                except Gone as gone:
                    why = f"the sandbox stopped it: it {gone}"
            if not self._doubt.holds and len(self._ends) < f.MAX_STATES:
                self._ends[question] = why
        raise self._stopped(why)

    def _answer(
        self, wanted: type[A], kind: type[f.Request], fields: Mapping[str, Any], states: Sequence[Held], patience: float
    ) -> tuple[A, bytes]:
        answer, data = self._line.ask(kind, fields, patience)
        if isinstance(answer, f.Unknown) and states:
            for state in states:
                if state.number in answer.states:
                    self._revive(state, patience)
            answer, data = self._line.ask(kind, fields, patience)
        if isinstance(answer, f.Fault):
            raise (RaisedValue if answer.usual else Raised)(_one_line(answer.line))
        if not isinstance(answer, wanted):
            self._line.end()  # guard: answer-to-this-request
            raise Gone("answered something else than was asked")
        return answer, data

    def _revive(self, state: Held, patience: float) -> None:
        """Make a state again that the inside does not keep any more, from the actions. The last gets its old number."""
        task = state.task
        numbers = [*(next(self._numbers) for _ in state.actions), state.number]
        fields: dict[str, Any] = {"new": numbers[0], "index": task.number, "heldout": task.heldout}
        told = _hash(b"", self._answer(f.Begun, f.Begin, fields, (), patience)[1])
        for action, before, number in zip(state.actions, numbers, numbers[1:], strict=False):
            told = _hash(told, self._answer(f.Acted, f.Act, self._acting(before, number, action), (), patience)[1])
            self._line.forget(before)
        if told != state.told:
            self._line.end()  # it keeps another state under this number
            raise self._stopped("it is not deterministic: it answered the same actions differently the second time")

    def _stopped(self, why: str) -> Exception:
        if self._doubt.holds:  # guard: stopped-is-no-verdict
            return Undecided(f"{self.name}: {why}")
        return Raised(why)


# --- plain data and back ---


def _scored(points: f.Points) -> Scored:
    return Score(points.parts, points.metrics) if isinstance(points, f.Parts) else points


def _messages(messages: Any) -> list[Message]:
    if not isinstance(messages, list):
        raise Raised(f"reset() gives {type(messages).__name__} for its messages, not a list")
    return [message if isinstance(message, dict) else {} for message in messages]


def _unmarked(reply: Any) -> Any:
    """A reply with the policy's turns again in the place of their tables."""
    if isinstance(reply, dict) and list(reply) == [f.MARK]:
        return _written(reply[f.MARK])
    return [_unmarked(item) for item in reply] if isinstance(reply, list) else reply


def _written(fields: Any) -> Written:
    match fields:
        case [int(turn), bool(reasoning), [*calls]]:
            return Written(turn, reasoning, tuple((str(name), str(of)) for name, of in calls))
    raise Raised("a turn of the policy in a history has another form")


def _hash(before: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(before + data, digest_size=16).digest()


def _one_line(text: str) -> str:
    return " ".join(text.split())[: f.MAX_LINE_CHARS]
