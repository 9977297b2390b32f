"""The embedded engine: samples a policy with torch in this process, and replays what others say they sampled.

It does not deal with environments, text or the network. One call of `extend` is one batch. Keys and values are kept between
the turns of a batch's conversations.

The steps are in `prefill` (prefills), `sampling` (sampling) and `scoring`.

Axes: B rows (conversations), C tokens of a row, D width, T tokens written in a turn.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.engine.decoder import Cache, Decoder
from shoal.engine.interface import Continuation, EngineRequest, PolicyScore, ScoreRequest, demand_room
from shoal.engine.noise import family
from shoal.engine.prefill import prefill_tokens, punch_after, read, read_openings
from shoal.engine.sampling import write
from shoal.engine.scoring import score, score_parts
from shoal.errors import StateError
from shoal.models.checkpoint import load_int8, load_policy
from shoal.models.cpu_offload import Parked
from shoal.models.hf_model import probe_tokens
from shoal.models.load_tensors import demand_finite_logits
from shoal.models.lora import pairs_of, read_adapter
from shoal.models.lora_config import has_adapter
from shoal.models.safetensors_header import key_of_base
from shoal.models.transformer_config import TransformerConfig
from shoal.protocol.messages import EngineFacts
from shoal.protocol.noise import PHILOX


@dataclass
class _Batch:
    """Conversations that were extended together: row i of the cache has the tokens `cached[i]` of `rollouts[i]`."""

    rollouts: list[str]
    cached: list[list[int]]
    cache: Cache


class LocalEngine:
    """`engine.interface.Engine` with a model in this process."""

    def __init__(
        self, threads: int | None = None, dtype: str = "float32", device: str = "cpu", noise: str = PHILOX
    ) -> None:
        """threads: of this process; None leaves the number to torch. dtype: float32 or bfloat16 for weights and
        products, or int8 for the layers' matrices, with products in float32. noise: the run's family. Raises `StateError`
        for an unknown one."""
        if threads is not None:
            torch.set_num_threads(threads)
        self.facts = EngineFacts(f"shoal-local/torch-{torch.__version__}", dtype, device)
        self.version = -1
        self._dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.float32}[dtype]
        self._family = family(noise)
        self._loaded: Decoder | None = None
        self._base = ""
        """As of `key_of_base`, if the policy in memory is an adapter over it; else empty."""
        self._batches: dict[str, _Batch] = {}
        self._at_work = threading.Lock()
        """Held by calls that use or load the weights."""
        self._parked = Parked()

    def load(self, directory: Path, version: int) -> None:
        """Load the policy of a checkpoint directory and forget all conversations. Raises `StateError`, also if a short text
        has logits that are not finite."""
        with self._at_work:  # guard: one-load-at-a-time
            self.version = -1
            self._batches.clear()
            base = key_of_base(directory) if has_adapter(directory) else ""
            if self._loaded is not None and self._computes_as(directory, base, self._loaded.spec):
                adapter, tensors = read_adapter(directory, self._loaded.spec)
                self._loaded.adapt(pairs_of(adapter, tensors, self._loaded.spec))
                self.version = version
                return
            self._loaded = None  # first, so that two versions are never in memory
            model = load_int8(directory) if self.facts.dtype == "int8" else load_policy(directory, self._dtype)
            decoder = Decoder(model, self.facts.device)
            tokens_BT = probe_tokens(decoder.spec.vocab_size)[None].to(self.facts.device)
            with torch.inference_mode():
                logits_TV = decoder.logits(decoder.hidden_states(tokens_BT)[0])
            demand_finite_logits(logits_TV, directory, self.facts.dtype)
            self._loaded, self._base = decoder, base
            self.version = version

    def _computes_as(self, directory: Path, base: str, spec: TransformerConfig) -> bool:
        """Whether the model in memory is this directory's but for the adapter, in its weights and in its config, which no
        root covers: what a version computes does not depend on which versions a node loaded before it."""
        if not base or self.facts.dtype == "int8":  # guard: adapted-int8-is-loaded-anew
            return False
        # guard: adapter-over-its-base, adapter-with-the-config
        return base == self._base and TransformerConfig.from_directory(directory) == spec

    def park(self) -> None:
        """Move weights and conversations out of the device's memory. Until `come_back` nothing may be asked."""
        with self._at_work:
            self._parked.park(self._loaded, self._batches, device=self.facts.device)

    def come_back(self) -> None:
        with self._at_work:
            self._parked.come_back()

    def forget(self, rollouts: Iterable[str]) -> None:
        """Forget these conversations, which are over. Their memory is freed with the last one of their batch."""
        for rollout in rollouts:
            self._batches.pop(rollout, None)

    @torch.inference_mode()
    def extend(self, requests: Sequence[EngineRequest], temperature: float) -> list[Continuation]:
        """One turn of each conversation, as one batch. Raises `StateError` if a turn could pass the last position."""
        if not requests:
            return []
        with self._at_work:
            return self._extend(requests, temperature)

    @torch.inference_mode()
    def score(self, requests: Sequence[ScoreRequest], temperature: float, hidden: bool = False) -> list[PolicyScore]:
        with self._at_work:
            decoder = self._decoder()
            parts = score_parts(requests, prefill_tokens(decoder.spec, decoder.device))
            return score(decoder, requests, parts, temperature, hidden, self._family)

    def _extend(self, requests: Sequence[EngineRequest], temperature: float) -> list[Continuation]:
        decoder = self._decoder()
        for request in requests:
            demand_room(decoder.spec, request.token_ids, request.max_new)
        batch = self._recall(requests) or self._open(requests)
        counts_B, conversations = [len(cached) for cached in batch.cached], [request.token_ids for request in requests]
        hidden_BD = read(decoder, batch.cache, counts_B, conversations)
        start = batch.cache.used
        turns = write(decoder, batch.cache, requests, hidden_BD, temperature, self._family)
        kept_B = [min(len(turn.token_ids) - 1, batch.cache.used - start) for turn in turns]
        punch_after(batch.cache, start, kept_B)
        for cached, request, turn, kept in zip(batch.cached, requests, turns, kept_B, strict=True):
            cached[:] = [*request.token_ids, *turn.token_ids[:kept]]
        return turns

    def _decoder(self) -> Decoder:
        assert self._loaded is not None, "load a policy before using the engine"
        assert not self._parked, "the engine is parked"
        if self.version < 0:  # guard: no-version-is-never-used
            raise StateError("the engine has no version, since loading one failed. Load a version")
        return self._loaded

    def _recall(self, requests: Sequence[EngineRequest]) -> _Batch | None:
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

    def _open(self, requests: Sequence[EngineRequest]) -> _Batch:
        """Make a batch of new conversations, and read all but the last token of each."""
        openings = [list(request.token_ids[:-1]) for request in requests]
        cache = read_openings(self._decoder(), openings, room=1 + max(request.max_new for request in requests))
        return self._remember(requests, openings, cache)

    def _remember(self, requests: Sequence[EngineRequest], cached: list[list[int]], cache: Cache) -> _Batch:
        batch = _Batch([request.rollout for request in requests], cached, cache)
        assert len(set(batch.rollouts)) == len(requests), "a conversation is in one batch twice"
        self._batches |= dict.fromkeys(batch.rollouts, batch)
        return batch
