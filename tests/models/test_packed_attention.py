"""Conversations packed into one row: each has the hidden states and gradients that it has alone, and sees no other."""

import pytest
import torch
from torch import Tensor

from shoal.config import TinyPolicy
from shoal.models import packed_attention
from shoal.models.packed_attention import SharedPrefixGroup
from shoal.models.random_model import initialise, tiny_spec
from shoal.models.rope import RopeScaling
from shoal.models.transformer import Transformer

FAMILIES = [
    SharedPrefixGroup(0, (9,)),
    SharedPrefixGroup(5, (3, 8, 1, 6)),
    SharedPrefixGroup(4, (7, 7)),
    SharedPrefixGroup(0, (2, 5)),
    SharedPrefixGroup(0, (1,)),
    SharedPrefixGroup(12, (4,)),
]


def _model(family: str, tied: bool = False) -> Transformer:
    tiny = TinyPolicy(family=family, width=48, layers=3, heads=6, kv_heads=2, mlp_width=80, tied=tied)  # type: ignore[arg-type]
    model = Transformer(tiny_spec(tiny))
    initialise(model, seed=7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(8))
    return model


def _row(seed: int = 1) -> Tensor:
    count = sum(family.tokens for family in FAMILIES)
    return torch.randint(0, 64, (count,), generator=torch.Generator().manual_seed(seed))


def _apart(row_N: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Each conversation's tokens, and the places of its own hidden states in the row; shared tokens go to the first."""
    found, begin = [], 0
    for family in FAMILIES:
        first_P = torch.arange(begin, begin + family.shared)
        own = begin + family.shared
        for length in family.own:
            places = torch.cat([first_P, torch.arange(own, own + length)])
            found.append((row_N[places], places))
            own += length
        begin = own
    return found


@pytest.mark.parametrize(
    ("family", "mask_cost", "padding_tokens"),
    [("llama", 2, 256), ("qwen2", 0, 256), ("qwen3", 0, 3), ("qwen3", 1000, 0)],
)
def test_packed_conversations_have_the_hidden_states_and_gradients_of_each_alone(
    family: str, mask_cost: int, padding_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a family's conversations are read with a mask or from their beginning, together or one by one."""
    monkeypatch.setattr(packed_attention, "MASK_COST", mask_cost)
    monkeypatch.setattr(packed_attention, "PADDING_TOKENS", padding_tokens)
    model, row_N = _model(family), _row()
    weight_ND = torch.randn(len(row_N), 48, generator=torch.Generator().manual_seed(4))
    packed_ND = model(row_N[None], FAMILIES)[0]
    (packed_ND * weight_ND).sum().backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    seen: set[int] = set()
    for tokens_T, places in _apart(row_N):
        alone_TD = model(tokens_T[None])[0]
        assert (alone_TD - packed_ND.detach()[places]).abs().max() < 1e-5
        fresh = torch.tensor([int(place) not in seen for place in places])  # a shared token is in the row once
        seen.update(places.tolist())
        (alone_TD[fresh] * weight_ND[places[fresh]]).sum().backward()
    assert len(seen) == len(row_N)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert (ours[name] - parameter.grad).abs().max() <= 1e-5 * (1 + parameter.grad.abs().max()), name


@pytest.mark.parametrize("mask_cost", [0, 2])
def test_no_conversation_sees_another(mask_cost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_attention, "MASK_COST", mask_cost)
    model, row_N = _model("qwen3"), _row()
    conversations = _apart(row_N)
    with torch.no_grad():
        before_ND = model(row_N[None], FAMILIES)[0]
        for tokens_T, places in conversations:
            changed_N = row_N.clone()
            mine = torch.ones(len(row_N), dtype=torch.bool)
            mine[places] = False
            changed_N[mine] = (changed_N[mine] + 17) % 64
            after_ND = model(changed_N[None], FAMILIES)[0]
            assert torch.equal(after_ND[places], before_ND[places]), "others' tokens changed this conversation"
            assert len(tokens_T) == len(places)


def test_a_token_sees_only_earlier_ones_of_its_conversation() -> None:
    model, row_N = _model("llama"), _row()
    changed_N = row_N.clone()
    last = FAMILIES[0].tokens - 1
    changed_N[last] = (row_N[last] + 1) % 64
    with torch.no_grad():
        before_ND, after_ND = model(row_N[None], FAMILIES)[0], model(changed_N[None], FAMILIES)[0]
    assert torch.equal(before_ND[:last], after_ND[:last]) and not torch.equal(before_ND[last], after_ND[last])


def test_positions_begin_anew_in_each_conversation_with_a_scaled_rotation_too() -> None:
    model, row_N = _model("llama"), _row()
    scaling = RopeScaling("yarn", 4.0, 16, 1.0, 32.0, 1.14)
    model.spec = model.spec.__class__(**{**model.spec.__dict__, "rope_scaling": scaling})
    with torch.no_grad():
        packed_ND = model(row_N[None], FAMILIES)[0]
        for tokens_T, places in _apart(row_N):
            assert (model(tokens_T[None])[0] - packed_ND[places]).abs().max() < 1e-5


def test_equal_lengths_give_the_bits_of_padded_rows() -> None:
    """Nothing is padded then, and the same operations are made. 64 shared tokens are worth sharing there, too."""
    model = _model("qwen3")
    row_N = torch.randint(0, 64, (64 + 3 * 10,), generator=torch.Generator().manual_seed(5))
    rows_BT = torch.stack([torch.cat([row_N[:64], own_S]) for own_S in row_N[64:].split(10)])
    with torch.no_grad():
        packed_ND, padded_BTD = model(row_N[None], [SharedPrefixGroup(64, (10, 10, 10))])[0], model(rows_BT)
    assert torch.equal(packed_ND[:64], padded_BTD[0, :64])
    assert torch.equal(packed_ND[64:], padded_BTD[:, 64:].flatten(0, 1))


@pytest.mark.parametrize("shape", [(-1, (3,)), (2, ()), (2, (3, 0))])
def test_an_empty_conversation_is_a_fault_of_ours(shape: tuple[int, tuple[int, ...]]) -> None:
    with pytest.raises(AssertionError, match="no conversation is empty"):
        SharedPrefixGroup(*shape)
