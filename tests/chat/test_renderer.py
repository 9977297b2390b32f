"""The renderer gives the tokens of `apply_chat_template`, turn by turn, for our tokenizer."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from shoal.chat.renderer import Renderer
from shoal.config import TinyPolicy
from shoal.errors import ConfigError, StateError
from shoal.models.random_model import CHARACTERS, SPECIALS, make_tiny, tiny_spec


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "policy"
    make_tiny(TinyPolicy(width=16, layers=1, heads=2, kv_heads=1, mlp_width=16), directory, seed=0, dtype="float32")
    return directory


def _template(directory: Path, messages: list[dict[str, str]], prompt: bool = True) -> list[int]:
    peer = AutoTokenizer.from_pretrained(directory)
    ids: list[int] = peer.apply_chat_template(messages, add_generation_prompt=prompt)["input_ids"]
    return ids


def _talk(directory: Path, opening: list[dict[str, str]], turns: list[tuple[str, str]]) -> None:
    """Play a conversation as `envs/play_episodes` does and compare with the template's text at every turn."""
    renderer, peer = Renderer.from_directory(directory), AutoTokenizer.from_pretrained(directory)
    messages, conversation = list(opening), renderer.start(opening)
    assert conversation == _template(directory, messages)
    for said, answered in turns:
        written = [*peer(said, add_special_tokens=False)["input_ids"], renderer.eos_id]
        conversation += written + renderer.reply(answered)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": answered}]
        assert conversation == _template(directory, messages)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_tiny_tokenizer_renders_as_transformers_does_over_many_turns(family: str, tmp_path: Path) -> None:
    """Beside a Qwen2 config `transformers` rebuilds the tokenizer and loses the lowering of capitals, so none here."""
    tiny = TinyPolicy(family=family, width=16, layers=1, heads=2, kv_heads=1, mlp_width=16)  # type: ignore[arg-type]
    make_tiny(tiny, tmp_path / "policy", seed=0, dtype="float32")
    opening = [{"role": "system", "content": "play!"}, {"role": "user", "content": CHARACTERS}]
    _talk(tmp_path / "policy", opening, [("crane", "_ # _ = ?"), ("slots", "no: 3 * 4 <= 12"), ("", "end.")])


def test_the_tiny_vocabulary_is_64_characters_and_no_policy_can_spell_a_control_token(tiny: Path) -> None:
    renderer = Renderer.from_directory(tiny)
    assert renderer.vocabulary == len(SPECIALS) + len(CHARACTERS) == 64 == len(set(SPECIALS) | set(CHARACTERS))
    assert renderer.eos_id == 5
    assert renderer.decode(range(6, 64)) == CHARACTERS
    assert AutoTokenizer.from_pretrained(tiny).decode(range(6, 64)) == CHARACTERS
    assert all("|" in token for token in SPECIALS) and "|" not in CHARACTERS
    assert renderer.reply("Abc |")[1:-2] == [6, 7, 8, 42, 1]


Change = Callable[[str, str], Path]


@pytest.fixture
def changed(tiny: Path, tmp_path: Path) -> Change:
    """Gives the tiny policy another text in one of its files."""

    def change(name: str, text: str) -> Path:
        shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
        (tmp_path / name).write_text(text, encoding="latin-1")
        return tmp_path

    return change


CONFIG, JINJA = "tokenizer_config.json", "chat_template.jinja"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("tokenizer.json", "{", "tokenizer.json is damaged"),
        ("tokenizer.json", "\xff\xfe", "tokenizer.json is damaged"),
        (CONFIG, "[]", "tokenizer_config.json is damaged"),
        (CONFIG, "{}", "no chat template"),
        (CONFIG, '{"eos_token": 5}', r"tokenizer_config\.json: eos_token is 5"),
        (CONFIG, '{"pad_token": {}}', r"tokenizer_config\.json: pad_token is {}"),
        (CONFIG, '{"bos_token": [1]}', r"bos_token is \[1\]"),
        (CONFIG, '{"image_token": {}}', "image_token is {}"),
        (CONFIG, '{"added_tokens_decoder": null}', "added_tokens_decoder is null"),
        (CONFIG, '{"added_tokens_decoder": {"5": "a"}}', "added_tokens_decoder is .* must be an id"),
        (CONFIG, '{"additional_special_tokens": "x"}', 'special_tokens is "x"'),
        (CONFIG, '{"extra_special_tokens": {"a": 5}}', 'extra_special_tokens is {"a": 5}'),
        (CONFIG, '{"chat_template": 5}', r"tokenizer_config\.json: chat_template is 5"),
        (CONFIG, '{"chat_template": [5]}', r"chat_template is \[5\]"),
        ("special_tokens_map.json", '{"eos_token": 5}', r"special_tokens_map\.json: eos_token is 5"),
        ("added_tokens.json", '{"<a>": "b"}', r'added_tokens\.json: <a> is "b"'),
        (JINJA, "\n{% for %}", r"malformed: /.*/chat_template\.jinja, line 2: .*\. Correct"),
        (JINJA, "{{ 1 | thrice }}", r"chat_template\.jinja, line 1: No filter named 'thrice'\. Correct"),
        (JINJA, "{{ " + "(" * 9999, r"malformed: /.*/chat_template\.jinja, .*\. Correct"),
        (JINJA, "{{ " + "9" * 9999, r"malformed: /.*/chat_template\.jinja, .*\. Correct"),
        (
            CONFIG,
            '{"chat_template": [{"name": "default", "template": "\\n{{ x"}]}',
            r"_config\.json, line 2: .*\. Correct",
        ),
    ],
)
def test_a_damaged_tokenizer_is_refused_in_one_line(name: str, text: str, says: str, changed: Change) -> None:
    with pytest.raises(StateError, match=says) as refused:
        Renderer.from_directory(changed(name, text))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages[9].content + 1 }}",
        "{% for a in range(1000000) %}x{% endfor %}",
    ],
)
def test_a_template_reaches_nothing_outside_and_its_errors_become_ours(template: str, changed: Change) -> None:
    renderer = Renderer.from_directory(changed(JINJA, template))
    with pytest.raises(StateError, match="chat template"):
        renderer.start([{"role": "user", "content": "hi"}])


def test_a_template_without_the_assistants_turns_is_refused_at_the_first_reply(changed: Change) -> None:
    renderer = Renderer.from_directory(changed(JINJA, "{{ messages[0].content }}"))
    with pytest.raises(StateError, match="multi-turn"):
        renderer.reply("hi")


@pytest.mark.parametrize(
    "change", [{"heads": 0}, {"kv_heads": 3}, {"width": 130}, {"layers": 0}, {"max_positions": -1}, {"kv_heads": 0}]
)
def test_a_tiny_policy_whose_numbers_do_not_fit_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"policy\.tiny"):
        tiny_spec(TinyPolicy(**change))


def test_rendering_needs_neither_torch_nor_transformers(tiny: Path) -> None:
    program = (
        "import sys, json; from pathlib import Path; from shoal.chat.renderer import Renderer;"
        "from shoal.models.checkpoint import tensors_of; tensors_of(Path(sys.argv[1]));"
        "Renderer.from_directory(Path(sys.argv[1])).reply('hi');"
        "print(json.dumps([name for name in ('torch', 'transformers') if name in sys.modules]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(tiny)], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(result.stdout) == []
