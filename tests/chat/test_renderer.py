"""The renderer gives the tokens of `apply_chat_template`, turn by turn, for our tokenizer and for ChatML."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from shoal.chat.renderer import Renderer
from shoal.config import TinyPolicy
from shoal.errors import ConfigError, StateError
from shoal.models.config import write_json
from shoal.models.random_model import CHARACTERS, SPECIALS, make_tiny, tiny_spec

CHATML = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant") %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
TEXTS = ["Hello there.", "What is 12 + 30?\nSay it in words!", " spaced  out ", "naïve 漢字 🙂", "{{ messages }}"]


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer with the template of Qwen2.5, beside a config of more tokens than it knows."""
    directory = tmp_path_factory.mktemp("chatml")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS * 5, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {"tokenizer_class": "TokenizersBackend", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    )
    (directory / "chat_template.jinja").write_text(CHATML)
    spec = tiny_spec(TinyPolicy()).to_hf()
    size = tokenizer.get_vocab_size()
    write_json(
        directory / "config.json", spec | {"vocab_size": size + 50, "eos_token_id": size - 2, "pad_token_id": None}
    )
    return directory


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
    """Play a conversation as `envs/play` does and compare with the template's text at every turn."""
    renderer, peer = Renderer.from_directory(directory), AutoTokenizer.from_pretrained(directory)
    messages, conversation = list(opening), renderer.start(opening)
    assert conversation == _template(directory, messages)
    for said, answered in turns:
        written = [*peer(said, add_special_tokens=False)["input_ids"], renderer.eos_id]
        conversation += written + renderer.reply(answered)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": answered}]
        assert conversation == _template(directory, messages)


@pytest.mark.parametrize("system", [False, True])
def test_the_tiny_tokenizer_renders_as_transformers_does_over_many_turns(system: bool, tiny: Path) -> None:
    opening = [{"role": "user", "content": "Guess a WORD of 5 letters.\n(lower case)"}]
    opening = [{"role": "system", "content": "play!"}, *opening] if system else opening
    _talk(tiny, opening, [("crane", "_ # _ = ?"), ("slots", "no: 3 * 4 <= 12"), ("", "end.")])


@pytest.mark.parametrize("system", [False, True])
def test_chatml_renders_as_transformers_does_over_many_turns(system: bool, chatml: Path) -> None:
    opening = [{"role": "user", "content": TEXTS[0]}]
    opening = [{"role": "system", "content": TEXTS[2]}, *opening] if system else opening
    _talk(chatml, opening, [(TEXTS[1], TEXTS[3]), (TEXTS[3], TEXTS[4]), ("", TEXTS[2]), (TEXTS[4], "")])


@settings(max_examples=30, deadline=None)
@given(
    content=st.text(st.characters(blacklist_categories=["Cs"]), max_size=40), role=st.sampled_from(["user", "system"])
)
def test_any_reply_continues_the_templates_text(chatml: Path, content: str, role: str) -> None:
    renderer = Renderer.from_directory(chatml)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": role, "content": content},
    ]
    opening = renderer.start(messages[:1])
    assert renderer.start(messages)[len(opening) + 1 :] == [
        renderer.eos_id,
        *renderer.reply([{"role": role, "content": content}]),
    ]


def test_only_control_tokens_end_a_turn_by_the_control_rule(chatml: Path, tiny: Path) -> None:
    renderer, peer = Renderer.from_directory(chatml, "control"), AutoTokenizer.from_pretrained(chatml)
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert renderer.stop_ids == frozenset(peer.convert_tokens_to_ids(specials))
    assert renderer.eos_id == peer.eos_token_id
    assert peer.convert_tokens_to_ids("<think>") not in renderer.stop_ids
    for rule in ("control", "model"):
        assert Renderer.from_directory(tiny, rule).stop_ids == frozenset(range(6))
        assert not Renderer.from_directory(tiny, rule).has_own_stops


def test_decoding_drops_control_tokens_and_replaces_bad_bytes(chatml: Path) -> None:
    renderer, peer = Renderer.from_directory(chatml), AutoTokenizer.from_pretrained(chatml)
    ids = peer(TEXTS[3], add_special_tokens=False)["input_ids"]
    assert renderer.decode([*ids, renderer.eos_id]) == TEXTS[3]
    lone_byte = peer.convert_tokens_to_ids("ð")
    assert renderer.decode([lone_byte, *ids[:1]]).startswith("\N{REPLACEMENT CHARACTER}")
    assert renderer.decode([renderer.vocabulary - 1]) == ""


