"""The normaliser of chat messages: one form for each message, and one line for each that no template gets."""

from typing import Any

import pytest

from shoal.chat.messages import (
    MAX_CALLS,
    BadMessage,
    as_messages,
    normal,
    plain,
    template_arguments,
    text_of,
    with_defaults,
)

ADD = {"function": {"name": "add", "arguments": '{"a": 1}'}}


def test_content_and_calls_stay_as_they_are() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    asked = {"role": "assistant", "content": None, "reasoning_content": "", "tool_calls": [ADD]}
    told = normal([{"role": "user", "content": parts}, asked])
    assert told[0] == {"role": "user", "content": parts} and text_of(told[0]) == "one two"
    assert told[1] == {"role": "assistant", "reasoning_content": "", "tool_calls": [ADD]} and text_of(told[1]) == ""


def test_completed_results_have_the_id_and_the_name_of_their_call() -> None:
    bare = {"function": {"name": "mul", "arguments": ""}}
    asked = {"role": "assistant", "tool_calls": [ADD, {"id": "x", **bare}]}
    none = {"role": "assistant", "content": "done", "tool_calls": []}
    told = with_defaults([asked, {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}, none])
    assert told[0]["tool_calls"] == [
        {"id": "call00000", "type": "function", **ADD},
        {"id": "x", "type": "function", "function": {"name": "mul", "arguments": {}}},
    ]
    assert [(m["tool_call_id"], m["name"]) for m in told[1:3]] == [("call00000", "add"), ("x", "mul")]
    assert "tool_calls" not in told[3]
    told = with_defaults(
        [asked, {"role": "tool", "content": "2", "tool_call_id": "x"}, {"role": "tool", "content": "1"}]
    )
    assert [m["name"] for m in told[1:]] == ["mul", "add"]


def test_completed_ids_are_those_of_no_other_call() -> None:
    asked = {"role": "assistant", "tool_calls": [{"id": "call00000", **ADD}, ADD, ADD]}
    (told,) = with_defaults([asked])
    assert [call["id"] for call in told["tool_calls"]] == ["call00000", "call00001", "call00002"]


def test_other_keys_of_a_call_stay() -> None:
    call = {"index": 0, "function": {"strict": True, "name": "add", "arguments": {}}, "id": "x"}
    (told,) = normal([{"role": "assistant", "tool_calls": [call]}])
    assert told["tool_calls"] == [call] and list(told["tool_calls"][0]) == list(call)
    with pytest.raises(BadMessage, match="index of a tool call contains a set"):
        normal([{"role": "assistant", "tool_calls": [{**call, "index": {1}}]}])


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("hello", "a message has a role and a content, .*found str"),
        ({"role": "robot", "content": ""}, "role 'robot': use system, user, assistant, tool"),
        ({"content": ""}, "role None"),
        ({"role": "user"}, "no content"),
        ({"role": "user", "content": 3}, "content of a message of role user is int"),
        ({"role": "user", "content": "", "name": "bob"}, "has the key name: known are content, role"),
        ({"role": "user", "content": ["text"]}, "write .*type"),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "write .*type"),
        ({"role": "assistant", "tool_calls": [{"name": "add"}]}, "a tool call is .*write"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "not JSON"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": []}}]}, "are list: give an"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 9999}}]}, "not JSON"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
            "are list: give an object",
        ),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": {1}}}}]}, "contains a set"),
        ({"role": "assistant", "tool_calls": [ADD] * (MAX_CALLS + 1)}, f"129 tool calls, limit {MAX_CALLS}"),
        ({"role": "assistant", "content": "", "reasoning_content": ["x"]}, "reasoning_content of a message is list"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "input_image: .* no image"),
    ],
)
def test_a_malformed_message_is_refused_in_one_line(message: Any, says: str) -> None:
    with pytest.raises(BadMessage, match=says) as refused:
        normal([message])
    assert "\n" not in str(refused.value)


def test_keys_that_are_none_are_absent() -> None:
    """A table has one column for each key of any row, of a part, and of a call."""
    none = dict.fromkeys(("reasoning_content", "tool_calls", "tool_call_id", "name", "images"))
    parts = [{"type": "text", "text": "hi", "image_url": None}]
    call = {"id": None, "type": None, "index": None, "function": {"name": "add", "arguments": None, "strict": None}}
    rows: list[dict[str, Any]] = [
        {"role": "user", "content": parts} | none,
        {"role": "assistant", "content": None} | none | {"tool_calls": [call]},
        {"role": "tool", "content": "4"} | none,
        {"role": "assistant", "content": "four"} | none,
    ]
    bare = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "add"}}]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "four"},
    ]
    assert normal(rows) == normal(bare) and "tool_calls" not in normal(rows)[3]
    given = {"function": {"arguments": {"unit": None}, "name": "add"}}
    shown = normal([{"role": "assistant", "tool_calls": [given]}])[0]["tool_calls"][0]["function"]
    assert list(shown) == ["arguments", "name"] and shown["arguments"] == {"unit": None}, "as it was given"


def test_a_reply_is_a_text_a_message_or_several() -> None:
    said = {"role": "tool", "content": "4"}
    assert as_messages("hi") == [{"role": "user", "content": "hi"}]
    assert as_messages(said) == [said] and as_messages([said, said]) == [said, said]
    for wrong in (None, 3, [], ["hi"]):
        with pytest.raises(BadMessage, match="a reply is a text, a message or a list of messages"):
            as_messages(wrong)


def test_template_arguments_are_plain_data() -> None:
    assert template_arguments({"tools": ({"a": 1.5},), "enable_thinking": False}) == {
        "tools": [{"a": 1.5}],
        "enable_thinking": False,
    }
    for wrong in ({"bos_token": "x"}, {"messages": []}, {"a": float("nan")}, {"a": {1: 2}}, {"a": object()}):
        with pytest.raises(BadMessage, match="template argument"):
            template_arguments(wrong)
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(BadMessage, match="nested deeper than 64"):
        plain(deep, "it")
