"""Checkpoints on disk: complete or absent, exact after a round trip; hostile bytes are refused in one line."""

import hashlib
import itertools
import json
import math
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from shoal.chat.renderer import Renderer
from shoal.config import TinyPolicy
from shoal.errors import StateError
from shoal.models import safetensors_writer
from shoal.models.checkpoint import find_tensors, load_policy, read_header, save_policy, tensors_of
from shoal.models.config import write_json
from shoal.models.load_tensors import _fill
from shoal.models.lora_config import AdapterSpec
from shoal.models.random_model import make_tiny, tiny_spec
from shoal.models.safetensors_header import find_whole
from shoal.models.tokenizer_loader import open_tokenizer
from shoal.models.transformer import Transformer
from shoal.models.transformer_config import TransformerConfig
from shoal.weights.manifest import is_publishable
from tests.low_memory import full_disk

SMALL = TinyPolicy(width=16, layers=2, heads=2, kv_heads=1, mlp_width=24, max_positions=64)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    make_tiny(SMALL, tmp_path / "policy", seed=3, dtype="float32")
    return tmp_path / "policy"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_shapes_that_a_spec_promises_equal_the_models(family: str, tied: bool) -> None:
    spec = tiny_spec(TinyPolicy(family=family, width=16, layers=2, heads=4, kv_heads=2, mlp_width=24, tied=tied))  # type: ignore[arg-type]
    model = Transformer(spec)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == spec.tensor_shapes()
    assert model.state_dict().keys() == spec.tensor_shapes().keys()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saving_and_loading_gives_the_same_values_in_the_dtype(dtype: str, checkpoint: Path, tmp_path: Path) -> None:
    model = load_policy(checkpoint)
    save_policy(model, tmp_path / "copy", dtype, tokenizer_from=checkpoint)
    target = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    narrow, wide = load_policy(tmp_path / "copy", target), load_policy(tmp_path / "copy")
    for name, parameter in model.named_parameters():
        assert narrow.get_parameter(name).dtype == target
        assert torch.equal(narrow.get_parameter(name), parameter.to(target))
        assert torch.equal(wide.get_parameter(name), parameter.to(target).float())
    save_policy(wide, tmp_path / "again", dtype, tokenizer_from=tmp_path / "copy")
    assert tensors_of(tmp_path / "again") == tensors_of(tmp_path / "copy")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "copy" / name).read_bytes()


