"""Memory that an engine needs for a workload, by model kind."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.models.checkpoint import find_tensors
from shoal.models.config import ModelConfig
from shoal.models.hf_config import HFConfig
from shoal.models.nf4_config import NF4, decoding_bytes_of, weight_bytes_of
from shoal.models.parameter_counts import ANY_WIDTHS, adapter_parameters_of

# --- How much the embedded engine holds at a time ---
#
# What bounds its memory beyond weights and caches.
#
# Light: what a run needs is also asked on a machine without torch.


PREFILL_TOKENS = {"cpu": 1024, "cuda": 16384, "mps": 4096}
"""Padded tokens of one prefill, at most: as many as fit a CPU's cache, or fill a GPU."""

PREFILL_BYTES = 1 << 30
"""What a layer makes of a prefill on a GPU, at most: a large policy fills a GPU with fewer tokens."""

NOISE_VALUES = 1 << 15
"""Noise values made, and logits kept, at a time in a turn: enough to spread the cost of small operations, but little to
throw away if the turn ends early."""

SCORED_VALUES = 1 << 22
"""Number of logits and noise values held at a time when scoring."""


# --- How much memory the embedded engine needs for a policy and a piece of work, before anything is allocated ---
#
# The host chose the policy, the sampling limits and the lease. The figures are upper bounds for usual work; long replies
# of an environment can take more, which `weights/memory_limit` limits in another way. `tests/engine/test_needs.py`
# compares them with what the engine takes.
#
# All results are bytes.


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


def adapter_bytes(spec: ModelConfig | HFConfig, rank: int, targets: Sequence[str]) -> int:
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

    spec: ModelConfig
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


# --- How much memory the engine for other architectures needs, before anything is allocated ---
#
# Called as `needs` is, for policies that transformers computes. The weights' sizes are those of the files. What an
# architecture computes between them is not known, so its activations are taken to be as large as those of common ones.
# The operating system enforces the limit in any case.
#
# All results are bytes.


LIBRARY_BYTES = 200_000_000
"""Of transformers' own code, most of which is imported when the first policy is loaded."""

HF_CACHE_COPIES = 3
"""The cache grows by being copied, and a few rows are copied when others have ended."""


@dataclass(frozen=True)
class AnyNeeds:
    """What one policy needs in an engine of one dtype."""

    spec: HFConfig
    dtype: str
    values: int
    """Of all tensors in its files."""
    largest: int
    """Values of the largest tensor."""

    @staticmethod
    def of(spec: HFConfig, directory: Path, dtype: str) -> "AnyNeeds":
        """Those of the policy in a directory. Raises `StateError` if its files are damaged."""
        sizes = [math.prod(stored.shape) for stored in find_tensors(directory).values()]
        return AnyNeeds(spec, dtype, sum(sizes), max(sizes, default=0))

    @property
    def loaded(self) -> int:
        """The weights as they stay in memory, and the code that computes with them."""
        return ITEM_BYTES[self.dtype] * self.values + LIBRARY_BYTES

    def load(self) -> int:
        """While the weights are read: the tensors of the files, what transformers makes of them, and one tensor more."""
        return self.loaded + ITEM_BYTES[self.dtype] * self.values + 8 * self.largest

    def in_passing(self) -> int:
        """As of `Needs`."""
        return self.load()

    def play(self, rows: int, max_tokens: int, all_tokens: int = 0) -> int:
        """Beyond the weights, for a batch of `rows` conversations of at most `max_tokens`; `all_tokens` as for `Needs`."""
        spec, tokens = self.spec, min(max_tokens, self.spec.max_positions)
        cache = 2 * spec.layers * spec.kv_heads * spec.head_dim * ITEM_BYTES[self.dtype] * rows * tokens
        logits = LOGIT_BYTES * max(NOISE_VALUES, rows * spec.vocab_size)
        read = self._token * rows * tokens
        return HF_CACHE_COPIES * cache + logits + read + rows * (ROW_BYTES + max(tokens, all_tokens) * TOKEN_BYTES)

    def score(self, tokens: int, longest: int, hidden: bool) -> int:
        """Beyond the weights, for a prefill of conversations of at most `longest` tokens each, `tokens` in all."""
        logits = SCORED_LOGIT_BYTES * max(self.spec.vocab_size, min(SCORED_VALUES, tokens * self.spec.vocab_size))
        read = self._token * max(PREFILL_TOKENS["cpu"], min(longest, tokens, self.spec.max_positions))
        return logits + read + tokens * (TOKEN_BYTES + (2 * 4 * self.spec.width if hidden else 0))

    @property
    def _token(self) -> int:
        return 4 * ANY_WIDTHS * max(self.spec.width, self.spec.heads * self.spec.head_dim)


def needs_of_spec(spec: ModelConfig | HFConfig, dtype: str, adapter: int = 0, base: str = "") -> Needs | AnyNeeds:
    """What an engine needs for a policy whose files may not be here. `adapter` and `base` are as of `Needs`: other
    architectures have none."""
    if isinstance(spec, ModelConfig):
        return Needs(spec, dtype, adapter, base)
    return AnyNeeds(spec, dtype, spec.parameters, spec.vocab_size * spec.width)
