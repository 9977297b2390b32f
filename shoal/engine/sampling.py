"""Writing a turn: the tokens that the noise of the seeds chooses, for a batch of conversations, until all have ended.

It does not deal with conversations beyond their turn.

The token at absolute index t is the argmax of logits / temperature + noise(seed, t). At a tie, the lowest id wins.

Axes: B rows (conversations), K tokens that share one call for noise, D width, V vocabulary, T tokens written in a turn.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.algos.noise.philox import seed_words
from shoal.engine.decoder import logprobs_of
from shoal.engine.interface import Continuation, DecoderBackend, EngineRequest, KVCache
from shoal.engine.noise import NoiseScheme
from shoal.models.memory import NOISE_VALUES


def write(
    decoder: DecoderBackend,
    cache: KVCache,
    requests: Sequence[EngineRequest],
    hidden_BD: Tensor,
    temperature: float,
    family: NoiseScheme,
) -> list[Continuation]:
    """One turn of each row: up to and including its first stop token, or up to its limit.

    When half of the rows have ended, the others continue in a copy of the cache. The tokens written after that are not
    remembered, so the next turn reads them again.
    """
    longest, rows = max(request.max_new for request in requests), _Rows(requests, decoder)
    tokens_BT = torch.zeros(len(requests), longest, dtype=torch.int64, device=decoder.device)
    logprobs_BT = torch.zeros(len(requests), longest, device=decoder.device)
    written = 0
    while written < longest and rows.open:
        chosen_KB, logprobs_KB, hidden_BD = _write_some(
            decoder, cache, rows, hidden_BD, range(written, longest), temperature, family
        )
        columns = slice(written, written + len(chosen_KB))
        tokens_BT[rows.index_B, columns], logprobs_BT[rows.index_B, columns] = chosen_KB.t(), logprobs_KB.t()
        written = columns.stop
        if 0 < rows.open <= len(rows.index_B) // 2:
            still_B = torch.nonzero(~rows.done_B).squeeze(-1)
            hidden_BD, cache = hidden_BD[still_B], cache.rebuilt(still_B.tolist(), longest - written)
            rows.keep(still_B)
    turns = []
    for request, tokens, logprobs in zip(requests, tokens_BT.tolist(), logprobs_BT.tolist(), strict=True):
        stops = (index for index, token in enumerate(tokens[: request.max_new]) if token in request.stop_ids)
        length = next(stops, request.max_new - 1) + 1
        turns.append(Continuation(tokens[:length], logprobs[:length]))
    return turns


def _write_some(
    decoder: DecoderBackend,
    cache: KVCache,
    rows: "_Rows",
    hidden_BD: Tensor,
    left: range,
    temperature: float,
    family: NoiseScheme,
) -> tuple[Tensor, Tensor, Tensor]:
    """The next tokens of every row, as many as share one call for noise: ids and log-probs [K, B], hidden states. `left`
    are the places in the turn that are still empty."""
    B, V = len(rows.index_B), decoder.spec.vocab_size
    K = min(max(1, NOISE_VALUES // (B * V)), len(left))
    positions_KB = rows.positions_B + torch.arange(left.start, left.start + K, device=decoder.device)[:, None]
    if K > 1:
        noise_KBV = family.noise(rows.words_B4.repeat(K, 1), positions_KB.reshape(-1), V).view(K, B, V)
    rope_KB = decoder.rope(positions_KB)
    scaled: list[Tensor] = []
    tokens: list[Tensor] = []
    for step in range(K):
        scaled.append(decoder.logits(hidden_BD).div_(temperature))
        if K > 1:
            tokens.append((scaled[-1] + noise_KBV[step]).argmax(-1))
        else:
            tokens.append(family.best(scaled[-1], rows.words_B4, positions_KB[step]))
        rows.note(tokens[-1], left.start + step + 1)
        if rows.open == 0 or step + 1 == len(left):
            break
        hidden_BD = decoder.extend(tokens[-1][:, None], rope_KB[step], cache)
    chosen_KB = torch.stack(tokens)
    return chosen_KB, logprobs_of(torch.stack(scaled), chosen_KB), hidden_BD


class _Rows:
    """The conversations being written: row b of the tensors is conversation index_B[b] of the turn."""

    def __init__(self, requests: Sequence[EngineRequest], decoder: DecoderBackend) -> None:
        device, sets = decoder.device, list(dict.fromkeys(request.stop_ids for request in requests))
        self.index_B = torch.arange(len(requests), device=device)
        self.words_B4 = seed_words([request.seed for request in requests]).to(device)
        self.positions_B = torch.tensor([len(request.token_ids) for request in requests], device=device)
        """Absolute index of the first token of the turn."""
        self.done_B = torch.zeros(len(requests), dtype=torch.bool, device=device)
        self.open = len(requests)
        """Rows whose turn has not ended."""
        self._limit_B = torch.tensor([request.max_new for request in requests], device=device)
        self._set_B = torch.tensor([sets.index(request.stop_ids) for request in requests], device=device)
        self._stop_UV = torch.zeros(len(sets), decoder.spec.vocab_size, dtype=torch.bool, device=device)
        for stop_V, ids in zip(self._stop_UV, sets, strict=True):
            stop_V[[i for i in ids if i < len(stop_V)]] = True
        self._all_to_the_end = not any(sets) and len({request.max_new for request in requests}) == 1

    def note(self, token_B: Tensor, written: int) -> None:
        """Mark the rows that end: each row now has `written` tokens in this turn, of which `token_B` is the last."""
        if not self._all_to_the_end:
            self.done_B |= self._stop_UV[self._set_B, token_B] | (self._limit_B <= written)
            self.open = len(token_B) - int(self.done_B.sum())

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows."""
        for name in ("index_B", "words_B4", "positions_B", "done_B", "_limit_B", "_set_B"):
            setattr(self, name, getattr(self, name)[rows])
