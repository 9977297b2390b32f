"""The embedded engine: samples a policy with torch in this process, and replays what others say they sampled.

Called by workers, validators and evaluation through `engine.base`. It does not deal with environments, text or the
network. One call of `extend` is one batch. Keys and values are kept between the turns of a batch's conversations.

The token at absolute index t is the argmax of logits / temperature + gumbel(seed, t). At a tie, the lowest id wins.

Axes: B rows (conversations), C new tokens of a row, T tokens written in a turn, N tokens to be scored, D width,
V vocabulary.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from shoal.algos.gumbel import gumbel, seed_words
from shoal.engine.base import Continuation, Request, Score, ScoreRequest
from shoal.engine.decoder import Cache, Copy, Decoder
from shoal.engine.inplace import Change
from shoal.errors import StateError
from shoal.policy.files import load_policy
from shoal.policy.quantise import round_to_int8
from shoal.protocol.types import EngineFacts

PREFILL_TOKENS = {"cpu": 1024, "cuda": 16384}
"""Padded tokens of one prefill: as many as fit a CPU's cache, or fill a GPU."""

NOISE_VALUES = 1 << 15
"""Noise values made, and logits kept, at a time in a turn: enough to spread the cost of small operations, but little to
throw away if the turn ends early."""

SCORED_VALUES = 1 << 22
"""Number of logits and noise values held at a time when scoring."""


@dataclass
class _Batch:
    """Conversations that were extended together: row i of the cache has the tokens `cached[i]` of `rollouts[i]`."""

    rollouts: list[str]
    cached: list[list[int]]
    cache: Cache


