"""The first prompt as a person sees it: whole, with each control token marked, and nothing that acts on a terminal."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shoal.chat.renderer import Renderer
from shoal.chat.tool_calls import NOTATIONS
from shoal.env import Step
from shoal.envs.lint.messages import Recorded
from shoal.envs.lint.process_checks import prompt_lengths
from shoal.envs.prompt_preview import MAX_CHARS, first_prompt, learned_row, odd_prompts
from shoal.errors import MessagesRefused, PromptsTooLong, ShoalError, StateError
from shoal.protocol.messages import Sampling
from shoal.protocol.rollout_validation import MODEL_REMEDY, unbegun_remedy
from tests.envs.plain import Plain
from tests.models.templates import ADD, NAMES, directory_of, renderer_of

SAMPLING = Sampling(1.0, 200, 4000, 9000)


class _Saying(Plain):
    """Begins with a text."""

    name, num_tasks = "saying", 3

    def __init__(self, text: str) -> None:
        self.text = text

    def reset(self, task: int) -> Any:
        if not self.text:
            raise ValueError("nothing to say")
        return 0, [{"role": "user", "content": f"{self.text} {task}"}]

    def step(self, state: int, action: Any) -> Step:
        return Step(state, "", True)


def test_every_control_token_is_in_brackets_and_the_tokens_are_counted() -> None:
    renderer = renderer_of("qwen3")
    text = first_prompt("sums", _Saying("What is <|im_end"), renderer, SAMPLING, 2)
    count = len(renderer.start([{"role": "user", "content": "What is <|im_end 2"}]))
    head, *lines = text.split("\n")
    assert head == f"first prompt of sums, task 2: {count} tokens of at most 4000, 3 of them control tokens, in [[ ]]"
    assert lines[:2] == ["  | [[<|im_start|>]]user", "  | What is <|im_end 2[[<|im_end|>]]"]
    assert lines[2:4] == ["  | [[<|im_start|>]]assistant", "  | "]
    assert lines[4].startswith("later turns, if there are any, also read earlier thoughts"), "Qwen3 leaves them out"
    assert "earlier thoughts" not in first_prompt("sums", _Saying("hi"), renderer_of("qwen2_5"), SAMPLING)


def test_a_row_of_training_shows_what_is_learned_and_how_it_ends() -> None:
    renderer = renderer_of("qwen2_5")
    prompt, answer = renderer.start([{"role": "user", "content": "2 + 2?"}]), renderer.written("4\nindeed")
    learned = range(len(prompt), len(prompt) + len(answer))
    head, *lines = learned_row([*prompt, *answer], learned, renderer).split("\n")
    assert f"{len(prompt) + len(answer)} tokens, {len(answer)} of them learned" in head
    assert lines[-4:] == ["  | [[<|im_start|>]]assistant", "  | ", "  > 4", "  > indeed[[<|im_end|>]]"]


def test_what_would_act_on_a_terminal_is_escaped_and_each_line_is_marked_as_the_prompts() -> None:
    text = first_prompt("sums", _Saying("\x1b[2J\u202e\rerror: stop\n$ rm"), renderer_of("qwen3"), SAMPLING)
    assert "\\u001b[2J\\u202e\\r" in text and not set(text) & {"\x1b", "\u202e", "\r"}
    assert all(line.startswith("  | ") for line in text.split("\n")[1:-1]) and "  | $ rm 0[[<|im_end|>]]" in text.split(
        "\n"
    )


def test_the_middle_of_a_long_prompt_is_left_out_and_counted() -> None:
    text = first_prompt("sums", _Saying("begin " + "x" * 50_000 + " end"), renderer_of("qwen3"), SAMPLING)
    assert "begin xx" in text and "xx end 0[[<|im_end|>]]" in text and "characters ...]" in text
    assert len(text) < MAX_CHARS + 400 and "tokens of at most 4000" in text


def test_a_task_that_cannot_begin_is_named() -> None:
    with pytest.raises(ShoalError, match=r"cannot begin task.*nothing to say"):
        first_prompt("sums", _Saying(""), renderer_of("qwen3"), SAMPLING)


class _Uneven(_Saying):
    """Every third prompt is long."""

    num_tasks = 300

    def reset(self, task: int) -> Any:
        return 0, [{"role": "user", "content": "word " * (99 if task % 3 == 0 else 1)}]


def test_prompts_that_are_too_long_are_told_with_their_share_and_the_key() -> None:
    renderer, env = renderer_of("qwen3"), _Uneven("")
    short = Sampling(1.0, 20, 60)
    told = odd_prompts("words", env, renderer, short, range(300))
    share = re.search(r"prompts of words: (\d+) of 64 that were looked at \(\d+%\) are too long", told)
    assert share and 10 < int(share[1]) < 35
    room = "the longest: its prompt takes 514 tokens, and sampling.max_tokens = 60 leaves no room for a turn"
    assert room in told and told.endswith("Raise that key, or give shorter prompts")
    assert odd_prompts("words", env, renderer, SAMPLING, range(300)) == ""
    env.max_tokens = 50
    assert "envs.max_tokens = 50 leaves no room" in odd_prompts("words", env, renderer, SAMPLING, range(300))


class _Failing(_Uneven):
    """Every third task cannot begin."""

    def reset(self, task: int) -> Any:
        return (1 // (task % 3), [{"role": "user", "content": f"word {task}"}])


def test_tasks_that_do_not_begin_are_told_with_their_share_and_the_first_cause() -> None:
    told = odd_prompts("words", _Failing(""), renderer_of("qwen3"), SAMPLING, range(300))
    share = re.search(r"tasks of words: (\d+) of 64 .* the first: .*ZeroDivisionError", told)
    assert share and 10 < int(share[1]) < 35


def test_tasks_that_take_turns_are_all_looked_at() -> None:
    told = odd_prompts("words", _Uneven(""), renderer_of("qwen3"), Sampling(1.0, 20, 60), range(63 * 64))
    assert "are too long" in told, "each 63rd task is long, and a third of all"


def test_an_environment_of_which_all_prompts_are_too_long_is_refused_with_the_shortest_and_the_key() -> None:
    env, tasks = _Uneven(""), range(0, 300, 3)
    refused = (
        r"^no task of environment words can begin, because prompts are too long, all 64 that were looked at; the shortest: "
        r"its prompt takes 514 tokens, and sampling\.max_tokens = 60 leaves no room .* Raise that key, or give shorter pro"
    )
    with pytest.raises(PromptsTooLong, match=refused):
        odd_prompts("words", env, renderer_of("qwen3"), Sampling(1.0, 20, 60), tasks)


def test_a_chat_template_that_refuses_a_prompt_fails_the_check_and_hides_no_other_task() -> None:
    renderer = renderer_of("gemma3")
    shown = [[{"role": "user", "content": "word " * 99}], [{"role": "assistant", "content": "hi"}]]
    tasks = [Recorded(i, False, [], [], [messages, {}, 0]) for i, messages in enumerate([*shown, *shown])]
    found = prompt_lengths(tasks, renderer, Sampling(1.0, 20, 60))
    assert found.outcome == "failed" and "2 of 4 are not taken by the policy's chat template" in found.detail
    assert "2 of 4 prompts are too long" in found.detail and "sampling.max_tokens = 60" in found.detail
    assert prompt_lengths(tasks[:1], renderer, SAMPLING).outcome == "passed"
    assert prompt_lengths([Recorded(0, False, [], [])], renderer, SAMPLING).outcome == "skipped"


CHATML = (
    "{% for m in messages if WHICH %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


WHOLE = CHATML.replace(" if WHICH", "")


def _renderer_with(template: str, folder: Path) -> Renderer:
    (directory_of("qwen3", folder) / "chat_template.jinja").write_text(template)
    return Renderer.from_directory(folder)


def _renderer_of_size(folder: Path, config: Any, vocab_size: int) -> Renderer:
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size, "eos_token_id": 0}))
    return Renderer.from_directory(folder)


class _Longer(_Saying):
    """Answers each turn."""

    def step(self, state: int, action: Any) -> Step:
        return Step(state, "more", False)


@pytest.mark.parametrize("history", ["append", "template"])
@pytest.mark.parametrize("which", ["m.role != 'assistant'", "loop.first"])
def test_a_template_that_hides_turns_is_refused_where_an_environment_plays_more(
    which: str, history: str, tmp_path: Path
) -> None:
    shown = WHOLE.replace("<|im_start|>{{", "{% if WHICH %}<|im_start|>{{", 1)
    template = shown.replace("WHICH", which).replace("<|im_end|>\n", "<|im_end|>\n{% endif %}")
    renderer = _renderer_with(template, tmp_path)
    env: Any = _Longer("hi")
    env.history = history
    says = r"environment longer plays more than one turn, and .*chat_template\.jinja\) takes none after that"
    with pytest.raises(MessagesRefused, match=says):
        first_prompt("longer", env, renderer, SAMPLING)
    text = first_prompt("short", _Saying("hi"), renderer, SAMPLING)
    assert "\nlater turns of short: the policy's chat template (" in text and "earlier thoughts" not in text


class _Counting(_Saying):
    """Ends after so many turns."""

    turns, history = 4, "template"

    def step(self, state: int, action: Any) -> Step:
        return Step(state + 1, "more", state + 1 == self.turns)


def test_a_template_that_forgets_old_turns_is_refused_where_an_environment_plays_so_many(tmp_path: Path) -> None:
    renderer = _renderer_with(WHOLE.replace("messages", "messages[-2:]", 1), tmp_path)
    env = _Counting("hi")
    says = (
        r"counting plays more than 2 turns, and .*chat_template\.jinja\) takes none after that: .*does not show turn 0"
    )
    with pytest.raises(MessagesRefused, match=says):
        first_prompt("counting", env, renderer, SAMPLING)
    env.turns = 2
    assert "\nlater turns of counting: the policy's chat template (" in first_prompt(
        "counting", env, renderer, SAMPLING
    )
    env.turns, env.history = 4, "append"
    assert "turns of" not in first_prompt("counting", env, renderer, SAMPLING)


class _Recalling(_Counting):
    """Begins with a call of a tool and its result."""

    turns = 2

    def reset(self, task: int) -> Any:
        called = {"id": "abcDEF123", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
        opening = [
            {"role": "user", "content": "Add."},
            {"role": "assistant", "tool_calls": [called]},
            {"role": "tool", "content": "1", "tool_call_id": "abcDEF123"},
            {"role": "assistant", "content": "It is one."},
        ]
        return 0, [*opening, {"role": "user", "content": f"{self.text} {task}"}]


ALTERNATING = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}{{ tools | default([], true) | length }}"
)
"""As in Mistral's templates: users and answers take turns, and calls of tools with their results are no turns."""


