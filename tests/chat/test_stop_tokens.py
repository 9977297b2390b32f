"""Which tokens end a turn: by the model's rule those of its files and its template, by the control rule nearly all."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.chat.renderer import Renderer
from shoal.config import TinyPolicy
from shoal.errors import StateError
from shoal.models.checkpoint import load_policy, save_policy, snapshot
from shoal.models.config import write_json
from shoal.models.random_model import make_tiny, tiny_spec
from shoal.models.transformer_config import TransformerConfig
from shoal.protocol.constants import MAX_JSON_BYTES
from tests.models.templates import NAMES, directory_of, end_of, renderer_of, spell, tokenizer_of

BESIDE = {
    "diffusion_gemma": {"<|tool_response>"}, "gemma4": {"<|tool_response>"}, "gemma4_v3": {"<|tool_response>"},
    "gemma4_v4": {"<|tool_response>"}, "gemma4_v5": {"<|tool_response>"}, "gptoss": {"<|call|>"},
}  # fmt: skip
"""What ends a turn that calls a tool, where it is not the end token."""

"""SHA-256 of what 41 templates gave then, but that `written` closes thoughts, and refuses calls that transformers does not
show. Logs from then are replayed by this rule."""


def _stops(renderer: Renderer) -> set[str]:
    return {renderer._special[token] for token in renderer.stop_ids}


@pytest.mark.parametrize("name", NAMES)
def test_a_turn_ends_where_the_model_was_trained_to_end_it(name: str) -> None:
    assert _stops(renderer_of(name)) == {end_of(name), *BESIDE.get(name, ())}


@pytest.mark.parametrize("name", NAMES)
def test_an_ended_turn_and_its_reply_read_as_the_template_writes_them(name: str) -> None:
    """The end token that the policy wrote is there once, and nothing of the reply is missing."""
    renderer = renderer_of(name)
    turn = renderer.written({"role": "assistant", "content": "FINE"})
    told = spell(renderer, [*turn, *renderer.reply("GO ON")])
    asked = [{"role": "user", "content": "."}]
    whole = renderer._text([*asked, {"role": "assistant", "content": "FINE"}, {"role": "user", "content": "GO ON"}], {})
    end, shown = end_of(name), whole[whole.rindex("FINE") :]
    if name == "gptoss":  # in a history it ends turns with another token
        shown = shown.replace("<|end|>", end, 1)
    elif name == "glm4moe":  # its template ends turns with nothing
        shown = shown.replace("FINE", "FINE" + end, 1)
    assert told[told.rindex("FINE") :] == shown


@pytest.mark.parametrize("name", ["deepseekv3", "deepseek_r1_distill"])
def test_a_thought_that_the_template_leaves_out_is_learned(name: str) -> None:
    renderer = renderer_of(name)
    whole = {"role": "assistant", "content": "<think>\nGOOD\n</think>\n\n4"}
    apart = {"role": "assistant", "content": "4", "reasoning_content": "GOOD"}
    for said in (whole, apart, whole["content"]):
        assert renderer.decode(renderer.written(said)) == "GOOD\n</think>\n\n4", "the prompt has opened it"


def _checkpoint(name: str, directory: Path, ends: object = None, reserved: tuple[str, ...] = ()) -> Path:
    """A checkpoint's light files with this template, more control tokens, and a `generation_config.json`."""
    directory_of(name, directory)
    tokenizer = tokenizer_of(name)
    tokenizer.add_special_tokens([*reserved])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = json.loads((directory / "config.json").read_text())
    write_json(directory / "config.json", config | {"vocab_size": tokenizer.get_vocab_size()})
    if ends is not None:
        ids = [tokenizer.token_to_id(end) for end in ends] if isinstance(ends, list) else ends
        write_json(directory / "generation_config.json", {"eos_token_id": ids, "top_p": 0.9})
    return directory


def test_llama_writes_python_tags_and_reserved_tokens_within_turns(tmp_path: Path) -> None:
    more = ("<|eom_id|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|finetune_right_pad_id|>")
    ends = ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]
    directory = _checkpoint("llama3_1", tmp_path, ends, more)
    renderer = Renderer.from_directory(directory)
    assert _stops(renderer) == set(ends) and renderer.has_own_stops
    ids = {text: index for index, text in renderer._special.items()}
    call = [ids["<|python_tag|>"], *renderer.encode('{"name": "add"}'), ids["<|reserved_special_token_0|>"]]
    assert not renderer.stop_ids.intersection(call)
    assert renderer.decode([*call, ids["<|eom_id|>"]]) == '<|python_tag|>{"name": "add"}'
    older = Renderer.from_directory(directory, "control")
    assert ids["<|reserved_special_token_0|>"] in older.stop_ids and not _stops(renderer) >= _stops(older)


def test_the_list_of_generation_config_goes_before_that_of_config(tmp_path: Path) -> None:
    directory = _checkpoint("qwen3", tmp_path, ["<|im_end|>", "<|endoftext|>"], ("<|endoftext|>",))
    assert _stops(Renderer.from_directory(directory)) == {"<|im_end|>", "<|endoftext|>"}
    (directory / "generation_config.json").unlink()
    assert _stops(Renderer.from_directory(directory)) == {"<|im_end|>"}


