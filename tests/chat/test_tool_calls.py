"""Reasoning and tool calls in the policy's text: what a template renders is read back, and any text gives parts."""

import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.chat.messages import MAX_CALLS
from shoal.chat.tool_calls import PARSERS, parse, reasoning_length
from shoal.env import Action, ToolCall
from shoal.envs.lint import HOSTILE
from tests.models.templates import NAMES, WITHOUT_CALLS, WITHOUT_THOUGHT, renderer_of

ARGUMENTS: dict[str, Any] = {
    "a": 3, "x": -2.5, "yes": True, "none": None, "text": 'it\'s "so",\n{odd} [1] <b>',
    "list": [1, "two"], "map": {"k": {"n": 1}},
}  # fmt: skip
TYPES = {
    "a": "integer",
    "x": "number",
    "yes": "boolean",
    "none": "null",
    "text": "string",
    "list": "array",
    "map": "object",
}
PROBE = {
    "type": "function",
    "function": {
        "name": "probe.it",
        "description": "Probes.",
        "parameters": {"type": "object", "properties": {k: {"type": v, "description": k} for k, v in TYPES.items()}},
    },
}
NOTATIONS = (*PARSERS, "harmony", "atem", "")
WITH_CALLS = [name for name in NAMES if name not in WITHOUT_CALLS]
LOSSY = {"lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"}
"""These put a quote into a text without a sign that it does not end it."""


def test_every_template_that_shows_calls_has_a_notation() -> None:
    assert [name for name in NAMES if renderer_of(name)._dialect.calls] == WITH_CALLS
    assert {renderer_of(name).notation for name in WITH_CALLS} <= {*PARSERS, "harmony", "atem"}


def test_templates_show_thoughts_but_for_some() -> None:
    shown = [name for name in NAMES if renderer_of(name)._dialect.reasoning and not name.endswith("_nothink")]
    assert shown == [name for name in NAMES if name not in WITHOUT_THOUGHT]


def turn_of(name: str, *calls: dict[str, Any], content: str = "", reasoning: str = "") -> str:
    renderer = renderer_of(name)
    message = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    told = [{"function": {"name": "probe.it", "arguments": call}} for call in calls]
    return renderer.decode(renderer.written(message | ({"tool_calls": told} if told else {}), {"tools": [PROBE]}))


@pytest.mark.parametrize("name", WITH_CALLS)
def test_a_call_that_a_template_renders_is_read_back(name: str) -> None:
    given = ARGUMENTS | ({"text": "plain, [1]"} if name in LOSSY else {})
    thinking = renderer_of(name).open([{"role": "user", "content": "."}], {"tools": [PROBE]}).thinking
    action = Action(turn_of(name, given), renderer_of(name).notation, thinking, [PROBE])
    assert action.tool_calls == (ToolCall("probe.it", given),)
    assert (action.problems, action.reasoning, action.visible) == ((), "", "")


ONE_CALL = {"llama3_1", "llama3_2", "gptoss", "deepseek_r1_distill"}


@pytest.mark.parametrize("name", [name for name in WITH_CALLS if name not in ONE_CALL])
def test_several_calls_are_read_in_order(name: str) -> None:
    found = Action(turn_of(name, {"a": 1}, {"a": 2}, {}), renderer_of(name).notation, tools=[PROBE])
    assert found.tool_calls == tuple(ToolCall("probe.it", call) for call in ({"a": 1}, {"a": 2}, {}))


def test_reasoning_that_the_prompt_began_and_that_is_cut_short_is_reasoning() -> None:
    assert parse("hm", "hermes", thinking=True)[:2] == ("hm", "")
    assert parse("<think>hm")[:2] == ("hm", "") and parse("hm</think>\n\n4")[:2] == ("hm", "4")
    assert parse("say </think> or <think>")[0] == "say" and parse("<b> <think> no </think>")[:2] == (
        "",
        "<b> <think> no </think>",
    )
    assert parse("<think>a</think>b</think>c")[:2] == ("a", "b</think>c")