@pytest.mark.parametrize("history", ["append", "template"])
@pytest.mark.parametrize("tools", [(), (ADD,)])
def test_an_opening_that_calls_tools_is_judged_as_the_environment_gives_it(
    tools: tuple[Any, ...], history: str, tmp_path: Path
) -> None:
    env: Any = _Recalling("hi")
    env.tools, env.history, env.parser = tools, history, "hermes"
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    shown = WHOLE.replace("{{ m.content }}", calls + "{{ m.content or '' }}")
    renderer = _renderer_with(ALTERNATING + shown, tmp_path)
    text = first_prompt("recalling", env, renderer, SAMPLING)
    assert "| hi 0[[<|im_end|>]]" in text and "later turns of" not in text and "not shown" not in text


def test_a_template_that_opens_no_turn_for_the_policy_is_noted(tmp_path: Path) -> None:
    bare = WHOLE.partition("{% if add_generation_prompt")[0]
    text = first_prompt("saying", _Saying("hi"), _renderer_with(bare, tmp_path), SAMPLING)
    assert "\nno turn of saying is opened: " in text and "has to write '<|im_start|>assistant' by itself" in text
    renderer = _renderer_with(bare, tmp_path)
    with pytest.raises(StateError, match=r"a turn has to begin with '<\|im_start\|>assistant'"):
        renderer.written("hi")
    assert (
        renderer._decode_whole(renderer.written("<|im_start|>assistant\nhi")) == "<|im_start|>assistant\nhi<|im_end|>"
    )


