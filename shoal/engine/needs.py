"""How much memory the embedded engine needs for a policy and a piece of work, before anything is allocated.

Called by nodes that joined somebody's run, and by auditors. The host chose the policy, the sampling limits and the lease.
The figures are upper bounds for usual work; long replies of an environment can take more, which `roles/memory` limits in
another way. `tests/engine/test_needs.py` compares them with what the engine takes.

All results are bytes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.engine.held import NOISE_VALUES, PREFILL_BYTES, PREFILL_TOKENS, SCORED_VALUES
from shoal.policy.anyspec import AnySpec
from shoal.policy.nf4spec import NF4, decoding_bytes_of, weight_bytes_of
from shoal.policy.sizes import adapter_parameters_of
from shoal.policy.spec import PolicySpec

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int8": 4}
"""Of one weight in memory, by the dtype of the engine; int8 weights are kept as float32."""

ADAPTER_BYTES = 4 * 4
"""Bytes an engine holds for each adapter weight: one float32 copy as read, and three arranged, because query, key and value
are padded with zeros."""

LOGIT_BYTES = 48
"""Of one logit: itself, its noise in float64, its log-prob, and the copies while they are computed."""

SCORED_LOGIT_BYTES = 72
"""The same when scoring, which takes and frees so many logits again and again. The system's allocator keeps much of what
is freed, in pieces that the next logits do not fit: measured, up to 65 bytes of a logit, of which at most 15 are in use."""

TOKEN_BYTES = 128
"""Of one token in Python's lists: the conversation, the cache's contents, the log-probs."""

ROW_BYTES = 8192
"""Of one conversation, without its tokens."""

CACHE_COPIES = 2
"""A cache of which half of the rows have ended is copied; so is one that becomes too small."""

READ_TOKENS = 8
"""Tokens that are read at a time for each row: a reply of the environment and the last token before it."""


def adapter_bytes(spec: PolicySpec | AnySpec, rank: int, targets: Sequence[str]) -> int:
    """What an engine holds of an adapter of this rank, beside its base; 0: there is none."""
    return ADAPTER_BYTES * adapter_parameters_of(spec, rank, targets) if rank else 0


def played_on_gpu(size: int) -> int:
    """What `play` gives, on a GPU, which reads more at a time: openings are read before a cache has a copy."""
    return max(size, size // 2 + PREFILL_BYTES)


def scored_on_gpu(size: int) -> int:
    """What `score` gives, on a GPU."""
    return size + PREFILL_BYTES


@dataclass(frozen=True)
class Needs:
    """What one policy needs in an engine of one dtype."""

    spec: PolicySpec
    dtype: str
    adapter: int = 0
    """As `adapter_bytes`."""
    base: str = ""
    """As of `policy.adapter.base`."""

    @property
    def loaded(self) -> int:
        """The weights as they stay in memory: layers, embedding, and the head beside it."""
        return self._layers + 2 * self._item * self._head + self.adapter

    def load(self) -> int:
        """While the weights are read and arranged: the model and its arranged form, a head twice, one layer and tensor
        more, and an eighth of all that for holes between them. Each layer of the model is given back when it is arranged,
        but the system's allocator may keep it: measured, in one of six loads it kept all."""
        # Codes are not arranged in another form.
        model = self._item * self._head + (0 if self.base == NF4 else self._layers)
        return (self.loaded + model + self._beside + self.adapter) * 9 // 8

    def in_passing(self) -> int:
        """In the memory of the CPU while the weights are read on their way to a GPU."""
        heads = (1 if self.spec.tied else 2) * self._head
        return self._layers + self._item * heads + self._beside + self.adapter

    def play(self, rows: int, max_tokens: int, all_tokens: int = 0) -> int:
        """Beyond the weights, for a batch of `rows` conversations of at most `max_tokens`.

        The engine remembers one row of each rollout at a time. `all_tokens`: those of all its rows; 0 is `max_tokens`.
        """
        spec, tokens = self.spec, min(max_tokens, self.spec.max_positions)
        cache = 2 * spec.layers * spec.kv_heads * spec.head_dim * self._item * rows * (tokens + 64)
        logits = LOGIT_BYTES * max(NOISE_VALUES, rows * spec.vocab_size)
        read = self._token * max(PREFILL_TOKENS["cpu"], tokens, rows * READ_TOKENS)
        told = rows * (ROW_BYTES + max(tokens, all_tokens) * TOKEN_BYTES)
        return CACHE_COPIES * cache + logits + read + told + self._decoding

    def score(self, tokens: int, longest: int, hidden: bool) -> int:
        """Beyond the weights, for a prefill of conversations of at most `longest` tokens each, `tokens` in all."""
        spec = self.spec
        logits = SCORED_LOGIT_BYTES * max(spec.vocab_size, min(SCORED_VALUES, tokens * spec.vocab_size))
        read = self._token * max(PREFILL_TOKENS["cpu"], min(longest, tokens, spec.max_positions))
        return logits + read + tokens * (TOKEN_BYTES + (2 * 4 * spec.width if hidden else 0)) + self._decoding

    @property
    def _item(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def _head(self) -> int:
        """Parameters of the head, or of the embedding."""
        return self.spec.vocab_size * self.spec.width

    @property
    def _beside(self) -> int:
        """What exists for a moment: three forms of a layer, and a tensor as it is read."""
        largest = max(math.prod(shape) for shape in self.spec.tensor_shapes().values())
        return 3 * self._layers // self.spec.layers + 4 * largest

    @property
    def _decoding(self) -> int:
        """Of codes while they are multiplied."""
        return decoding_bytes_of(self.spec) if self.base == NF4 else 0

    @property
    def _layers(self) -> int:
        """Bytes of all layers."""
        outside = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
        shapes = self.spec.tensor_shapes()
        return weight_bytes_of(self.spec, self._item, self.base) - self._item * sum(
            math.prod(shapes[name]) for name in outside if name in shapes
        )

    @property
    def _token(self) -> int:
        """Activations of one token in one layer: the residual, queries with keys and values, the MLP; in float32."""
        spec = self.spec
        heads = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        return 4 * (4 * spec.width + 6 * heads + 4 * spec.mlp_width)
