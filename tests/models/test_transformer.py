"""Our model computes what `transformers` computes, both open what the other writes, and gradients are right."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from shoal.config import TinyPolicy
from shoal.models import layers
from shoal.models.checkpoint import load_policy, save_policy
from shoal.models.layers import gated, unit
from shoal.models.packed_attention import SharedPrefixGroup
from shoal.models.random_model import initialise, tiny_spec
from shoal.models.transformer import Transformer, _behind

FAMILIES = ("llama", "qwen2", "qwen3")
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
TOKENS_BT = torch.randint(0, 64, (3, 40), generator=torch.Generator().manual_seed(1))


def _model(family: str, tied: bool) -> Transformer:
    """A small model in which no parameter has a neutral value, so that leaving it out would show."""
    tiny = TinyPolicy(family=family, width=48, layers=3, heads=6, kv_heads=2, mlp_width=80, tied=tied)  # type: ignore[arg-type]
    model = Transformer(tiny_spec(tiny))
    initialise(model, seed=7)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize(
    ("family", "tied", "shard_size"),
    [("llama", False, "1GB"), ("qwen2", True, "20KB"), ("qwen3", False, "20KB"), ("qwen3", True, "1GB")],
)
def test_we_open_what_transformers_writes_whole_or_sharded(
    family: str, tied: bool, shard_size: str, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    config = CONFIGS[family](
        vocab_size=64, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=80, tie_word_embeddings=tied, rope_parameters={"rope_type": "default", "rope_theta": 5e4},
        max_position_embeddings=128, bos_token_id=None, eos_token_id=5,
    )  # fmt: skip
    peer = AutoModelForCausalLM.from_config(config)
    peer.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")
    model = load_policy(tmp_path)
    with torch.no_grad():
        assert (peer(TOKENS_BT).logits - model.logits(model(TOKENS_BT))).abs().max() < 1e-4


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}, "rope_theta": 7e3},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_theta": 5e4}, "rope_scaling": {"rope_type": "default"}, "rope_theta": 7e3},
        {"rope_parameters": {"rope_theta": 5e4}, "rope_scaling": {}},
        {"rope_parameters": None, "rope_scaling": None, "rope_theta": 7e3},
    ],
)
def test_rotation_is_read_from_the_key_that_transformers_reads(keys: dict[str, Any], tmp_path: Path) -> None:
    save_policy(_model("qwen3", tied=False), tmp_path, "float32")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_theta"], config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config | keys))
    peer, model = AutoModelForCausalLM.from_pretrained(tmp_path), load_policy(tmp_path)
    with torch.no_grad():
        theirs, ours = (logits.log_softmax(-1) for logits in (peer(TOKENS_BT).logits, model.logits(model(TOKENS_BT))))
    assert (theirs - ours).abs().max() < 1e-4


def test_padding_on_the_right_does_not_change_earlier_positions() -> None:
    model = _model("qwen3", tied=False)
    with torch.no_grad():
        whole = model(TOKENS_BT)
        padded = TOKENS_BT.clone()
        padded[:, 25:] = 0
        assert torch.equal(model(padded)[:, :25], whole[:, :25])


@pytest.mark.parametrize(("pad_id", "families"), [(None, None), (0, [SharedPrefixGroup(0, (40, 40, 40))]), (-1, None)])
@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("mistral", True), ("qwen2", True), ("qwen3", False)])
def test_gradients_equal_those_of_transformers_at_each_pad_token(
    family: str, tied: bool, pad_id: int | None, families: list[SharedPrefixGroup] | None, tmp_path: Path
) -> None:
    assert {0, 63} <= set(TOKENS_BT[:, :-1].flatten().tolist()), "each pad token is an input"
    save_policy(_model("llama" if family == "mistral" else family, tied), tmp_path, "float32")
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": family, "sliding_window": None}
    (tmp_path / "config.json").write_text(json.dumps(config | {"pad_token_id": pad_id}))
    model, peer = load_policy(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)
    save_policy(model, tmp_path / "next", "float32")
    assert json.loads((tmp_path / "next" / "config.json").read_text())["pad_token_id"] == pad_id
    weight_BTV = torch.randn(3, 40, 64, generator=torch.Generator().manual_seed(4))
    hidden = model(TOKENS_BT if families is None else TOKENS_BT.view(1, -1), families)
    (peer(TOKENS_BT).logits * weight_BTV).sum().backward()
    (model.logits(hidden).view(3, 40, 64) * weight_BTV).sum().backward()
    theirs = dict(peer.named_parameters())
    for name, parameter in model.named_parameters():
        ours_grad, theirs_grad = parameter.grad, theirs[name].grad
        assert ours_grad is not None and theirs_grad is not None
        assert (ours_grad - theirs_grad).abs().max() < 1e-4 * theirs_grad.abs().max(), name


def test_the_gradients_of_norm_and_gate_agree_with_finite_differences() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(4, 3, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    floor = torch.tensor([0.1], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: unit(x, floor), (x,))
    assert torch.autograd.gradcheck(gated, (x,))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefix_that_all_rows_share_is_computed_once_with_the_same_result(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model(family, tied=False)
    tokens_BT = torch.randint(0, 64, (6, 40), generator=torch.Generator().manual_seed(6))
    tokens_BT[:, :25] = tokens_BT[0, :25]
    weight_BTV = torch.randn(6, 40, 64, generator=torch.Generator().manual_seed(4))
    lengths: list[int] = []
    real = layers.finish
    monkeypatch.setattr(layers, "finish", lambda x, mixed, w: lengths.append(len(x)) or real(x, mixed, w))
    results = []
    for worth in (layers.WORTH_SHARING, 10**9):
        monkeypatch.setattr(layers, "WORTH_SHARING", worth)
        model.zero_grad()
        logits_BTV = model.logits(model(tokens_BT))
        (logits_BTV * weight_BTV).sum().backward()
        results.append([logits_BTV.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert lengths == [25 + 6 * 15] * 3 + [6 * 40] * 3
    for shared, apart in zip(*results, strict=True):
        assert (shared - apart).abs().max() < 1e-5 * max(1.0, float(apart.abs().max()))


def test_the_last_token_of_equal_rows_is_computed_for_each_row() -> None:
    model = _model("qwen3", tied=True)
    with torch.no_grad():
        expected_TD = model(TOKENS_BT[:1])[0]
        assert (model(TOKENS_BT[:1].repeat(8, 1)) - expected_TD).abs().max() < 1e-5


@pytest.mark.parametrize("families", [None, [SharedPrefixGroup(20, (30, 20)), SharedPrefixGroup(0, (25, 25))]])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_layers_that_are_computed_again_give_the_same_gradients_and_keep_less(
    family: str, families: list[SharedPrefixGroup] | None
) -> None:
    def learned(recompute: bool) -> tuple[list[torch.Tensor | None], int]:
        model, kept_bytes = _model(family, tied=False).train(), 0
        model.recompute = recompute
        own = {parameter.data_ptr() for parameter in model.parameters()}

        def count(kept: torch.Tensor) -> torch.Tensor:
            nonlocal kept_bytes
            kept_bytes += 0 if kept.data_ptr() in own else kept.nbytes
            return kept

        tokens = TOKENS_BT if families is None else TOKENS_BT.view(1, -1)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda kept: kept):
            hidden = model(tokens, families)
        model.logits(hidden).log_softmax(-1).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()], kept_bytes

    (kept, kept_bytes), (again, again_bytes) = learned(recompute=False), learned(recompute=True)
    assert all(
        one is not None and other is not None and one.equal(other) for one, other in zip(kept, again, strict=True)
    )
    assert again_bytes < kept_bytes / 4


@pytest.mark.parametrize("outputs", [1, 255, 700])
def test_a_narrow_matrix_is_scaled_by_rows_with_the_bits_of_the_whole(outputs: int) -> None:
    generator = torch.Generator().manual_seed(outputs)
    matrix_XD = torch.randn(outputs, 512, generator=generator).bfloat16()
    norm_D = torch.randn(512, generator=generator).bfloat16()
    whole_DX = _behind(norm_D, matrix_XD)
    with torch.inference_mode():
        by_rows_DX = _behind(norm_D, matrix_XD)
    assert by_rows_DX.dtype == torch.bfloat16 and torch.equal(by_rows_DX, whole_DX)
    assert by_rows_DX.stride() == whole_DX.stride()