class LocalEngine:
    """`engine.base.Engine` with a model in this process."""

    def __init__(self, threads: int | None = None, dtype: str = "float32", device: str = "cpu") -> None:
        """threads: of this process; None leaves the number to torch. dtype: float32 or bfloat16 for weights and
        products, or int8 for the layers' matrices, with products in float32."""
        if threads is not None:
            torch.set_num_threads(threads)
        self.facts = EngineFacts(f"shoal-local/torch-{torch.__version__}", dtype, device)
        self.version = -1
        self._dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.float32}[dtype]
        self._loaded: Decoder | None = None
        self._batches: dict[str, _Batch] = {}
        self._at_work = threading.Lock()
        """Held by calls that use or change the weights."""

    def load(self, directory: Path, version: int) -> None:
        """Load the policy of a checkpoint directory and forget all conversations. Raises `StateError`."""
        self._loaded, self.version = None, -1  # first, so that two versions are never in memory
        self._batches.clear()
        model = load_policy(directory, self._dtype)
        if self.facts.dtype == "int8":
            round_to_int8(model)
        self._loaded = Decoder(model, self.facts.device)
        self.version = version

    @torch.inference_mode()
    def change(self, before: Path, after: Path, version: int, is_right: Callable[[Path], bool]) -> bool:
        """Turn the policy in `before` into the one in `after`, in place; see `engine.base.InPlace`."""
        with self._at_work:
            assert not self._batches, "no version is changed while a block is open"  # guard: no-swap-in-an-open-block
            if self._loaded is None or self.version < 0 or self.facts.dtype == "int8":
                return False
            change = Change(self._loaded, before, after)
            if not change.is_worth_it or not is_right(before):  # guard: base-root-is-checked
                return False
            self.version = -1  # guard: changed-weights-are-torn
            change.make()
            if not is_right(after):  # guard: result-root-is-checked
                raise StateError(f"{after} is damaged: the weights that were made from it are torn")
            self.version = version
            return True

    def forget(self, rollouts: Iterable[str]) -> None:
        """Forget these conversations, which are over. Their memory is freed with the last one of their batch."""
        for rollout in rollouts:
            self._batches.pop(rollout, None)

    @torch.inference_mode()
    def extend(self, requests: Sequence[Request], temperature: float) -> list[Continuation]:
        """One turn of each conversation, as one batch. Raises `StateError` if a turn could pass the last position."""
        if not requests:
            return []
        with self._at_work:
            return self._extend(requests, temperature)

    @torch.inference_mode()
    def score(self, requests: Sequence[ScoreRequest], temperature: float, hidden: bool = False) -> list[Score]:
        """Log-probs and replay gaps of the policy's tokens, with one prefill of each conversation."""
        with self._at_work:
            return self._score(requests, temperature, hidden)

    def _extend(self, requests: Sequence[Request], temperature: float) -> list[Continuation]:
        decoder = self._decoder()
        for request in requests:
            _demand_room(decoder, request.token_ids, request.max_new)
        batch = self._recall(requests) or self._open(requests)
        hidden_BD = _read(decoder, batch, requests)
        start = batch.cache.used
        tokens_BT, logprobs_BT = _write(decoder, batch.cache, requests, hidden_BD, temperature)
        lengths_B = [_turn_length(row, request) for row, request in zip(tokens_BT, requests, strict=True)]
        kept_B = [min(length - 1, batch.cache.used - start) for length in lengths_B]
        _punch_after(batch.cache, start, kept_B)
        turns = [
            Continuation(tokens[:length], logprobs[:length])
            for tokens, logprobs, length in zip(tokens_BT, logprobs_BT, lengths_B, strict=True)
        ]
        for cached, request, turn, kept in zip(batch.cached, requests, turns, kept_B, strict=True):
            cached[:] = [*request.token_ids, *turn.token_ids[:kept]]
        return turns

    def _score(self, requests: Sequence[ScoreRequest], temperature: float, hidden: bool) -> list[Score]:
        decoder = self._decoder()
        for request in requests:
            _demand_room(decoder, request.token_ids, 0)
        scores: dict[int, Score] = {}
        for rows in _score_parts(requests, decoder.device):
            members = [requests[row] for row in rows]
            hidden_BCD = decoder.hidden_states(_padded([request.token_ids for request in members], decoder.device))
            scores |= zip(rows, _score_rows(decoder, members, hidden_BCD, temperature, hidden), strict=True)
        return [scores[row] for row in range(len(requests))]

    def _decoder(self) -> Decoder:
        assert self._loaded is not None, "load a policy before using the engine"
        if self.version < 0:  # guard: torn-is-never-used
            raise StateError("the engine's weights are torn: a change to another version failed. Load a version")
        return self._loaded

    def _recall(self, requests: Sequence[Request]) -> _Batch | None:
        """The batch that holds exactly these conversations before their next turn, with room for it.

        None if they were not extended together before, or if a conversation differs from the one that we remember.
        Conversations of the batch that are not requested leave the cache.
        """
        batch = self._batches.get(requests[0].rollout)
        if batch is None or any(self._batches.get(request.rollout) is not batch for request in requests):
            return None
        place = {rollout: row for row, rollout in enumerate(batch.rollouts)}
        rows = [place[request.rollout] for request in requests]
        for row, request in zip(rows, requests, strict=True):
            cached = batch.cached[row]
            if len(cached) >= len(request.token_ids) or list(request.token_ids[: len(cached)]) != cached:
                return None
        news = max(len(request.token_ids) - len(batch.cached[row]) for row, request in zip(rows, requests, strict=True))
        room = news + max(request.max_new for request in requests)
        fits = batch.cache.used + room <= batch.cache.capacity
        if fits and rows == list(range(batch.cache.rows)):
            return batch
        for rollout in batch.rollouts:
            self._batches.pop(rollout, None)
        cache = batch.cache.rebuilt(rows, room if fits else 2 * room + batch.cache.used)
        return self._remember(requests, [batch.cached[row] for row in rows], cache)

    def _open(self, requests: Sequence[Request]) -> _Batch:
        """Make a batch of new conversations, and read all but the last token of each."""
        openings = [list(request.token_ids[:-1]) for request in requests]
        cache = _read_openings(self._decoder(), openings, room=1 + max(request.max_new for request in requests))
        return self._remember(requests, openings, cache)

    def _remember(self, requests: Sequence[Request], cached: list[list[int]], cache: Cache) -> _Batch:
        batch = _Batch([request.rollout for request in requests], cached, cache)
        assert len(set(batch.rollouts)) == len(requests), "a conversation is in one batch twice"
        self._batches |= dict.fromkeys(batch.rollouts, batch)
        return batch


def _read_openings(decoder: Decoder, openings: list[list[int]], room: int) -> Cache:
    """A cache that holds the openings, with room for more columns. Equal neighbours, as in a group, are read once."""
    longest, runs = max(len(opening) for opening in openings), _equal_runs(openings)
    cache = Cache(decoder.spec, len(openings), longest + room, decoder.dtype, decoder.device)
    cache.used = longest
    if longest > 0:
        for chosen in _by_length([openings[run.start] for run in runs], decoder.device):
            tokens_BC = _padded([openings[runs[index].start] for index in chosen], decoder.device)
            decoder.prefill(tokens_BC, cache, _copies([runs[index] for index in chosen]))
    _punch_after(cache, 0, [len(opening) for opening in openings])
    return cache


def _read(decoder: Decoder, batch: _Batch, requests: Sequence[Request]) -> Tensor:
    """Bring the cache up to date with the requests' tokens. Returns hidden states [B, D] of each row's last token."""
    news = [request.token_ids[len(cached) :] for request, cached in zip(requests, batch.cached, strict=True)]
    counts_B = [len(new) for new in news]
    start, C = batch.cache.used, max(counts_B)
    starts_B = torch.tensor([len(cached) for cached in batch.cached], device=decoder.device)
    rope = decoder.rope((starts_B[:, None] + torch.arange(C, device=decoder.device)).reshape(-1))
    hidden_ND = decoder.extend(_padded(news, decoder.device), rope, batch.cache)
    _punch_after(batch.cache, start, counts_B)
    return hidden_ND[[row * C + count - 1 for row, count in enumerate(counts_B)]]