def test_tensors_are_listed_with_dtype_shape_and_hash(checkpoint: Path) -> None:
    listed = tensors_of(checkpoint)
    weight = load_policy(checkpoint).model.norm.weight
    expected = hashlib.sha256(weight.detach().numpy().tobytes()).hexdigest()
    assert listed["model.norm.weight"] == ("F32", (16,), expected)
    assert list(listed) == sorted(listed)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_weights_are_written_as_shards_that_both_libraries_open(dtype: str, tied: bool, tmp_path: Path) -> None:
    make_tiny(msgspec.structs.replace(SMALL, tied=tied), tmp_path / "whole", seed=3, dtype=dtype)
    model = load_policy(tmp_path / "whole")
    save_policy(model, tmp_path / "parts", dtype, tokenizer_from=tmp_path / "whole", shard_bytes=4000)
    files = sorted(path.name for path in (tmp_path / "parts").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    for file in files:
        tensors = read_header(tmp_path / "parts" / file).values()
        assert len(tensors) == 1 or sum(t.end - t.start for t in tensors) <= 4000
    assert tensors_of(tmp_path / "parts") == tensors_of(tmp_path / "whole")  # and so the same weights root
    again = load_policy(tmp_path / "parts")
    assert all(torch.equal(p, again.get_parameter(name)) for name, p in model.named_parameters())
    peer = AutoModelForCausalLM.from_pretrained(tmp_path / "parts", dtype=torch.float32)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert (peer(tokens).logits - again.logits(again(tokens))).abs().max() < 1e-4


def test_a_smaller_policy_replaces_shards_and_their_index(checkpoint: Path) -> None:
    model = load_policy(checkpoint)
    save_policy(model, checkpoint, "float32", shard_bytes=4000)
    assert (checkpoint / "model.safetensors.index.json").exists() and not (checkpoint / "model.safetensors").exists()
    save_policy(model, checkpoint, "float32")
    assert [path.name for path in checkpoint.glob("model*")] == ["model.safetensors"]


def test_a_tensor_beyond_5_gb_of_a_file_is_found_and_read(tmp_path: Path) -> None:
    rows, side = 1400, 1 << 20
    header = {"a": _entry(0, rows * side * 4, [rows, side]), "b": _entry(rows * side * 4, rows * side * 4 + 8, [2])}
    _write(tmp_path / "model.safetensors", header, b"")
    with (tmp_path / "model.safetensors").open("r+b") as file:  # a file with a hole: it takes no room
        file.seek(rows * side * 4, 2)
        file.write(struct.pack("<2f", 1.5, -2.0))
    stored = find_tensors(tmp_path)
    assert stored["a"].end - stored["a"].start > 5_000_000_000
    read = torch.empty(2)
    with stored["b"].file.open("rb", buffering=0) as file:
        _fill(read, stored["b"], file)
    assert read.tolist() == [1.5, -2.0]


def test_code_beside_a_model_is_neither_run_nor_written_on(checkpoint: Path, tmp_path: Path) -> None:
    code = f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).write_text('')"
    names = ("modeling_mine.py", "configuration_mine.py", "tokenization_mine.py", "sitecustomize.py")
    for name in names:
        (checkpoint / name).write_text(code)
    foreign = {"auto_map": dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"), "modeling_mine.Mine")}
    for name in ("config.json", "tokenizer_config.json"):
        config = json.loads((checkpoint / name).read_text())
        (checkpoint / name).write_text(json.dumps(config | foreign))
    model = load_policy(checkpoint)
    Renderer.from_directory(checkpoint).start([{"role": "user", "content": "hi"}])
    save_policy(model, tmp_path / "copy", "float32", tokenizer_from=checkpoint)
    AutoModelForCausalLM.from_pretrained(tmp_path / "copy", trust_remote_code=False)
    assert not (tmp_path / "ran").exists()
    assert (
        not list((tmp_path / "copy").glob("*.py")) and "auto_map" not in (tmp_path / "copy" / "config.json").read_text()
    )
    assert not any(is_publishable(name) for name in names)


def test_no_code_of_ours_trusts_code_beside_a_model() -> None:
    package = Path(__file__).parents[2] / "shoal"
    assert not [file for file in package.rglob("*.py") if "trust_remote_code=True" in file.read_text()]


@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.bfloat16], [torch.int8, torch.float32]])
def test_weights_are_written_with_the_bytes_of_the_safetensors_library(
    dtypes: list[torch.dtype], tmp_path: Path
) -> None:
    shapes = {"b.weight": (3, 5), "a.long\u00e9 name": (7,), "b": (2, 2), "a": (3,)}
    tensors = {
        name: (9 * torch.randn(shape)).to(dtype)
        for (name, shape), dtype in zip(shapes.items(), itertools.cycle(dtypes), strict=False)
    }
    save_file(tensors, tmp_path / "library", metadata={"format": "pt"})
    forms = {
        name: safetensors_writer.TensorHeader(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    }
    safetensors_writer.write_tensors(tmp_path / "ours", forms, tensors.items())
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "library").read_bytes()


def test_half_a_checkpoint_is_removed_when_the_disk_is_full(checkpoint: Path) -> None:
    before, model = tensors_of(checkpoint), load_policy(checkpoint)
    with (
        full_disk(4000),
        pytest.raises(StateError, match=r"cannot write checkpoint .*File too large\. Raise the limit"),
    ):
        save_policy(model, checkpoint, "float32")
    assert tensors_of(checkpoint) == before
    assert [path.name for path in checkpoint.parent.iterdir()] == [checkpoint.name]