class _Told(_Saying):
    """Begins with a system message."""

    def reset(self, task: int) -> Any:
        return 0, [{"role": "system", "content": "Be brief"}, {"role": "user", "content": self.text}]


def test_a_system_message_that_moves_into_the_users_turn_is_noted(tmp_path: Path) -> None:
    env = _Told("hi")
    for which, is_noted in (("True", False), ("m.role != 'system'", True)):
        text = first_prompt("saying", env, _renderer_with(CHATML.replace("WHICH", which), tmp_path), SAMPLING)
        assert "Be brief" in text and ("\nthe chat template shows no system message" in text) == is_noted


def test_what_a_template_shows_once_and_replies_repeat_is_counted(tmp_path: Path) -> None:
    reminding = WHOLE.replace(
        "{{ m.content }}", "{{ m.content }}{% if loop.last %} Do remember the tools that there are{% endif %}"
    )
    env = _Counting("hi")
    renderer = _renderer_with(reminding, tmp_path)
    assert "each later turn" not in first_prompt("counting", env, renderer, SAMPLING)
    env.history = "append"
    assert re.search(
        r"\neach later turn reads \d+ tokens again that", first_prompt("counting", env, renderer, SAMPLING)
    )


CUTTING = {
    "</thought>": "{% set c = m.content.split('</thought>')[-1].lstrip() %}",
    "<answer>": "{% set c = m.content.split('<answer>')[-1].split('</answer>')[0] %}",
    "{{ ... }}": "{% set c = m.content %}{% if '{{' in c and '}}' in c %}{% set c = c.split('}}')[1] %}{% endif %}",
    "[[": "{% set c = m.content.replace('[[', '[') %}",
    "[/THINK]": "{% set t %}[/THINK]{% endset %}{% set c = m.content.split(t)[-1] %}",
    "</th>": "{% set c = m.content.split('</' ~ 'th>')[-1] %}",
    "<note>": "{% set c = m.content[8:] if m.content.startswith('<note>') else m.content %}",
}
"""Templates that leave out parts of a turn at marks of their own, by these marks."""