def _equal_runs(openings: list[list[int]]) -> list[range]:
    """Ranges of neighbouring rows that have the same opening."""
    starts = [row for row, opening in enumerate(openings) if row == 0 or opening != openings[row - 1]]
    return [range(start, stop) for start, stop in pairwise([*starts, len(openings)])]


def _copies(runs: list[range]) -> list[Copy]:
    """What each run copies from a prefill with one row a run. Neighbouring runs of a single row share one copy."""
    copies: list[Copy] = []
    for place, run in enumerate(runs):
        rows, source = copies[-1] if copies else (slice(0, 0), slice(0, 1))
        if len(run) == 1 and rows.stop == run.start and rows.stop - rows.start == source.stop - source.start:
            copies[-1] = (slice(rows.start, run.stop), slice(source.start, place + 1))
        else:
            copies.append((slice(run.start, run.stop), slice(place, place + 1)))
    return copies


def _write(
    decoder: Decoder, cache: Cache, requests: Sequence[Request], hidden_BD: Tensor, temperature: float
) -> tuple[list[list[int]], list[list[float]]]:
    """Sample until every row has ended its turn. Returns token ids and log-probs, [B][T], meaningless after a row's end.

    When half of the rows have ended, the others continue in a copy of the cache. The tokens written after that are not
    remembered, so the next turn reads them again.
    """
    longest, rows = max(request.max_new for request in requests), _Rows(requests, decoder)
    tokens_BT = torch.zeros(len(requests), longest, dtype=torch.int64, device=decoder.device)
    logprobs_BT = torch.zeros(len(requests), longest, device=decoder.device)
    written = 0
    while written < longest and rows.open:
        chosen_KB, logprobs_KB, hidden_BD = _write_some(decoder, cache, rows, hidden_BD, written, longest, temperature)
        columns = slice(written, written + len(chosen_KB))
        tokens_BT[rows.index_B, columns], logprobs_BT[rows.index_B, columns] = chosen_KB.t(), logprobs_KB.t()
        written = columns.stop
        if 0 < rows.open <= len(rows.index_B) // 2:
            still_B = torch.nonzero(~rows.done_B).squeeze(-1)
            hidden_BD, cache = hidden_BD[still_B], cache.rebuilt(still_B.tolist(), longest - written)
            rows.keep(still_B)
    return tokens_BT.tolist(), logprobs_BT.tolist()


