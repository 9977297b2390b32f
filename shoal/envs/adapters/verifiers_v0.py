"""An unmodified environment of verifiers v0: any module with `load_environment`, version 0.1.14.

An environment file calls `environment`, in an interpreter that has verifiers (`<0.2`) and the module. The module's own
rollout loop runs, and its rubric scores. That covers SingleTurnEnv, MultiTurnEnv, ToolEnv and classes derived from
them. At each model request the loop stops until the policy has written. Not supported: group rewards, tools that change
from row to row, images, and environments that rewrite the conversation.
"""

import asyncio
import functools
import inspect
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.env import Score
from shoal.envs.adapters.episode import Ask, Episode, GeneratorEnv, Problem, bounds_of, split, suspended
from shoal.envs.adapters.message_conversion import History, openai_tool, said
from shoal.envs.exceptions import REPRODUCIBLE_ERRORS
from shoal.errors import ShoalError


class VerifiersV0(GeneratorEnv):
    """An environment of verifiers v0."""

    def __init__(
        self, id: str, args: Mapping[str, Any] = {}, heldout: int = 0, reward_bounds: Sequence[float] | None = None,
        reproducible: bool = True,
    ) -> None:  # fmt: skip
        """`id` is the module's name for `load_environment`, and `args` are its arguments.

        Rows for evaluation are held out, except those that are also training rows. Without rows for evaluation, the
        last `heldout` rows are held out. Give `reward_bounds` if a reward function leaves the range 0 to 1, and
        `reproducible = false` if a judge, a clock or a server decides.
        """
        import verifiers

        self.name, self.reproducible = f"verifiers/{id}", reproducible
        with kept_signals():
            self._env = verifiers.load_environment(id, **args)
        self.source = Path(sys.modules[id.replace("-", "_").split("/")[-1]].__file__ or "")
        if self._env.requires_group_rollouts:
            raise ShoalError(
                f"environment {self.name} compares the answers of a group, which this adapter does not support"
            )
        rows, own = self._env.build_dataset(), self._env.build_eval_dataset()
        if rows is None:
            raise ShoalError(f"environment {self.name} has no rows to train on, only rows for evaluation")
        if own is None:
            self._rows = list(map(_plain_row, rows))
            self.num_tasks, self.num_heldout = split(len(self._rows), heldout)
        else:
            training = list(map(_plain_row, rows))
            seen = set(map(repr, training))
            fresh = [row for row in map(_plain_row, own) if repr(row) not in seen]
            self._rows, self.num_tasks, self.num_heldout = [*training, *fresh], len(training), len(fresh)
        defs = self._env.tool_defs or ()
        self.tools = [openai_tool(tool.name, tool.description, tool.parameters) for tool in defs]
        self.weights = _weights(self._env.rubric)
        self._errors: list[BaseException] = []
        """What reward functions raised in the episode that is scored now."""
        _note_errors(self._env.rubric, self._errors)
        self.reward_bounds = bounds_of(reward_bounds, self.weights)
        self._inline = _reads_thinking(self._env.parser)
        self._client = _client_class()
        self._loop = asyncio.new_event_loop()

    def content(self, index: int) -> Any:
        return self._rows[index]

    def episode(self, task: Problem) -> Episode:
        return suspended(self._loop, lambda ask: self._play(task, ask))

    async def _play(self, task: Problem, ask: Ask) -> Score:
        history = History(self.name)
        row = {**task.content, "example_id": task.number}
        state = await self._env.rollout(row, self._client(ask, history, self._inline), "policy", {})
        if state.get("error") is not None:
            raise state["error"]
        self._errors.clear()
        await self._env.rubric.score_rollout(state)
        await self._env.rubric.cleanup(state)
        if self._errors:
            raise self._errors[0]
        return self._score(state)

    def _score(self, state: Mapping[str, Any]) -> Score:
        reward, named = float(state["reward"]), {name: float(value) for name, value in state["metrics"].items()}
        parts = {name: value for name, value in named.items() if name in self.weights}
        metrics = {name: value for name, value in named.items() if name not in self.weights}
        if abs(sum(self.weights[name] * value for name, value in parts.items()) - reward) > 1e-9:
            parts, metrics = {"reward": reward}, named  # a rubric that does not just add weighted parts
        return Score(parts, {**metrics, "truncated": float(state["is_truncated"])})


def _plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "example_id"}


def _weights(rubric: Any) -> dict[str, float]:
    """Weights of the reward functions by name. As in verifiers, functions of the same name are added."""
    functions, weights = rubric._get_reward_funcs(), rubric._get_reward_weights()
    named = [(function.__name__, float(weight)) for function, weight in zip(functions, weights, strict=True)]
    return {name: weight for name, weight in named if weight}


def _note_errors(rubric: Any, errors: list[BaseException]) -> None:
    """Note what reward functions raise, or that they give no number: verifiers only logs it, and takes it for a reward of
    0. Functions without weight are metrics, and change no reward."""
    for inner in getattr(rubric, "rubrics", ()):
        _note_errors(inner, errors)
    rubric.funcs = [
        _noted(function, errors) if weight else function
        for function, weight in zip(rubric.funcs, rubric.weights, strict=True)
    ]


def _noted(function: Callable[..., Any], errors: list[BaseException]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def noted(*args: Any, **kwargs: Any) -> Any:
        try:
            value = function(*args, **kwargs)
            value = await value if inspect.isawaitable(value) else value
            float(value)
        except REPRODUCIBLE_ERRORS as error:
            errors.append(error)
            raise
        return value

    return noted


def _reads_thinking(parser: Any) -> bool:
    """Whether a parser looks for reasoning in the content. Servers without a reasoning parser leave it there."""
    import verifiers

    if isinstance(parser, verifiers.XMLParser):
        return any("think" in names for _, names in parser._fields)
    return isinstance(parser, verifiers.ThinkParser) and not isinstance(parser, verifiers.MaybeThinkParser)


def _client_class() -> Any:
    """The class of the client that asks the policy. It is made here because its base is in verifiers."""
    import verifiers
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage, ToolCall

    class Policy(Client):
        def __init__(self, ask: Ask, history: History, inline: bool) -> None:
            super().__init__(None)
            self._ask, self._history, self._inline = ask, history, inline

        async def get_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any) -> Any:
            action = await self._ask(self._history.new(message.model_dump() for message in prompt))
            if action is None:  # a token limit: verifiers ends the rollout as truncated, and scores it
                raise verifiers.OverlongPromptError("the conversation is at its token limit")
            turn = said(action, self._history.calls, self._inline)
            self._history.wrote(turn)
            calls = [ToolCall(id=key, name=name, arguments=given) for key, name, given in turn.calls]
            message = ResponseMessage(
                content=turn.content,
                reasoning_content=turn.reasoning or None,
                tool_calls=calls or None,
                finish_reason="tool_calls" if calls else "stop",
                is_truncated=False,
            )
            return Response(id="policy", created=0, model=model, message=message)

        async def close(self) -> None: ...

    # The abstract methods are for formats of other servers, which `get_response` does not use.
    Policy.__abstractmethods__ = frozenset()
    return Policy


@contextmanager
def kept_signals() -> Iterator[None]:
    """Undo the signal handlers that verifiers installs when an environment is made."""
    if threading.current_thread() is not threading.main_thread():
        raise ShoalError("verifiers v0 makes environments only in the main thread: load this one there")
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


environment = VerifiersV0
