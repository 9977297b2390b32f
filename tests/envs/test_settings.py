"""Settings of an environment in a run file: system prompt, examples, template arguments and token limits."""

from typing import Any

import pytest

from shoal.chat.renderer import Renderer
from shoal.config import EnvConfig
from shoal.env import Action, Env, Message, Step, ToolCall
from shoal.envs.interface import describe, success_of, task_of
from shoal.envs.load import env_digest, env_of, load_env, load_run_envs
from shoal.envs.replay import replay_group
from shoal.envs.rollout_rules import Conversation
from shoal.envs.settings_wrapper import limits_of, with_settings
from shoal.errors import ShoalError
from shoal.protocol.messages import EnvSpec, Sampling
from tests.envs.plain import Plain
from tests.models.templates import ADD, renderer_of, spell

EXAMPLES = ({"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"})


def spec(**settings: Any) -> EnvSpec:
    return EnvSpec("arithmetic", env_digest("arithmetic"), load_env("arithmetic", {}).num_tasks, 1.0, {}, **settings)


def test_a_system_prompt_and_examples_come_before_the_task() -> None:
    env = load_run_envs([spec(system="be brief", examples=EXAMPLES)], own_files=False)["arithmetic"]
    plain = load_env("arithmetic", {})
    _, messages = env.reset(env.task(3))
    assert messages == [{"role": "system", "content": "be brief"}, *EXAMPLES, *plain.reset(plain.task(3))[1]]
    assert (env.name, env.num_tasks, success_of(env, env.reset(env.task(3))[0])) == (
        "arithmetic",
        plain.num_tasks,
        False,
    )


class Asking(Plain):
    """It has a system prompt and a tool of its own, and answers a call by two results."""

    name, num_tasks, tools = "asking", 2, (ADD,)
    template = {"enable_thinking": False, "date": "2030-01-01"}

    def reset(self, task: int) -> tuple[int, list[Message]]:
        return 0, [{"role": "system", "content": "ITS OWN"}, {"role": "user", "content": "GO"}]

    def step(self, state: int, action: str) -> Step:
        results = [{"role": "tool", "tool_call_id": f"c{i}", "name": "add", "content": f"RESULT {i}"} for i in (1, 2)]
        return Step(state + 1, results, state == 1)

    def score(self, state: int) -> float:
        return state / 2


def test_the_runs_system_prompt_takes_the_place_of_the_environments() -> None:
    env = with_settings(Asking(), EnvConfig("asking", system="THE RUN'S", template={"date": "2031-01-01"}))
    assert [message["content"] for message in env.reset(0)[1]] == ["THE RUN'S", "GO"]
    assert describe(env).arguments == {"tools": [ADD], "enable_thinking": False, "date": "2031-01-01"}
    assert with_settings(env, EnvConfig("asking")) is env


def play(env: Env, renderer: Renderer, sampling: Sampling) -> Conversation:
    talk = Conversation(env, renderer, env.task(0), sampling)
    while talk.ending is None:
        talk.write([*renderer.encode("x"), renderer.eos_id][: talk.room])
    return talk


def test_tools_and_template_arguments_reach_the_prompt_and_a_reply_may_be_several_results() -> None:
    renderer, sampling = renderer_of("qwen3"), Sampling(1.0, 16, 4000)
    talk = play(Asking(), renderer, sampling)
    text = spell(renderer, talk.tokens)
    assert '"name": "add"' in text and text.count("<think>\n\n</think>") == 2  # two prompts, without thinking
    assert text.count("<tool_response>") == 2 and text.index("RESULT 1") < text.index("RESULT 2")
    assert ("tool", "RESULT 1") in talk.texts
    assert not replay_group(Asking(), renderer, 0, [talk.rollout(0)], sampling)[0].problem
    other = with_settings(Asking(), EnvConfig("asking", template={"enable_thinking": True}))
    assert replay_group(other, renderer, 0, [talk.rollout(0)], sampling)[0].problem


