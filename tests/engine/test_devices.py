"""The engine computes on the device that was asked for, and nowhere else."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from shoal.engine.decoder import Decoder
from shoal.engine.interface import EngineRequest, ScoreRequest
from shoal.engine.native import LocalEngine
from shoal.engine.prefill import prefill_tokens
from shoal.models.device import AUTO, DEVICES
from shoal.models.memory import PREFILL_BYTES, PREFILL_TOKENS
from shoal.models.transformer import Transformer
from shoal.models.transformer_config import TransformerConfig
from tests.fake_device import MixedDevices, OneDevice, values_are_zeros

SPEC = TransformerConfig("qwen3", 32, 2, 4, 2, 8, 64, 100, 512, 1e4, 1e-6, True, (0,))
SEED = b"device" + bytes(26)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalEngine]:
    """An engine on a device that is not the CPU."""
    monkeypatch.setitem(PREFILL_TOKENS, "meta", 64)
    engine = LocalEngine(device="meta")
    engine._loaded, engine.version = Decoder(Transformer(SPEC), "meta"), 0
    with values_are_zeros(monkeypatch):
        yield engine


def test_turns_and_scores_stay_on_the_device(elsewhere: LocalEngine) -> None:
    requests = [EngineRequest(str(i), [1, 2, 3, *[i] * i], SEED, 5, frozenset({1, 7})) for i in range(3)]
    for _ in range(2):  # the second turn goes on from the cache
        turns = elsewhere.extend(requests, 0.7)
        requests = [
            one._replace(token_ids=[*one.token_ids, *turn.token_ids, 3])
            for one, turn in zip(requests, turns, strict=True)
        ]
    elsewhere.extend(requests[:2], 1.0)  # a row has left the batch
    scores = elsewhere.score([ScoreRequest(one.token_ids, [2, 3], SEED) for one in requests], 1.0, hidden=True)
    assert [score.gaps_P.shape for score in scores] == [(2,)] * 3
    assert elsewhere.facts.device == "meta"


def test_every_device_has_a_size_of_prefill() -> None:
    assert PREFILL_TOKENS.keys() == set(DEVICES) - {AUTO}


def test_a_large_policy_reads_fewer_tokens_at_a_time_on_a_gpu() -> None:
    """A layer of it makes at most 1 GiB of them, which the preflight adds. A CPU's cache holds as many of any policy."""
    shape = TransformerConfig("qwen3", 4096, 36, 32, 8, 128, 12288, 151936, 32768, 1e6, 1e-6, False, (0,))
    assert [prefill_tokens(SPEC, device) for device in ("cpu", "cuda", "cuda:1", "mps")] == [1024, 16384, 16384, 4096]
    assert prefill_tokens(shape, "cpu") == 1024 < prefill_tokens(shape, "cuda") < 4096
    assert PREFILL_BYTES - 4 * shape.layer_activations() < 4 * shape.layer_activations() * prefill_tokens(shape, "cuda")


@pytest.mark.parametrize(("device", "copied"), [("cpu", True), ("meta", False)])
def test_a_tied_head_is_there_once_on_a_gpu_and_twice_on_a_cpu(device: str, copied: bool) -> None:
    """A view of the embedding is not contiguous."""
    assert Decoder(Transformer(SPEC), device).weights.head_DV.is_contiguous() == copied


@pytest.mark.parametrize("mix", [
    lambda a, b: a + b, lambda a, b: a @ b, lambda a, b: torch.cat([a, b]), lambda a, b: a.index_select(0, b[0].long()),
])  # fmt: skip
def test_mixed_devices_are_noticed(mix: Callable[[Tensor, Tensor], Tensor]) -> None:
    a, b = torch.zeros(2, 2), torch.zeros(2, 2, device="meta")
    with OneDevice(), pytest.raises(MixedDevices):
        mix(a, b)
