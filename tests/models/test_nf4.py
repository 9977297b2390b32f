"""NF4 against the quantiles that it is made of, and against values worked by hand; and products with codes against those
with the decoded weights."""

import math
from pathlib import Path
from statistics import NormalDist

import msgspec
import pytest
import torch
from torch import Tensor

from shoal.config import TinyPolicy
from shoal.models import nf4_layout
from shoal.models.checkpoint import load_policy, write_nf4
from shoal.models.lora import begin_adapter, decode
from shoal.models.lora_config import AdapterSpec
from shoal.models.nf4 import (
    BLOCK,
    GROUP,
    NUMBERS,
    Codes,
    Nf4,
    Nf4Matrix,
    coded,
    constants_coded,
    constants_decoded,
    decoded,
)
from shoal.models.random_model import make_tiny
from shoal.models.transformer import Transformer

TINY = TinyPolicy(width=128, layers=2, heads=4, kv_heads=2, mlp_width=192, max_positions=64)


def test_the_16_numbers_are_quantiles_of_a_normal_distribution():
    last, normal = 1 - (1 / 32 + 1 / 30) / 2, NormalDist()

    def quantiles(count: int) -> list[float]:
        return [normal.inv_cdf(last + (0.5 - last) * i / count) / normal.inv_cdf(last) for i in range(count)]

    assert sorted([*(-q for q in quantiles(7)), 0.0, *quantiles(8)]) == pytest.approx(NUMBERS, abs=1e-6)


def test_a_block_worked_by_hand():
    # The largest is 2, so the shares are 1, -0.5, 0.1, 0 and -1. Nearest are 1.0 (code 15), -0.52507 (2),
    # 0.07958 (8; the middle to 0.16093 is 0.12), 0.0 (7) and -1.0 (0). Pairs: 15 + 16 * 2, 8 + 16 * 7, 0.
    found = coded(torch.tensor([2.0, -1.0, 0.2, 0.0, -2.0]))
    assert found.pairs.tolist() == [47, 120, 0] and found.c_b.tolist() == [2.0] and found.n == 5
    expected = [2.0, 2 * NUMBERS[2], 2 * NUMBERS[8], 0.0, -2.0]
    assert decoded(found).tolist() == pytest.approx(expected, rel=1e-6)


def test_each_weight_becomes_the_nearest_number_times_the_largest_of_its_block():
    w_n = torch.randn(3 * BLOCK + 7, generator=torch.Generator().manual_seed(0)) * 0.02
    found, table = coded(w_n), torch.tensor(NUMBERS)
    assert found.pairs.dtype == torch.uint8 and len(found.pairs) == math.ceil(len(w_n) / 2) and len(found.c_b) == 4
    for b, (block, got) in enumerate(zip(w_n.split(BLOCK), decoded(found).split(BLOCK), strict=True)):
        assert found.c_b[b] == block.abs().max()
        nearest = table[(block[:, None] / found.c_b[b] - table).abs().argmin(1)] * found.c_b[b]
        torch.testing.assert_close(got, nearest, rtol=0, atol=0)


def test_of_two_numbers_as_near_the_lower_is_taken():
    table = torch.tensor(NUMBERS, dtype=torch.float64)
    middle_n = ((table[:-1] + table[1:]) / 2).float()
    for i, middle in enumerate(middle_n):
        assert int(coded(torch.stack([middle, torch.tensor(1.0)])).pairs[0] & 15) == i


def test_a_block_of_zeros_stays_zero():
    assert decoded(coded(torch.zeros(100))).tolist() == [0.0] * 100


def test_constants_in_8_bits_worked_by_hand():
    # Mean 3, so the rest is -2, 0 and 2; the scale is 2 / 127, and the codes are -127, 0 and 127.
    found = constants_coded(torch.tensor([1.0, 3.0, 5.0]))
    assert found.code_b.tolist() == [-127, 0, 127] and found.mean.tolist() == [3.0]
    assert found.c2_g.tolist() == pytest.approx([2 / 127])
    assert constants_decoded(found).tolist() == pytest.approx([1.0, 3.0, 5.0])


def test_double_quantisation_moves_a_weight_by_less_than_a_hundredth_of_its_block():
    w_n = torch.randn(BLOCK * (GROUP + 3), generator=torch.Generator().manual_seed(3))
    plain = coded(w_n)
    doubled = Nf4(plain.pairs, constants_decoded(constants_coded(plain.c_b)), plain.n)
    assert len(constants_coded(plain.c_b).c2_g) == 2
    moved_bB = (decoded(doubled) - decoded(plain)).abs().view(-1, BLOCK)
    assert (moved_bB.amax(1) < 0.01 * plain.c_b).all()


def test_constants_that_are_all_the_same_are_kept():
    assert constants_decoded(constants_coded(torch.full((5,), 0.25))).tolist() == [0.25] * 5


# --- products ---


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
    monkeypatch.setitem(nf4_layout._DECODED_VALUES, "cpu", 5 * 128)
    blocks = [weight for _, weight in Nf4Matrix(list(coded.codes().values())[:1], torch.float32).blocks()]
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
    matrix_IX, order_X = Nf4Matrix([codes], torch.float32, None, torch.tensor([3, 0, 5, 1, 2, 4])), [1, 3, 4, 0, 5, 2]
    x_NI, added_NX = (torch.randn(3, n, generator=generator).requires_grad_() for n in (64, 6))
    weight_IX = codes.whole()[order_X].t()
    product, expected = matrix_IX.product(x_NI, added_NX), added_NX + x_NI @ weight_IX
    assert torch.allclose(product, expected, atol=1e-5)
    dy_NX = torch.randn(3, 6, generator=generator)
    found, wanted = (torch.autograd.grad(one, (x_NI, added_NX), dy_NX) for one in (product, expected))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted, strict=True))
