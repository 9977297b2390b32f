"""An unmodified taskset of verifiers v1: a package that exports a `Taskset`, and an `Env` if several agents play.

An environment file calls `environment`, in an interpreter that has verifiers (0.4) and the package. The package's own
`Env.run`, tasks, hooks (`setup`, `finalize`, `@vf.stop`, `@vf.reward`, `@vf.metric`) and tools run. The chat loop of
the `null` harness and the tool servers, which verifiers starts as programs, run in this process, without a network. Not
supported: containers, other harnesses, `@vf.intercept`, and servers elsewhere. The policy plays one agent. An opponent,
seeded from the task, plays the others.
"""

import asyncio
import itertools
import random
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from shoal.env import Score
from shoal.envs.adapters.episode import (
    Ask,
    Episode,
    GeneratorEnv,
    Problem,
    bounds_of,
    one_opponent,
    opponents_move,
    split,
    suspended,
)
from shoal.envs.adapters.message_conversion import History, ModelTurn, said
from shoal.envs.adapters.verifiers_v1_rollout import AgentRollout, ToolServer, refuse
from shoal.errors import ShoalError


class VerifiersV1(GeneratorEnv):
    """A taskset of verifiers v1."""

    def __init__(
        self, id: str, args: Mapping[str, Any] = {}, tasks: int = 0, heldout: int = 0, seat: str = "",
        opponent: str | list[str] = "random", reward_bounds: Sequence[float] | None = None, reproducible: bool = True,
    ) -> None:  # fmt: skip
        """`id` is the package's name, and `args` are the fields of its environment's configuration, such as
        `{"taskset": {...}}`.

        The first `tasks` are for training (0: all but the held-out ones of a finite taskset), the next `heldout` are
        held out. `seat` names the policy's agent. If it is empty, trained agents with equal configurations take turns
        from task to task. Give `reward_bounds` if a reward leaves the range 0 to 1.
        """
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        self.name, self.reproducible = f"verifiers/{id}", reproducible
        config = {**args, "taskset": {**args.get("taskset", {}), "id": id}}
        self._env = load_environment(resolve_env_config(config))
        self.source = Path(sys.modules[type(self._env.taskset).__module__].__file__ or "")
        self._seats = agent_config_fields(self._env.config)
        self._fixed_seat, self._opponent = seat, one_opponent(opponent)
        if seat and seat not in self._seats:
            raise ShoalError(f"environment {self.name} has no agent {seat}: its agents are {', '.join(self._seats)}")
        refuse(self.name, self._env.taskset.task_type(), self._seats)
        self._take(tasks, heldout)
        self._loop = asyncio.new_event_loop()
        self._shared = [ToolServer(toolset) for toolset in self._env.taskset.toolsets(self._env.taskset.config)]
        first = self._tasks[0]
        servers = [*self._shared, *map(ToolServer, first.toolsets(first.config))]
        self.tools = [tool for server in servers for tool in self._loop.run_until_complete(server.tools())]
        self._loop.run_until_complete(self._start())
        rewards = {hook.__name__: float(getattr(hook, "_vf_weight", 1.0)) for hook in first.hooks("reward")}
        self.reward_bounds = bounds_of(reward_bounds, rewards)

    def _take(self, tasks: int, heldout: int) -> None:
        taskset = self._env.taskset
        if not taskset.bounded and tasks < 1:
            raise ShoalError(f"environment {self.name} has endless tasks: give their number with tasks and heldout")
        self._tasks = list(itertools.islice(taskset, tasks + heldout if tasks else None))
        self.num_tasks, self.num_heldout = split(len(self._tasks), heldout)

    async def _start(self) -> None:
        for server in self._shared:
            await server.start(None)
        await self._env.start()

    def content(self, index: int) -> Any:
        data: dict[str, Any] = self._tasks[index].data.model_dump(mode="json", exclude_defaults=True, exclude={"idx"})
        return data

    def episode(self, task: Problem) -> Episode:
        return suspended(self._loop, lambda ask: self._play(task, ask))

    def _seat(self, task: Problem, trainable: Sequence[str]) -> str:
        """The policy's agent. An agent that the environment does not train must be named to be the policy's."""
        if self._fixed_seat:
            return self._fixed_seat
        if not trainable:
            raise ShoalError(f"environment {self.name} does not train any agent: name the policy's with seat")
        alike = [name for name in trainable if self._seats[name] == self._seats[trainable[0]]]
        return alike[task.number % len(alike)]

    async def _play(self, problem: Problem, ask: Ask) -> Score:
        from verifiers.v1.agent import Agents
        from verifiers.v1.episode import EnvInfo
        from verifiers.v1.episode import Episode as TheirEpisode
        from verifiers.v1.trace import TraceTask

        task = self._tasks[problem.number + (self.num_tasks if problem.heldout else 0)]
        told = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        episode = TheirEpisode(env=EnvInfo(id=self._env.config.env_id), task=told)
        seats: dict[str, EpisodeAgent] = {}

        def make(name: str, config: Any) -> EpisodeAgent:
            seats[name] = EpisodeAgent(
                name, config, self._other(name, problem), self._shared, type(task), episode.traces
            )
            return seats[name]

        agents = Agents(self._env.config, make)
        await self._env.setup(agents)
        own = self._seat(problem, [name for name, seat in seats.items() if seat.trainable])
        seats[own].voice = self._policy(ask)
        await self._env.run(task, agents)
        await self._env.finalize(task, episode)
        return self._score(episode.traces, own)

    def _score(self, traces: Sequence[Any], seat: str) -> Score:
        own = [trace for trace in traces if trace.agent.name == seat]
        if len(own) != 1:
            raise ShoalError(
                f"environment {self.name} ran its agent {seat} {len(own)} times in an episode, expected once"
            )
        if missing := [name for name, reward in own[0].rewards.items() if reward is None]:
            raise ShoalError(f"environment {self.name} did not score {', '.join(missing)}")
        parts = {name: float(reward.value) for name, reward in own[0].rewards.items()}
        metrics = {name: float(value) for name, value in own[0].metrics.items() if value is not None}
        return Score(parts, {**metrics, "truncated": float(own[0].is_truncated)})

    def _policy(self, ask: Ask) -> "Voice":
        history = History(self.name)

        async def speak(messages: Sequence[Any], tools: Sequence[str]) -> ModelTurn | None:
            if sorted(tools) != sorted(tool["function"]["name"] for tool in self.tools):
                raise ShoalError(f"environment {self.name} offers other tools in this episode: {', '.join(tools)}")
            action = await ask(history.new(message.model_dump() for message in messages))
            if action is None:
                return None
            turn = said(action, history.calls)
            history.wrote(turn)
            return turn

        return speak

    def _other(self, name: str, problem: Problem) -> "Voice":
        """The voice of an agent that the policy does not play."""
        rng, turns = random.Random(f"{self.name}/{name}/{problem.number}/{problem.heldout}"), itertools.count()

        async def speak(messages: Sequence[Any], tools: Sequence[str]) -> ModelTurn:
            return ModelTurn(opponents_move(self._opponent, str(messages[-1].content), next(turns), rng), "", ())

        return speak


