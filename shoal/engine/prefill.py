"""Reading conversations into a cache: prefills of similar lengths, where a group's opening is read once, and new tokens.

It does not deal with noise, or with which conversations belong together.

Axes: B rows (conversations), C new tokens of a row, D width.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from shoal.engine.decoder import Cache, Copy, Decoder
from shoal.models.config import ModelConfig
from shoal.models.device import CPU
from shoal.models.memory import PREFILL_BYTES, PREFILL_TOKENS


def read_openings(decoder: Decoder, openings: list[list[int]], room: int) -> Cache:
    """A cache that holds the openings, with room for more columns. Equal neighbours, as in a group, are read once."""
    longest, runs = max(len(opening) for opening in openings), _equal_runs(openings)
    cache = Cache(decoder.spec, len(openings), longest + room, decoder.dtype, decoder.device)
    cache.advance(longest)
    if longest > 0:
        for chosen in by_length([openings[run.start] for run in runs], prefill_tokens(decoder.spec, decoder.device)):
            tokens_BC = padded([openings[runs[index].start] for index in chosen], decoder.device)
            decoder.prefill(tokens_BC, cache, _copies([runs[index] for index in chosen]))
    punch_after(cache, 0, [len(opening) for opening in openings])
    return cache


def read(decoder: Decoder, cache: Cache, cached: Sequence[int], conversations: Sequence[Sequence[int]]) -> Tensor:
    """Add to a cache what it lacks of each row's conversation, of which it has the first `cached` tokens.

    Returns hidden states [B, D] of each row's last token.
    """
    news = [conversation[count:] for conversation, count in zip(conversations, cached, strict=True)]
    counts_B = [len(new) for new in news]
    start, C = cache.used, max(counts_B)
    starts_B = torch.tensor(cached, device=decoder.device)
    rope = decoder.rope((starts_B[:, None] + torch.arange(C, device=decoder.device)).reshape(-1))
    hidden_ND = decoder.extend(padded(news, decoder.device), rope, cache)
    punch_after(cache, start, counts_B)
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


def punch_after(cache: Cache, start: int, counts_B: list[int]) -> None:
    """From column `start` on, each row has its number of tokens; the columns after them become holes."""
    if min(counts_B) < cache.used - start:
        columns = torch.arange(cache.used - start, device=cache.keys_LBKSE.device)
        cache.punch(start, columns >= torch.tensor(counts_B, device=columns.device)[:, None])


def prefill_tokens(spec: ModelConfig, device: str) -> int:
    """Padded tokens of one prefill of a policy. It depends on nothing that changes, because bits depend on it."""
    most, least = PREFILL_TOKENS[device.split(":")[0]], PREFILL_TOKENS[CPU]
    return min(most, max(least, PREFILL_BYTES // (4 * spec.layer_activations())))


def by_length(sequences: Sequence[Sequence[int]], budget: int) -> list[list[int]]:
    """Indices of sequences, longest first, cut so that each part has at most `budget` tokens when padded to its longest."""
    parts: list[list[int]] = []
    for index in sorted(range(len(sequences)), key=lambda i: -len(sequences[i])):
        if parts and (len(parts[-1]) + 1) * len(sequences[parts[-1][0]]) <= budget:
            parts[-1].append(index)
        else:
            parts.append([index])
    return parts


def padded(sequences: Sequence[Sequence[int]], device: str) -> Tensor:
    """Token ids, int64[B, C], padded on the right with zeros. What a pad holds is never seen."""
    longest = max(len(sequence) for sequence in sequences)
    rows = [[*sequence, *[0] * (longest - len(sequence))] for sequence in sequences]
    return torch.tensor(rows, dtype=torch.int64, device=device)
