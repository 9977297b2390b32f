"""The renderer on the 41 real chat templates of TRL 1.16: openings, replies, tool calls, thinking and histories."""

import itertools
import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tokenizers import normalizers
from transformers.utils.chat_template_utils import _compile_jinja_template

from shoal.chat.isolated import ContainedRenderer
from shoal.chat.messages import BadMessage, Written, normal
from shoal.chat.renderer import Renderer, TextSpan
from shoal.chat.template import Template, _Day
from shoal.chat.template_capabilities import MARK
from shoal.errors import StateError
from shoal.models.chat_template_files import TemplateSource
from tests.models.templates import ADD, FOLDER, NAMES, WITHOUT_CALLS, WITHOUT_RESULTS, directory_of, renderer_of, spell

SYSTEM, USER = {"role": "system", "content": "BE BRIEF"}, {"role": "user", "content": "WHAT IS IT"}
TOOLS: dict[str, Any] = {"tools": [ADD]}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "add", "arguments": {"a": 3, "b": 4}}}],
}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "TOOLRESULT"}

DROPPING = {
    "deepseek_r1_distill", "deepseekv3", "diffusion_gemma", "gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5",
    "glm4moe", "gptoss", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl", "nemotron_3_5_lightning", "nemotron_3_nano",
    "nemotron_3_super", "nemotron_3_ultra", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6",
}  # fmt: skip
"""Templates that leave out the thinking of earlier turns."""


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("gptoss", "muse_glimmer", "llama3_2")])
def test_openings_are_those_of_transformers(name: str) -> None:
    """Three more templates ask for today's date. `gemma` refuses a system prompt, and some want parts."""
    renderer, arguments = renderer_of(name), {} if name in WITHOUT_CALLS else TOOLS
    system = [] if name == "gemma" else [SYSTEM]
    messages = [*system, USER]
    parted = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    template = _compile_jinja_template((FOLDER / f"{name}.jinja").read_text())
    text = template.render(
        messages=parted if renderer._dialect.parts else messages, add_generation_prompt=True, bos_token="<bos>",
        eos_token=renderer._template._tokens["eos_token"], **arguments,
    )  # fmt: skip
    assert spell(renderer, renderer.start(messages, arguments)) == text
    for texts in (["WHAT IS IT"], ["WHAT IS ", " IT"]):
        split = {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}
        told = (parted if renderer._dialect.parts else messages)[:-1]
        try:
            text = template.render(
                messages=[*told, split], add_generation_prompt=True, bos_token="<bos>",
                eos_token=renderer._template._tokens["eos_token"], **arguments,
            )  # fmt: skip
        except (TypeError, jinja2.TemplateError):
            text = ""
        if "WHAT" not in text or "'type'" in text or '"text", "text"' in text:
            text = spell(
                renderer, renderer.start([*messages[:-1], {"role": "user", "content": "".join(texts)}], arguments)
            )
        assert spell(renderer, renderer.start([*messages[:-1], split], arguments)) == text


