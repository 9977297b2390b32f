"""Prompts, replies, histories and texts are those of `AutoTokenizer` and `apply_chat_template`, for many odd checkpoints.

Each property of `odd_checkpoints` is tried alone, and pairs of them. What cannot be read as transformers does is refused.
"""

import contextlib
import datetime
import itertools
import json
import random
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer
from transformers.models.auto import tokenization_auto
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.tokenization_utils_tokenizers import TokenizersBackend
from transformers.utils import chat_template_utils

from shoal.chat.messages import Written
from shoal.chat.renderer import Renderer, opening_key
from shoal.chat.template_capabilities import MARK
from shoal.env import Step
from shoal.envs.play_episodes import play_scripted
from shoal.envs.replay import replay_group
from shoal.envs.rollout_rules import Conversation
from shoal.errors import Overreach, ShoalError, StateError
from shoal.models.checkpoint import WeightSnapshot, save_policy
from shoal.models.hf_model import _files_of
from shoal.models.open_model import OURS, kind_of
from shoal.models.tokenizer_loader import open_tokenizer
from shoal.models.transformer import Transformer
from shoal.models.transformer_config import TransformerConfig
from shoal.models.transformers_tokenizers import BUILD, FILE, class_of
from shoal.protocol.messages import Sampling
from tests.envs.plain import Plain
from tests.models.odd_checkpoints import (
    AT_LAST,
    CALLS,
    CHATML,
    COUNT,
    END,
    HISTORIES,
    KINDS,
    PROPERTIES,
    REFUSED,
    SAYS,
    TEMPLATES,
    TEXT_END,
    TEXTS,
    THOUGHT,
    TOKENS,
    Change,
    Files,
    plain,
    talk_template,
)
from tests.models.templates import ADD

PAIRS = [
    *itertools.product(KINDS, TOKENS), *itertools.product(KINDS, TEMPLATES), *itertools.product(TOKENS, TEMPLATES),
    *itertools.combinations(TOKENS, 2),
]  # fmt: skip
NORMALIZED = [(kind, "normalized control of the decoder") for kind in ("sentencepiece", "mistral", "phi 3")]
EQUAL = [(), *((name,) for name in {**KINDS, **TOKENS, **TEMPLATES}), *dict.fromkeys([*NORMALIZED, *PAIRS[::7]])]
"""Combinations that are read as transformers reads them."""

USER = {"role": "user", "content": TEXTS[0] + " <|tool|>king<|think|> THE king  Hello"}
TALKS = [
    [USER],
    [{"role": "system", "content": TEXTS[2]}, {"role": "user", "content": TEXTS[3]}],
    [USER, {"role": "assistant", "content": TEXTS[4]}, {"role": "user", "content": f"{TEXTS[5]} {END} "}],
]


class _Day(datetime.datetime):
    @classmethod
    def now(cls, tz: object = None) -> "datetime.datetime":  # type: ignore[override]
        return datetime.datetime(2024, 7, 26)


@pytest.fixture(autouse=True)
def _one_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """The day that our templates see."""
    monkeypatch.setattr(chat_template_utils, "datetime", _Day)
    transformers.logging.set_verbosity_error()


