"""A packed head gives the logits of a plain one, and is made only where it pays."""

from pathlib import Path

import pytest
import torch

from shoal.engine import decoder as packed_head
from shoal.engine.decoder import Decoder
from shoal.engine.native import LocalEngine
from shoal.models.checkpoint import load_policy
from tests.engine.claims import two_turns
from tests.engine.conftest import write_policy

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@pytest.fixture
def none_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_head, "LARGE", 0)


def engine_with(directory: Path) -> LocalEngine:
    engine = LocalEngine(threads=1)
    engine.load(directory, 0)
    return engine


@pytest.mark.parametrize("rows", [1, 16, 65])
@torch.inference_mode()
def test_a_packed_head_gives_the_logits_of_a_plain_one(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    head_VD, hidden_ND = (torch.randn(size, 48, generator=generator) for size in (1001, rows))
    copy = torch.ops.mkldnn._reorder_linear_weight(head_VD, packed_head.ROWS)
    logits_NV = packed_head.product(hidden_ND, copy)
    assert logits_NV.is_contiguous() and torch.allclose(logits_NV, hidden_ND @ head_VD.t(), atol=1e-4)
    assert torch.equal(logits_NV, packed_head.product(hidden_ND, copy))


def test_only_a_large_head_in_float32_on_a_cpu_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_head, "LARGE", 64 * 8)
    assert packed_head.packed(torch.zeros(64, 8)) is not None
    assert packed_head.packed(torch.zeros(63, 8)) is None
    assert packed_head.packed(torch.zeros(64, 8, dtype=torch.bfloat16)) is None
    assert packed_head.packed(torch.zeros(64, 8, device="meta")) is None


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_is_packed_in_the_place_of_its_copy(tied: bool, tmp_path: Path, none_is_too_small: None) -> None:
    """An untied head is not: it would be in memory twice."""
    decoder = Decoder(load_policy(write_policy(tmp_path, tied=tied)), "cpu")
    plain, embedding = decoder.weights.head_DV, decoder.weights.frame.embedding_VD
    assert (decoder._packed_head is not None) == (plain.data_ptr() == embedding.data_ptr()) == tied


def test_a_policy_writes_and_scores_the_same_with_a_packed_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = write_policy(tmp_path, tied=True)
    turns, scores = two_turns(engine_with(policy))
    monkeypatch.setattr(packed_head, "LARGE", 0)
    packed_turns, packed_scores = two_turns(engine_with(policy))
    assert [turn.token_ids for turn in turns] == [turn.token_ids for turn in packed_turns]
    for one, other in zip(scores, packed_scores, strict=True):
        assert torch.allclose(torch.from_numpy(one.logprobs_P), torch.from_numpy(other.logprobs_P), atol=1e-4)