class EpisodeAgent:
    """An agent of an episode, with what the package's `Env.run` uses: `run` and `interaction`."""

    def __init__(
        self, name: str, config: Any, voice: "Voice", shared: Sequence[ToolServer], kind: type, finished: list[Any]
    ) -> None:
        self.config, self.trainable = config, True
        self.voice = voice
        self._name, self._shared, self._kind, self._finished = name, shared, kind, finished

    async def run(self, task: Any, **options: Any) -> Any:
        """Play a task from its prompt to the end."""
        async with self._rollout(task, options) as rollout:
            await rollout.segment(None)
            rollout.trace.stop("agent_completed")
        return rollout.trace

    @asynccontextmanager
    async def interaction(self, task: Any, **options: Any) -> AsyncIterator["Exchange"]:
        """Play a task turn by turn, as the caller asks."""
        async with self._rollout(task, options) as rollout:
            yield Exchange(rollout)
            rollout.trace.stop("user_closed")

    @asynccontextmanager
    async def _rollout(self, task: Any, options: Mapping[str, Any]) -> AsyncIterator[AgentRollout]:
        if unknown := [name for name, value in options.items() if value and name != "on_trace"]:
            raise ShoalError(f"an agent is run with {', '.join(unknown)}, which this adapter does not support")
        shared = self._shared if isinstance(task, self._kind) else ()
        rollout = AgentRollout(task, self.config, self._name, self.trainable, self.voice, shared)
        if options.get("on_trace"):
            options["on_trace"](rollout.trace)
        try:
            await rollout.open()
            yield rollout
            await rollout.close()
            self._finished.append(rollout.trace)
        finally:
            await rollout.release()


class Exchange:
    """A rollout that its caller talks to."""

    def __init__(self, rollout: AgentRollout) -> None:
        self._rollout = rollout

    @property
    def trace(self) -> Any:
        return self._rollout.trace

    async def turn(self, message: Any = None) -> Any:
        """Say something to the agent, and wait until it has finished its turn."""
        from verifiers.v1.agent import Segment
        from verifiers.v1.dialects import parse_message
        from verifiers.v1.types import UserMessage

        if isinstance(message, str):
            message = [UserMessage(content=message)]
        elif message is not None:
            message = [parse_message(part) if isinstance(part, dict) else part for part in message]
        before = len(self.trace.nodes)
        if not await self._rollout.segment(message):
            return Segment(messages=[], terminated=True)
        nodes = itertools.dropwhile(lambda node: not node.sampled, self.trace.nodes[before:])
        return Segment(messages=[node.message for node in nodes])


Voice = Callable[..., Any]
"""Called with the conversation and the names of the tools, and awaited. Gives an agent's turn; None at a token limit."""


environment = VerifiersV1