@contextlib.contextmanager
def checkpoint(*names: str, template: str = "", change: Change = lambda files: None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        files: Files = plain()
        files.template = template or files.template
        change(files)
        for name in names:
            PROPERTIES[name](files)
        files.write(Path(directory))
        yield Path(directory)


@contextlib.contextmanager
def both(*names: str, template: str = "", change: Change = lambda files: None) -> Iterator[tuple[Any, Renderer]]:
    """What transformers and our renderer make of a checkpoint."""
    with checkpoint(*names, template=template, change=change) as directory:
        yield AutoTokenizer.from_pretrained(directory), Renderer.from_directory(directory)


@contextlib.contextmanager
def rendering(*names: str, template: str = "", change: Change = lambda files: None) -> Iterator[Renderer]:
    with checkpoint(*names, template=template, change=change) as directory:
        yield Renderer.from_directory(directory)


def ids_of(peer: Any, messages: list[dict[str, Any]], **arguments: Any) -> list[int]:
    ids: list[int] = peer.apply_chat_template(messages, add_generation_prompt=True, **arguments)["input_ids"]
    return ids


def differences(directory: Path) -> list[str]:
    """What differs between our renderer and transformers."""
    peer, renderer = AutoTokenizer.from_pretrained(directory), Renderer.from_directory(directory)
    found = []
    for text in [*TEXTS, *(message["content"] for talk in TALKS for message in talk)]:
        ids = peer(text, add_special_tokens=False)["input_ids"]
        shown = peer.decode([i for i in ids if i not in renderer.stop_ids], skip_special_tokens=True)
        if renderer.encode(text) != ids:
            found.append(f"{text!r} is {renderer.encode(text)}, not {ids}")
        if renderer.decode(ids) != shown:
            found.append(f"{ids} is {renderer.decode(ids)!r}, not {shown!r}")
    for talk, tools in itertools.product(TALKS, (None, [ADD])):
        ours, theirs = renderer.start(talk, {"tools": tools} if tools else {}), ids_of(peer, talk, tools=tools)
        if ours != theirs:
            found.append(f"{talk} with {tools}: {peer.decode(ours)!r}, not {peer.decode(theirs)!r}")
    for answer in (TEXTS[3], TEXTS[2]):
        said = {"role": "assistant", "content": TEXTS[1]}
        reply, theirs = renderer.reply(answer), ids_of(peer, [USER, said, {"role": "user", "content": answer}])
        if theirs[-len(reply) :] != reply or theirs[-len(reply) - 1] != peer.convert_tokens_to_ids(END):
            found.append(f"the reply {answer!r} is {peer.decode(reply)!r} of {peer.decode(theirs)!r}")
    for text in (TEXTS[3], TEXTS[1], "13"):
        told = peer.apply_chat_template([USER, {"role": "assistant", "content": text}])["input_ids"]
        ours, theirs = renderer.written({"role": "assistant", "content": text}), told[len(ids_of(peer, [USER])) :]
        if ours != theirs[: len(ours)] or ours[-1] != peer.convert_tokens_to_ids(END):
            found.append(f"the message {text!r} is {peer.decode(ours)!r} of {peer.decode(theirs)!r}")
        if text == "13" and renderer.written(text) != ours:
            found.append(
                f"the text {text!r} is {peer.decode(renderer.written(text))!r}, the message {peer.decode(ours)!r}"
            )
    return found


@pytest.mark.parametrize("part", range(16))
def test_openings_replies_and_texts_are_those_of_transformers(part: int) -> None:
    for names in EQUAL[part::16]:
        with checkpoint(*names) as directory:
            assert not differences(directory), names


@pytest.mark.parametrize(
    ("head", "turn"),
    [
        ("{{ messages | length }}\n", "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"),
        ("{{ messages | length }} messages\n", "{{ m.role }}: {{ m.content }}\n"),
        ("{{ messages | length }}: ", "{{ m.content }} "),
        ("", "{{ m.content }}{{ ' (last)' if loop.last }}\n"),
        ("", "{{ m.content if m.role == 'user' }}\n"),
        ("", "{{ m.content }}|{{ m.content }}\n"),
    ],
)
def test_a_turn_is_never_lost(head: str, turn: str) -> None:
    with rendering(template=f"{head}{{% for m in messages %}}{turn}{{% endfor %}}") as renderer:
        for said in ("Four", {"role": "assistant", "content": "Four"}):
            ids = renderer.written(said)
            text = renderer.decode(ids)
            assert "Four" in text and ids[-1] in renderer.stop_ids and "written" not in text


OPENED, CLOSED = "<think>\n", "<think>\n\n</think>\n\n"
CALL = [{"id": "abc", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
ANSWERS: list[tuple[dict[str, Any], str]] = [
    ({"content": "<tip> 4"}, "<tip> 4"),
    ({"content": "", "tool_calls": CALL}, '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'),
    ({"content": "thin", "tool_calls": CALL}, 'thin<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'),
]


def thinking_template(opening: str, thought: str = THOUGHT) -> str:
    """A template whose prompts end with `opening`."""
    return talk_template(thought).replace("assistant\n{% endif %}", f"assistant\n{opening}{{% endif %}}")


@pytest.mark.parametrize("opening", ["", OPENED, CLOSED])
@pytest.mark.parametrize("thought", [THOUGHT, THOUGHT.replace("<think>\n", "<think>")])
def test_a_turn_begins_where_its_prompt_ends_or_before_the_thought_there(opening: str, thought: str) -> None:
    with both(template=thinking_template(opening, thought)) as (peer, renderer):
        for said, shown in ANSWERS:
            for hm in ("", "hm"):
                message = {"role": "assistant", **said, "reasoning_content": hm}
                if hm and opening == CLOSED:
                    with pytest.raises(StateError, match="this prompt has closed the thought"):
                        renderer.written(message)
                    continue
                body = f"{hm}\n</think>\n\n" if opening == OPENED else ""
                if hm and not opening:
                    body = f"{thought.partition('{{')[0].rpartition('%}')[2]}hm\n</think>\n\n"
                assert peer.decode(renderer.written(message)) == f"{body}{shown}{END}"


def test_an_answer_that_does_not_continue_its_prompt_is_refused_by_name() -> None:
    with rendering(template=talk_template().replace("<|im_start|>assistant", "<|im_start|>bot")) as renderer:
        assert renderer.written({"role": "assistant", "content": "4"}) == renderer.written("4")
        with pytest.raises(StateError, match="not show this answer as a continuation of its prompt"):
            renderer.written({"role": "assistant", "content": "", "tool_calls": CALL})


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


OPENED_TURN = "<|im_start|>assistant\n"


def _in_parts(part: str) -> str:
    shown = "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}PART{% endfor %}{% endif %}"
    return CHATML.replace("{{ m.content }}", shown.replace("PART", part))


LATE_SYSTEM = (
    "{{ bos_token }}{% set s = messages[0].content if messages[0].role == 'system' %}"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' or m.role == 'tool' %}"
    "{{ '[INST] ' + (s + '\n\n' if s and loop.last else '') + m.content + '[/INST]' }}"
    "{% else %} {{ m.content | trim }}" + CALLS + "<|im_end|>{% endif %}{% endfor %}"
)
"""Puts the system message into the user's last one, as Mistral's templates do."""
IDS = "{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.type }}{% endfor %}"
AS_TEXT = (
    "c.function.name + (c.function.arguments if c.function.arguments is string else c.function.arguments | tojson)"
)
SHAPES = {
    "parts trimmed": (_in_parts("{{ p.text | trim }}"), OPENED_TURN),
    "parts numbered": (_in_parts("{{ loop.index }}:{{ p.text }};"), OPENED_TURN),
    "parts alone": (CHATML.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}"), OPENED_TURN),
    "a system message late": (LATE_SYSTEM, "[/INST]"),
    "the user's last message in other words": (COUNT + talk_template(AT_LAST), OPENED_TURN),
    "ids and names": (talk_template("{{ m.name }}|{{ m.tool_call_id }}|" + IDS), OPENED_TURN),
    "arguments as text": (talk_template(IDS).replace("c.function | tojson", AS_TEXT), OPENED_TURN),
    "one call at most": (
        talk_template("{% if 'tool_calls' in m and m.tool_calls | length != 1 %}{{ raise_exception('one') }}{% endif %}"),
        OPENED_TURN,
    ),
}  # fmt: skip
"""Templates, and how each begins a turn of the policy. They show messages as their keys and parts are."""

BARE = {"function": {"name": "add", "arguments": {}}}
EMPTY = {"function": {"name": "add", "arguments": ""}}
SHOWN: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "count 1"}],
    [{"role": "user", "content": _parts("count ", " 1")}],
    [{"role": "system", "content": "Be kind."}, {"role": "user", "content": _parts("count 1")}],
    [{"role": "system", "content": _parts("Be ", " kind.")}, {"role": "user", "content": "count 1"}],
    [{"role": "system", "content": "Be kind."}, {"role": "user", "content": " "}],
    *(
        [
            {"role": "system", "content": "Be kind."}, {"role": "user", "content": "count 1"},
            {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "5", **named},
        ]
        for call in (BARE, EMPTY, {**BARE, "id": "abc"}, *CALL) for named in ({}, {"name": "add"}, {"tool_call_id": "abc"})
    ),
    [{"role": "user", "content": "count 1"}, {"role": "assistant", "content": "1", "tool_calls": []}, USER],
]  # fmt: skip
SAID: list[dict[str, Any]] = [
    {"content": "3"}, {"content": " 3 "}, {"content": _parts("3")}, {"content": _parts("3 ", " 4")},
    {"content": "", "tool_calls": CALL}, {"content": "", "tool_calls": [BARE]},
    {"content": "", "tool_calls": [EMPTY]}, {"content": "3", "tool_calls": []},
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_keys_and_parts_of_messages_are_shown_as_transformers_shows_them(shape: str) -> None:
    template, opening = SHAPES[shape]
    equal = 0
    with both(template=template, change=lambda files: files.config.update(bos_token=TEXT_END)) as (peer, renderer):
        for talk in SHOWN:
            theirs = _shown_by(peer, talk, add_generation_prompt=True)
            if theirs:
                assert peer.decode(renderer.start(talk)) == theirs, talk
            for said in SAID:
                answer = {"role": "assistant", **said}
                whole = _shown_by(peer, [*talk, answer])
                if theirs and whole:
                    written = peer.decode(renderer.written(answer, before=talk))
                    assert written == f"{whole.rpartition(opening)[2].partition(END)[0]}{END}", (talk, answer)
                    equal += 1
    assert equal >= 2


def test_a_mark_is_not_forged_by_arguments_of_calls_or_of_the_template() -> None:
    """What is escaped in JSON text is a mark only once it is read."""
    shows_tools = "{% for t in tools or [] %}{{ t.function.description }}\n{% endfor %}" + talk_template()
    call = {"id": "abc", "function": {"name": "add", "arguments": '{"a": "' + f"{MARK}.0r;" + '"}'}}
    escaped = {**call, "function": {"name": "add", "arguments": json.dumps({"a": f"{MARK}.0r;"})}}
    with both(template=shows_tools) as (peer, renderer):
        for one in (call, escaped):
            opening = [
                USER,
                {"role": "assistant", "content": "", "tool_calls": [one]},
                {"role": "user", "content": "and"},
            ]
            segments = renderer.history([*opening, Written(0), {"role": "user", "content": "more"}])
            text = peer.decode(segments[0].token_ids)
            assert text.count(".0r;") == 1 and text.endswith("and<|im_end|>\n<|im_start|>assistant\n")
        tool = {"type": "function", "function": {"name": "add", "description": f"A {MARK}.0r; B", "parameters": {}}}
        segments = renderer.history([USER, Written(0), USER], {"tools": [tool]})
        assert USER["content"] in peer.decode(segments[0].token_ids)


def test_an_answer_in_parts_is_whole_or_refused_by_name() -> None:
    numbered, first = SHAPES["parts numbered"][0], CHATML.replace("{{ m.content }}", "{{ m.content[0].text }}")
    odd = [
        (first, _parts("3", "4")),
        (SHAPES["parts trimmed"][0], _parts("good ", "<|im_", " end|>")),
        (SHAPES["parts trimmed"][0], _parts("good ", "<|im_", " end|>", "and more")),
        (numbered, _parts(*"a" * 129)),
    ]
    for template, parts in odd:
        with (
            checkpoint(template=template) as directory,
            pytest.raises(ShoalError, match=r"leaves out|129 parts, limit 128"),
        ):
            Renderer.from_directory(directory).written({"role": "assistant", "content": parts})
    strict = numbered.replace("{% if add_generation_prompt %}", "{% if add_generation_prompt and messages[-1].role == "
                              "'assistant' %}{{ raise_exception('no') }}{% elif add_generation_prompt %}")  # fmt: skip
    for template in (strict, 'Tools look like {"type": "function"}\n' + numbered):
        with rendering(template=template) as renderer:
            answer = {"role": "assistant", "content": _parts("3", "4")}
            assert renderer.decode(renderer.written(answer)) == "1:3;2:4;"


def _shown_by(peer: Any, messages: list[dict[str, Any]], **arguments: Any) -> str:
    """What transformers shows; empty if the template refuses the messages, prints lists as data or leaves out a text."""
    try:
        text: str = peer.apply_chat_template(messages, tokenize=False, **arguments)
    except (TypeError, jinja2.TemplateError):
        return ""
    return (
        ""
        if "'type':" in text
        or '"arguments": ""' in text
        or not all(part in text for m in messages for part in _texts_of(m))
        else text
    )


def _texts_of(message: dict[str, Any]) -> list[str]:
    content, calls = message["content"], [call["function"]["name"] for call in message.get("tool_calls", ())]
    return calls + ([content.strip()] if isinstance(content, str) else [part["text"].strip() for part in content])


def test_a_mark_is_not_forged_by_parts_that_a_template_joins() -> None:
    with both(template=SHAPES["parts alone"][0]) as (peer, renderer):
        for mark in (MARK, f"{MARK}.0v;"):
            for parts in (_parts(mark), _parts(mark[:3], mark[3:])):
                reply = [{"role": "user", "content": parts}]
                text = peer.decode(renderer.reply(reply))
                assert text.count(mark) == 1 and text.startswith("\n<|im_start|>user")
                segments = renderer.history([{"role": "user", "content": "a"}, Written(0), *reply])
                assert peer.decode(segments[-1].token_ids) == text


@pytest.mark.parametrize(
    "words",
    [*(f"m.content | {name}" for name in ("upper", "title", "tojson", "e", "wordwrap(3)", "replace('<', '(')")),
     "m.content[:4]"],
)  # fmt: skip
def test_a_template_that_changes_the_words_of_a_turn_is_refused_by_name(words: str) -> None:
    """The policy would learn other words than it writes, and no end of its turns could be seen."""
    with checkpoint(template=talk_template().replace("m.content", words)) as directory:
        for act in (lambda one: one.written("4"), lambda one: one.start([USER]), lambda one: one.reply("more")):
            with pytest.raises(StateError, match="changes the words"):
                act(Renderer.from_directory(directory))


@pytest.mark.parametrize("kind", ["qwen class", "sentencepiece", "unigram"])
def test_a_turn_that_takes_a_token_of_the_prompt_repeats_nothing_and_adds_no_space(kind: str) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    with rendering(kind, template=template + "{{ 'assistant: ' if add_generation_prompt }}") as renderer:
        words = [word for text in TEXTS for word in text.split() if word.isascii() and word.isalpha()]
        merged = [word for word in words if renderer.encode(f": {word}")[:2] != renderer.encode(": ")]
        assert merged, "these words begin with the prompt's space"
        for word in merged:
            row = [*renderer.start([USER]), *renderer.written({"role": "assistant", "content": word})]
            assert renderer._decode_whole(row).endswith(f"assistant: {word}{END}")


def test_a_turn_loses_no_word_that_has_one_token_with_the_end_of_its_prompt() -> None:
    template = (
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{{ 'assistant:\\n' if add_generation_prompt }}"
    )
    with checkpoint(template=template) as directory:
        words = {"[UNK]": 0, "<|im_end|>": 1, "<|endoftext|>": 2, "king": 3, "queen": 4}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
        tokenizer.add_special_tokens(["<|im_end|>", "<|endoftext|>"])
        tokenizer.save(str(directory / "tokenizer.json"))
        assert Renderer.from_directory(directory).written("king queen") == [3, 4, 1]


@pytest.mark.parametrize("kind", ["qwen class", "sentencepiece", "mistral", "unigram"])
def test_a_thought_is_closed_without_more_white_space_than_the_template_writes(kind: str) -> None:
    with rendering(kind, template=thinking_template(OPENED)) as renderer:
        text = renderer._decode_whole([*renderer.start([USER]), *renderer.written("king")])
        assert text.endswith(f"{OPENED}\n</think>\n\nking{END}")


LEFT_OPEN = CHATML.replace("<|im_end|>", "{% if not loop.last or add_generation_prompt %}<|im_end|>{% endif %}")


def _id_of(files: Files, text: str) -> int:
    return next(int(token["id"]) for token in files.tokenizer["added_tokens"] if token["content"] == text)


def _ends_by(ends: tuple[str, ...], files: Files) -> None:
    """Let the files name other ends than the template's."""
    files.config["eos_token"], ids = ends[0], [_id_of(files, end) for end in ends]
    files.model["eos_token_id"] = ids if len(ids) > 1 else ids[0]


@pytest.mark.parametrize("ends", [(TEXT_END,), (TEXT_END, END)])
def test_the_last_turn_of_a_template_that_leaves_it_open_ends_as_earlier_ones_do(ends: tuple[str, ...]) -> None:
    """As Qwen1.5's first template does, whose eos is another."""
    with both(template=LEFT_OPEN, change=partial(_ends_by, ends)) as (peer, renderer):
        assert renderer.stop_ids == {peer.convert_tokens_to_ids(end) for end in (TEXT_END, END)}
        history = [USER, {"role": "assistant", "content": "4"}, {"role": "user", "content": "more"}]
        for answer in ("4", history[1]):
            told = [*renderer.start([USER]), *renderer.written(answer), *renderer.reply("more")]
            assert told == ids_of(peer, history)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_as_transformers_does_is_refused_by_name(name: str) -> None:
    for others in [(), *((other,) for other in list(KINDS)[:2] + list(TOKENS)[:4])]:
        with checkpoint(*others, name) as directory:
            with pytest.raises(StateError, match=SAYS[name]) as refused:
                Renderer.from_directory(directory)
            assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", HISTORIES)
@pytest.mark.parametrize(
    ("tools", "calls", "thinks"), [(False, False, False), (True, True, False), (False, False, True), (True, True, True)]
)
def test_a_history_is_what_the_template_shows_of_it(name: str, tools: bool, calls: bool, thinks: bool) -> None:
    opens = HISTORIES[name].endswith("<think>\n{% endif %}")
    call = {"id": "abc", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "first"}]
    items: list[Any] = [*messages]
    parts: dict[tuple[int, str], str] = {}
    for turn in range(3):
        called = calls and turn == 1
        thought = {"reasoning_content": f"HM {turn}"} if thinks else {}
        said = {"role": "assistant", "content": "" if called else f"said {turn}", **thought}
        answer = (
            {"role": "tool", "tool_call_id": "abc", "name": "add", "content": "4"}
            if called
            else {"role": "user", "content": "more"}
        )
        messages += [{**said, "tool_calls": [call]} if called else said, answer]
        items += [Written(turn, thinks, (("abc", "add"),) if called else ()), answer]
        parts[turn, "reasoning"] = f"{'' if opens else '<think>' + chr(10)}HM {turn}\n</think>\n\n"
        parts[turn, "visible"] = (
            f'<tool_call>{{"name": "add", "arguments": {{"a": 1}}}}</tool_call>{END}' if called else f"said {turn}{END}"
        )
    with both(template=HISTORIES[name]) as (peer, renderer):
        segments = renderer.history(items, {"tools": [ADD]} if tools else {})
        ours = "".join(peer.decode(s.token_ids) if s.turn < 0 else parts[s.turn, s.part] for s in segments)
        theirs = peer.apply_chat_template(
            messages, tools=[ADD] if tools else None, add_generation_prompt=True, tokenize=False
        )
        assert ours == theirs