def _write(path: Path, header: Any, data: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def _entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


HOSTILE: dict[str, Callable[[Path], None]] = {
    "empty": lambda p: p.write_bytes(b""),
    "header longer than the file": lambda p: _write(p, {}, b"", length=1000),
    "header of 2^63 bytes": lambda p: _write(p, {}, b"", length=1 << 63),
    "header above the cap": lambda p: _write(p, b" " * ((1 << 20) + 1), b""),
    "no JSON": lambda p: _write(p, b"{nope", b""),
    "deep JSON": lambda p: _write(p, b"[" * 100_000, b""),
    "a list": lambda p: _write(p, [], b""),
    "pickled dtype": lambda p: _write(p, {"a": _entry(0, 4, [1], "OBJ")}, b"1234"),
    "integers": lambda p: _write(p, {"a": _entry(0, 4, [1], "I32")}, b"1234"),
    "bytes after the last tensor": lambda p: _write(p, {"a": _entry(0, 4, [1])}, b"12345"),
    "tensor beyond the end": lambda p: _write(p, {"a": _entry(0, 8, [2])}, b"1234"),
    "overlap": lambda p: _write(p, {"a": _entry(0, 8, [2]), "b": _entry(4, 12, [2])}, bytes(12)),
    "gap": lambda p: _write(p, {"a": _entry(0, 4, [1]), "b": _entry(8, 12, [1])}, bytes(12)),
    "size against shape": lambda p: _write(p, {"a": _entry(0, 8, [3])}, bytes(8)),
    "negative offset": lambda p: _write(p, {"a": _entry(-4, 0, [1])}, bytes(4)),
    "negative side": lambda p: _write(p, {"a": _entry(0, 4, [-1, -1])}, bytes(4)),
    "empty tensor": lambda p: _write(p, {"a": _entry(0, 0, [0])}, b""),
    "huge side": lambda p: _write(p, {"a": _entry(0, 4, [1 << 40])}, bytes(4)),
    "shape of text": lambda p: _write(p, {"a": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}, bytes(4)),
    "unknown field": lambda p: _write(p, {"a": _entry(0, 4, [1]) | {"eval": "x"}}, bytes(4)),
    "too many tensors": lambda p: _write(p, {f"t{i}": _entry(0, 0, [1]) for i in range(10_001)}, b""),
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_a_hostile_weights_file_is_refused_in_one_line(fault: str, tmp_path: Path) -> None:
    HOSTILE[fault](tmp_path / "model.safetensors")
    with pytest.raises(StateError) as refused:
        tensors_of(tmp_path)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [
        ("F64", "dtype=torch.float32"),
        ("F8_E4M3", "is quantised: use it in full"),
        ("I32", "If it is a mask, .* quantised"),
    ],
)
def test_a_dtype_that_no_policy_has_gets_its_own_remedy(dtype: str, remedy: str, tmp_path: Path) -> None:
    _write(tmp_path / "model.safetensors", {"a": _entry(0, 8, [1], dtype)}, bytes(8))
    with pytest.raises(StateError, match=rf"tensor a is {dtype}; a policy's are one of .*{remedy}"):
        tensors_of(tmp_path)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2000), st.binary(min_size=1, max_size=8))
