"""Memory that an engine or a trainer takes for a policy, in bytes, by its config alone.

Light: no torch. The figures are upper bounds for usual work: `tests/engine/test_engine_memory.py` and
`tests/train/test_trainer_memory.py` compare them with what is taken.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.models.config import TARGETS, ModelConfig
from shoal.models.lora_config import AdapterSpec, has_adapter
from shoal.models.nf4_layout import BLOCK, GROUP, MAX_DECODED_VALUES, NF4, is_coded
from shoal.models.open_model import spec_of

# --- weights ---

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int8": 4}
"""Of one weight in memory; those of int8 are kept as float32."""

DECODING_BYTES = 24
"""Of an NF4 value while it is decoded: the place of its code, its number, its weight rounded and multiplied."""


def weight_bytes(config: ModelConfig, item: float, base: str = "") -> int:
    """All weights, of which a plain one takes `item`. `base`: as of `policy.adapter.base`."""
    coded = config.layer_matrices().values() if base == NF4 else ()
    plain = config.num_parameters() - sum(map(math.prod, coded))
    return int(item * plain) + sum(_coded_bytes(math.prod(shape)) for shape in coded)


def _coded_bytes(values: int) -> int:
    return values // 2 + values // BLOCK + 4 * -(-values // BLOCK // GROUP) + 4


def _decoding_bytes(config: ModelConfig, base: str) -> int:
    """What a product with NF4 codes takes beside its result: a block of weights, and the float32 constants of a matrix."""
    largest = max(map(math.prod, config.layer_matrices().values()), default=0) if base == NF4 else 0
    return DECODING_BYTES * min(MAX_DECODED_VALUES, largest) + 3 * 4 * largest // BLOCK


# --- an engine ---

PREFILL_TOKENS = {"cpu": 1024, "cuda": 16384, "mps": 4096}
"""Padded tokens of one prefill, at most: as many as fit a CPU's cache, or fill a GPU."""

PREFILL_BYTES = 1 << 30
"""What a layer makes of a prefill on a GPU, at most: a large policy fills a GPU with fewer tokens."""

NOISE_VALUES = 1 << 15
"""Noise values made, and logits kept, at a time in a turn: enough to spread the cost of small operations, but little to
throw away if the turn ends early."""

SCORED_VALUES = 1 << 22
"""Number of logits and noise values held at a time when scoring."""

ADAPTER_BYTES = 4 * 4
"""Of an adapter weight in an engine: one float32 copy as read, and three arranged, because query, key and value are padded
with zeros."""

LOGIT_BYTES = 48
"""Of one logit: itself, its noise in float64, its log-prob, and the copies while they are computed."""

SCORED_LOGIT_BYTES = 72
"""The same when scoring, which takes and frees so many logits again and again. The system's allocator keeps much of what
is freed, in pieces that the next logits do not fit: measured, up to 65 bytes of a logit, of which at most 15 are in use."""

TOKEN_BYTES = 128
"""Of one token in Python's lists: the conversation, the cache's contents, the log-probs."""

ROW_BYTES = 8192
"""Of one conversation, without its tokens."""

READ_TOKENS = 8
"""Tokens that are read at a time for each row: a reply of the environment and the last token before it."""

LIBRARY_BYTES = 200_000_000
"""Of transformers' own code, most of which is imported when the first policy is loaded."""