CALLED: list[Any] = [{"function": {"name": "add", "arguments": arguments}} for arguments in ({"a": 3}, '{"a":3}')]
INLINE = "<think>\nHM\n</think>\n\n4"


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("idefics3", "llava_next", "smolvlm")])
@pytest.mark.parametrize(
    "said",
    [
        {"content": None, "tool_calls": [CALLED[0]]},
        {"content": "HM", "tool_calls": [CALLED[1]]},
        {"tool_calls": [CALLED[1]]},
        {"content": INLINE, "reasoning_content": ""},
    ],
)
def test_a_message_of_the_assistant_is_shown_as_by_transformers_or_in_a_form_that_the_template_takes(
    said: dict[str, Any], name: str
) -> None:
    """Three templates want contents that are lists."""
    renderer, told = renderer_of(name), {key: value for key, value in said.items() if value is not None}
    template = _compile_jinja_template((FOLDER / f"{name}.jinja").read_text())
    calls = [{"id": "call00000", "type": "function", **call} for call in said.get("tool_calls", ())]
    told |= {"thinking": told["reasoning_content"]} if "reasoning_content" in told else {}
    told |= {"tool_calls": calls} if calls else {}
    objects = [{**call, "function": CALLED[0]["function"]} for call in calls]
    turn, day = {"role": "assistant", **told}, renderer._template._tokens | {"strftime_now": _Day("2024-07-26")}
    for after, prompt in itertools.product(([], [RESULT] if calls else [USER]), (True, False)):
        messages = normal([USER, {"role": "assistant", **said}, *after])
        if calls and name in WITHOUT_CALLS:
            with pytest.raises(StateError, match="shows no tool calls"):
                renderer._text(messages, TOOLS, prompt)
            continue
        ours = renderer._text(messages, TOOLS, prompt)
        try:
            theirs = template.render(messages=[USER, turn, *after], add_generation_prompt=prompt, **TOOLS, **day)
            if any(enclosed in theirs for enclosed in ('\\"a', '{{"a', '"{"a')):  # what nobody would read as a call
                told_so = [USER, turn | {"tool_calls": objects}, *after]
                theirs = template.render(messages=told_so, add_generation_prompt=prompt, **TOOLS, **day)
        except (jinja2.TemplateError, TypeError):
            assert calls and "add" in ours, "it refuses this form: ours is another"
        else:
            assert ours == theirs


@pytest.mark.parametrize("name", NAMES)
def test_tool_results_follow_a_turn_that_calls(name: str) -> None:
    renderer = renderer_of(name)
    if name in WITHOUT_RESULTS:
        with pytest.raises(StateError):
            renderer.reply([RESULT], TOOLS)
        return
    for results in ([RESULT], [RESULT, {**RESULT, "tool_call_id": "call00001", "content": "SECOND"}]):
        reply = spell(renderer, renderer.reply(results, TOOLS))
        assert "value" not in reply.split("TOOLRESULT")[0].replace("{value:", "") and "</tool_call>" not in reply
        assert all(result["content"] in reply for result in results) or name.startswith(("gpt", "llama"))


@pytest.mark.parametrize("name", NAMES)
def test_a_turn_that_calls_a_tool_ends_with_its_first_stop_token(name: str) -> None:
    """The marks of a call may be control tokens. They reach the parser, and do not end the turn."""
    renderer = renderer_of(name)
    if name in WITHOUT_CALLS:
        with pytest.raises(StateError, match="shows no tool calls"):
            renderer.written(CALL, TOOLS)
        return
    turn = renderer.written(CALL, TOOLS)
    assert turn[-1] in renderer.stop_ids and not renderer.stop_ids.intersection(turn[:-1])
    text = renderer.decode(turn)
    assert "add" in text and "3" in text and "4" in text
    assert all(mark in text for mark in (renderer._special.get(token, "") for token in turn[:-1]))
    whole = renderer._encode(
        renderer._text(
            [USER, {**CALL, "tool_calls": [{"id": "call00000", "type": "function", **CALL["tool_calls"][0]}]}],
            TOOLS,
            prompt=False,
        )
    )
    closed = (
        "\n</think>\n\n" if name.startswith("deepseek") else ""
    )  # the prompt opens a thought, the template shows none
    assert spell(renderer, turn[:-1]).removeprefix(closed) in spell(renderer, whole)


@pytest.mark.parametrize(("name", "part"), [("gemma4", "reasoning_content"), ("llama3_1", "content")])
def test_a_message_of_which_the_template_leaves_out_a_part_is_refused(name: str, part: str) -> None:
    said = {"reasoning_content": {"role": "assistant", "content": "4"}, "content": CALL}[part]
    with pytest.raises(StateError, match="leaves out 'GOOD' of a turn"):
        renderer_of(name).written({**said, part: "GOOD"}, TOOLS)


