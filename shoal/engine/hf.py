"""The engine for policies of any architecture: samples and scores with a model of `transformers` in this process.

Called through `engine.base`, if a run needs it. Tokens, noise and log-probs are those of the local engine's contract, with
the same code (`writing`, `scoring`); only hidden states come from `transformers`. Nothing is remembered between turns: each
turn reads its conversations again, because not every architecture can leave holes in its memory.

When a policy is loaded, the engine compares three ways to read the same tokens: without a cache, with one, and in a row
that begins with padding. If padding changes anything, conversations of different lengths are read apart.

Axes: B rows (conversations), T tokens of a row, C new tokens of a row, U different conversations, D width.
"""

import inspect
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.engine.base import Continuation, Request, Score, ScoreRequest
from shoal.engine.families import Family, family
from shoal.engine.reading import by_length, prefill_tokens
from shoal.engine.room import demand_room
from shoal.engine.scoring import score
from shoal.engine.writing import turn_length, write
from shoal.errors import StateError
from shoal.policy.anymodel import TOLERANCE, AnyModel, load_any, refused_by_name
from shoal.policy.parking import Parked
from shoal.protocol.bounds import TRANSFORMERS
from shoal.protocol.noise import PHILOX
from shoal.protocol.types import EngineFacts

_PADS = 3
"""Tokens of padding in the row that shows whether padding changes anything."""


class AnyCache:
    """What `transformers` remembers of B rows, of which all have the same number of columns, perhaps after padding."""

    def __init__(self, past: Any, mask_BT: Tensor | None) -> None:
        """`mask_BT` is 0 at padding; None if there is none."""
        self.past, self.mask_BT = past, mask_BT

    def rebuilt(self, rows: Sequence[int], room: int) -> "AnyCache":
        """The chosen rows, in that order."""
        chosen = torch.tensor(rows, device=None if self.mask_BT is None else self.mask_BT.device)
        self.past.reorder_cache(chosen)
        return AnyCache(self.past, None if self.mask_BT is None else self.mask_BT[chosen])


class AnyDecoder:
    """A model of `transformers`, ready to generate: an `engine.steps.Steps`."""

    @torch.inference_mode()
    def __init__(self, model: AnyModel, device: str) -> None:
        model.whole.to(device)
        self.model, self.spec, self.device = model, model.spec, device
        reader = model.body if model.head_weight() is not None else model.whole
        self._reader, taken = reader, inspect.signature(reader.forward).parameters
        self._takes_positions = "position_ids" in taken
        self.reads_padding = True
        """Whether rows that begin with padding have the same hidden states as rows without."""
        self._examine()

    def rope(self, positions_x: Tensor) -> Tensor:
        """The positions themselves."""
        return positions_x

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits, fp32[N, V]."""
        return self.model.logits(hidden_ND).to(torch.float32, copy=True)

    def hidden_states(self, tokens_BC: Tensor) -> Tensor:
        """Hidden states, [B, C, D], of right-padded conversations, without a cache."""
        return self.model.hidden(tokens_BC)

    def read(self, conversations: Sequence[Sequence[int]]) -> tuple[Tensor, AnyCache]:
        """Hidden states, [B, D], of the last token of each conversation, and what comes before the next."""
        different = list(dict.fromkeys(map(tuple, conversations)))
        longest = max(len(one) for one in different)
        pads_U = torch.tensor([longest - len(one) for one in different], device=self.device)
        rows = [[*[0] * (longest - len(one)), *one] for one in different]
        columns_T = torch.arange(longest, device=self.device)
        positions_UT = (columns_T - pads_U[:, None]).clamp_min(0)
        mask_UT = (columns_T >= pads_U[:, None]).long() if pads_U.any() else None
        cache = AnyCache(None, mask_UT)
        hidden_UTD = self._through(torch.tensor(rows, device=self.device), positions_UT, cache)
        place = {one: index for index, one in enumerate(different)}
        at_B = [place[tuple(conversation)] for conversation in conversations]
        return hidden_UTD[at_B, -1], cache.rebuilt(at_B, 0)

    def extend(self, tokens_BC: Tensor, rope: Tensor, cache: AnyCache) -> Tensor:
        """Hidden states, [B * C, D], of the next tokens of every row, at the positions `rope`."""
        if cache.mask_BT is not None:
            cache.mask_BT = torch.cat([cache.mask_BT, torch.ones_like(tokens_BC)], 1)
        return self._through(tokens_BC, rope.view(tokens_BC.shape), cache).flatten(0, 1)

    def _through(self, tokens_BC: Tensor, positions_BC: Tensor, cache: AnyCache) -> Tensor:
        placed = {"position_ids": positions_BC} if self._takes_positions else {}
        result = self._reader(
            input_ids=tokens_BC, attention_mask=cache.mask_BT, past_key_values=cache.past, use_cache=True, **placed
        )
        cache.past = getattr(result, "past_key_values", None)
        if cache.past is None or not hasattr(cache.past, "reorder_cache"):
            raise StateError(f"{self.spec.architecture} has no cache in transformers, so it cannot write")
        return result.logits if self._reader is self.model.whole else result.last_hidden_state

    def _examine(self) -> None:
        """Refuse a model whose cache changes what it computes; and see whether padding does."""
        tokens = [1 + i * max(1, self.spec.vocab_size // 10) % (self.spec.vocab_size - 1) for i in range(8)]
        expected_TD = self.hidden_states(torch.tensor([tokens], device=self.device))[0]
        if not self._agrees([tokens[:6], tokens[:6]], tokens[6], expected_TD[5:7]):  # guard: cache-is-proven
            raise StateError(f"{self.spec.architecture}: with a cache, transformers computes other values than without")
        try:
            longer = [7 % self.spec.vocab_size] * _PADS + tokens[:6]
            self.reads_padding = self._agrees(
                [tokens[:6], longer], tokens[6], expected_TD[5:7]
            )  # guard: padding-is-proven
        except (ValueError, TypeError, RuntimeError):
            self.reads_padding = False

    def _agrees(self, conversations: list[list[int]], then: int, expected_2D: Tensor) -> bool:
        """Whether the first conversation's last token, and `then` after it, have the expected hidden states."""
        hidden_BD, cache = self.read(conversations)
        lengths_B = torch.tensor([len(one) for one in conversations], device=self.device)
        next_BD = self.extend(torch.full((len(conversations), 1), then, device=self.device), lengths_B, cache)
        found_2D = torch.stack([hidden_BD[0], next_BD[0]])
        most = TOLERANCE[torch.promote_types(found_2D.dtype, torch.bfloat16)] * float(expected_2D.abs().max())
        return bool((found_2D - expected_2D).abs().max() <= most)


