"""Weights as int8: hand-worked matrices, and which parts of a policy are rounded."""

from pathlib import Path

import torch

from shoal.config import TinyPolicy
from shoal.policy.files import load_policy
from shoal.policy.quantise import dequantised, quantised, round_to_int8
from shoal.policy.tiny import make_tiny


def test_each_output_is_rounded_by_its_own_scale() -> None:
    weight_OI = torch.tensor([[1.27, -0.5, 0.004], [-254.0, 100.9, 1.0], [0.0, 0.0, 0.0]])
    values_OI, scale_O1 = quantised(weight_OI)
    assert values_OI.tolist() == [[127, -50, 0], [-127, 50, 0], [0, 0, 0]]
    assert torch.allclose(scale_O1, torch.tensor([[0.01], [2.0], [1.0]]))


def test_no_weight_moves_by_more_than_half_a_step() -> None:
    weight_OI = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    moved_OI = (dequantised(*quantised(weight_OI)) - weight_OI).abs()
    assert torch.all(moved_OI <= weight_OI.abs().amax(-1, keepdim=True) / 254 * 1.001)


def test_matrices_of_the_layers_are_rounded_and_nothing_else(tmp_path: Path) -> None:
    make_tiny(TinyPolicy(width=32, layers=2, heads=2, kv_heads=1, mlp_width=64), tmp_path, 0, "float32")
    before, after = load_policy(tmp_path), load_policy(tmp_path)
    round_to_int8(after)
    changed = {name for name, weight in after.named_parameters() if not weight.equal(before.get_parameter(name))}
    assert changed == {name for name, _ in before.named_parameters() if name.endswith("_proj.weight")}


def test_rounding_a_second_time_changes_almost_nothing(tmp_path: Path) -> None:
    weight_OI = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    once_OI = dequantised(*quantised(weight_OI))
    assert torch.allclose(dequantised(*quantised(once_OI)), once_OI, rtol=1e-6)
