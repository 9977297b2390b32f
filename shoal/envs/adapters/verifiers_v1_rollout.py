"""One agent's rollout under verifiers v1, without its servers: chat loop, tools and hooks in this process.

The trace, its graph and the stop conditions come from verifiers. Features that cannot work here are refused by name before
the first episode.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.envs.adapters.message_conversion import openai_tool
from shoal.errors import ShoalError


def refuse(name: str, kind: Any, seats: Mapping[str, Any]) -> None:
    """Raise `ShoalError` for tasks and agents that this process cannot run."""
    from verifiers.v1.utils.decorators import discover_decorated

    if kind.NEEDS_CONTAINER:
        raise ShoalError(f"environment {name} needs a container for each task, which this adapter does not start")
    if discover_decorated(kind.__new__(kind), "intercept"):
        raise ShoalError(f"environment {name} uses @vf.intercept, which this adapter does not support")
    for seat, config in seats.items():
        harness = getattr(config.harness, "id", None) or "null"
        if harness not in ("null", "bash"):
            raise ShoalError(
                f"environment {name} runs its agent {seat} in the harness {harness}: only null is possible"
            )


class ToolServer:
    """The tools of one toolset, called directly."""

    def __init__(self, toolset: Any) -> None:
        from mcp.server.mcpserver import MCPServer

        if getattr(toolset.config, "url", None):
            raise ShoalError(f"the tool server {toolset.server_name} is at {toolset.config.url}: it needs a network")
        self._toolset, self._server = toolset, MCPServer(toolset.server_name or type(toolset).__name__)
        toolset.register(self._server)

    async def start(self, data: Any) -> None:
        """Set the toolset up, also for one task if its data are given."""
        await self._toolset.setup()
        if data is not None:
            await self._toolset.setup_task(data)

    async def tools(self) -> list[dict[str, Any]]:
        """The server's tools, with the names that verifiers gives them."""
        found = await self._server.list_tools()
        return [openai_tool(self._full(tool.name), tool.description or "", tool.input_schema) for tool in found]

    async def names(self) -> dict[str, str]:
        """The tools' names within the server, by full name."""
        return {self._full(tool.name): tool.name for tool in await self._server.list_tools()}

    async def call(self, name: str, arguments: Mapping[str, Any], state: Any) -> str:
        """A tool's answer. `state` is the rollout's, which tools may read and change."""

        async def pull() -> Any:
            return state

        async def push(before: bytes) -> None: ...

        self._toolset._pull_state, self._toolset._push_state = pull, push
        result = await self._server.call_tool(name, dict(arguments))
        return "\n".join(part.text if part.type == "text" else str(part) for part in result.content)

    def _full(self, name: str) -> str:
        return f"{self._toolset.server_name}_{name}" if self._toolset.server_name else name