class TransformersEngine:
    """`engine.base.Engine` with a model of `transformers` in this process."""

    def __init__(
        self, threads: int | None = None, dtype: str = "float32", device: str = "cpu", noise: str = PHILOX
    ) -> None:
        """threads: of this process; None leaves the number to torch. dtype: float32 or bfloat16, of weights and products.
        noise: the run's family.

        Raises `StateError` for an unknown family, and `ImportError` if transformers is not installed."""
        import transformers

        if threads is not None:
            torch.set_num_threads(threads)
        versions = f"{transformers.__version__}-torch-{torch.__version__}"
        self.facts = EngineFacts(f"shoal-{TRANSFORMERS}/{versions}", dtype, device)
        self.version = -1
        self._dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
        self._family = family(noise)
        self._loaded: AnyDecoder | None = None
        self._at_work = threading.Lock()
        self._parked = Parked()

    def load(self, directory: Path, version: int) -> None:
        """Load the policy of a checkpoint directory. Raises `StateError`."""
        with self._at_work:  # guard: one-any-load-at-a-time
            self._loaded, self.version = None, -1  # first, so that two versions are never in memory
            model = load_any(directory, self._dtype)
            with refused_by_name(directory, model.spec):
                self._loaded = AnyDecoder(model, self.facts.device)
            self.version = version

    def park(self) -> None:
        """Move the weights out of the device's memory. Until `come_back` nothing may be asked."""
        with self._at_work:
            self._parked.park(self._loaded, device=self.facts.device)

    def come_back(self) -> None:
        """Move them back, with the same bits. Raises `torch.OutOfMemoryError`."""
        with self._at_work:
            self._parked.come_back()

    def forget(self, rollouts: Iterable[str]) -> None:
        """Nothing: no conversation is remembered."""

    @torch.inference_mode()
    def extend(self, requests: Sequence[Request], temperature: float) -> list[Continuation]:
        """One turn of each conversation, as one batch. Raises `StateError` if a turn could pass the last position."""
        decoder = self._decoder()
        for request in requests:
            demand_room(decoder.spec, request.token_ids, request.max_new)
        turns: dict[int, Continuation] = {}
        with self._at_work:
            for part in _parts(requests, decoder.reads_padding):
                members = [requests[row] for row in part]
                turns |= zip(part, _extend(decoder, members, temperature, self._family), strict=True)
        return [turns[row] for row in range(len(requests))]

    @torch.inference_mode()
    def score(self, requests: Sequence[ScoreRequest], temperature: float, hidden: bool = False) -> list[Score]:
        """Log-probs and replay gaps of the policy's tokens, with one prefill of each conversation."""
        decoder = self._decoder()
        budget = prefill_tokens(decoder.spec, decoder.device)
        parts = by_length([request.token_ids for request in requests], budget)
        with self._at_work:
            return score(decoder, requests, parts, temperature, hidden, self._family)

    def _decoder(self) -> AnyDecoder:
        assert self._loaded is not None, "load a policy before using the engine"
        assert not self._parked, "the engine is parked"
        return self._loaded


def _extend(decoder: AnyDecoder, requests: Sequence[Request], temperature: float, family: Family) -> list[Continuation]:
    hidden_BD, cache = decoder.read([request.token_ids for request in requests])
    tokens_BT, logprobs_BT = write(decoder, cache, requests, hidden_BD, temperature, family)
    lengths_B = [turn_length(row, request) for row, request in zip(tokens_BT, requests, strict=True)]
    return [
        Continuation(tokens[:length], logprobs[:length])
        for tokens, logprobs, length in zip(tokens_BT, logprobs_BT, lengths_B, strict=True)
    ]


def _parts(requests: Sequence[Request], reads_padding: bool) -> list[list[int]]:
    """Rows that are read together: all, or those of the same length where padding would change them."""
    if reads_padding:
        return [list(range(len(requests)))] if requests else []
    parts: dict[int, list[int]] = {}
    for row, request in enumerate(requests):
        parts.setdefault(len(request.token_ids), []).append(row)
    return list(parts.values())