def test_a_message_after_a_conversation_that_the_template_refuses_is_written_as_after_another() -> None:
    renderer = renderer_of("gptoss")
    refused = [USER, {"role": "assistant", "content": "."}, RESULT]
    for said in (CALL, {"role": "assistant", "content": "4"}, "4"):
        assert renderer.written(said, TOOLS, before=refused) == renderer.written(said, TOOLS)


def test_a_turn_keeps_its_parts_where_the_tokenizer_changes_the_text() -> None:
    """Qwen's classes compose letters."""
    renderer = renderer_of("qwen3", normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]))
    for thought in ({}, {"reasoning_content": "\n\nLet me think\n\n"}):
        told = [renderer.written({"role": "assistant", "content": text} | thought) for text in ("Cafe\u0301", "café")]
        assert told[0] == told[1]
        inner = "let me think" if thought else ""
        assert renderer.decode(told[0]) == f"<think>\n{inner}\n</think>\n\ncafé"


def test_what_follows_the_end_of_a_turn_is_left_out() -> None:
    renderer, said = renderer_of("qwen3"), {"role": "assistant", "content": "4<|im_end|>GOOD"}
    assert renderer.decode(renderer.written(said)) == "4"
    with pytest.raises(StateError, match=r"leaves out '4<\|im_end\|>GOOD' of a turn"):
        renderer.written(said | {"reasoning_content": "HM"})


@pytest.mark.parametrize("name", NAMES)
def test_whether_earlier_thinking_is_kept_is_measured(name: str) -> None:
    assert renderer_of(name).keeps_thinking() == (name not in DROPPING)


@pytest.mark.parametrize("name", ["qwen3_6", "gptoss", "deepseekv3", "glm4moe", "lfm2_2_5"])
def test_arguments_decide_whether_thinking_is_kept(name: str) -> None:
    kept = renderer_of(name).keeps_thinking({"preserve_thinking": True})
    assert kept == (name in ("qwen3_6", "lfm2_2_5"))


@pytest.mark.parametrize("part", ["image", "image_url", "input_image", "input_audio", "video", "file"])
def test_parts_that_are_not_text_are_refused_by_name(part: str) -> None:
    with pytest.raises(BadMessage, match=f"part of type {part}.*text only, no .*Describe it") as refused:
        renderer_of("qwen3_vl").start([{"role": "user", "content": [{"type": part, part: "..."}]}])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "day"), [("llama3_2", "26 Jul 2024"), ("gptoss", "2024-07-26"), ("muse_glimmer", "2024-07-26")]
)
def test_a_template_has_no_clock_but_an_argument(name: str, day: str) -> None:
    renderer = renderer_of(name)
    messages = [USER]
    assert f"ate: {day}" in spell(renderer, renderer.start(messages))
    told = spell(renderer, renderer.start(messages, {"date": "2031-02-03"}))
    assert ("03 Feb 2031" if name == "llama3_2" else "2031-02-03") in told and day not in told
    with pytest.raises(StateError, match="date is 'soon'"):
        renderer.start(messages, {"date": "soon"})


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("a\n{{ range(9)|random }}", "chat_template.jinja, line 2: random draws at random"),
        ("{% if messages is none %}{{ [1]|random }}{% endif %}", "line 1: random draws at random"),
        ("{{ [[1, 2]]|map('random')|list }}", "line 1: it draws at random"),
        ("{{ lipsum(1) }}", "line 1: lipsum draws at random"),
        ("{{ raise_exception }}", "where an object is in memory .<function _raise_exception at 0x"),
        ("{{ messages|map(attribute='role') }}", "in memory .<generator object sync_do_map at 0x.*chat_template.jinja"),
        ("{{ 'x' ~ messages[0].items }}", "in memory .<built-in method items"),
        ("{{ raise_exception|e }}", "where an object is in memory .<function _raise_exception at 0x"),
        ("{{ (messages[0].keys() - ['role'])|list }}", "line 1: it makes a set"),
    ],
)
def test_a_template_that_differs_on_each_machine_is_refused(source: str, says: str) -> None:
    with pytest.raises(StateError, match=says):
        Template(source, {}, TemplateSource("/models/x/chat_template.jinja")).text(
            [{"role": "user", "content": "hi"}], {}
        )


