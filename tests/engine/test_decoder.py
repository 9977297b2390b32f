"""The cached passes give the logits of `transformers`, however a conversation is cut into them."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from shoal.engine.decoder import Cache, Decoder
from shoal.models.checkpoint import load_policy
from tests.engine.conftest import write_policy

TOKENS_BT = torch.randint(0, 64, (4, 30), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_prefill_chunks_and_single_tokens_give_the_logits_of_transformers(
    family: str, tied: bool, tmp_path: Path
) -> None:
    directory = write_policy(tmp_path / "policy", family, tied)
    with torch.inference_mode():
        expected_BTV = AutoModelForCausalLM.from_pretrained(directory)(TOKENS_BT).logits
        decoder = Decoder(load_policy(directory), "cpu")
        cache = Cache(decoder.spec, 4, 30, torch.float32, "cpu")
        decoder.prefill(TOKENS_BT[:, :11], cache, [(slice(0, 4), slice(0, 4))])
        cache.advance(11)
        hidden = []
        for start, stop in ((11, 18), (18, 19), (19, 20), (20, 29), (29, 30)):
            rope = decoder.rope(torch.arange(start, stop)).repeat(4, 1, 1, 1)
            hidden.append(decoder.extend(TOKENS_BT[:, start:stop], rope, cache).view(4, stop - start, -1))
        logits_BTV = decoder.logits(torch.cat(hidden, 1).flatten(0, 1)).view(4, 19, 64)
    assert (logits_BTV - expected_BTV[:, 11:]).abs().max() < 1e-4


def test_memory_that_was_never_written_is_not_attended_to(policy: Path) -> None:
    """Rows of different lengths are prefilled separately. The rest of a shorter row holds old memory, even NaN."""
    with torch.inference_mode():
        decoder = Decoder(load_policy(policy), "cpu")
        cache = Cache(decoder.spec, 2, 20, torch.float32, "cpu")
        cache.keys_LBKSE.fill_(float("nan"))
        cache.values_LBKSE.fill_(float("nan"))
        cache.advance(15)
        decoder.prefill(TOKENS_BT[:1, :15], cache, [(slice(0, 1), slice(0, 1))])
        decoder.prefill(TOKENS_BT[1:2, :6], cache, [(slice(1, 2), slice(0, 1))])
        cache.punch(0, torch.arange(15) >= torch.tensor([[15], [6]]))
        tokens_BC = torch.stack([TOKENS_BT[0, 15:16], TOKENS_BT[1, 6:7]])
        hidden_BD = decoder.extend(tokens_BC, decoder.rope(torch.tensor([15, 6])), cache)
        for row, length in ((0, 16), (1, 7)):
            expected = decoder.hidden_states(TOKENS_BT[row : row + 1, :length])[0, -1]
            assert (hidden_BD[row] - expected).abs().max() < 1e-5
