"""Adapters: what they compute, the files that `peft` opens, and the files that are refused."""

import copy
import importlib.util
import json
import math
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shoal.config import TinyPolicy
from shoal.errors import StateError
from shoal.models import lora_config
from shoal.models.checkpoint import load_policy, save_policy, snapshot
from shoal.models.lora import begin_adapter, load_adapter, merge, read_adapter
from shoal.models.lora_config import TARGETS, AdapterSpec, LoraBase
from shoal.models.random_model import make_tiny
from shoal.models.transformer import Transformer

TINY = TinyPolicy(width=32, layers=2, heads=4, kv_heads=2, mlp_width=48, max_positions=64)
FAMILIES = ("llama", "qwen2", "qwen3")


def of_family(family: str) -> TinyPolicy:
    return msgspec.structs.replace(TINY, family=family)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    make_tiny(TINY, tmp_path / "base", 3, "float32")
    return tmp_path / "base"


def adapted(base: Path, targets: tuple[str, ...] = TARGETS, dtype: torch.dtype = torch.float32) -> Transformer:
    """A base with an adapter that changes what it computes."""
    model = load_policy(base, dtype)
    begin_adapter(model, AdapterSpec(4, 8.0, targets), 1, LoraBase("ab" * 32))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.trainable().items():
            if name.endswith("lora_B"):
                parameter.normal_(0.0, 0.2, generator=generator)
    return model


def logits(model: Transformer) -> Tensor:
    tokens_BT = torch.arange(40).view(2, 20) % model.spec.vocab_size
    return model.logits(model.hidden(tokens_BT))


def merged(model: Transformer) -> Transformer:
    """A whole model whose matrices include the products of the adapter."""
    whole = copy.deepcopy(model)
    merge(whole)
    assert whole.adapter is None and whole.trainable().keys() == dict(whole.named_parameters()).keys()
    assert whole.published().tensors.keys() == whole.spec.tensor_shapes().keys()
    return whole


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        *((family, TARGETS) for family in FAMILIES),
        ("llama", ("k_proj",)),
        ("qwen2", ("v_proj", "down_proj")),
        ("qwen3", ("q_proj", "o_proj", "up_proj")),
    ],
)
def test_the_unmerged_product_is_that_of_the_merged_matrices(tmp_path, family, targets):
    make_tiny(of_family(family), tmp_path / "base", 3, "float32")
    model = adapted(tmp_path / "base", targets)
    assert (logits(model) - logits(load_policy(tmp_path / "base"))).abs().max() > 0.1
    assert torch.allclose(logits(model), logits(merged(model)), atol=1e-5)