def test_a_template_may_show_an_address_that_a_message_has() -> None:
    ask = [{"role": "user", "content": "what is <object at 0x7f12>?"}]
    source = "{% set lipsum = 3 - 1 %}{{ lipsum }} {{ messages[0].content }}"
    assert Template(source, {}).text(ask, {}) == "2 what is <object at 0x7f12>?"
    jump = [{"role": "user", "content": "0x1f"}]
    for shown in ("jump at {}", "<jump at {}>"):
        assert Template(shown.format("{{ messages[0].content }}"), {}).text(jump, {}) == shown.format("0x1f")
    assert Template("jump at 0x{{ messages[0].content }}", {}).text([{"role": "user", "content": "1f"}], {})


def test_thinking_may_be_turned_off_and_is_reported_open() -> None:
    renderer = renderer_of("qwen3_5_think")
    assert renderer.open([USER]).thinking and renderer.go_on("GO ON").thinking
    assert not renderer.open([USER], {"enable_thinking": False}).thinking
    assert spell(renderer, renderer.start([USER], {"enable_thinking": False})).endswith("<think>\n\n</think>\n\n")
    assert renderer_of("deepseekv3").open([USER]).thinking and not renderer_of("qwen3").open([USER]).thinking
    with pytest.raises(BadMessage, match="messages: the renderer sets it itself"):
        renderer.start([USER], {"messages": []})


# --- histories ---


def filled(segments: list[TextSpan], parts: dict[tuple[int, str], list[int]]) -> list[int]:
    """Token ids of a history, with those of the policy in their places."""
    return [
        token
        for segment in segments
        for token in (parts[segment.turn, segment.part] if segment.turn >= 0 else segment.token_ids)
    ]


PREFILLED = {"qwen3_5_nothink"}
"""Its prompt writes an empty thought, which it leaves out of earlier turns."""
EMPTY_THOUGHTS = {"glm4moe"}
"""It writes an empty thought into earlier turns that had none."""


@pytest.mark.parametrize("name", [name for name in NAMES if name not in PREFILLED])
def test_a_history_of_plain_turns_is_the_conversation_so_far(name: str) -> None:
    """For templates whose prompt begins a thought, the turns close it."""
    renderer = renderer_of(name)
    opening = renderer.open([USER])
    closes = opening.thinking and not renderer.keeps_thinking()
    thought = renderer.encode("</think>\n\n") if opening.thinking else []
    turns = [[*renderer.encode(text), renderer.eos_id] for text in ("ONE", "TWO")]
    written = [[*thought, *turn] for turn in turns]
    talk = [*opening.token_ids, *written[0], *renderer.reply("GO ON"), *written[1], *renderer.reply("AND")]
    first, second = (Written(i, opening.thinking) for i in range(2))
    items = [USER, first, {"role": "user", "content": "GO ON"}, second, {"role": "user", "content": "AND"}]
    parts = {(i, "visible"): turn for i, turn in enumerate(turns)} | {(i, "reasoning"): thought for i in range(2)}
    told = filled(renderer.history(items), parts)
    if closes:
        assert "<think>" not in spell(renderer, told).split("AND")[0].replace("<think></think>", "")
    elif name in EMPTY_THOUGHTS:
        assert spell(renderer, told).replace("\n<think></think>\n", "") == spell(renderer, talk)
    else:
        assert told == talk


GEMMA4 = ["diffusion_gemma", "gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5"]


@pytest.mark.parametrize("name", [*GEMMA4, "gptoss"])
def test_the_result_of_a_tool_that_no_turn_called_is_refused_by_name_where_none_is_shown(name: str) -> None:
    renderer = renderer_of(name)
    with pytest.raises(StateError, match="calls no tool with the result of one"):
        renderer.go_on([RESULT], TOOLS, after="text")
    with pytest.raises(StateError, match="calls no tool with the result of one"):
        renderer.history([USER, Written(0), RESULT], TOOLS)
    assert renderer.go_on([RESULT], TOOLS, after="calls") == renderer.go_on([RESULT], TOOLS)