def test_the_tiny_vocabulary_is_64_characters_and_no_policy_can_spell_a_control_token(tiny: Path) -> None:
    renderer = Renderer.from_directory(tiny)
    assert renderer.vocabulary == len(SPECIALS) + len(CHARACTERS) == 64 == len(set(SPECIALS) | set(CHARACTERS))
    assert renderer.eos_id == 5
    assert renderer.decode(range(6, 64)) == CHARACTERS
    assert AutoTokenizer.from_pretrained(tiny).decode(range(6, 64)) == CHARACTERS
    assert all("|" in token for token in SPECIALS) and "|" not in CHARACTERS
    assert renderer.reply("Abc |")[1:-2] == [6, 7, 8, 42, 1]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_autotokenizer_reads_the_tiny_tokenizer_beside_each_family(family: str, tmp_path: Path) -> None:
    """Beside a Qwen2 config `transformers` rebuilds the tokenizer and loses the lowering of capitals, so none here."""
    tiny = TinyPolicy(family=family, width=16, layers=1, heads=2, kv_heads=1, mlp_width=16)  # type: ignore[arg-type]
    make_tiny(tiny, tmp_path / "policy", seed=0, dtype="float32")
    messages = [{"role": "user", "content": CHARACTERS}]
    assert _template(tmp_path / "policy", messages) == Renderer.from_directory(tmp_path / "policy").start(messages)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("tokenizer.json", "{", "tokenizer.json is damaged"),
        ("tokenizer.json", "\xff\xfe", "tokenizer.json is damaged"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json is damaged"),
        ("tokenizer_config.json", "{}", "no chat template"),
        (
            "tokenizer_config.json",
            '{"eos_token": 5}',
            r"tokenizer_config\.json: eos_token is 5, and must be a text or a table",
        ),
        ("tokenizer_config.json", '{"pad_token": {}}', r"tokenizer_config\.json: pad_token is {}, and must be a text"),
        ("tokenizer_config.json", '{"bos_token": [1]}', r"bos_token is \[1\], and must be a text or a table"),
        ("tokenizer_config.json", '{"image_token": {}}', "image_token is {}, and must be a text"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": null}',
            "added_tokens_decoder is null, and must be a table",
        ),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"5": "a"}}',
            "added_tokens_decoder is .* must be an id with",
        ),
        ("tokenizer_config.json", '{"additional_special_tokens": "x"}', 'special_tokens is "x", and must be a list'),
        (
            "tokenizer_config.json",
            '{"extra_special_tokens": {"a": 5}}',
            'extra_special_tokens is {"a": 5}, and must be',
        ),
        (
            "tokenizer_config.json",
            '{"chat_template": 5}',
            r"tokenizer_config\.json: chat_template is 5, and must be a text",
        ),
        ("tokenizer_config.json", '{"chat_template": [5]}', r"chat_template is \[5\], and must be a text or a list"),
        (
            "special_tokens_map.json",
            '{"eos_token": 5}',
            r"special_tokens_map\.json: eos_token is 5, and must be a text",
        ),
        ("added_tokens.json", '{"<a>": "b"}', r'added_tokens\.json: <a> is "b", and must be a whole number'),
        (
            "chat_template.jinja",
            "\n{% for %}",
            r"malformed: /.*/chat_template\.jinja, line 2: .*\. Correct the template there",
        ),
        (
            "chat_template.jinja",
            "{{ 1 | thrice }}",
            r"malformed: /.*/chat_template\.jinja, line 1: No filter named 'thrice'\. Correct",
        ),
        ("chat_template.jinja", "{{ " + "(" * 9999, r"malformed: /.*/chat_template\.jinja, .*\. Correct"),
        ("chat_template.jinja", "{{ " + "9" * 9999, r"malformed: /.*/chat_template\.jinja, .*\. Correct"),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "default", "template": "\\n{{ x"}]}',
            r"malformed: chat_template of /.*/tokenizer_config\.json, line 2: .*\. Correct the template there",
        ),
    ],
)
def test_a_damaged_tokenizer_is_refused_in_one_line(
    name: str, text: str, says: str, tiny: Path, tmp_path: Path
) -> None:
    for path in tiny.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(StateError, match=says) as refused:
        Renderer.from_directory(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception('only the user may speak') }}",
        "{{ 1 / 0 }}",
        "{{ messages[9].content + 1 }}",
        "{% for a in range(1000000) %}x{% endfor %}",
    ],
)
def test_a_template_reaches_nothing_outside_and_its_errors_become_ours(
    template: str, tiny: Path, tmp_path: Path
) -> None:
    for path in tiny.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    renderer = Renderer.from_directory(tmp_path)
    with pytest.raises(StateError, match="chat template"):
        renderer.start([{"role": "user", "content": "hi"}])


def test_a_template_without_the_assistants_turns_is_refused_at_the_first_reply(tiny: Path, tmp_path: Path) -> None:
    for path in tiny.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    renderer = Renderer.from_directory(tmp_path)
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