def test_a_history_whose_turns_cannot_be_found_is_refused_by_name() -> None:
    shown = "{{ m.role }}: {{ m.reasoning_content }}{{ m.content }}<|im_end|>"
    template = "{{ messages | length }}{% for m in messages %}" + shown + "{% endfor %}"
    items: list[Any] = [{"role": "user", "content": "a"}, Written(0, True), {"role": "user", "content": "b"}]
    with (
        checkpoint(template=template) as directory,
        pytest.raises(StateError, match=r"turn 0.*not where the turn begins"),
    ):
        Renderer.from_directory(directory).history(items)


REPEATED = "{% for q in messages %}{% if q.role == 'assistant' %}earlier: {{ q.content }}\n{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("thinks", "after"),
    [
        (True, "{% if loop.index0 == ns.last %}" + REPEATED + "{% endif %}"),
        (False, "{% if loop.last %}#" + REPEATED + "{% endif %}"),
    ],
)
def test_a_template_that_repeats_a_turn_later_is_refused_by_name(thinks: bool, after: str) -> None:
    items: list[Any] = [USER, Written(0, thinks), USER, Written(1, thinks), USER]
    with rendering(template=COUNT + talk_template(after + THOUGHT)) as renderer:
        with pytest.raises(StateError, match="again elsewhere"):
            renderer.reply("higher")
        with pytest.raises(StateError, match="turn 0 again elsewhere"):
            renderer.history(items)


