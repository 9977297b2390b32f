"""The engine for policies of any architecture: samples and scores with a model of `transformers` in this process.

Tokens, noise and log-probs are those of the local engine's contract, with the same code (`sampling`, `scoring`); only
hidden states come from `transformers`. Nothing is remembered between turns: each turn reads its conversations again,
because not every architecture can leave holes in its memory.

When a policy is loaded, the engine compares three ways to read the same tokens: without a cache, with one, and in a row
that begins with padding. If padding changes anything, conversations of different lengths are read apart. If the rotation
depends on the length (`longrope`), what is written across its change is replayed, too. If layers see a window, the same is
compared once more with a window that these tokens pass; for later weights of the same config, with fewer tokens.

Axes: B rows (conversations), T tokens of a row, C new tokens of a row, U different conversations, D width.
"""

import inspect
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.engine.interface import Continuation, EngineRequest, PolicyScore, ScoreRequest, demand_room
from shoal.engine.noise import NoiseScheme, family
from shoal.engine.prefill import by_length, prefill_tokens
from shoal.engine.sampling import write
from shoal.engine.scoring import score
from shoal.errors import StateError, one_line
from shoal.models.cpu_offload import Parked
from shoal.models.hf_model import CHOSEN, TOLERANCE, HFModel, load_any, refused_by_name
from shoal.protocol.messages import EngineFacts
from shoal.protocol.noise import PHILOX
from shoal.protocol.tolerances import TRANSFORMERS

_PADS = 3
"""Tokens of padding in the row that shows whether padding changes anything."""

_WINDOW, _PASSED = 4, 12
"""Tokens of the windows with which a model is examined, and of the text that passes them."""

_EXAMINED = dict[str, bool]()
"""The models with windows that were examined at length in this process, by their configs: whether they read padding."""


class AnyCache:
    """What `transformers` remembers of B rows, of which all have the same number of columns, perhaps after padding."""

    def __init__(self, past: Any, mask_BT: Tensor | None, last: int) -> None:
        """`mask_BT` is 0 at padding; None if there is none. `last` is the last position that these rows may come to. Rows
        that have ended stay there while others go on, since the highest position may decide the rotation of all."""
        self.past, self.mask_BT, self.last = past, mask_BT, last

    def rebuilt(self, rows: Sequence[int], room: int) -> "AnyCache":
        """The chosen rows, in that order."""
        chosen = torch.tensor(rows, device=None if self.mask_BT is None else self.mask_BT.device)
        self.past.reorder_cache(chosen)
        return AnyCache(self.past, None if self.mask_BT is None else self.mask_BT[chosen], self.last)