@pytest.mark.parametrize("name", sorted(set(NAMES) - WITHOUT_CALLS))
def test_what_the_user_says_after_a_call_is_read_as_in_a_history(name: str) -> None:
    renderer = renderer_of(name)
    *_, last = renderer.history([USER, Written(0, False, (("call00000", "add"),)), USER], TOOLS)
    assert renderer.go_on([USER], TOOLS, after="calls").token_ids == last.token_ids


@pytest.mark.parametrize("name", ["qwen3", "lfm2_2_5", "gemma4_v5", "qwen3_5_think", "nemotron_3_nano", "qwen2_5"])
def test_an_empty_thought_stays_where_the_template_shows_one_or_reads_it_as_text(name: str) -> None:
    renderer, calls = renderer_of(name), (("call00000", "add"),)
    for words in (True, False):
        told = renderer.history([USER, Written(0, True, calls, empty=not words), RESULT], TOOLS)
        shown = [one.part for one in told if one.turn == 0]
        stays = words or name in ("qwen3_5_think", "nemotron_3_nano", "qwen2_5")
        assert shown == (["reasoning", "visible"] if stays else ["visible"])


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "qwen3_6", "qwen3_5_nothink"])
@pytest.mark.parametrize("thinks", [False, True])
def test_a_thought_in_a_text_follows_a_prompt_that_has_begun_or_closed_it(name: str, thinks: bool) -> None:
    renderer, arguments = renderer_of(name), {"enable_thinking": thinks}
    prompt = spell(renderer, renderer.start([USER], arguments))
    said = {"role": "assistant", "content": "<think>\n\n</think>\n\n4"}
    text = prompt + spell(renderer, renderer.written(said, arguments))
    assert text.count("<think>") == 1 and "<think>\n\n</think>\n\n4" in text
    if prompt.rstrip().endswith("</think>"):
        with pytest.raises(StateError, match="closed the thought"):
            renderer.written({**said, "content": "<think>\nHM\n</think>\n\n4"}, arguments)


@pytest.mark.parametrize("name", sorted(set(NAMES) - WITHOUT_CALLS))
def test_a_history_shows_a_call_without_a_thought_once_and_closes_the_thought_of_its_prompt(name: str) -> None:
    renderer = renderer_of(name)
    items = [USER, Written(0, False, (("call00000", "add"),)), RESULT]
    text = spell(renderer, filled(renderer.history(items, TOOLS), {(0, "visible"): renderer.encode("CALL-0;")}))
    assert text.index("WHAT IS IT") < text.index("CALL-0;") < text.index("TOOLRESULT") and text.count("CALL-0;") == 1
    before = text[: text.index("CALL-0;")]
    assert before.rfind("<think>") <= before.rfind("</think>"), "the template closes it, the policy did not"