def test_a_template_that_ends_turns_with_another_token_than_the_files_name_adds_it(tmp_path: Path) -> None:
    """As in models that were tuned to chat, whose files still name the end of a text."""
    directory = _checkpoint("qwen3", tmp_path, ["<|endoftext|>"], ("<|endoftext|>",))
    write_json(directory / "tokenizer_config.json", {"eos_token": "<|endoftext|>"})
    assert _stops(Renderer.from_directory(directory)) == {"<|im_end|>", "<|endoftext|>"}


def test_a_template_that_always_opens_the_next_turn_ends_no_turn_with_its_header(tmp_path: Path) -> None:
    directory = _checkpoint("qwen3", tmp_path)
    write_json(directory / "tokenizer_config.json", {})
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    )
    assert _stops(Renderer.from_directory(directory)) == {"<|im_end|>"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is damaged"),
        (
            '{"eos_token_id": "5"}',
            r'/generation_config\.json: eos_token_id is "5", and must be a whole number or a list or null: correct',
        ),
        (
            '{"eos_token_id": 64}',
            r"/generation_config\.json: eos_token_id = \[64\]: not below vocab_size = 64",
        ),
        (
            '{"eos_token_id": -1}',
            r"/generation_config\.json: eos_token_id = \[-1\]: an id is below 0; leave the key out if",
        ),
    ],
)
def test_a_damaged_generation_config_is_refused_in_one_line(text: str, says: str, tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", tiny_spec(TinyPolicy()).to_hf())
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(StateError, match=says) as refused:
        TransformerConfig.from_directory(tmp_path)
    assert "\n" not in str(refused.value)


SAMPLING = {"top_k": 20, "do_sample": True, "pad_token_id": 3, "temperature": 0.6, "top_p": 0.95, "own": {"é": [1e-7]}}
"""What a model says of sampling; shoal's tiny ones have another temperature, and another token to pad with."""


def _started(directory: Path, **generation: Any) -> Path:
    """A tiny policy whose config.json names 5 as its end, with a `generation_config.json` as other programs write it."""
    tiny = TinyPolicy(width=16, layers=1, heads=2, kv_heads=1, mlp_width=16)
    make_tiny(tiny, directory, seed=0, dtype="float32")
    text = json.dumps(SAMPLING | generation, ensure_ascii=False)
    (directory / "generation_config.json").write_text(text, encoding="utf-8")
    return directory


def _generation(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "generation_config.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize(
    ("named", "kept"),
    [
        ({"eos_token_id": 5}, 5),
        ({"eos_token_id": [5]}, [5]),
        ({"eos_token_id": [4, 5]}, [4, 5]),
        ({"eos_token_id": 2}, 2),
        ({"eos_token_id": None}, 5),
        ({}, 5),
    ],
)
def test_published_versions_keep_what_the_first_says_of_sampling(
    named: dict[str, Any], kept: object, tmp_path: Path
) -> None:
    one, two, three = _started(tmp_path / "one", **named), tmp_path / "two", tmp_path / "three"
    save_policy(load_policy(one), two, "float32", tokenizer_from=one)
    assert _generation(two) == SAMPLING | {"eos_token_id": kept}
    assert TransformerConfig.from_directory(two) == TransformerConfig.from_directory(one)
    save_policy(snapshot(load_policy(two), "float32"), three, "float32", tokenizer_from=two)
    name = "generation_config.json"
    assert (three / name).read_bytes() == (two / name).read_bytes()


def test_the_end_tokens_of_a_policy_go_before_those_beside_its_tokenizer(tmp_path: Path) -> None:
    one, other = _started(tmp_path / "one", eos_token_id=[4, 5]), _started(tmp_path / "other", eos_token_id=[3])
    save_policy(load_policy(one), tmp_path / "two", "float32", tokenizer_from=other)
    assert _generation(tmp_path / "two") == SAMPLING | {"eos_token_id": [4, 5]}
    assert TransformerConfig.from_directory(tmp_path / "two").turn_ends == (4, 5)


def test_a_policy_that_began_without_a_generation_config_has_that_of_its_spec(tmp_path: Path) -> None:
    one = _started(tmp_path / "one")
    (one / "generation_config.json").unlink()
    model = load_policy(one)
    save_policy(model, tmp_path / "two", "float32", tokenizer_from=one)
    expected = {"do_sample": True, "temperature": 1.0, "eos_token_id": 5, "pad_token_id": 0}
    assert _generation(tmp_path / "two") == model.spec.generation_to_hf() == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"eos_token_id": 5, "own": "' + MAX_JSON_BYTES * "x" + '"}', "is larger than 1048576 bytes"),
        (9999 * "[", "is damaged"),
        ("[5]", "is damaged"),
        ('{"eos_token_id": [5, "5"]}', "must be a whole number"),
        ("<html>", "is a web page"),
    ],
)
def test_a_generation_config_that_was_damaged_since_is_not_published(text: str, says: str, tmp_path: Path) -> None:
    model = load_policy(_started(tmp_path / "one"))
    (tmp_path / "one" / "generation_config.json").write_text(text)
    with pytest.raises(StateError, match=says):
        save_policy(model, tmp_path / "two", "float32", tokenizer_from=tmp_path / "one")
    assert {path.name for path in tmp_path.iterdir()} == {"one"}