def test_an_environment_may_have_lower_token_limits(renderer: Renderer) -> None:
    run = Sampling(1.0, 16, 200)
    env = with_settings(load_env("wordle", {}), EnvConfig("wordle", max_turn_tokens=3, max_tokens=30))
    assert limits_of(env, run) == Sampling(1.0, 3, 30) and limits_of(load_env("wordle", {}), run) is run
    talk = play(env, renderer, run)
    assert len(talk.tokens) <= 30 and Conversation(env, renderer, env.task(0), run).room == 3
    wide = with_settings(load_env("wordle", {}), EnvConfig("wordle", max_turn_tokens=99, max_tokens=999))
    assert limits_of(wide, run) == run


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"examples": EXAMPLES * 33}, "66 messages in examples, limit 64"),
        ({"examples": EXAMPLES[:1]}, "do not end with a message of the assistant"),
        ({"examples": ({"role": "system", "content": ""},)}, "examples begin with a system message"),
        ({"examples": ({"role": "user"},)}, "no content"),
        ({"parser": "hermit"}, "parser = 'hermit'; known are hermes"),
        ({"weights": {"form": float("inf")}}, "weights.form = inf: give a finite number"),
        ({"template": {"messages": []}}, "the renderer sets it itself"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_in_one_line(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ShoalError, match=says) as refused:
        env_of(spec(**settings))
    assert "\n" not in str(refused.value)


class Calculator(Asking):
    """It adds what the policy asks it to, and remembers what it was told."""

    def step(self, state: Any, action: str) -> Step:
        assert isinstance(action, Action)
        heard = (action.reasoning, action.visible, action.tool_calls, action.problems)
        if action.tool_calls:
            call = action.tool_calls[0]
            return Step(
                heard, [{"role": "tool", "name": call.name, "content": str(sum(call.arguments.values()))}], False
            )
        return Step(heard, None, True)

    def score(self, state: Any) -> float:
        return 1.0 if state and "7" in state[1] else 0.0


@pytest.mark.parametrize("name", ["qwen3_5_think", "gptoss", "gemma4_v5", "llama3_1"])
def test_a_policy_calls_a_tool_and_uses_its_result(name: str) -> None:
    renderer, sampling, env = renderer_of(name), Sampling(1.0, 600, 6000), Calculator()
    talk = Conversation(env, renderer, 0, sampling)
    calls = [{"function": {"name": "add", "arguments": {"a": 3, "b": 4}}}]
    talk.write(renderer.written({"role": "assistant", "content": "", "tool_calls": calls}, describe(env).arguments))
    assert talk.state[2] == (ToolCall("add", {"a": 3, "b": 4}),) and talk.state[3] == ()
    talk.write(renderer.written({"role": "assistant", "content": "it is 7"}, describe(env).arguments))
    assert talk.reward == 1.0 and talk.state[1] == "it is 7" and ("tool", "7") in talk.texts
    assert replay_group(env, renderer, 0, [talk.rollout(0)], sampling)[0].reward == 1.0


def test_a_run_file_may_name_another_notation() -> None:
    renderer, env = renderer_of("qwen3"), with_settings(Calculator(), EnvConfig("calculator", parser="llama"))
    talk = Conversation(env, renderer, 0, Sampling(1.0, 600, 6000))
    talk.write([*renderer.encode('{"name": "add", "parameters": {"a": 1}}'), renderer.eos_id])
    assert talk.state[2] == (ToolCall("add", {"a": 1}),)


def test_two_environments_of_one_class_are_named_by_their_labels() -> None:
    for label, digits in (("easy", 1), ("hard", 2)):
        env = env_of(EnvConfig("arithmetic", {"digits": digits}, label=label))
        with pytest.raises(ShoalError, match=rf"^environment {label} cannot make task -1"):
            task_of(env, -1)
    plain = env_of(EnvConfig("arithmetic"))
    with pytest.raises(ShoalError, match=r"^environment arithmetic cannot make task -1"):
        task_of(plain, -1)
