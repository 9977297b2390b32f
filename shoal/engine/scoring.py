"""Scoring written conversations: log-probs and replay gaps of the policy's tokens, after one prefill.

It makes the noise of the seeds again, and does not know who sampled.

Axes: B rows (conversations), C tokens of a row, N tokens to be scored, P those of one conversation, D width,
V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.algos.noise.philox import seed_words
from shoal.engine.decoder import logprobs_of
from shoal.engine.interface import DecoderBackend, PolicyScore, ScoreRequest, demand_room
from shoal.engine.noise import NoiseScheme
from shoal.engine.prefill import by_length, padded
from shoal.models.memory import SCORED_VALUES


def score(
    decoder: DecoderBackend,
    requests: Sequence[ScoreRequest],
    parts: Sequence[Sequence[int]],
    temperature: float,
    want_hidden: bool,
    family: NoiseScheme,
) -> list[PolicyScore]:
    """Scores of conversations, in their order. A part has the indices of those that are prefilled together. Raises
    `StateError` if one is longer than the policy reads."""
    for request in requests:
        demand_room(decoder.spec, request.token_ids, 0)
    scores: dict[int, PolicyScore] = {}
    for part in parts:
        members = [requests[row] for row in part]
        hidden_BCD = decoder.hidden_states(padded([request.token_ids for request in members], decoder.device))
        scores |= zip(part, _score_rows(decoder, members, hidden_BCD, temperature, want_hidden, family), strict=True)
    return [scores[row] for row in range(len(requests))]


def score_parts(requests: Sequence[ScoreRequest], budget: int) -> list[list[int]]:
    """Rows to prefill together, of at most `budget` tokens. A group's rollouts have a prefill of their own, which computes
    their opening once."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for row, request in enumerate(requests):
        alike.setdefault(tuple(request.token_ids[: min(request.policy_positions, default=1)]), []).append(row)
    families = [rows for rows in alike.values() if len(rows) > 1]
    families.append([rows[0] for rows in alike.values() if len(rows) == 1])
    return [
        [rows[index] for index in part]
        for rows in families
        for part in by_length([requests[row].token_ids for row in rows], budget)
    ]


def _score_rows(
    decoder: DecoderBackend,
    requests: list[ScoreRequest],
    hidden_BCD: Tensor,
    temperature: float,
    want_hidden: bool,
    family: NoiseScheme,
) -> list[PolicyScore]:
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
        logprobs.append(logprobs_of(scaled_NV, tokens_N[n]).cpu())
        gaps.append(family.gaps(scaled_NV, words_B4[rows_N[n]], positions_N[n], tokens_N[n]).cpu())
    hidden = hidden_ND.float().cpu().split(counts) if want_hidden else [None] * len(counts)
    return [
        PolicyScore(
            logprobs_P.numpy(), gaps_P.numpy(), None if hidden_PD is None else hidden_PD.numpy(), largest_P.numpy()
        )
        for logprobs_P, gaps_P, hidden_PD, largest_P in zip(
            *(torch.cat(parts).split(counts) for parts in (logprobs, gaps)),
            hidden,
            torch.cat(largest).split(counts),
            strict=True,
        )
    ]