@pytest.mark.parametrize(("marks", "cut"), CUTTING.items())
def test_a_template_that_cuts_turns_at_marks_of_its_own_shows_no_history(marks: str, cut: str, tmp_path: Path) -> None:
    """transformers would show a part of the turn; we keep its tokens, so it is refused. Appended turns need no cut."""
    template = WHOLE.replace("{{ m.content }}", "{{ c }}").replace("%}<|im", f"%}}{cut}<|im", 1)
    renderer, env = _renderer_with(template, tmp_path), _Counting("hi")
    with pytest.raises(
        MessagesRefused, match=r"counting plays more than one turn, .* leaves out parts of earlier turns"
    ):
        first_prompt("counting", env, renderer, SAMPLING)
    env.history = "append"
    text = first_prompt("counting", env, renderer, SAMPLING)
    assert f"cuts earlier turns at '{marks}'" in text and "the chat template alone would not do" in text
    opened = template.replace("assistant\n{% endif", "assistant\n<thought>\n{% endif")
    with pytest.raises(StateError, match=r"begins turns with .*<thought>.* and cuts them at"):
        _renderer_with(opened, tmp_path).written("hi")
    closed = template.replace("assistant\n{% endif", "assistant\n<think>\n\n</think>\n\n{% endif")
    renderer = _renderer_with(closed, tmp_path)
    assert renderer.decode(renderer.written("hi")) == "hi", "a thought that is known and closed"


def test_arguments_of_a_template_decide_whether_it_cuts_turns(tmp_path: Path) -> None:
    cut = "{% set c = m.content.split('</thought>')[-1] if drop else m.content %}"
    template = WHOLE.replace("{{ m.content }}", "{{ c }}").replace("%}<|im", f"%}}{cut}<|im", 1)
    renderer = _renderer_with(template, tmp_path)
    assert (renderer.cut_marks({}), renderer.cut_marks({"drop": True})) == ("", "</thought>")


def test_a_template_that_counts_turns_is_noted_where_turns_are_appended(tmp_path: Path) -> None:
    counting = WHOLE.replace("{{ m.content }}", "{% if m.role == 'user' %}{{ loop.index }}: {% endif %}{{ m.content }}")
    renderer, env = _renderer_with(counting, tmp_path), _Counting("hi")
    assert "such as another number" not in first_prompt("counting", env, renderer, SAMPLING)
    env.history = "append"
    assert "such as another number: see envs.history" in first_prompt("counting", env, renderer, SAMPLING)