def test_a_damaged_header_gives_the_tensors_or_a_refusal_never_a_crash(
    tmp_path_factory: pytest.TempPathFactory, place: int, noise: bytes
) -> None:
    directory = tmp_path_factory.mktemp("damaged")
    tensors = {"a": _entry(0, 8, [2]), "b": _entry(8, 16, [2, 2], "BF16"), "__metadata__": {"format": "pt"}}
    _write(directory / "model.safetensors", tensors, bytes(16))
    data = bytearray((directory / "model.safetensors").read_bytes())
    place %= len(data)
    data[place : place + len(noise)] = noise
    (directory / "model.safetensors").write_bytes(data)
    try:
        entries = read_header(directory / "model.safetensors")
    except StateError as refusal:
        assert "\n" not in str(refusal)
    else:
        assert sum(entry.end - entry.start for entry in entries.values()) == 16  # no byte missing, none twice


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_a_pointer_of_git_lfs_is_named_in_the_place_of_any_file(name: str, checkpoint: Path) -> None:
    (checkpoint / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 11421896\n")
    with pytest.raises(StateError, match=rf"/{name} is a pointer of Git LFS .*fetch all files \(`git lfs pull`\)$"):
        open_tokenizer(checkpoint)
        find_tensors(checkpoint)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_web_page_is_named_in_the_place_of_a_small_file(name: str, checkpoint: Path) -> None:
    (checkpoint / name).write_text("\n<!DOCTYPE html>\n<html><body>Access to model is restricted</body></html>\n")
    with pytest.raises(StateError, match=rf"/{name} is a web page \(HTML\) .*: download the file again$"):
        Renderer.from_directory(checkpoint)


@pytest.mark.parametrize("name", [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "model.safetensors", "model.safetensors.index.json", "adapter_config.json",
])  # fmt: skip
def test_a_pipe_is_refused_in_the_place_of_any_file_instead_of_waited_for(name: str, checkpoint: Path) -> None:
    (checkpoint / name).unlink(missing_ok=True)
    if name.endswith("index.json"):
        (checkpoint / "model.safetensors").unlink()
    os.mkfifo(checkpoint / name)
    with pytest.raises(StateError, match=rf"/{name} is a pipe or a device in the place of a file: put the file itself"):
        if name == "adapter_config.json":
            AdapterSpec.from_directory(checkpoint)
        Renderer.from_directory(checkpoint)
        find_tensors(checkpoint)


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_chat_template_longer_than_any_models_is_refused(name: str, checkpoint: Path) -> None:
    config = checkpoint / "tokenizer_config.json"
    told = json.loads(config.read_text())
    text = told["chat_template"] + "{# " + "x" * (1 << 18) + " #}"
    if name == config.name:
        write_json(config, told | {"chat_template": [{"name": "default", "template": text}]})
    else:
        (checkpoint / name).write_text(text)
    with pytest.raises(StateError, match=rf"/{name}.* 262144"):
        Renderer.from_directory(checkpoint)


def test_a_chat_template_that_is_not_utf8_is_refused_as_by_transformers(checkpoint: Path) -> None:
    (checkpoint / "chat_template.jinja").write_bytes(b"{{ messages }}\xff\xfe")
    with pytest.raises(
        StateError, match=r"/chat_template\.jinja is not UTF-8 text: byte 14 is 0xff\. Write it in UTF-8"
    ):
        Renderer.from_directory(checkpoint)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_json_file_is_utf8_also_in_texts_that_nobody_reads(name: str, checkpoint: Path) -> None:
    path = checkpoint / name
    begun = path.read_bytes().rstrip().removesuffix(b"}") + b', "a": "'
    path.write_bytes(begun + b'\xe9\xff"}')
    with pytest.raises(StateError, match=rf"/{name} is .*0xe9 in position {len(begun)}: "):
        Renderer.from_directory(checkpoint)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"<!DOCTYPE html>\n<html>" + bytes(99), r"begins with '<!DOCTYPE html>.*'\. Download it again"),
        (
            b"PK\x03\x04" + bytes([255]) * 99,
            r"begins with 'PK.*Weights in pickles \(\.bin\) are never read: .*save_pretrained",
        ),
        (b"GGUF\x03\0\0\0\1" + bytes(99), r"Weights in GGUF are for other programs: download the model in safetensors"),
        (b"", "it has 0 bytes. Download it again"),
        ((200).to_bytes(8, "little") + b"{}", "header of 200 in 10 bytes"),
    ],
)
def test_a_file_that_is_no_safetensors_says_how_it_begins_and_what_to_do(
    data: bytes, says: str, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(StateError, match=f"is not a whole safetensors file: .*{says}"):
        find_tensors(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused_and_no_machine_is_blamed(value: float, checkpoint: Path) -> None:
    """Otherwise a worker of such a version would be told to check its own memory."""
    model = load_policy(checkpoint)
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 4] = value
    save_policy(model, checkpoint.parent / "v000007-abc", "float32", tokenizer_from=checkpoint)
    with pytest.raises(
        StateError,
        match=r"v000007-abc: model\.layers\.1\.mlp\.up_proj\.weight .*machine is not at fault.*If the model is yours, take",
    ):
        load_policy(checkpoint.parent / "v000007-abc")


@pytest.mark.parametrize(
    "index",
    [
        {"weight_map": {"a": "../model.safetensors"}},
        {"weight_map": {"a": "/etc/passwd"}},
        {"weight_map": {"a": "model.bin"}},
        {"weight_map": {"a": "o\0ne.safetensors"}},
        {"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}},
        {"weight_map": {}},
        {"weight_map": []},
        {},
    ],
)
def test_a_hostile_index_of_shards_is_refused(index: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    _write(tmp_path / "one.safetensors", {"a": _entry(0, 4, [1])}, bytes(4))
    if index == {"weight_map": {}}:
        assert find_tensors(tmp_path) == {}
        return
    with pytest.raises(StateError):
        find_tensors(tmp_path)


def test_a_config_that_does_not_fit_the_weights_is_refused_with_the_tensors_name(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    for change, says in (
        ({"intermediate_size": 25}, "gate_proj|down_proj|up_proj"),
        ({"num_hidden_layers": 3}, r"lacks tensor model\.layers\.2"),
        ({"num_hidden_layers": 1}, r"does not explain, model\.layers\.1"),
        ({"model_type": "llama"}, "k_norm"),
        (
            {"num_key_value_heads": None},
            r"k_proj.*config\.json is wrong \(num_key_value_heads = null, .*\)\. Correct it",
        ),
        ({"vocab_size": 10}, r"config\.json is wrong \(vocab_size = 10, hidden_size = \d+\)\. Correct it, or take"),
    ):
        (checkpoint / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(StateError, match=says):
            load_policy(checkpoint)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "gpt2"}, "known: llama, mistral, qwen2, qwen3"),
        ({"hidden_size": "16"}, 'config.json: hidden_size is "16", and must be a whole number: correct it there'),
        ({"rms_norm_eps": None}, "config.json: rms_norm_eps is null, and must be a number: correct it there"),
        ({"rope_theta": "1e4"}, 'config.json: rope_theta is "1e4", and must be a number or null: correct it there'),
        ({"tie_word_embeddings": None}, "tie_word_embeddings is null, and must be true or false: correct it there"),
        ({"layer_types": [1]}, r"layer_types is \[1\], and layer_types\[0\] must be a text: correct it there"),
        ({"hidden_size": -16}, "hidden_size = -16"),
        ({"hidden_size": 1 << 40}, "hidden_size = "),
        ({"num_hidden_layers": 1 << 23}, "MAX_TENSORS"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads = 3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"intermediate_size": -1}, "intermediate_size = -1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings = 0"),
        ({"head_dim": 7}, "must be even"),
        ({"rms_norm_eps": 0}, r"rms_norm_eps = 0\.0: must be above 0 and below 1\. Choose"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            "rope_parameters gives no factor, which rope_type yarn needs",
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "rope_theta"),
        ({"rope_parameters": None, "rope_theta": None}, "rope_theta = None"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": None}, "rope_type is 'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "known: default, linear, llama3, yarn"),
        ({"rope_scaling": {"rope_type": ["yarn"], "factor": 4.0}}, "rope_type is"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "malformed"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1e30}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_slow": 9, "beta_fast": 8}}, "bounds"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4, "attention_factor": -1}},
            "must be above 0 and at most 100",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": math.e, "mscale": 1, "mscale_all_dim": -10}}, "attention"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}, "rope_theta": 1}, "cannot be scaled"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": -1}}, "original"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "rope_scaling gives no low_freq_factor, which rope_type llama3 needs",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling gives no factor, which rope_type linear needs"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.25}, r'partial_rotary_factor.* = "auto"'),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "nested by layer type"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": None}},
            "nested by layer type",
        ),
        ({"rope_scaling": {"sliding_attention": {"rope_type": "default"}}}, "nested by layer type"),
        ({"hidden_act": "gelu"}, r'gelu.*\. Choose another model, or set policy\.implementation = "auto"'),
        ({"rope_theta": 1e12, "rope_parameters": None}, "must be at least 1 and below 1e12"),
        ({"attention_bias": True}, r'attention_bias.* = "auto"'),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, r'sliding windows; .* = "auto"'),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers of 2"),
        ({"is_causal": False}, "is_causal is False: tokens would see later ones"),
        ({"is_causal": None}, "is_causal is None"),
        ({"per_layer_config": {"0": {"num_key_value_heads": 1}}}, "per_layer_config"),
        ({"text_config": {"hidden_size": 64}}, "text_config"),
        ({"eos_token_id": [5, 900]}, r"eos_token_id = \[5, 900\]: not below vocab_size = \d+\. Choose another model"),
        ({"pad_token_id": 64}, r"pad_token_id = 64: not in -64\.\.63\. Choose another model"),
        ({"pad_token_id": -65}, r"pad_token_id = -65: not in -64\.\.63\. Choose another model"),
    ],
)
def test_a_config_that_we_cannot_run_is_refused_with_the_reason(
    change: dict[str, Any], says: str, checkpoint: Path
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(StateError, match=says) as refused:
        TransformerConfig.from_directory(checkpoint)
    assert str(checkpoint) in str(refused.value) and "\n" not in str(refused.value)


def test_another_family_is_named_though_it_lacks_our_keys(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_embd": 768}')
    with pytest.raises(StateError, match="model_type is 'gpt2'; known: llama, mistral, qwen2, qwen3"):
        TransformerConfig.from_directory(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 5000, '{"model_type": "qwen3"}', "\x00\xff"])
def test_a_damaged_config_is_refused(text: str, checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(StateError, match=r"config\.json"):
        load_policy(checkpoint)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_spec_reads_back_from_its_own_config(family: str, tmp_path: Path) -> None:
    spec = tiny_spec(TinyPolicy(family=family, width=32, heads=4, kv_heads=2, tied=True))  # type: ignore[arg-type]
    (tmp_path / "config.json").write_text(json.dumps(spec.to_hf()))
    assert TransformerConfig.from_directory(tmp_path) == spec


@pytest.mark.parametrize(
    ("gone", "left", "remedy"),
    [
        (
            "model.safetensors",
            "model-00001-of-00002.safetensors",
            "model.safetensors.index.json, which names them, is mis",
        ),
        ("model.safetensors", "pytorch_model.bin", "AutoModelForCausalLM.from_pretrained"),
        ("tokenizer.json", "tokenizer.model", "AutoTokenizer.from_pretrained"),
        ("tokenizer.json", "vocab.txt", "download all its files again"),
    ],
)
def test_a_file_that_a_model_lacks_is_named_with_its_remedy(
    checkpoint: Path, gone: str, left: str, remedy: str
) -> None:
    (checkpoint / gone).rename(checkpoint / left)
    with pytest.raises(StateError, match=rf"{re.escape(gone)}: No such file.*{re.escape(remedy)}"):
        find_whole(checkpoint) if gone == "model.safetensors" else open_tokenizer(checkpoint)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_without_its_head_is_to_be_saved_again_with_one(tied: bool, tmp_path: Path) -> None:
    import transformers

    shape = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "eos_token_id": 5}
    config = transformers.LlamaConfig(**shape, intermediate_size=16, tie_word_embeddings=tied)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(StateError, match=r"no prefix model\., such as embed_tokens.weight.* with AutoModelForCausalLM"):
        load_policy(tmp_path)


def test_a_tied_model_stored_under_the_name_of_its_head_is_to_be_saved_again(tmp_path: Path) -> None:
    """As `save_model` of safetensors stores it."""
    import transformers
    from safetensors.torch import save_model

    shape = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "eos_token_id": 5}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**shape, intermediate_size=16, tie_word_embeddings=True)
    )
    model.save_pretrained(tmp_path)
    save_model(model, str(tmp_path / "model.safetensors"))
    with pytest.raises(StateError, match=r"embed_tokens.weight: if it is stored as lm_head.weight .* save_pretrained"):
        load_policy(tmp_path)
