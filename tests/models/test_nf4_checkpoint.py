"""Directories whose layers are NF4 codes: what is written, what is read, and what is refused."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shoal.config import TinyPolicy
from shoal.errors import StateError
from shoal.models import checkpoint, nf4, nf4_checkpoint
from shoal.models.checkpoint import (
    load_int8,
    load_policy,
    policy_tensors,
    read_tensors,
    tensors_of,
    write_nf4,
)
from shoal.models.lora import decode
from shoal.models.memory import weight_bytes
from shoal.models.nf4_layout import is_coded
from shoal.models.random_model import make_tiny, tiny_spec

TINY = TinyPolicy(width=64, layers=2, heads=4, kv_heads=2, mlp_width=128, max_positions=64)
MATRIX = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    make_tiny(TINY, tmp_path / "plain", 3, "float32")
    return tmp_path / "plain"


@pytest.fixture
def coded(plain: Path, tmp_path: Path) -> Path:
    write_nf4(plain, tmp_path / "coded")
    return tmp_path / "coded"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_weight_is_its_number_times_its_constant_rounded_to_the_dtype_of_the_base(tmp_path: Path, dtype: str) -> None:
    make_tiny(TINY, tmp_path / "plain", 3, dtype)
    write_nf4(tmp_path / "plain", tmp_path / "coded")
    before, stored = load_policy(tmp_path / "plain"), load_file(tmp_path / "coded" / "model.safetensors")
    table, decoded = torch.tensor(nf4.NUMBERS), load_policy(tmp_path / "coded")
    decode(decoded)
    for name, weight in before.named_parameters():
        if not name.endswith("_proj.weight"):
            assert decoded.get_parameter(name).equal(weight)
            continue
        pairs, constants = stored[f"{name}_nf4"], stored[f"{name}_constants"]
        number_OI = table[torch.stack([pairs & 15, pairs >> 4], 2).flatten(1).int()]
        scale_b = stored[f"{name}_scales"].repeat_interleave(nf4.GROUP)[: constants.numel()]
        constant_b = constants.view(-1).float() * scale_b + stored[f"{name}_mean"]
        expected = number_OI * constant_b.view(len(weight), -1).repeat_interleave(nf4.BLOCK, 1)
        assert decoded.get_parameter(name).equal(expected.to(getattr(torch, dtype)).float()), name
        error_OI = (decoded.get_parameter(name) - weight).detach()
        assert float(error_OI.norm() / weight.detach().norm()) < 0.12


def test_what_is_not_a_matrix_of_a_layer_stays_as_it_was(plain: Path, coded: Path) -> None:
    before, after = tensors_of(plain), tensors_of(coded)
    kept = {name for name in before if not name.endswith("_proj.weight")}
    assert all(after[name] == before[name] for name in kept)
    assert {name.rpartition("weight_")[2] for name in after.keys() - kept} == {"nf4", "constants", "scales", "mean"}
    assert {path.name for path in coded.iterdir()} == {path.name for path in plain.iterdir()}


def test_the_bytes_are_those_that_are_reckoned(coded: Path) -> None:
    spec = load_policy(coded).spec
    tensors = load_file(coded / "model.safetensors")
    assert weight_bytes(spec, 4, "nf4") == sum(tensor.nbytes for tensor in tensors.values())
    large = tiny_spec(msgspec.structs.replace(TINY, width=1024, mlp_width=3072, heads=8, kv_heads=8))
    values = sum(math.prod(shape) for shape in large.layer_matrices().values())
    assert weight_bytes(large, 0, "nf4") == pytest.approx(4.127 / 8 * values, rel=1e-3)


def test_a_model_is_coded_in_place_in_shards_and_no_longer_names_its_hub(
    coded: Path, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plain / ".hub").write_text("hf:ann/small@" + "a" * 40)
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 20_000)
    write_nf4(plain, plain)
    assert len(list(plain.glob("*.safetensors"))) > 3 and is_coded(plain)
    assert tensors_of(plain) == tensors_of(coded) and not (plain / ".hub").exists()
    assert torch.equal(load_policy(plain).codes()[MATRIX].whole(), load_policy(coded).codes()[MATRIX].whole())


def test_the_matrices_stay_codes_in_memory(coded: Path) -> None:
    model = load_policy(coded, torch.bfloat16)
    assert not any(".layers." in name and one.dim() == 2 for name, one in model.named_parameters())
    values = sum(codes.outputs * codes.inputs for codes in model.codes().values())
    # A scale for each 256 constants, and one more for each of these small matrices.
    assert sum(one.nbytes for one in model.buffers()) < 0.53 * values


def _with(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: value})


def _without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without(f"{MATRIX}_mean"), f"lacks tensor {MATRIX}_mean"),
        (_without("model.norm.weight"), "lacks tensor model.norm.weight"),
        (_with("stray.weight", torch.ones(3)), "has a tensor that a policy in NF4 of its config has not, stray.weight"),
        (_with(MATRIX, torch.ones(64, 128)), f"config has not, {MATRIX}:"),
        (_with(f"{MATRIX}_nf4", torch.ones(64, 128, dtype=torch.uint8)), r"U8\[64, 128\], .* asks for U8\[64, 64\]"),
        (_with(f"{MATRIX}_nf4", torch.ones(64, 64, dtype=torch.int8)), r"I8\[64, 64\], .* asks for U8"),
        (_with(f"{MATRIX}_constants", torch.ones(64, 2)), r"F32\[64, 2\], .* asks for I8"),
        (_with(f"{MATRIX}_scales", torch.ones(2)), r"F32\[2\], .* asks for F32\[1\]"),
        (_with(f"{MATRIX}_mean", torch.ones(1, dtype=torch.bfloat16)), r"BF16\[1\], .* asks for F32"),
        (_with("model.norm.weight", torch.ones(64, dtype=torch.uint8)), r"U8\[64\], .* asks for floats\[64\]"),
        (_with("model.norm.weight", torch.ones(64, dtype=torch.int8)), r"I8\[64\], .* asks for floats\[64\]"),
        (_with(f"{MATRIX}_mean", torch.full((1,), float("nan"))), "not finite numbers"),
        (_with(f"{MATRIX}_scales", torch.full((1,), 3e38)), "not finite numbers"),
    ],
)
def test_a_directory_of_any_other_form_is_refused(
    change: Callable[[dict[str, Tensor]], object], said: str, coded: Path
) -> None:
    tensors = load_file(coded / "model.safetensors")
    change(tensors)
    save_file(tensors, coded / "model.safetensors")
    with pytest.raises(StateError, match=said) as told:
        load_policy(coded)
    assert "\n" not in str(told.value)


def test_codes_of_a_larger_config_are_refused_before_memory_is_taken(
    coded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((coded / "config.json").read_text())
    (coded / "config.json").write_text(json.dumps(config | {"intermediate_size": 1 << 20}))
    monkeypatch.setattr(nf4_checkpoint, "Transformer", None)
    with pytest.raises(StateError, match="its config asks for"):
        load_policy(coded)


def test_nf4_is_refused_where_only_floats_are_read(coded: Path) -> None:
    for read in (policy_tensors, lambda directory: write_nf4(directory, directory)):
        with pytest.raises(StateError, match="in NF4, which only shoal's own engine and trainer read"):
            read(coded)
    with pytest.raises(StateError, match="NF4, which only a whole model"):
        read_tensors(coded, torch.float32)
    with pytest.raises(StateError, match="in NF4 already: sample in float32 or bfloat16"):
        load_int8(coded)


def test_a_model_whose_inputs_are_not_multiples_of_64_is_refused(tmp_path: Path) -> None:
    make_tiny(msgspec.structs.replace(TINY, mlp_width=96), tmp_path / "odd", 3, "float32")
    with pytest.raises(
        StateError, match=r"NF4 takes 64 inputs .*down_proj.weight has 96: leave policy.adapter.base out"
    ):
        write_nf4(tmp_path / "odd", tmp_path / "coded")
    assert not (tmp_path / "coded").exists()