def test_a_new_adapter_changes_no_bit_and_follows_from_its_seed(base):
    models = [load_policy(base) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        begin_adapter(model, AdapterSpec(4, 8.0), seed)
    assert logits(models[0]).equal(logits(load_policy(base)))
    first, again, other = (model.trainable() for model in models)
    assert all(first[name].equal(again[name]) for name in first)
    drawn = [name for name in first if name.endswith("lora_A")]
    assert len(drawn) == 14 and not any(first[name].equal(other[name]) for name in drawn)
    assert all(first[name].abs().max() <= 1 / math.sqrt(first[name].shape[1]) for name in drawn)


def test_only_the_adapter_has_gradients_and_in_float32_beside_a_bfloat16_base(base):
    model = adapted(base, dtype=torch.bfloat16)
    logits(model).float().square().mean().backward()
    learned = model.trainable()
    assert len(learned) == 2 * 14 and all(one.dtype == torch.float32 for one in learned.values())
    assert all(one.grad is not None and one.grad.abs().max() > 0 for one in learned.values())
    assert all(one.grad is None for name, one in model.named_parameters() if name not in learned)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_that_of_the_merged_product(tmp_path, family):
    """By automatic differentiation of the merged matrices, which uses none of the arranged ones."""
    make_tiny(of_family(family), tmp_path / "base", 3, "float32")
    model = adapted(tmp_path / "base")
    logits(model).square().mean().backward()
    whole = load_policy(tmp_path / "base")
    whole.load_state_dict(merged(model).state_dict())
    logits(whole).square().mean().backward()
    for name, parameter in model.trainable().items():
        matrix, kind = name.rsplit(".", 1)
        gradient_OI, module = whole.get_parameter(f"{matrix}.weight").grad, model.get_submodule(matrix)
        expected = gradient_OI @ module.lora_A.t() if kind == "lora_B" else module.lora_B.t() @ gradient_OI
        assert torch.allclose(parameter.grad, module.scale * expected, atol=1e-6), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_published_is_the_adapter_alone_in_float32(base, tmp_path, dtype):
    model = adapted(base)
    for saved in (model, snapshot(model, dtype)):
        save_policy(saved, tmp_path / "adapter", dtype, tokenizer_from=base)
        stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        assert not (tmp_path / "adapter" / "model.safetensors").exists()
        assert {name: tuple(one.shape) for name, one in stored.items()} == model.adapter.tensor_shapes(model.spec)
        assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in stored
        for name, parameter in model.trainable().items():
            assert stored[lora_config.stored_name(name)].equal(parameter)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8)
    assert LoraBase.from_directory(tmp_path / "adapter") == LoraBase("ab" * 32)
    again = load_policy(base)
    load_adapter(again, tmp_path / "adapter")
    assert logits(again).equal(logits(model))


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed: pip install '.[peft]'")
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_opens_it_and_computes_the_same(tmp_path, family):
    import peft
    import transformers

    make_tiny(of_family(family), tmp_path / "base", 3, "float32")
    model = adapted(tmp_path / "base")
    save_policy(model, tmp_path / "adapter", "float32")
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(whole, tmp_path / "adapter")
    tokens_BT = torch.arange(40).view(2, 20) % model.spec.vocab_size
    with torch.no_grad():
        found = theirs(tokens_BT).logits
        assert (found - logits(model)).abs().max() < 1e-4
    theirs.save_pretrained(tmp_path / "theirs")
    again = load_policy(tmp_path / "base")
    load_adapter(again, tmp_path / "theirs")
    assert logits(again).equal(logits(model)), "and what it saves opens here"


@pytest.fixture
def files(base: Path, tmp_path: Path) -> Path:
    save_policy(adapted(base), tmp_path / "adapter", "float32")
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"r": 0}, "rank = 0: must be between 1 and 512"),
        ({"r": 1 << 40}, "must be between 1 and 512"),
        ({"r": 8}, "is \\[4, 32\\], config.json asks for \\[8, 32\\]"),
        ({"lora_alpha": float("nan")}, "is not an adapter's config"),
        ({"lora_alpha": -1}, "alpha = -1.0: must be above 0"),
        ({"target_modules": ["q_proj", "lm_head"]}, "targets has 'lm_head'; known are q_proj"),
        ({"target_modules": []}, "targets is empty"),
        ({"target_modules": ["q_proj"]}, "has a tensor that its config does not explain"),
        ({"peft_type": "VERA"}, "asks for peft_type = 'VERA'"),
        ({"use_dora": True}, "asks for use_dora, which is not supported"),
        ({"use_rslora": True}, "asks for use_rslora"),
        ({"modules_to_save": ["lm_head"]}, "asks for modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "asks for rank_pattern"),
    ],
)
def test_a_config_of_something_else_is_refused(files, base, change, said):
    path = files / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(StateError, match=said):
        load_adapter(load_policy(base), files)


def test_tensors_of_other_shapes_and_infinite_ones_are_refused(files, base, tmp_path):
    path = files / "adapter_model.safetensors"
    stored, spec = load_file(path), load_policy(base).spec
    name = sorted(stored)[0]
    for value, said in (
        (torch.zeros(4, 31), "config.json asks for"),
        (torch.full_like(stored[name], float("nan")), "not finite numbers"),
    ):
        save_file(stored | {name: value}, path)
        with pytest.raises(StateError, match=said):
            read_adapter(files, spec)
    save_file(stored | {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 32)}, path)
    with pytest.raises(StateError, match="does not explain"):
        read_adapter(files, spec)
    path.unlink()
    with pytest.raises(StateError, match="cannot read"):
        read_adapter(files, spec)