LEADING = (
    COUNT
    + "{% for m in messages %}{% if m.role == 'user' %}{% if loop.index0 == ns.last %}REM {% endif %}[{{ m.content }}]"
    "{% else %}LEAD{{ m.content }}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}OPEN{% endif %}"
)


@pytest.mark.parametrize("reminds", [True, False])
@pytest.mark.parametrize(
    ("lead", "prompt"), [(" ", ""), ("<a>", ""), ("AI: ", ""), ("<a>\n\n", "<a>\n"), ("<a>", "<a>")]
)
def test_a_history_has_once_what_the_policy_wrote_before_its_words(lead: str, prompt: str, reminds: bool) -> None:
    template = LEADING.replace("LEAD", lead).replace("OPEN", prompt).replace("REM ", "REM " if reminds else "")
    with both("sentencepiece", template=template) as (peer, renderer):
        said = {"role": "assistant", "content": "42"}
        turn = renderer.written(said)
        segments = renderer.history([USER, Written(0), USER, Written(1), USER])
        ours = [token for one in segments for token in (turn if one.turn >= 0 else one.token_ids)]
        told = peer.apply_chat_template([USER, said, USER, said, USER], add_generation_prompt=True, tokenize=False)
        assert renderer._decode_whole(ours) == renderer._decode_whole(renderer.encode(told))