class AnyDecoder:
    """A model of `transformers`, ready to generate: an `engine.interface.DecoderBackend`."""

    @torch.inference_mode()
    def __init__(self, model: HFModel, device: str) -> None:
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
        return self.model.logits(hidden_ND).to(torch.float32, copy=True)

    def hidden_states(self, tokens_BC: Tensor) -> Tensor:
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
        short = self.model.short_rotation
        cache = AnyCache(None, mask_UT, (short if longest <= short else self.spec.max_positions) - 1)
        hidden_UTD = self._through(torch.tensor(rows, device=self.device), positions_UT, cache)
        place = {one: index for index, one in enumerate(different)}
        at_B = [place[tuple(conversation)] for conversation in conversations]
        return hidden_UTD[at_B, -1], cache.rebuilt(at_B, 0)

    def extend(self, tokens_BC: Tensor, rope: Tensor, cache: AnyCache) -> Tensor:
        """Hidden states, [B * C, D], of the next tokens of every row, at the positions `rope`."""
        if cache.mask_BT is not None:
            cache.mask_BT = torch.cat([cache.mask_BT, torch.ones_like(tokens_BC)], 1)
        positions_BC = rope.view(tokens_BC.shape).clamp_max(cache.last)  # guard: ended-rows-rotate-nobody
        return self._through(tokens_BC, positions_BC, cache).flatten(0, 1)

    def _through(self, tokens_BC: Tensor, positions_BC: Tensor, cache: AnyCache) -> Tensor:
        placed = {"position_ids": positions_BC} if self._takes_positions else {}
        result = self._reader(
            input_ids=tokens_BC, attention_mask=cache.mask_BT, past_key_values=cache.past, use_cache=True, **placed
        )
        cache.past = getattr(result, "past_key_values", None)
        if cache.past is None or not hasattr(cache.past, "reorder_cache"):
            raise StateError(
                f"{self.model.where}: {self.spec.family} has no cache of keys and values in transformers, so it "
                "cannot write turns. Choose another model"
            )
        return result.logits if self._reader is self.model.whole else result.last_hidden_state

    def _examine(self) -> None:
        """Refuse a model whose cache changes what it computes; and see whether padding does.

        Windows are examined at length for the first weights of a config: later weights of it show with fewer tokens what
        those of the first may have hidden.
        """
        windowed, passed = bool(self.model.window_keys()), min(_PASSED, self.spec.max_positions)
        again = windowed and (key := self._computation()) in _EXAMINED
        try:
            with self.model.windows_of(lambda _: _PASSED):
                same = again or self._agrees(6, 8)
            past = again or not windowed or self._agrees(6, 8)
            with self.model.windows_of(lambda own: min(own, _WINDOW)):
                past &= not windowed or self._agrees(_WINDOW + 3, min(9, passed) if again else passed)
                past &= not windowed or self._agrees(3, min(6, passed) if again else passed)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
            if not windowed or "can't allocate memory" in str(error):
                raise
            text = f"{type(error).__name__}: {one_line(error)}"
            raise self._refused(f"with which transformers cannot write ({text})") from None
        if not same:  # guard: cache-is-proven
            raise StateError(
                f"{self.model.where}: with a cache, transformers computes other values of this {self.spec.family} "
                "than without, so no replay would agree. Choose another model"
            )
        if not past:  # guard: windows-are-proven
            raise self._refused(
                "by which its cache forgets tokens that its forward pass reads, so no replay would agree"
            )
        try:
            self.reads_padding = _EXAMINED[key] if again else self._agrees(6, 8, _PADS)  # guard: padding-is-proven
            with self.model.windows_of(lambda own: min(own, _WINDOW)):
                self.reads_padding &= not windowed or self._agrees(3, 6 if again else passed, _PADS)
        except (ValueError, TypeError, RuntimeError):
            self.reads_padding = False
        if windowed:
            _EXAMINED[key] = self.reads_padding

    def _computation(self) -> str:
        """What tells how this model computes, whatever its weights are. In one process, the libraries are the same."""
        whole = self.model.whole
        config = whole.config.to_json_string(use_diff=False)
        return f"{config} {whole.config._attn_implementation} {whole.dtype} {self.device}"

    def _refused(self, fault: str) -> StateError:
        keys, text = self.model.window_keys(), self.model.whole.config.get_text_config()
        said = " and ".join(key if key == "layer_types" else f"{key} = {getattr(text, key)}" for key in keys)
        remedy = f"Set {' and '.join(keys)} to null"
        if CHOSEN in keys:
            remedy = f"Set max_position_embeddings to {getattr(text, CHOSEN)}, so that no text is longer"
        return StateError(
            f"transformers cannot run this {self.spec.family} as its config.json says: it has {said}, {fault}. "
            f"{remedy}, or choose another model"
        )

    def _agrees(self, read: int, tokens: int, pads: int = 0) -> bool:
        """Whether a text of so many tokens has the same hidden states at once, and if its end is written token by token
        from a cache of its first ones, beside a conversation that has more of them."""
        spread = max(1, self.spec.vocab_size // 10)
        text = [1 + i * spread % (self.spec.vocab_size - 1) for i in range(tokens)]
        expected_TD = self.hidden_states(torch.tensor([text], device=self.device))[0, read - 1 :]
        opening = text[:read]
        hidden_BD, cache = self.read([opening, [7 % self.spec.vocab_size] * pads + opening])
        found = [hidden_BD[0]]
        for at in range(read, tokens):
            positions_B = torch.tensor([at, at + pads], device=self.device)
            found.append(self.extend(torch.full((2, 1), text[at], device=self.device), positions_B, cache)[0])
        found_TD = torch.stack(found)
        most = TOLERANCE[torch.promote_types(found_TD.dtype, torch.bfloat16)] * float(expected_TD.abs().max())
        return bool((found_TD - expected_TD).abs().max() <= most)


class TransformersEngine:
    """`engine.interface.Engine` with a model of `transformers` in this process."""

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
                _examine_rotation(self._loaded, self._family)
            self.version = version

    def park(self) -> None:
        """Move the weights out of the device's memory. Until `come_back` nothing may be asked."""
        with self._at_work:
            self._parked.park(self._loaded, device=self.facts.device)

    def come_back(self) -> None:
        with self._at_work:
            self._parked.come_back()

    def forget(self, rollouts: Iterable[str]) -> None:
        """Nothing: no conversation is remembered."""

    @torch.inference_mode()
    def extend(self, requests: Sequence[EngineRequest], temperature: float) -> list[Continuation]:
        """One turn of each conversation, as one batch. Raises `StateError` if a turn could pass the last position."""
        with self._at_work:
            decoder = self._decoder()
            for request in requests:
                demand_room(decoder.spec, request.token_ids, request.max_new)
            return _turns(decoder, requests, temperature, self._family)

    @torch.inference_mode()
    def score(self, requests: Sequence[ScoreRequest], temperature: float, hidden: bool = False) -> list[PolicyScore]:
        with self._at_work:
            decoder = self._decoder()
            budget = prefill_tokens(decoder.spec, decoder.device)
            parts = by_length([request.token_ids for request in requests], budget)
            return score(decoder, requests, parts, temperature, hidden, self._family)

    def _decoder(self) -> AnyDecoder:
        assert self._loaded is not None, "load a policy before using the engine"
        assert not self._parked, "the engine is parked"
        return self._loaded


def _turns(
    decoder: AnyDecoder, requests: Sequence[EngineRequest], temperature: float, family: NoiseScheme
) -> list[Continuation]:
    """One turn of each conversation. One that passes the length at which the rotation changes is read again there."""
    turns = [Continuation([], []) for _ in requests]
    left = list(range(len(requests)))
    while left:
        now = [_up_to_another_rotation(requests[row], turns[row], decoder.model.short_rotation) for row in left]
        for part in _parts(now, decoder):
            chosen = [now[i] for i in part]
            hidden_BD, cache = decoder.read([request.token_ids for request in chosen])
            written = write(decoder, cache, chosen, hidden_BD, temperature, family)
            for place, found in zip(part, written, strict=True):
                before = turns[left[place]]
                turns[left[place]] = Continuation(before.token_ids + found.token_ids, before.logprobs + found.logprobs)
        left = [row for row in left if _is_open(requests[row], turns[row])]
    return turns


def _up_to_another_rotation(request: EngineRequest, turn: Continuation, short: int) -> EngineRequest:
    """What is written next of a turn: all that is left of it, or as much as has the rotation of the text so far."""
    if not short:
        return request
    tokens, most = [*request.token_ids, *turn.token_ids], request.max_new - len(turn.token_ids)
    if 0 < len(tokens) <= short:
        most = min(most, short + 1 - len(tokens))  # the last of them is predicted by a text of `short` tokens
    return request._replace(token_ids=tokens, max_new=most)


def _is_open(request: EngineRequest, turn: Continuation) -> bool:
    return len(turn.token_ids) < request.max_new and turn.token_ids[-1] not in request.stop_ids


def _examine_rotation(decoder: AnyDecoder, family: NoiseScheme) -> None:
    """Refuse a model whose turns cannot be replayed across the length at which its rotation changes: a short conversation
    beside a long one, of a few tokens, as if it changed there."""
    model, limit = decoder.model, decoder.spec.max_positions
    if not model.short_rotation or limit < 12:
        return
    step = max(1, decoder.spec.vocab_size // 10)
    opening = [1 + i * step % (decoder.spec.vocab_size - 1) for i in range(7)]
    asked = [EngineRequest(str(n), opening[:n], bytes([n] * 32), 5, frozenset()) for n in (3, 7)]
    with torch.inference_mode(), model.rotating_short_to(5):
        turns = _turns(decoder, asked, 1.0, family)
        written = [
            ScoreRequest([*one.token_ids, *turn.token_ids], range(len(one.token_ids), len(one.token_ids) + 5), one.seed)
            for one, turn in zip(asked, turns, strict=True)
        ]
        scores = score(decoder, written, [[0, 1]], 1.0, False, family)
    for turn, found in zip(turns, scores, strict=True):
        gap = float(np.abs(found.logprobs_P - np.array(turn.logprobs, dtype=np.float32)).max())
        largest = 1.0 if found.largest_P is None else max(1.0, float(found.largest_P.max()))
        if gap > TOLERANCE[model.whole.dtype] * largest:  # guard: rotation-is-proven
            raise StateError(
                f"{decoder.spec.family}: where its rotation changes, a replay differs by {gap:.2g} nats from the "
                "sampled tokens. Choose another model"
            )


def _parts(requests: Sequence[EngineRequest], decoder: AnyDecoder) -> list[list[int]]:
    """Rows that are read together: all with the same rotation, or those of the same length where padding would change
    them."""
    parts: dict[int, list[int]] = {}
    for row, request in enumerate(requests):
        length, short = len(request.token_ids), decoder.model.short_rotation
        parts.setdefault(int(length > short > 0) if decoder.reads_padding else length, []).append(row)
    return list(parts.values())
