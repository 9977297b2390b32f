"""Weights as int8: hand-worked matrices, which parts of a policy are rounded, and directories that hold codes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shoal.config import TinyPolicy
from shoal.errors import StateError
from shoal.models.checkpoint import (
    load_int8,
    load_policy,
    policy_tensors,
    read_tensors,
    save_policy,
    snapshot,
    tensors_of,
)
from shoal.models.int8 import dequantised, quantised, round_to_int8
from shoal.models.lora import begin_adapter, read_adapter
from shoal.models.lora_config import AdapterSpec
from shoal.models.random_model import make_tiny
from shoal.models.transformer import Transformer
from shoal.weights.delta.patch import apply_patch, make_patch
from shoal.weights.delta.tensor_codes import coded_directory

MATRIX = "model.layers.0.mlp.up_proj.weight"


def test_each_output_is_rounded_by_its_own_scale() -> None:
    weight_OI = torch.tensor([[1.27, -0.5, 0.004], [-254.0, 100.9, 1.0], [0.0, 0.0, 0.0]])
    values_OI, scale_O1 = quantised(weight_OI)
    assert values_OI.tolist() == [[127, -50, 0], [-127, 50, 0], [0, 0, 0]]
    assert torch.allclose(scale_O1, torch.tensor([[0.01], [2.0], [1.0]]))


def test_matrices_of_the_layers_are_rounded_and_nothing_else(tmp_path: Path) -> None:
    make_tiny(TinyPolicy(width=32, layers=2, heads=2, kv_heads=1, mlp_width=64), tmp_path, 0, "float32")
    before, after = load_policy(tmp_path), load_policy(tmp_path)
    round_to_int8(after)
    changed = {name for name, weight in after.named_parameters() if not weight.equal(before.get_parameter(name))}
    assert changed == {name for name, _ in before.named_parameters() if name.endswith("_proj.weight")}


# --- directories that hold codes ---


@pytest.fixture
def whole(tmp_path: Path) -> Transformer:
    """A policy in full precision."""
    tiny = TinyPolicy(width=256, layers=2, heads=4, kv_heads=2, mlp_width=512, tied=True)
    make_tiny(tiny, tmp_path / "whole", 0, "float32")
    return load_policy(tmp_path / "whole")


@pytest.fixture
def codes(whole: Transformer, tmp_path: Path) -> Path:
    """Its directory in int8."""
    save_policy(whole, tmp_path / "int8", "int8")
    return tmp_path / "int8"


def weights_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def test_int8_has_half_of_the_bytes_of_bfloat16(whole: Transformer, codes: Path, tmp_path: Path) -> None:
    save_policy(whole, tmp_path / "bfloat16", "bfloat16")
    assert weights_bytes(codes) < 0.52 * weights_bytes(tmp_path / "bfloat16")


def test_a_directory_in_int8_is_codes_times_scales_for_everyone_who_loads_it(whole: Transformer, codes: Path) -> None:
    loaded, stored = load_policy(codes), tensors_of(codes)
    for name, weight in whole.named_parameters():
        expected = dequantised(*quantised(weight.detach())) if weight.dim() == 2 else weight
        assert loaded.get_parameter(name).equal(expected), name
        assert stored[name][0] == ("I8" if weight.dim() == 2 else "F32")


def test_what_is_published_in_int8_is_not_rounded_again(whole: Transformer, codes: Path, tmp_path: Path) -> None:
    published, rounded_here = load_int8(codes), load_int8(tmp_path / "whole")
    for name, weight in load_policy(codes).named_parameters():
        assert weight.equal(published.get_parameter(name)), name
    assert rounded_here.get_parameter(MATRIX).equal(published.get_parameter(MATRIX))
    assert rounded_here.model.embed_tokens.weight.equal(whole.model.embed_tokens.weight)
    tensors = load_file(codes / "model.safetensors")
    tensors[MATRIX].clamp_(-100, 100)  # our own rounding, made again, would give itself
    save_file(tensors, codes / "model.safetensors")
    assert load_int8(codes).get_parameter(MATRIX).equal(load_policy(codes).get_parameter(MATRIX))


def test_a_snapshot_keeps_full_precision_and_gives_the_same_codes(
    whole: Transformer, codes: Path, tmp_path: Path
) -> None:
    taken = snapshot(whole, "int8")
    save_policy(taken, tmp_path / "again", "int8")
    save_policy(taken, tmp_path / "kept", "float32")
    assert tensors_of(tmp_path / "again") == tensors_of(codes)
    assert tensors_of(tmp_path / "kept") == tensors_of(tmp_path / "whole")


def test_shards_of_codes_are_read_as_one_file(whole: Transformer, codes: Path, tmp_path: Path) -> None:
    save_policy(whole, tmp_path / "shards", "int8", shard_bytes=200_000)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    assert tensors_of(tmp_path / "shards") == tensors_of(codes)
    assert load_policy(tmp_path / "shards").get_parameter(MATRIX).equal(load_policy(codes).get_parameter(MATRIX))


def test_a_small_step_is_a_small_patch_between_codes(whole: Transformer, codes: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in whole.parameters():
            weight.add_(1e-6 * torch.randn(weight.shape, generator=generator))
    save_policy(whole, tmp_path / "next", "int8")
    before, after = coded_directory(codes), coded_directory(tmp_path / "next")
    patch = make_patch(before, after)
    assert patch is not None and len(patch) < weights_bytes(codes) / 40
    patched = {name: type(one)(one.dtype, one.shape, one.codes.copy()) for name, one in before.items()}
    apply_patch(patched, patch)
    assert all((patched[name].codes == one.codes).all() for name, one in after.items())


def _without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def _with(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without(f"{MATRIX}_scale"), "without"),
        (_with(f"{MATRIX}_scale", torch.ones(512)), "without"),
        (_with(f"{MATRIX}_scale", torch.ones(512, 1, dtype=torch.bfloat16)), "without"),
        (_with(f"{MATRIX}_scale", torch.full((512, 1), float("nan"))), "not finite"),
        (_with(f"{MATRIX}_scale", torch.full((512, 1), 3e38)), "not finite"),
        (_with("model.norm.weight", torch.ones(256, dtype=torch.int8)), "without"),
        (_with("model.norm.weight_scale", torch.ones(256, 1)), "does not explain"),
        (_with("stray.weight_scale", torch.ones(8, 1)), "does not explain"),
    ],
)
def test_codes_of_any_other_form_are_refused(
    change: Callable[[dict[str, Tensor]], object], words: str, codes: Path
) -> None:
    tensors = load_file(codes / "model.safetensors")
    change(tensors)
    save_file(tensors, codes / "model.safetensors")
    with pytest.raises(StateError, match=words):
        load_policy(codes)


def test_int8_is_refused_where_only_floats_are_read(codes: Path) -> None:
    for read in (lambda: read_tensors(codes, torch.float32), lambda: policy_tensors(codes)):
        with pytest.raises(StateError, match="int8, which only"):
            read()


def test_codes_in_an_adapter_are_refused(whole: Transformer, tmp_path: Path) -> None:
    adapted = load_policy(tmp_path / "whole")
    begin_adapter(adapted, AdapterSpec(2, 4.0, ("q_proj",)), seed=1)
    save_policy(adapted, tmp_path / "adapter", "float32")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name: tensor.to(torch.int8) for name, tensor in load_file(file).items()}, file)
    with pytest.raises(StateError, match="int8, which only"):
        read_adapter(tmp_path / "adapter", whole.spec)