class AgentRollout:
    """One agent on one task: `open`, any number of segments, `close`."""

    def __init__(
        self,
        task: Any,
        config: Any,
        name: str,
        trainable: bool,
        voice: Callable[..., Any],
        shared: Sequence[ToolServer],
    ) -> None:
        from verifiers.v1.clients import EvalClientConfig, ModelContext
        from verifiers.v1.configs.agent import resolve_agent
        from verifiers.v1.session import RolloutLimits, RolloutSession, hook_boundary
        from verifiers.v1.state import state_cls
        from verifiers.v1.trace import AgentInfo, Trace, TraceTask
        from verifiers.v1.types import Request, Response, Sampling

        if task.data.image or task.NEEDS_CONTAINER:
            raise ShoalError(f"task {task.data.idx} needs the container image {task.data.image}")
        client, sampling = EvalClientConfig(), Sampling()
        config = resolve_agent(config, model="policy", client=client, sampling=sampling, harness=None)
        self._task, self._voice, self._shared = task, voice, shared
        self.trace = Trace(
            task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            state=state_cls(type(task))(),
            agent=AgentInfo(config=config, name=name, trainable=trainable),
        )
        stops: dict[type, list[Any]] = {Trace: [], Request: [], Response: []}
        for hook in task.hooks("stop"):
            stops[hook_boundary(hook, allow_trace=True)].append(hook)
        self._session = RolloutSession(
            ctx=ModelContext(model="policy", client=client, sampling=sampling),
            trace=self.trace,
            trace_stops=stops[Trace],
            request_stops=stops[Request],
            response_stops=stops[Response],
            limits=RolloutLimits(max_turns=config.max_turns),
        )
        self._runtime: Any = None
        self._conversation: list[Any] = []
        self._calls = 0

    async def open(self) -> None:
        """Run the task's `setup` and start its tools."""
        from verifiers.v1.utils.decorators import invoke

        if self._wants_runtime():
            from verifiers.v1.runtimes import SubprocessConfig, make_runtime

            self._runtime = make_runtime(SubprocessConfig(), name=self.trace.id)
            await self._runtime.start()
        await invoke(self._task.setup, {"trace": self.trace, "runtime": self._runtime})
        own = [ToolServer(toolset) for toolset in self._task.toolsets(self._task.config)]
        for server in own:
            await server.start(self._task.data)
        self._tools: list[dict[str, Any]] = []
        self._servers: dict[str, tuple[ToolServer, str]] = {}
        for server in [*self._shared, *own]:
            self._tools += await server.tools()
            self._servers |= {full: (server, inner) for full, inner in (await server.names()).items()}

    async def segment(self, messages: Sequence[Any] | None) -> bool:
        """Let the agent answer until it calls no more tools. False if the rollout is over before it says anything."""
        from verifiers.v1 import graph
        from verifiers.v1.types import AssistantMessage, Request, Response, Tool, ToolCall, ToolMessage

        prompt = [*self._conversation, *(self._opening(messages) if not self._conversation else messages or ())]
        tools = [Tool(**tool["function"]) for tool in self._tools]
        spoke = False
        while not await self._session.refused():
            _, _, stopped = await self._session.rewrite_request(Request(messages=prompt, tools=tools or None))
            if stopped:
                self.trace.stop(stopped)
                break
            turn = graph.prepare_turn(self.trace, prompt, tools)
            said = await self._voice(prompt, list(self._servers))
            if said is None:
                self.trace.stop("max_total_tokens")
                break
            calls = [ToolCall(id=key, name=name, arguments=given) for key, name, given in said.calls]
            message = AssistantMessage(
                content=said.content, reasoning_content=said.reasoning or None, tool_calls=calls or None
            )
            response = Response(
                id="policy", created=0, model="policy", message=message, finish_reason="tool_calls" if calls else "stop"
            )
            _, _, stopped = await self._session.rewrite_response(response)
            turn.commit(response)
            spoke, prompt = True, [*prompt, message]
            self._conversation = prompt
            if stopped:
                self.trace.stop(stopped)
            if stopped or not calls:
                break
            for call in calls:
                content = await self._call(call.name, json.loads(call.arguments))
                prompt.append(ToolMessage(tool_call_id=call.id, content=content, name=call.name))
        return spoke

    async def close(self) -> None:
        """Run the task's `finalize`, and score the rollout."""
        from verifiers.v1.utils.decorators import invoke

        await invoke(self._task.finalize, {"trace": self.trace, "runtime": self._runtime})
        await self._task.score(self.trace, self._runtime)
        self.trace.is_completed = self.trace.ok = True

    async def release(self) -> None:
        """Remove the rollout's files."""
        if self._runtime is not None:
            await self._runtime.stop()

    def _opening(self, messages: Sequence[Any] | None) -> list[Any]:
        from verifiers.v1.types import SystemMessage, UserMessage

        data = self._task.data
        system = [SystemMessage(content=data.system_prompt)] if data.system_prompt else []
        prompt = [UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt or ())
        if not (prompt or messages):
            raise ShoalError(f"task {data.idx} has no prompt, and nobody opens the conversation")
        return [*system, *prompt, *(messages or ())]

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A tool's answer or the error that it raised, truncated as in the chat loop of verifiers."""
        from verifiers.v1.harnesses.utils.compaction import truncate_tool_output

        if name not in self._servers:
            return f"error: unknown tool {name!r}"
        server, inner = self._servers[name]
        try:
            answer = await server.call(inner, arguments, self.trace.state)
        except Exception as fault:  # noqa: BLE001  a tool is foreign code
            answer = str(fault)
        return str(truncate_tool_output(answer))

    def _wants_runtime(self) -> bool:
        from verifiers.v1.task import Task

        kind = type(self._task)
        overridden = [hook for hook in (kind.setup, kind.finalize) if hook not in (Task.setup, Task.finalize)]
        hooks = [*overridden, *self._task.hooks("reward"), *self._task.hooks("metric")]
        return any("runtime" in inspect.signature(hook).parameters for hook in hooks)