SWITCHED = (
    "{% set ns = namespace(thinks=false) %}{% for m in messages if m.role == 'user' and '/think' in m.content %}"
    "{% set ns.thinks = true %}{% endfor %}" + CHATML[: CHATML.index("{% if add")] + "{% if add_generation_prompt %}"
    "<|im_start|>assistant\n{% if ns.thinks == OPENS %}<think>\n{% else %}<think></think>{% endif %}{% endif %}"
)


def test_a_limit_of_this_machine_is_no_refusal_of_an_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise nodes with other limits would read another reply."""
    with checkpoint() as directory:
        renderer, opening = Renderer.from_directory(directory), [{"role": "user", "content": "long"}]
        text = renderer._text

        def limited(messages: Any, *more: Any, **given: Any) -> str:
            if messages[0]["content"] == "long":
                raise Overreach("took too long")
            return text(messages, *more, **given)

        monkeypatch.setattr(renderer, "_text", limited)
        with pytest.raises(Overreach):
            renderer.go_on("more", None, opening_key(opening))


class Asking(Plain):
    """Asks again in each reply."""

    def __init__(self, opening: list[dict[str, Any]], history: str, *replies: str) -> None:
        self._opening, self.history, self._replies = opening, history, replies

    def reset(self, task: int) -> tuple[int, list[dict[str, Any]]]:  # type: ignore[override]
        return 0, self._opening

    def step(self, state: int, action: str) -> Step:
        return Step(state + 1, (*self._replies, "end")[state], state >= len(self._replies))


@pytest.mark.parametrize("opens", ["true", "false"])
@pytest.mark.parametrize("asks", [True, False])
def test_a_message_of_the_conversation_may_open_or_close_the_thought_before_an_answer(opens: str, asks: bool) -> None:
    before = [{"role": "user", "content": "12+3= /think" if asks else "12+3="}]
    with checkpoint(template=SWITCHED.replace("OPENS", opens)) as directory:
        renderer = Renderer.from_directory(directory)
        is_open = asks == (opens == "true")
        assert renderer.open(before).thinking == is_open
        for answer in ("15", {"role": "assistant", "content": "15"}):
            text = renderer.decode(renderer.written(answer, before=before))
            assert text == ("\n</think>\n\n15" if is_open else "15")
        closed = "<think>\n\n</think>\n\n" if is_open else "<think></think>"
        for history in ("append", "template"):
            talk = play_scripted(
                Asking(before, history, "again"), renderer, 0, lambda *_: "15", random.Random(0), Sampling(1.0, 99, 999)
            )
            last = renderer._decode_whole(talk.rows[-1].tokens).split("<|im_start|>assistant\n")[-1]
            assert last.split(END)[0] == f"{closed}15", "the reply follows the same opening"
            other, rollout = Renderer.from_directory(directory), talk.rollout(0)
            again = Asking(before, history, "again")
            assert not replay_group(again, other, 0, [rollout], Sampling(1.0, 99, 999))[0].problem, "verifiers agree"
        again = Asking(before, "template", "now /think", "again")
        talk = play_scripted(again, renderer, 0, lambda *_: "15", random.Random(0), Sampling(1.0, 99, 999))
        last = renderer._decode_whole(talk.rows[-1].tokens).split("<|im_start|>assistant\n")[-1]
        closed = "<think>\n\n</think>\n\n" if opens == "true" else "<think></think>"
        assert last.split(END)[0] == f"{closed}15", "it follows all replies"


SPLIT = CHATML.replace("m.content", "m.content.split('</think>')[-1]")


@pytest.mark.parametrize("opening", ["", OPENED])
@pytest.mark.parametrize(
    "action",
    [
        "<think>\na\n<think>\n\n6",
        "hm\nhm\n3",
        "<think>\na</think>6",
        "a</think>\n\n6",
        "Sure. <think>\na\n</think>\n\n6",
        "a</think>b</think>6",
    ],
)
def test_a_thought_that_is_not_closed_stays_in_a_history(opening: str, action: str) -> None:
    template = SPLIT.replace("assistant\n{% endif %}", f"assistant\n{opening}{{% endif %}}")
    with both(template=template) as (peer, renderer):
        talk = Conversation(Asking([USER], "template", "again"), renderer, 0, Sampling(1.0, 99, 999))
        talk.write([*renderer.encode(action), renderer.eos_id])
        history = [USER, {"role": "assistant", "content": action}, {"role": "user", "content": "again"}]
        shown = peer.apply_chat_template(history, add_generation_prompt=True, tokenize=False)
        kept_space = shown.replace("<|im_start|>assistant\n\n\n", "<|im_start|>assistant\n")
        assert renderer._decode_whole(talk.rows[-1].tokens) in (shown, kept_space)


GLM = (
    "{% for m in messages %}{{ '<|tool|>' if m.role == 'tool' else '<|think|>' if m.role == 'user' else '<|im_start|>' }}\n"
    "{{ m.content }}" + CALLS + "{% endfor %}{% if add_generation_prompt %}<|im_start|>\n{% endif %}"
)
"""Ends no turn: the model ends it with what begins the next message. As in GLM's templates."""
CALL_TEXT = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def _ends_with_markers(files: Files) -> None:
    PROPERTIES["normalized control"](files)
    files.config["eos_token"] = TEXT_END
    files.model["eos_token_id"] = [_id_of(files, text) for text in (TEXT_END, "<|tool|>", "<|think|>")]