@pytest.mark.parametrize("name", NAMES[::5])
def test_real_templates_open_turns_and_repeat_little(name: str) -> None:
    """Nor does one repeat much, but where it would leave out thoughts, which is another note."""
    renderer, env = renderer_of(name), _Counting("hi")
    env.history = "append"
    text = first_prompt("counting", env, renderer, SAMPLING)
    assert "no turn of" not in text and "each later turn" not in text and "cuts earlier turns" not in text


def test_a_template_that_hides_later_replies_is_refused_where_an_environment_gives_some(tmp_path: Path) -> None:
    renderer = _renderer_with(
        CHATML.replace("WHICH", "m.role != 'user'").replace("{% for", "{{ messages[0].content }}{% for", 1), tmp_path
    )
    with pytest.raises(MessagesRefused, match="shows nothing of an environment's reply"):
        first_prompt("longer", _Longer("hi"), renderer, SAMPLING)


class _Asking(_Saying):
    """Its task is not in the last message."""

    def reset(self, task: int) -> Any:
        said = [{"role": "user", "content": f"{self.text} {task}"}, {"role": "assistant", "content": "?"}]
        return 0, [*said, {"role": "user", "content": "Answer:"}]


def test_a_template_that_shows_another_message_than_the_task_is_refused(tmp_path: Path) -> None:
    renderer = _renderer_with(CHATML.replace("WHICH", "m == messages[-1]"), tmp_path)
    with pytest.raises(
        MessagesRefused, match=r"chat_template\.jinja\) and its tokenizer make one prompt of all 3 tasks"
    ):
        odd_prompts("asking", _Asking("say"), renderer, SAMPLING, range(3))
    opened = [Recorded(i, False, [], [], (_Asking("say").reset(i)[1], {}, 0)) for i in range(3)]
    found = prompt_lengths(opened, renderer, SAMPLING)
    assert found.outcome == "failed" and "one prompt of all 3 tasks" in found.detail
    assert odd_prompts("saying", _Saying("say"), renderer, SAMPLING, range(3)) == ""


def test_tokens_that_the_model_lacks_are_told_and_the_tasks_with_them_counted(tmp_path: Path) -> None:
    renderer = _renderer_with(WHOLE, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    sizes = (renderer._tokenizer.get_vocab_size(), renderer._tokenizer.get_vocab_size() - 1)
    last = renderer._tokenizer.id_to_token(sizes[1])
    whole, smaller = (_renderer_of_size(tmp_path, config, size) for size in sizes)
    assert whole.beyond_model() == ""
    said = smaller.beyond_model()
    assert said.startswith(f"tokenizer: it knows {sizes[0]:,} tokens, ") and repr(last)[:40] in said

    class Rare(_Saying):
        def reset(self, task: int) -> Any:
            return 0, [{"role": "user", "content": last if task == 1 else f"say {task}"}]

    told = odd_prompts("rare", Rare("say"), smaller, SAMPLING, range(3))
    assert told.startswith("prompts of rare: 1 of 3 that were looked at are refused, and their tasks never begin; ")
    assert unbegun_remedy(told.partition("the first: ")[2]) == MODEL_REMEDY


class _Calling(_Saying):
    """Has a tool."""

    tools = (ADD,)


def test_tools_whose_calls_nobody_reads_are_noted_until_a_parser_is_named(tmp_path: Path) -> None:
    tools = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    unknown, known = (_renderer_with(tools + marks + WHOLE, tmp_path) for marks in ("", "<tool_call>"))
    env: Any = _Calling("hi")
    text = first_prompt("calling", env, unknown, SAMPLING)
    assert (
        "\ntool calls of calling are not read: the policy's chat template (" in text and "chat_template.jinja)" in text
    )
    assert "Set envs.parser to one of hermes, " in text and "\nthe tools of" not in text
    hidden = _renderer_with(WHOLE, tmp_path)
    assert "\nthe tools of calling are not shown: " in first_prompt("calling", env, hidden, SAMPLING)
    assert "\nthe tools of" not in first_prompt("calling", _Saying("hi"), hidden, SAMPLING)
    for renderer, game, parser in ((known, env, ""), (unknown, _Saying("hi"), ""), (unknown, env, "none"),
                                   *((unknown, env, name) for name in NOTATIONS)):  # fmt: skip
        game.parser = parser
        assert "tool calls of" not in first_prompt("calling", game, renderer, SAMPLING)