@pytest.mark.parametrize("name", sorted(set(NAMES) - WITHOUT_CALLS))
def test_a_history_leaves_out_the_thoughts_that_the_template_drops(name: str) -> None:
    renderer = renderer_of(name)
    parts = {(i, part): renderer.encode(f"{part}-{i};") for i in range(3) for part in ("reasoning", "visible")}
    items = [
        SYSTEM, USER, Written(0, True), {"role": "user", "content": "GO ON"},
        Written(1, True, (("call00000", "add"),)), RESULT,
    ]  # fmt: skip
    told = filled(renderer.history(items, TOOLS), parts)
    text = spell(renderer, told)
    assert ("reasoning-0;" in text) == (name not in DROPPING)
    assert text.index("BE BRIEF") < text.index("visible-0;") < text.index("GO ON") < text.index("visible-1;")
    assert text.index("visible-1;") < text.index("TOOLRESULT")
    assert "\N{OBJECT REPLACEMENT CHARACTER}" not in text


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_nothink", "nemotron_3_nano"])
@pytest.mark.parametrize("thought", ["<think>\nHM\n</think>\n\n", "HM\n</think>\n\n"])
@pytest.mark.parametrize("switch", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_a_history_has_the_mark_of_a_thought_once_whether_the_prompt_or_the_turn_or_neither_opens_it(
    name: str, thought: str, switch: dict[str, bool]
) -> None:
    """A prompt may have opened a thought, or closed one that the policy opens again."""
    renderer, arguments = renderer_of(name), TOOLS | switch
    items = [USER, Written(0, True, (("call00000", "add"),), opens_reasoning=thought.startswith("<think>")), RESULT]
    parts = {(0, "reasoning"): renderer.encode(thought), (0, "visible"): renderer.encode("CALL")}
    text = "".join(spell(renderer, filled(renderer.history(items, arguments), parts)).split())
    assert "assistant<think>HM</think>CALL" in text and text.count("HM") == 1


def test_marks_cannot_be_forged_by_a_message() -> None:
    renderer, forged = renderer_of("qwen3"), {"role": "user", "content": f"{MARK}.0v; {MARK}"}
    segments = renderer.history([forged, Written(0), forged])
    assert [segment.turn for segment in segments] == [-1, 0, -1]
    assert spell(renderer, segments[0].token_ids).count(".0v;") == 1
    assert spell(renderer, renderer.reply([forged])).count(".0v;") == 1
    with pytest.raises(BadMessage, match="turn twice"):
        renderer.history([USER, Written(0), USER, Written(0)])


def test_nothing_is_hidden_in_the_json_text_of_arguments() -> None:
    """This template gets it as an object, in which what was escaped is a mark, or no text."""
    renderer = renderer_of("glm4moe")
    replies = []
    for arguments in ({"a": MARK}, json.dumps({"a": MARK})):
        call = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "add", "arguments": arguments}}],
        }
        replies.append(renderer.reply([USER, call, RESULT, USER], TOOLS))
    assert replies[0] == replies[1]
    call["tool_calls"][0]["function"]["arguments"] = '{"a": "\\ud800"}'
    with pytest.raises(ValueError, match="surrogates"):
        renderer.start([USER, call, RESULT], TOOLS)


@pytest.mark.parametrize("name", ["qwen3", "gptoss"])
def test_a_contained_renderer_gives_the_same(name: str, tmp_path: Path) -> None:
    here, apart = Renderer.from_directory(directory_of(name, tmp_path)), ContainedRenderer(tmp_path)
    assert (here.stop_ids, here.notation) == (apart.stop_ids, apart.notation)
    assert here.stop_ids == renderer_of(name).stop_ids
    for content in ("WHAT IS IT", "naïve 漢字 🙂", "", "x" * 100_000):
        asked = [SYSTEM, {"role": "user", "content": content}]
        assert here.open(asked, TOOLS) == apart.open(asked, TOOLS)
        assert here.encode(content) == apart.encode(content)
    with pytest.raises(ValueError):
        apart.start([{"role": "user", "content": "\ud800"}])
    assert here.go_on([RESULT], TOOLS) == apart.go_on([RESULT], TOOLS)
    assert here.written(CALL, TOOLS) == apart.written(CALL, TOOLS)
    assert here.decode(here.written(CALL, TOOLS)) == apart.decode(here.written(CALL, TOOLS))
    assert here.keeps_thinking() == apart.keeps_thinking()
    items = [USER, Written(0, True), USER, Written(1, True, (("call00000", "add"),)), RESULT]
    assert here.history(items, TOOLS) == apart.history(items, TOOLS)


def test_an_answer_whose_white_space_the_template_changes_is_written_as_it_shows_it() -> None:
    told = renderer_of("qwen3").written({"role": "assistant", "content": "<think>hm  so</think>3"})
    assert renderer_of("qwen3").decode(told) == "<think>\nhm  so\n</think>\n\n3"