@pytest.mark.parametrize(
    ("notation", "text", "says"),
    [
        ("hermes", "<tool_call>{", "is not closed"),
        ("hermes", "<tool_call>{</tool_call>", "no JSON"),
        ("hermes", "<tool_call>[]</tool_call>", "no name"),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "arguments of f are list, not an object"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN is no JSON"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', "too large"),
        ("hermes", f'<tool_call>{{"a": {"9" * 5000}}}</tool_call>', "more than 64 digits"),
        ("hermes", f"<tool_call>{'[' * 20000}{']' * 20000}</tool_call>", "nested deeper than 32"),
        ("qwen-xml", "<tool_call>f</tool_call>", "<function=...> is missing"),
        ("glm", "<tool_call>\n</tool_call>", "no name"),
        ("lfm", "<|tool_call_start|>[f(a=)]<|tool_call_end|>", "a name is missing"),
        ("lfm", "<|tool_call_start|>[f(a='x)]<|tool_call_end|>", "a text is not closed"),
        ("gemma", "<|tool_call>call:f{a:" + "[" * 5000 + "<tool_call|>", "nested deeper than 32"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{<｜tool▁call▁end｜>", "no JSON"),
        ("mistral", "[TOOL_CALLS]{", "no JSON"),
        ("llama", '{"name": "f", "parameters": {}', "no JSON"),
        ("harmony", " to=functions.f<|channel|>commentary json<|message|>{", "no JSON"),
        ("atem", " to=f<|message|>{}", "<atem:invoke ...> is missing"),
    ],
)  # fmt: skip
def test_a_malformed_call_is_a_problem_and_not_a_call(notation: str, text: str, says: str) -> None:
    found = parse(text, notation)
    assert found.calls == () and len(found.problems) == 1 and says in found.problems[0]
    assert "\n" not in found.problems[0] and len(found.problems[0]) <= 200


def test_calls_are_found_beside_malformed_ones_and_up_to_a_limit() -> None:
    good = '<tool_call>{"name": "f"}</tool_call>'
    found = parse(f"so: {good}<tool_call>?</tool_call>{good} done", "hermes")
    assert found.calls == (ToolCall("f", {}),) * 2 and len(found.problems) == 1 and found.visible == "so:  done"
    found = parse(good * 500, "hermes")
    assert len(found.calls) == MAX_CALLS and "only the first 128" in found.problems[0]


def test_other_notations_of_a_notation() -> None:
    assert parse('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]', "mistral").calls == (
        ToolCall("f", {"a": 1}),
        ToolCall("g", {}),
    )
    assert parse('ok[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": 1}', "mistral").calls == (ToolCall("f", {"a": 1}, "abc"),)
    assert parse('<|python_tag|>{"name": "f", "parameters": {"a": "b"}}', "llama").calls == (ToolCall("f", {"a": "b"}),)
    assert parse("<|python_tag|>print(1)", "llama").calls == (ToolCall("code_interpreter", {"code": "print(1)"}),)
    assert parse('{"answer": 4}', "llama")[1:4] == ('{"answer": 4}', (), ())
    assert parse('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}', "deepseek").calls[0].name == "f"
    text = "<|channel|>analysis<|message|>HM<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    text += '<|constrain|>json<|message|>{"a": 1}'
    assert parse(text, "harmony")[:3] == ("HM", "", (ToolCall("f", {"a": 1}),))


MARKS = """
<tool_call> </tool_call> <think> </think> {"name":"f","arguments":{ } [ ] " \\ ' <function=f> <parameter=a> <arg_key>
1 , : = [ARGS] <|tool_call_start|>[f(a= )]<|tool_call_end|> <|tool_call>call:f{ <tool_call|> <|"|> <|channel|>analysis
<|message|> [TOOL_CALLS] to=f <|start|>assistant <|end|> <｜tool▁call▁begin｜> <｜tool▁sep｜> <|python_tag|>
<atem:invoke name="f">
"""
PIECES = MARKS.split()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    notation=st.sampled_from(NOTATIONS),
    thinking=st.booleans(),
    pieces=st.lists(st.sampled_from([*HOSTILE[:6], *PIECES]), max_size=12),
)
@example("hermes", False, ["<tool_call>" * 50])
def test_any_text_gives_parts_and_never_raises(notation: str, thinking: bool, pieces: list[str]) -> None:
    text = "".join(pieces)
    found = parse(text, notation, thinking)
    assert parse(text, notation, thinking) == found and 0 <= found.begins <= len(text)


@pytest.mark.parametrize("notation", NOTATIONS)
@pytest.mark.parametrize(
    "piece",
    [
        "<tool_call>", '\\"', "<tool_call><function=f><parameter=a>", "<|start|>", "<tool_call>a<arg_key>", "[", " ",
        "<think>",
        "<|tool_call_start|>[f(a='\\'", '<|tool_call>call:f{a:<|"|>', "[TOOL_CALLS]", '<atem:invoke name="f">',
    ],
)  # fmt: skip
def test_a_long_hostile_text_is_read_in_linear_time(notation: str, piece: str) -> None:
    text = "<tool_call>" + piece * (200_000 // len(piece)) + "</tool_call>"
    began = time.process_time()
    parse(text, notation)
    assert time.process_time() - began < 2.0


def test_an_action_is_a_text_to_an_environment_that_wants_no_more() -> None:
    action = Action('<think>\nhm\n</think>\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>', "hermes")
    assert action == str(action) and hash(action) == hash(str(action)) and action.strip().startswith("<think>")
    assert (action.reasoning, action.visible, action.tool_calls[0].name) == ("hm", "", "f")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_THOUGHT])
def test_the_tokens_of_a_turn_are_cut_where_its_reasoning_ends(name: str) -> None:
    renderer = renderer_of(name)
    message = {"role": "assistant", "content": "vier ✓", "reasoning_content": "HM, ✓ SO"}
    if name in ("gemma4", "gemma4_v3", "gemma4_v4"):
        message |= {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    turn = renderer.written(message, {"tools": [PROBE]})
    thinking = renderer.open([{"role": "user", "content": "."}], {"tools": [PROBE]}).thinking
    action = Action(renderer.decode(turn), renderer.notation, thinking, [PROBE])
    assert action.reasoning == "HM, ✓ SO" and action.visible == ("" if action.tool_calls else "vier ✓")
    count = reasoning_length(turn, action, renderer.decode)
    assert renderer.decode(turn[:count]) + renderer.decode(turn[count:]) == action
    assert renderer.decode(turn[count:]).startswith(("vier ✓", "<|tool_call>")) and "SO" in renderer.decode(
        turn[:count]
    )
    plain = Action("vier", renderer.notation)
    assert reasoning_length(renderer.encode("vier"), plain, renderer.decode) == 0