@dataclass(frozen=True)
class EngineMemory:
    """What a policy takes in shoal's own engine of one dtype. Long replies of an environment can take more, which
    `weights/memory_limit` limits in another way."""

    config: ModelConfig
    dtype: str
    adapter: int = 0
    """Weights of an adapter over it."""
    base: str = ""
    """As of `policy.adapter.base`."""

    cache_copies = 2
    """A cache of which half of the rows have ended is copied; so is one that becomes too small."""
    cache_spare = 64
    """Columns of a cache beyond the tokens."""

    @property
    def loaded(self) -> int:
        """The weights as they stay in memory: layers, embedding, and the head beside it."""
        return self._layers + 2 * self._item * self._head + self._adapter

    def load(self) -> int:
        """While the weights are read and arranged: the model and its arranged form, a head twice, one layer and tensor
        more, and an eighth of all that for holes between them. Each layer of the model is given back when it is arranged,
        but the system's allocator may keep it: measured, in one of six loads it kept all."""
        # Codes are not arranged in another form.
        model = self._item * self._head + (0 if self.base == NF4 else self._layers)
        return (self.loaded + model + self._beside + self._adapter) * 9 // 8

    def load_for_gpu(self) -> int:
        """In the memory of the CPU while the weights are read on their way to a GPU."""
        heads = (1 if self.config.tied else 2) * self._head
        return self._layers + self._item * heads + self._beside + self._adapter

    def play(self, rows: int, max_tokens: int, all_tokens: int = 0) -> int:
        """Beyond the weights, for a batch of `rows` conversations of at most `max_tokens`.

        The engine remembers one row of each rollout at a time. `all_tokens`: those of all its rows; 0 is `max_tokens`.
        """
        tokens = min(max_tokens, self.config.max_positions)
        cache = self.config.kv_bytes_per_token(self._item) * rows * (tokens + self.cache_spare)
        logits = LOGIT_BYTES * max(NOISE_VALUES, rows * self.config.vocab_size)
        told = rows * (ROW_BYTES + max(tokens, all_tokens) * TOKEN_BYTES)
        return self.cache_copies * cache + logits + self._read(rows, tokens) + told + self._decoding

    def score(self, tokens: int, longest: int, hidden: bool) -> int:
        """Beyond the weights, for a prefill of conversations of at most `longest` tokens each, `tokens` in all."""
        config = self.config
        logits = SCORED_LOGIT_BYTES * max(config.vocab_size, min(SCORED_VALUES, tokens * config.vocab_size))
        read = self._token * max(PREFILL_TOKENS["cpu"], min(longest, tokens, config.max_positions))
        return logits + read + tokens * (TOKEN_BYTES + (2 * 4 * config.width if hidden else 0)) + self._decoding

    @property
    def _item(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def _adapter(self) -> int:
        return ADAPTER_BYTES * self.adapter

    @property
    def _head(self) -> int:
        return self.config.vocab_size * self.config.width

    @property
    def _beside(self) -> int:
        """What exists for a moment: three forms of a layer, and a tensor as it is read."""
        return 3 * self._layers // self.config.layers + 4 * self.config.largest_tensor()

    @property
    def _decoding(self) -> int:
        return _decoding_bytes(self.config, self.base)

    @property
    def _layers(self) -> int:
        ends = self.config.num_parameters() - self.config.layers * self.config.layer_parameters()
        return weight_bytes(self.config, self._item, self.base) - self._item * ends

    def _read(self, rows: int, tokens: int) -> int:
        """Activations of the tokens that are read at a time in a turn."""
        return self._token * max(PREFILL_TOKENS["cpu"], tokens, rows * READ_TOKENS)

    @property
    def _token(self) -> int:
        """Activations of one token in one layer without gradients, float32."""
        return 4 * self.config.forward_activations()


class HFEngineMemory(EngineMemory):
    """The same of a policy that transformers computes. What an architecture computes between its weights is not known, so
    its activations are taken to be as large as those of common ones."""

    cache_copies = 3  # the cache grows by being copied, and a few rows are copied when others have ended
    cache_spare = 0

    @property
    def loaded(self) -> int:
        """The weights as they stay in memory, and the code that computes with them."""
        return self._item * self.config.num_parameters() + LIBRARY_BYTES

    def load(self) -> int:
        """While the weights are read: the tensors of the files, what transformers makes of them, and one tensor more."""
        return self.loaded + self._item * self.config.num_parameters() + 8 * self.config.largest_tensor()

    def load_for_gpu(self) -> int:
        return self.load()

    def _read(self, rows: int, tokens: int) -> int:
        return self._token * rows * tokens


def engine_memory(
    config: ModelConfig, dtype: str, rank: int = 0, targets: Sequence[str] = TARGETS, base: str = ""
) -> EngineMemory:
    """Of a policy whose files may not be here. `rank`: of an adapter over it; 0: there is none."""
    if not config.supports("adapters"):
        return HFEngineMemory(config, dtype)
    return EngineMemory(config, dtype, config.adapter_parameters(rank, targets) if rank else 0, base)


def engine_memory_in(directory: Path, dtype: str) -> EngineMemory:
    """Of the policy in a checkpoint directory. Raises `StateError`."""
    config = spec_of(directory)
    if not config.supports("adapters"):
        return engine_memory(config, dtype)
    adapter = AdapterSpec.from_directory(directory) if has_adapter(directory) else None
    base = NF4 if is_coded(directory) else ""
    return engine_memory(config, dtype, adapter.rank if adapter else 0, adapter.targets if adapter else (), base)


def played_on_gpu(size: int) -> int:
    """What `play` gives, on a GPU, which reads more at a time: openings are read before a cache has a copy."""
    return max(size, size // 2 + PREFILL_BYTES)


def scored_on_gpu(size: int) -> int:
    """What `score` gives, on a GPU."""
    return size + PREFILL_BYTES


# --- a trainer ---

HELD_LOGITS = 1 << 24
"""Logits that exist at a time, unless those of one token are more: 64 MiB of each of about four tensors."""

WHOLE_LOGIT_BYTES, PIECE_LOGIT_BYTES = 24, 16
"""Of one logit in a backward pass: itself, its log-prob, its gradient, and what is computed between them; float32. A loss
that is computed in pieces keeps less."""

HOLES, FIXED_HOLES, MOST_FIXED_HOLES = 1 / 8, 1 / 8, 256_000_000
"""Memory between tensors that is too small for others, as a share of activations and of what stays from step to step; of
the latter at most so much, because large tensors have memory of their own."""

MOST_CODED_HOLES = 200_000_000
"""Such memory where layers of NF4 are recomputed, at most: what stays of a layer is among what is decoded and forgotten.
A step of 16 layers took 80 to 165 MB more than is reckoned without it; it differs from run to run."""

MOMENT_BYTES = {"float32": 8.0, "8bit": 2.05, "offloaded": 8.0}
"""Of AdamW's two moments, for each weight that is learned."""


@dataclass(frozen=True)
class Layout:
    """How a trainer keeps a policy and what it makes of a micro-batch."""

    dtype: str = "float32"
    """Of the weights as the passes read them. Beside bfloat16 ones that are learned are float32 ones."""
    moments: str = "float32"
    """float32; 8bit; offloaded: with the float32 weights in the memory of the CPU."""
    recompute: str = "none"
    rank: int = 0
    """Of an adapter, which alone is learned; 0: all weights are."""
    microbatch_tokens: int = 2048
    row_tokens: int = 0
    """Of the longest row, which may be a micro-batch of its own."""
    processes: int = 1
    """Of the trainer. Each has as large a part of the policy."""
    targets: tuple[str, ...] = TARGETS
    """The matrices that an adapter changes."""
    base: str = ""
    """nf4: the layers below an adapter stay codes; see `nf4_layout`."""
    reference: bool = False
    """Whether the first policy is kept, too. With an adapter it is the base."""
    critic: bool = False
    """Whether a critic learns beside the policy."""


@dataclass(frozen=True)
class MemoryPart:
    """One of the things that memory is needed for."""

    name: str
    size: int
    """Bytes."""
    on_cpu: bool = False
    """Whether it stays in the CPU's memory, whatever computes."""


def trainer_parts(config: ModelConfig, layout: Layout) -> list[MemoryPart]:
    """What a trainer holds when it holds most: in the backward pass of a step's last micro-batch. If it has several
    processes, what each holds."""
    if layout.processes > 1:
        return _sharded_parts(config, layout)
    weights = config.num_parameters()
    learned = config.adapter_parameters(layout.rank, layout.targets) if layout.rank else weights
    has_masters = layout.dtype != "float32" and not layout.rank
    away = layout.moments == "offloaded"
    parts = [MemoryPart("weights", weight_bytes(config, ITEM_BYTES[layout.dtype], layout.base))]
    if layout.rank:
        parts.append(MemoryPart("adapter", 4 * learned))
    if layout.reference and not layout.rank:
        parts.append(MemoryPart("reference", int(weights * ITEM_BYTES[layout.dtype])))
    if has_masters:
        parts.append(MemoryPart("float32 weights", 4 * learned, away))
    parts += [
        MemoryPart("gradients", 4 * learned),
        MemoryPart("moments", int(learned * MOMENT_BYTES[layout.moments]), away),
    ]
    if layout.critic:
        # Its gradients come when the policy's are gone, and its passes need less, for they make no logits.
        values = critic_parameters(config)
        parts.append(MemoryPart("critic", int(values * ITEM_BYTES[layout.dtype])))
        if layout.dtype != "float32":
            parts.append(MemoryPart("critic's float32 weights", 4 * values, away))
        parts.append(MemoryPart("critic's moments", int(values * MOMENT_BYTES[layout.moments]), away))
    return [*parts, *_working_parts(config, layout, sum(part.size for part in parts if not part.on_cpu))]


def judge_parts(name: str, config: ModelConfig, layout: Layout) -> list[MemoryPart]:
    """What a trainer's frozen judge of this shape takes beside the policy: its weights, and one layer at work. It has no
    gradients, and computes before the policy does."""
    item = ITEM_BYTES[layout.dtype]
    tokens = max(layout.microbatch_tokens, layout.row_tokens)
    layer = item * (tokens * config.layer_activations() + config.arranged_values())
    return [MemoryPart(name, int(config.num_parameters() * item)), MemoryPart(f"{name} at work", layer)]


def _sharded_parts(config: ModelConfig, layout: Layout) -> list[MemoryPart]:
    """What one of several processes holds. Its part is float32, whatever the passes read."""
    own = math.ceil(config.num_parameters() / layout.processes)
    layer = config.layer_parameters()
    ends = config.num_parameters() - config.layers * layer
    # Embedding and head stay gathered during a micro-batch; of the layers, the one at work and the next. Their gradients
    # exist as the passes give them, and once more as they are added up.
    gathered, item = ends + 2 * layer, ITEM_BYTES[layout.dtype]
    parts = [
        MemoryPart("weights", 4 * own),
        MemoryPart("gradients", 4 * own),
        MemoryPart("moments", int(own * MOMENT_BYTES[layout.moments])),
        MemoryPart("gathered weights", int(gathered * item)),
        MemoryPart("their gradients", int(gathered * (item + 4))),
    ]
    return [*parts, *_working_parts(config, layout, sum(part.size for part in parts))]


def _working_parts(config: ModelConfig, layout: Layout, fixed: int) -> list[MemoryPart]:
    """What a micro-batch needs, and what is lost between tensors, of which some that take `fixed` bytes stay."""
    made = activations_of(config, layout)
    holes = int(min(fixed * FIXED_HOLES, MOST_FIXED_HOLES) + made * HOLES)
    if layout.base and layout.recompute == "layers" and config.supports("nf4"):
        tokens = max(layout.microbatch_tokens, layout.row_tokens)
        holes += min(config.layers * 4 * tokens * 4 * config.mlp_width, MOST_CODED_HOLES)
    return [MemoryPart("activations", made), MemoryPart("holes between them", holes)]


def trainer_state_bytes(config: ModelConfig, layout: Layout) -> int:
    """A saved state: float32 weights and moments of what is learned, a critic included."""
    learned = config.adapter_parameters(layout.rank, layout.targets) if layout.rank else config.num_parameters()
    learned += critic_parameters(config) if layout.critic else 0
    return int(learned * (4 + MOMENT_BYTES[layout.moments]))


def activations_of(config: ModelConfig, layout: Layout) -> int:
    """What the layers keep of a micro-batch, and the larger of two: what the head takes, or a layer's backward pass."""
    tokens, item = max(layout.microbatch_tokens, layout.row_tokens), 4 if layout.dtype == "float32" else 2
    if layout.base and config.supports("nf4"):  # nothing of a matrix is kept
        arranged, work = 0, _decoding_bytes(config, layout.base) + 4 * tokens * max(config.width, config.mlp_width)
    else:
        arranged, work = config.arranged_values(), item * config.layer_parameters()
    layer = item * (tokens * config.layer_activations() + arranged)
    backward = 3 * layer // 2 + work
    if layout.recompute == "layers":
        kept, backward = config.layers * item * tokens * config.width, layer + backward
    else:
        kept = config.layers * layer
    if tokens * config.vocab_size <= HELD_LOGITS:
        logits = WHOLE_LOGIT_BYTES * tokens * config.vocab_size
    else:
        logits = PIECE_LOGIT_BYTES * max(config.vocab_size, HELD_LOGITS)
    gradients = (
        4 * config.width * ((0 if layout.rank else config.vocab_size) + 3 * tokens)
    )  # of the head and its inputs
    return kept + max(logits + gradients, backward)


def critic_parameters(config: ModelConfig) -> int:
    """The weights of the same layers below a head of one number; see `value_head`."""
    own_head = 0 if config.tied else config.vocab_size * config.width
    return config.num_parameters() - own_head + config.width