class _Tools(Asking):
    tools = (ADD,)


@pytest.mark.parametrize("history", ["append", "template"])
@pytest.mark.parametrize("calls", [False, True])
def test_what_begins_the_next_message_may_end_a_turn_and_is_never_lost(history: str, calls: bool) -> None:
    answer = {"role": "tool", "content": "5"} if calls else {"role": "user", "content": "again"}
    said = {"role": "assistant", "content": "", "tool_calls": CALL} if calls else {"role": "assistant", "content": "4"}
    with both(template=GLM, change=_ends_with_markers) as (peer, renderer):
        theirs = peer.apply_chat_template([USER, said, answer], add_generation_prompt=True, tokenize=False)
        marker = "<|tool|>" if calls else "<|think|>"
        text = CALL_TEXT if calls else "4"
        assert peer.decode(renderer.written(said)) == peer.decode(renderer.written(text)) == f"{text}{marker}"
        for end in (TEXT_END, "<|tool|>", "<|think|>"):
            talk = Conversation(_Tools([USER], history, [answer]), renderer, 0, Sampling(1.0, 99, 999))
            talk.write([*renderer.encode(text), peer.convert_tokens_to_ids(end)])
            shown = theirs if end == marker else theirs.replace(f"{text}{marker}", f"{text}{end}{marker}")
            assert renderer._decode_whole(talk.rows[-1].tokens) == shown