def _write_some(
    decoder: Decoder, cache: Cache, rows: "_Rows", hidden_BD: Tensor, written: int, longest: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The next tokens of every row, as many as share one call for noise: ids and log-probs [K, B], hidden states."""
    B, V = len(rows.index_B), decoder.spec.vocab_size
    K = min(max(1, NOISE_VALUES // (B * V)), longest - written)
    positions_KB = rows.positions_B + torch.arange(written, written + K, device=decoder.device)[:, None]
    noise_KBV = gumbel(rows.words_B4.repeat(K, 1), positions_KB.reshape(-1), V).view(K, B, V)
    rope_KB = decoder.rope(positions_KB)
    scaled: list[Tensor] = []
    tokens: list[Tensor] = []
    for step in range(K):
        scaled.append(decoder.logits(hidden_BD).div_(temperature))
        tokens.append((scaled[-1] + noise_KBV[step]).argmax(-1))
        rows.note(tokens[-1], written + step + 1)
        if rows.open == 0 or written + step + 1 == longest:
            break
        hidden_BD = decoder.extend(tokens[-1][:, None], rope_KB[step], cache)
    chosen_KB = torch.stack(tokens)
    return chosen_KB, _logprobs(torch.stack(scaled), chosen_KB), hidden_BD


class _Rows:
    """The conversations being written: row b of the tensors is conversation index_B[b] of the turn."""

    def __init__(self, requests: Sequence[Request], decoder: Decoder) -> None:
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


def _score_parts(requests: Sequence[ScoreRequest], device: str) -> list[list[int]]:
    """Rows to prefill together. A group's rollouts have a prefill of their own, which computes their opening once."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for row, request in enumerate(requests):
        alike.setdefault(tuple(request.token_ids[: min(request.policy_positions, default=1)]), []).append(row)
    families = [rows for rows in alike.values() if len(rows) > 1]
    families.append([rows[0] for rows in alike.values() if len(rows) == 1])
    return [
        [rows[index] for index in part]
        for rows in families
        for part in _by_length([requests[row].token_ids for row in rows], device)
    ]


def _score_rows(
    decoder: Decoder, requests: list[ScoreRequest], hidden_BCD: Tensor, temperature: float, want_hidden: bool
) -> list[Score]:
    """Scores of prefilled conversations. The hidden state at t - 1 predicts token t."""
    counts = [len(request.policy_positions) for request in requests]
    rows_N = torch.repeat_interleave(torch.tensor(counts))
    positions_N = torch.tensor([t for request in requests for t in request.policy_positions], dtype=torch.int64)
    tokens_N = torch.tensor([request.token_ids[t] for request in requests for t in request.policy_positions])
    words_B4 = seed_words([request.seed for request in requests])
    rows_N, positions_N, tokens_N, words_B4 = (
        x.to(decoder.device) for x in (rows_N, positions_N, tokens_N.to(torch.int64), words_B4)
    )
    hidden_ND = hidden_BCD[rows_N, positions_N - 1]
    logprobs, gaps, largest = [torch.empty(0)], [torch.empty(0)], [torch.empty(0)]
    for n in torch.arange(len(rows_N), device=decoder.device).split(max(1, SCORED_VALUES // decoder.spec.vocab_size)):
        scaled_NV = decoder.logits(hidden_ND[n]).div_(temperature)
        largest.append(torch.maximum(scaled_NV.amax(-1), -scaled_NV.amin(-1)).cpu())
        noisy_NV = scaled_NV + gumbel(words_B4[rows_N[n]], positions_N[n], decoder.spec.vocab_size)
        logprobs.append(_logprobs(scaled_NV, tokens_N[n]).cpu())
        gaps.append((noisy_NV.amax(-1) - noisy_NV.gather(-1, tokens_N[n, None]).squeeze(-1)).cpu())
    hidden = hidden_ND.float().cpu().split(counts) if want_hidden else [None] * len(counts)
    return [
        Score(logprobs_P.numpy(), gaps_P.numpy(), None if hidden_PD is None else hidden_PD.numpy(), largest_P.numpy())
        for logprobs_P, gaps_P, hidden_PD, largest_P in zip(
            *(torch.cat(parts).split(counts) for parts in (logprobs, gaps)),
            hidden,
            torch.cat(largest).split(counts),
            strict=True,
        )
    ]


def _logprobs(scaled_xV: Tensor, tokens_x: Tensor) -> Tensor:
    return scaled_xV.log_softmax(-1).gather(-1, tokens_x.unsqueeze(-1)).squeeze(-1)


def _turn_length(tokens_T: list[int], request: Request) -> int:
    """Tokens of a row that belong to its turn: up to and including the first stop token, or up to the limit."""
    for index, token in enumerate(tokens_T[: request.max_new]):
        if token in request.stop_ids:
            return index + 1
    return request.max_new


def _punch_after(cache: Cache, start: int, counts_B: list[int]) -> None:
    """From column `start` on, each row has its number of tokens; the columns after them become holes."""
    if min(counts_B) < cache.used - start:
        columns = torch.arange(cache.used - start, device=cache.keys_LBKSE.device)
        cache.punch(start, columns >= torch.tensor(counts_B, device=columns.device)[:, None])


def _by_length(sequences: Sequence[Sequence[int]], device: str) -> list[list[int]]:
    """Indices of sequences, longest first, cut so that each part fits PREFILL_TOKENS when padded to its longest."""
    budget = PREFILL_TOKENS[device.split(":")[0]]
    parts: list[list[int]] = []
    for index in sorted(range(len(sequences)), key=lambda i: -len(sequences[i])):
        if parts and (len(parts[-1]) + 1) * len(sequences[parts[-1][0]]) <= budget:
            parts[-1].append(index)
        else:
            parts.append([index])
    return parts


def _padded(sequences: Sequence[Sequence[int]], device: str) -> Tensor:
    """Token ids, int64[B, C], padded on the right with zeros. What a pad holds is never seen."""
    longest = max(len(sequence) for sequence in sequences)
    rows = [[*sequence, *[0] * (longest - len(sequence))] for sequence in sequences]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _demand_room(decoder: Decoder, token_ids: Sequence[int], max_new: int) -> None:
    """Refuse conversations that would pass the last position, and token ids that the policy does not have."""
    spec, length = decoder.spec, len(token_ids)
    if length + max_new > spec.max_positions:
        raise StateError(
            f"a conversation of {length} tokens may grow by {max_new}, but the policy ends at {spec.max_positions}: "
            f"lower sampling.max_tokens, or use a policy with more positions"
        )
    if length == 0 or min(token_ids) < 0 or max(token_ids) >= spec.vocab_size:
        raise StateError(f"a conversation is empty or has token ids outside 0..{spec.vocab_size - 1}")
