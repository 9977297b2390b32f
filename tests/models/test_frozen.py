"""Products with codes against those with the decoded weights: the same bits, the same gradients, and less memory."""

from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from shoal.config import TinyPolicy
from shoal.models import nf4_config
from shoal.models.checkpoint import load_policy, write_nf4
from shoal.models.lora import begin_adapter, decode
from shoal.models.lora_config import AdapterSpec
from shoal.models.nf4 import Codes, Frozen
from shoal.models.random_model import make_tiny
from shoal.models.transformer import Transformer

TINY = TinyPolicy(width=128, layers=2, heads=4, kv_heads=2, mlp_width=192, max_positions=64)


def models(tmp_path: Path, dtype: torch.dtype, **changes: str) -> tuple[Transformer, Transformer]:
    """A policy over codes and the same over the decoded weights, with an adapter that changes what they compute."""
    make_tiny(msgspec.structs.replace(TINY, **changes), tmp_path / "plain", 3, "bfloat16")
    write_nf4(tmp_path / "plain", tmp_path / "coded")
    coded, plain = (load_policy(tmp_path / "coded", dtype) for _ in range(2))
    decode(plain)
    for model in (coded, plain):
        begin_adapter(model, AdapterSpec(4, 8.0), 1)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, parameter in model.trainable().items():
                if name.endswith("lora_B"):
                    parameter.normal_(0.0, 0.2, generator=generator)
    assert coded.codes() and not plain.codes()
    return coded, plain


def logits(model: Transformer) -> Tensor:
    tokens_BT = torch.arange(40).view(2, 20) % model.spec.vocab_size
    return model.logits(model.hidden(tokens_BT))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_policy_over_codes_computes_what_it_does_over_the_decoded_weights(tmp_path, family, dtype):
    coded, plain = models(tmp_path, dtype, family=family)
    assert logits(coded).equal(logits(plain)), "as long as a block holds a whole matrix"
    with torch.no_grad():
        assert logits(coded).equal(logits(plain))
    for model in (coded, plain):
        logits(model).float().square().mean().backward()
    most = 2e-6 if dtype == torch.float32 else 0.03
    for name, one in plain.trainable().items():
        found = coded.get_parameter(name).grad
        assert (found - one.grad).abs().max() < most * one.grad.abs().max(), name


def test_blocks_of_a_few_outputs_give_the_same_up_to_rounding(tmp_path, monkeypatch):
    coded, plain = models(tmp_path, torch.float32, family="qwen2")
    monkeypatch.setitem(nf4_config._DECODED_VALUES, "cpu", 5 * 128)
    blocks = [weight for _, weight in Frozen(list(coded.codes().values())[:1], torch.float32).blocks()]
    assert len(blocks) == 26 and blocks[-1].shape == (3, 128)
    for model in (coded, plain):
        logits(model).square().mean().backward()
    assert torch.allclose(logits(coded), logits(plain), atol=1e-6)
    for name, one in plain.trainable().items():
        assert torch.allclose(coded.get_parameter(name).grad, one.grad, atol=1e-7), name


def test_recomputing_layers_gives_the_same_gradient(tmp_path):
    coded, _ = models(tmp_path, torch.float32)
    found = []
    for recompute in (False, True):
        coded.recompute = recompute
        coded.zero_grad()
        logits(coded).square().mean().backward()
        found.append({name: one.grad.clone() for name, one in coded.trainable().items()})
    assert all(found[0][name].equal(one) for name, one in found[1].items())


def test_a_backward_pass_keeps_no_decoded_weight(tmp_path):
    coded, plain = models(tmp_path, torch.float32)
    matrices = {(192, 128), (384, 128), (256, 128), (128, 128), (128, 192)}

    def kept(model: Transformer) -> set[tuple[int, ...]]:
        shapes = set()
        with torch.autograd.graph.saved_tensors_hooks(lambda one: shapes.add(tuple(one.shape)) or one, lambda one: one):
            logits(model)
        return {shape for shape in shapes if shape in matrices or shape[::-1] in matrices}

    assert kept(plain) and not kept(coded)


def test_the_frozen_codes_get_no_gradient_and_the_residual_gets_its_own():
    generator = torch.Generator().manual_seed(0)
    codes = Codes(
        torch.randint(0, 256, (6, 32), generator=generator, dtype=torch.uint8),
        torch.randint(-127, 128, (6, 1), generator=generator, dtype=torch.int8),
        torch.full((1,), 0.01), torch.full((1,), 0.5), torch.float32,
    )  # fmt: skip
    matrix_IX, order_X = Frozen([codes], torch.float32, None, torch.tensor([3, 0, 5, 1, 2, 4])), [1, 3, 4, 0, 5, 2]
    x_NI, added_NX = (torch.randn(3, n, generator=generator).requires_grad_() for n in (64, 6))
    weight_IX = codes.whole()[order_X].t()
    product, expected = matrix_IX.product(x_NI, added_NX), added_NX + x_NI @ weight_IX
    assert torch.allclose(product, expected, atol=1e-5)
    dy_NX = torch.randn(3, 6, generator=generator)
    found, wanted = (torch.autograd.grad(one, (x_NI, added_NX), dy_NX) for one in (product, expected))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted, strict=True))