MISTRAL_CALLS = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% endfor %}]<|im_end|>{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("history", ["append", "template"])
@pytest.mark.parametrize("number", ["abcdef123", "short", "", "<|tool|>9"])
def test_calls_keep_the_ids_that_the_policy_wrote_and_the_white_space_of_the_template(
    history: str, number: str
) -> None:
    called = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}' + (f', "id": "{number}"' if number else "") + "}]"
    call = {"id": number, "function": {"name": "add", "arguments": {"a": 1}}}
    with both(template=MISTRAL_CALLS) as (peer, renderer):
        message = {"role": "assistant", "tool_calls": [call]}
        assert peer.decode(renderer.written(called)) == f"{called}{END}"
        assert not number or renderer.written(message) == renderer.written(called)
        assert peer.decode(renderer.written("4")) == f" 4{END}"
        env = _Tools([USER], history, [{"role": "tool", "content": "5"}])
        talk = Conversation(env, renderer, 0, Sampling(1.0, 199, 999))
        talk.write(renderer.written(called))
        shown = renderer._decode_whole(talk.rows[-1].tokens)
        own = number if number == "abcdef123" else "t000c0000" if history == "template" else "call00000"
        assert shown.endswith(f'{called}{END}[TOOL_RESULTS] {{"content": 5, "call_id": "{own}"}}[/TOOL_RESULTS]')


def test_a_history_finds_a_call_where_the_template_opens_no_turn_and_moves_its_tools() -> None:
    moved = "{% if m.role == 'user' %}{% if loop.index0 == ns.last %}[TOOLS]{% endif %}"
    template = COUNT + MISTRAL_CALLS.replace("{% if m.role == 'user' %}", moved, 1)
    call = {"id": "abcdef123", "function": {"name": "add", "arguments": {"a": 1}}}
    result = {"role": "tool", "content": "5", "tool_call_id": "abcdef123"}
    with both(template=template) as (peer, renderer):
        turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "assistant", "content": "4"}]
        written = [peer.decode(renderer.written(turn)) for turn in turns]
        items = [USER, Written(0, calls=(("abcdef123", "add"),)), result, Written(1), USER]
        segments = renderer.history(items)
        ours = "".join(written[one.turn] if one.turn >= 0 else peer.decode(one.token_ids) for one in segments)
        assert ours == peer.apply_chat_template([USER, turns[0], result, turns[1], USER], tokenize=False)


EARLIER = "{% if m.role == 'assistant' and not loop.last %}"


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (EARLIER + "(earlier) {% endif %}", "", r"adds '\(earlier\)( <think>)?' to a turn when"),
        ("{% if m.role == 'assistant' %}#{{ loop.index }} {% endif %}", "", "adds '#4( <think>)?' to a turn when"),
        ("", EARLIER + " [seen]{% endif %}", r"adds '\[seen\]' to earlier turns"),
    ],
)
@pytest.mark.parametrize(("thinks", "calls"), [(False, ()), (True, (("abc", "add"),))])
def test_a_template_that_adds_to_earlier_turns_is_refused_by_name(
    before: str, after: str, says: str, thinks: bool, calls: tuple[tuple[str, str], ...]
) -> None:
    with rendering(template=talk_template(before + THOUGHT, after)) as renderer:
        answer = {"role": "tool", "content": "4", "tool_call_id": "abc", "name": "add"} if calls else USER
        with pytest.raises(StateError, match=says):
            renderer.history([USER, Written(0, thinks, calls), answer, Written(1, thinks, calls), answer])
        if after:
            with pytest.raises(StateError, match=says):
                renderer.reply("more")


@pytest.mark.parametrize("after", ["[{{ m.content | length }}]", "{% if m.content | length > 9 %} REC{% endif %}"])
def test_a_history_whose_text_follows_from_the_words_of_a_turn_is_refused_by_name(after: str) -> None:
    refused = pytest.raises(StateError, match='other words of it: use history = "append"')
    with rendering(template=talk_template("", after)) as renderer, refused:
        renderer.history([USER, Written(0), USER])
    for kept in ("{{ m.content | trim }}", "{{ m.content.split('</think>')[-1].lstrip() }}"):
        with checkpoint(template=talk_template().replace("{{ m.content }}", kept)) as directory:
            assert Renderer.from_directory(directory).history([USER, Written(0), USER])


# --- which class opens a tokenizer ---


def _large(tokens: int) -> Change:
    """A vocabulary of this many tokens, where "aB" is one of them."""

    def change(files: Files) -> None:
        vocabulary = files.tokenizer["model"]["vocab"]
        files.tokenizer["model"]["merges"].append(["a", "B"])
        vocabulary["aB"] = len(vocabulary)
        for number in range(len(vocabulary), tokens):
            vocabulary[f"<unused {number}>"] = number

    return change


MISTRAL = {"model_type": "mistral", "transformers_version": "4.57.2"}


