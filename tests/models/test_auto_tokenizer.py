"""What a checkpoint's files say of its tokenizer and templates reaches the policy: each fault that was silent, once."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from shoal.chat.isolated import ContainedRenderer
from shoal.chat.renderer import Renderer
from shoal.env import Env, Step
from shoal.envs.rollout_rules import Conversation
from shoal.errors import ShoalError, StateError
from shoal.models.hub_download import Hub
from shoal.models.tokenizer_loader import demand_same_vocabulary, difference_from_file, vocabulary_of
from shoal.protocol.messages import Sampling
from tests.models.hub_server import fake_hub
from tests.models.odd_checkpoints import (  # fmt: skip
    AT_LAST,
    CHATML,
    COUNT,
    END,
    PROPERTIES,
    START,
    TEXT_END,
    THOUGHT,
    Change,
    Files,
    plain,
    talk_template,
)
from tests.models.templates import ADD

LONG = [{"role": "user", "content": "What is 12 + 30 ? " * 20}]
CONTROL = "<|tool|>say<|think|>"


def written(directory: Path, *changes: Change) -> Path:
    """A checkpoint with these properties."""
    files = plain()
    for change in changes:
        change(files)
    files.write(directory)
    return directory


@pytest.mark.parametrize("name", [name for name in PROPERTIES if "truncation" in name or "padding" in name])
def test_a_tokenizer_that_was_saved_cutting_or_filling_up_texts_does_neither(name: str, tmp_path: Path) -> None:
    as_saved, usual = written(tmp_path / "saved", PROPERTIES[name]), written(tmp_path / "usual")
    for renderer in (Renderer.from_directory(as_saved), ContainedRenderer(as_saved)):
        assert renderer.start(LONG) == Renderer.from_directory(usual).start(LONG)
        assert len(renderer.start(LONG)) > 64 and len(renderer.encode("Hello")) < 8


@pytest.mark.parametrize(
    "name",
    [
        "added_tokens_decoder", "additional_special_tokens", "extra_special_tokens", "named extra tokens",
        "model's named token", "special_tokens_map", "added_tokens.json",
    ],
)  # fmt: skip
def test_a_control_token_that_only_a_config_names_is_one_token(name: str, tmp_path: Path) -> None:
    directory = written(tmp_path, PROPERTIES[name])
    renderer = Renderer.from_directory(directory)
    ids = renderer.encode(CONTROL)
    assert ids == AutoTokenizer.from_pretrained(directory)(CONTROL, add_special_tokens=False)["input_ids"]
    assert ids[0] == vocabulary_of(directory)["<|tool|>"] and ids[-1] == vocabulary_of(directory)["<|think|>"]
    assert len(ids) == 2 + len(renderer.encode("say"))
    with pytest.raises(StateError, match="its tokenizer is not the policy's"):
        demand_same_vocabulary(directory, written(tmp_path / "usual"), "teacher")


@pytest.mark.parametrize(
    ("name", "named_by"),
    [
        ("plain end", "generation_config.json"),
        ("plain end, named elsewhere", "config.json"),
        ("pad is eos", "config.json"),
        ("wordpiece", "generation_config.json"),
        ("llama class", "config.json"),
    ],
)
def test_a_turn_is_the_text_without_the_token_that_ends_it(name: str, named_by: str, tmp_path: Path) -> None:
    """Even if the token is not special; the template tells which one it is, if no file does."""
    directory = written(tmp_path, PROPERTIES[name])
    if named_by != "config.json":
        ends = json.loads((directory / "config.json").read_text())["eos_token_id"]
        (directory / named_by).write_text(json.dumps({"eos_token_id": [ends]}))
    for renderer in (Renderer.from_directory(directory), ContainedRenderer(directory)):
        end = vocabulary_of(directory)[END]
        assert end in renderer.stop_ids
        assert renderer.decode([*renderer.encode("42"), end]) == renderer.decode(renderer.encode("42")) == "42"
        assert renderer.pieces([[end]]) == [[END]]


def test_the_template_for_tools_is_used_where_there_are_tools(tmp_path: Path) -> None:
    directory = written(tmp_path, PROPERTIES["tool_use"])
    peer, user = AutoTokenizer.from_pretrained(directory), [{"role": "user", "content": "hi"}]
    for renderer in (Renderer.from_directory(directory), ContainedRenderer(directory)):
        for tools in (None, [], [ADD]):
            ids = peer.apply_chat_template(user, tools=tools, add_generation_prompt=True)["input_ids"]
            assert renderer.start(user, {"tools": tools}) == ids
        assert "Adds two numbers" in peer.decode(renderer.start(user, {"tools": [ADD]}))


def test_a_template_for_tools_alone_is_refused_by_name_where_there_are_none(tmp_path: Path) -> None:
    only = {"name": "tool_use", "template": "TOOLS {{ tools | length }} " + CHATML}
    renderer = Renderer.from_directory(written(tmp_path, lambda files: files.config.update(chat_template=[only])))
    assert renderer.start(LONG, {"tools": [ADD]})
    with pytest.raises(StateError, match=r"named tool_use, and no default one"):
        renderer.start(LONG)


def test_templates_of_two_notations_are_refused(tmp_path: Path) -> None:
    both = [
        {"name": "default", "template": "{# <tool_call> #}" + CHATML},
        {"name": "tool_use", "template": "{# [TOOL_CALLS] #}" + CHATML},
    ]
    directory = written(tmp_path, lambda files: files.config.update(chat_template=both))
    with pytest.raises(StateError, match=r"two ways \(hermes, mistral\)"):
        Renderer.from_directory(directory)


@pytest.mark.parametrize("as_file", [False, True])
def test_a_model_on_a_hub_keeps_the_templates_that_are_in_a_folder(tmp_path: Path, as_file: bool) -> None:
    """Also without network, when only the cache has them."""
    pytest.importorskip("huggingface_hub")
    model, user = written(tmp_path / "model", PROPERTIES["a folder of templates"]), [{"role": "user", "content": "hi"}]
    default = "chat_template.jinja" if as_file else "additional_chat_templates/default.jinja"
    (model / default).write_text("DEFAULT " + CHATML)
    (model / "additional_chat_templates/rag.jinja").write_text("RAG")
    (model / "model.safetensors").write_bytes(b"weights")
    before = {path: path.read_bytes() for path in model.rglob("*") if path.is_file()}
    with fake_hub() as served:
        served.models["ann/small"] = model
        Hub(served.url, tmp_path / "cache").bring("hf:ann/small@main", tmp_path / "here")
    Hub("http://127.0.0.1:9", tmp_path / "cache").bring("hf:ann/small@main", tmp_path / "again")
    peer = AutoTokenizer.from_pretrained(model)
    for directory, tools in itertools.product((tmp_path / "here", tmp_path / "again"), (None, [ADD])):
        ids = peer.apply_chat_template(user, tools=tools, add_generation_prompt=True)["input_ids"]
        assert Renderer.from_directory(directory).start(user, {"tools": tools}) == ids
        assert peer.decode(ids).startswith("TOOLS" if tools else "DEFAULT")
        assert all(path.is_file() for path in directory.iterdir())
    assert before == {path: path.read_bytes() for path in model.rglob("*") if path.is_file()}


def test_the_host_is_told_where_a_class_replaces_what_the_file_says(tmp_path: Path) -> None:
    directory = written(tmp_path / "class", PROPERTIES["smollm"], PROPERTIES["truncation"])
    said = difference_from_file(directory)
    assert said.startswith("tokenizer: '123' is ['12', '3'] with tokenizer_class GPT2Tokenizer") and "\n" not in said
    assert "['1', '2', '3'] by tokenizer.json alone" in said and "PreTrainedTokenizerFast" in said
    fast = written(
        tmp_path / "file",
        PROPERTIES["smollm"],
        lambda files: files.config.update(tokenizer_class="PreTrainedTokenizerFast"),
    )
    assert not difference_from_file(fast) and not difference_from_file(
        written(tmp_path / "plain", PROPERTIES["llama 3"])
    )


def test_the_remedy_for_a_tokenizer_that_is_no_bpe_beside_qwen2_is_one_that_transformers_obeys(tmp_path: Path) -> None:
    """tokenizer_class = PreTrainedTokenizerFast is there already, and transformers ignores it."""

    def of_type(name: str) -> Change:
        return lambda files: files.model.update(model_type=name)

    refused = written(tmp_path / "qwen2", PROPERTIES["wordpiece"], of_type("qwen2"))
    with pytest.raises(
        StateError, match="take a model of another model_type, such as llama, with tokenizer_class"
    ) as said:
        Renderer.from_directory(refused)
    assert "write tokenizer_class" not in str(said.value)
    taken = written(tmp_path / "llama", PROPERTIES["wordpiece"], of_type("llama"))
    ours, theirs = Renderer.from_directory(taken).encode("Hello"), AutoTokenizer.from_pretrained(taken)
    assert ours == theirs.encode("Hello", add_special_tokens=False)


def test_a_token_that_the_model_lacks_is_refused_by_name(tmp_path: Path) -> None:
    directory = written(
        tmp_path, PROPERTIES["additional_special_tokens"], lambda files: files.model.update(vocab_size=300)
    )
    renderer = Renderer.from_directory(directory)
    with pytest.raises(StateError, match=r"of '<\|tool\|>', and the model has 300 tokens"):
        renderer.encode("<|tool|>")


class _Talking(Env):
    """Answers four times."""

    name, num_tasks, tools = "talking", 1, (ADD,)

    def __init__(self, history: str) -> None:
        self.history = history

    def task(self, index: int, heldout: bool = False) -> int:
        return index

    def reset(self, task: int) -> Any:
        return 0, [{"role": "user", "content": "first"}]

    def step(self, state: int, action: Any) -> Step:
        return Step(state + 1, f"more {state}", state == 4)

    def score(self, state: int) -> float:
        return 1.0


@pytest.mark.parametrize("thought", ["", THOUGHT])
def test_a_reminder_at_the_last_message_is_read_once_if_the_template_decides(thought: str, tmp_path: Path) -> None:
    template = COUNT + talk_template(AT_LAST + thought)
    directory = written(tmp_path, lambda files: files.config.update(chat_template=template))
    renderer, peer = Renderer.from_directory(directory), AutoTokenizer.from_pretrained(directory)
    for history, most in (("append", 4), ("template", 1)):
        talk = Conversation(_Talking(history), renderer, 0, Sampling(1.0, 200, 4000, 9000))
        messages = [{"role": "user", "content": "first"}]
        for turn in range(3):
            talk.write([*renderer.encode(f"said {turn}"), renderer.eos_id])
            messages += [{"role": "assistant", "content": f"said {turn}"}, {"role": "user", "content": f"more {turn}"}]
        assert not talk.fault and peer.decode(talk.context).count("REMINDER") == most
        if history == "template":
            assert (
                talk.context == peer.apply_chat_template(messages, tools=[ADD], add_generation_prompt=True)["input_ids"]
            )


def test_an_example_of_the_environment_is_shown_as_the_template_shows_it(tmp_path: Path) -> None:
    """A template that shows no thoughts hides those of examples; those that the policy wrote are its text."""
    renderer, peer = Renderer.from_directory(written(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    shown = {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
    messages = [*LONG, shown, *LONG]
    assert renderer.start(messages) == peer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert "two and two" in renderer.decode(renderer.written(shown))


def _without_unknown(model: dict[str, Any]) -> Change:
    def change(files: Files) -> None:
        files.tokenizer |= {"model": model, "pre_tokenizer": {"type": "WhitespaceSplit"}, "decoder": None}

    return change


@pytest.mark.parametrize(
    "model",
    [
        {"type": "WordLevel", "vocab": {TEXT_END: 0, START: 1, END: 2, "Hello": 3}, "unk_token": "<unk>"},
        {"type": "Unigram", "vocab": [[TEXT_END, 0.0], [START, 0.0], [END, 0.0], ["Hello", -1.0]], "unk_id": None},
        {"type": "BPE", "vocab": {TEXT_END: 0, START: 1, END: 2, "H": 3}, "merges": [], "unk_token": "<unk>"},
    ],
    ids=lambda model: str(model["type"]),
)
def test_a_tokenizer_that_raises_for_some_texts_is_refused_by_name_when_it_is_opened(
    model: dict[str, Any], tmp_path: Path
) -> None:
    directory = written(tmp_path, _without_unknown(model))
    for opened in (Renderer.from_directory, ContainedRenderer):
        with pytest.raises(StateError, match=f"the tokenizer {model['type']} of .* cannot read every text") as refused:
            opened(directory)
        assert "\n" not in str(refused.value) and str(directory) in str(refused.value)


def test_a_template_that_refuses_the_messages_is_not_the_fault_of_the_environment(tmp_path: Path) -> None:
    directory = written(tmp_path)
    strict = "{% if messages[0].content == 'first' %}{{ raise_exception('not first') }}{% endif %}"
    (directory / "chat_template.jinja").write_text(strict + CHATML)
    with pytest.raises(ShoalError, match=r"chat template or tokenizer does not take its messages: .*not first"):
        Conversation(_Talking("append"), Renderer.from_directory(directory), 0, Sampling(1.0, 200, 4000, 9000))


@pytest.mark.parametrize(
    ("own_file", "template", "says"),
    [
        (True, "\n{{ 1 / 0 }}", "line 2: division by zero"),
        (False, "\n\n{{ foo.bar }}", "line 3: 'foo' is undefined. Correct the template there"),
        (
            True,
            "{% macro f() %}\n{{ 'a' + 5 }}{% endmacro %}\n\n{{ f() }}",
            'line 2: can only concatenate str (not "int") to str.',
        ),
        (False, "{{ ''.__class__.x }}", "is unsafe. Correct the template there"),
    ],
)
def test_a_template_that_fails_is_named_with_its_line_and_corrected(
    own_file: bool, template: str, says: str, tmp_path: Path
) -> None:
    """No folder is named: verifiers on other machines say the same."""
    folder = tmp_path / "a model of mine"
    folder.mkdir()
    directory = written(folder)
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    if own_file:
        (directory / "chat_template.jinja").write_text(template)
    else:
        (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    file = "chat_template.jinja" if own_file else "chat_template of tokenizer_config.json"
    for opened in (Renderer.from_directory, ContainedRenderer):
        with pytest.raises(StateError) as refused:
            opened(directory).start(LONG)
        assert f"the chat template fails in {file}, line " in str(refused.value) and says in str(refused.value)