@pytest.mark.parametrize(
    ("kind", "tokens", "flag", "model", "applies"),
    [
        ("mistral", 100_001, True, MISTRAL, False),
        ("smollm", 100_001, True, MISTRAL, True),
        ("prefix space", 100_001, 1, MISTRAL | {"model_type": "ministral", "transformers_version": None}, True),
        ("qwen class", 100_001, True, MISTRAL | {"model_type": "pixtral", "transformers_version": "5.0.0rc1"}, True),
        ("prefix space", 100_000, True, MISTRAL, False),
        ("llama class", 100_001, True, MISTRAL | {"model_type": None}, True),
        ("prefix space", 100_001, False, MISTRAL, False),
        ("prefix space", 100_001, True, MISTRAL | {"transformers_version": "5.0.0"}, False),
        ("prefix space", 100_001, True, MISTRAL | {"transformers_version": "5.0.1.dev0"}, False),
        ("llama class", 100_001, True, MISTRAL | {"model_type": "llama"}, False),
    ],
)
def test_fix_mistral_regex_splits_where_transformers_does(
    kind: str, tokens: int, flag: object, model: dict[str, Any], applies: bool
) -> None:
    with tempfile.TemporaryDirectory() as name:
        files: Files = plain()
        PROPERTIES[kind](files)
        _large(tokens)(files)
        files.config["fix_mistral_regex"] = flag
        files.model |= model
        files.write(directory := Path(name))
        peer, ours = AutoTokenizer.from_pretrained(directory), open_tokenizer(directory).tokenizer
        for text in ["aB", "12aB  TheKing", *TEXTS]:
            assert ours.encode(text, add_special_tokens=False).ids == peer(text, add_special_tokens=False)["input_ids"]
        assert ("Lu}" in str(ours.pre_tokenizer)) == applies


def _published(directory: Path, target: Path) -> Path:
    """The same policy as a run publishes it."""
    if kind_of(directory) == OURS:
        model = Transformer(TransformerConfig.from_directory(directory), torch.bfloat16)
        save_policy(model, target, "bfloat16", directory, durable=False)
    else:
        files = _files_of(directory)
        save_policy(
            WeightSnapshot("bfloat16", {}, files, "model.safetensors"), target, "bfloat16", directory, durable=False
        )
    return target


@pytest.mark.parametrize("part", range(4))
def test_a_published_checkpoint_reads_prompts_as_the_one_that_it_began_with(part: int, tmp_path: Path) -> None:
    for number, name in enumerate([*KINDS, *TOKENS, *TEMPLATES][part::4]):
        with checkpoint(name) as directory:
            published = _published(directory, tmp_path / str(number))
            before, after = Renderer.from_directory(directory), Renderer.from_directory(published)
            assert (before.eos_id, before.stop_ids) == (after.eos_id, after.stop_ids), name
            for talk, tools in itertools.product(TALKS, ({}, {"tools": [ADD]})):
                assert before.start(talk, tools) == after.start(talk, tools), name
            assert [before.reply(text) for text in TEXTS] == [after.reply(text) for text in TEXTS], name
            assert not differences(published), name


def test_publishing_keeps_what_the_model_says_of_its_tokenizer(tmp_path: Path) -> None:
    files: Files = plain()
    PROPERTIES["smollm"](files)
    _large(100_001)(files)
    files.config["fix_mistral_regex"] = True
    small = {"hidden_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 100_001}
    files.model |= MISTRAL | small | {"sliding_window": None}
    (tmp_path / "before").mkdir()
    files.write(tmp_path / "before")
    assert kind_of(tmp_path / "before") == OURS
    published = _published(tmp_path / "before", tmp_path / "after")
    before, after = open_tokenizer(tmp_path / "before").tokenizer, open_tokenizer(published).tokenizer
    for text in ["aB", "12aB  TheKing", *TEXTS]:
        assert before.encode(text).ids == after.encode(text).ids
    assert str(before.pre_tokenizer) == str(after.pre_tokenizer)


def _name_of(kind: Any) -> str:
    if kind is None or kind.__name__ == "PythonBackend":
        return FILE
    plain_file = issubclass(kind, TokenizersBackend) and (kind is TokenizersBackend or "__init__" not in kind.__dict__)
    return FILE if plain_file else str(kind.__name__)


def _ours(config: dict[str, Any], model: dict[str, Any]) -> str:
    try:
        return class_of(config, model, False)
    except StateError as error:
        assert "not known here" in str(error)
        return "another"


def test_each_class_and_type_of_transformers_is_opened_as_it_does_or_refused() -> None:
    names = [
        name for name in dir(transformers) if name.endswith(("Tokenizer", "TokenizerFast")) and name != "AutoTokenizer"
    ]
    classes = {name: _name_of(tokenization_auto.tokenizer_class_from_name(name)) for name in names}
    helpers = {"BasicTokenizer", "CharacterTokenizer", "MecabTokenizer", "WordpieceTokenizer"}  # parts of others
    helpers |= {name for name in names if name.startswith("DPR")}  # refused where transformers takes the file
    wrong = {
        name: found
        for name, kind in classes.items()
        if name not in helpers
        and (found := _ours({"tokenizer_class": name}, {})) != (kind if kind in BUILD or kind == FILE else "another")
    }
    assert not wrong and len(classes) > 100
    by_type = {kind: tokenization_auto.TOKENIZER_MAPPING_NAMES.get(kind) for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    for kind, name in by_type.items():
        want = _name_of(tokenization_auto.tokenizer_class_from_name(name)) if name else FILE
        assert _ours({}, {"model_type": kind}) == (want if want in BUILD or want == FILE else "another"), kind
    ignored = tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    for kind in by_type:
        registered = _ours({}, {"model_type": kind})
        told = _ours({"tokenizer_class": "GPT2TokenizerFast"}, {"model_type": kind})
        assert told == (
            registered
            if (registered == FILE and by_type[kind]) or (kind in ignored and by_type[kind])
            else "GPT2Tokenizer"
        ), kind
