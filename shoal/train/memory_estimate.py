"""How much memory a trainer needs for a policy, before anything is loaded: bytes by what they are for.

Light: it imports no torch. The figures are upper bounds; `tests/train/test_memory_estimate.py` compares them with what a
learner takes.
"""

import math
from dataclasses import dataclass

from shoal.models.config import ModelConfig
from shoal.models.hf_config import HFConfig
from shoal.models.lora_config import TARGETS
from shoal.models.nf4_config import decoding_bytes_of
from shoal.models.parameter_counts import (
    adapter_parameters_of,
    arranged_values_of,
    critic_parameters_of,
    layer_parameters_of,
    layer_values_of,
    parameters_of,
    weights_of,
)

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

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
"""Of one weight as the passes read it, unless it is NF4."""


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
    """nf4: the layers below an adapter stay codes; see `nf4_config`."""
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


def parts_of(spec: ModelConfig | HFConfig, layout: Layout) -> list[MemoryPart]:
    """What a trainer holds when it holds most: in the backward pass of a step's last micro-batch. If it has several
    processes, what each holds."""
    if layout.processes > 1:
        return _parts_of_one(spec, layout)
    weights = parameters_of(spec)
    learned = adapter_parameters_of(spec, layout.rank, layout.targets) if layout.rank else weights
    has_masters = layout.dtype != "float32" and not layout.rank
    away = layout.moments == "offloaded"
    parts = [MemoryPart("weights", weights_of(spec, ITEM_BYTES[layout.dtype], layout.base))]
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
        values = critic_parameters_of(spec)
        parts.append(MemoryPart("critic", int(values * ITEM_BYTES[layout.dtype])))
        if layout.dtype != "float32":
            parts.append(MemoryPart("critic's float32 weights", 4 * values, away))
        parts.append(MemoryPart("critic's moments", int(values * MOMENT_BYTES[layout.moments]), away))
    return [*parts, *_made(spec, layout, sum(part.size for part in parts if not part.on_cpu))]


def judge_parts_of(name: str, spec: ModelConfig | HFConfig, layout: Layout) -> list[MemoryPart]:
    """What a trainer's frozen judge of this shape takes beside the policy: its weights, and one layer at work. It has no
    gradients, and computes before the policy does."""
    item = ITEM_BYTES[layout.dtype]
    tokens = max(layout.microbatch_tokens, layout.row_tokens)
    layer = item * (tokens * layer_values_of(spec) + arranged_values_of(spec))
    return [MemoryPart(name, int(parameters_of(spec) * item)), MemoryPart(f"{name} at work", layer)]


def _parts_of_one(spec: ModelConfig | HFConfig, layout: Layout) -> list[MemoryPart]:
    """What one of several processes holds. Its part is float32, whatever the passes read."""
    own = math.ceil(parameters_of(spec) / layout.processes)
    layer = layer_parameters_of(spec)
    ends = parameters_of(spec) - spec.layers * layer
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
    return [*parts, *_made(spec, layout, sum(part.size for part in parts))]


def _made(spec: ModelConfig | HFConfig, layout: Layout, fixed: int) -> list[MemoryPart]:
    """What a micro-batch needs, and what is lost between tensors, of which some that take `fixed` bytes stay."""
    made = activations_of(spec, layout)
    holes = int(min(fixed * FIXED_HOLES, MOST_FIXED_HOLES) + made * HOLES)
    if layout.base and layout.recompute == "layers" and isinstance(spec, ModelConfig):
        tokens = max(layout.microbatch_tokens, layout.row_tokens)
        holes += min(spec.layers * 4 * tokens * 4 * spec.mlp_width, MOST_CODED_HOLES)
    return [MemoryPart("activations", made), MemoryPart("holes between them", holes)]


def state_of(spec: ModelConfig | HFConfig, layout: Layout) -> int:
    """A saved state: float32 weights and moments of what is learned, a critic included."""
    learned = adapter_parameters_of(spec, layout.rank, layout.targets) if layout.rank else parameters_of(spec)
    learned += critic_parameters_of(spec) if layout.critic else 0
    return int(learned * (4 + MOMENT_BYTES[layout.moments]))


def activations_of(spec: ModelConfig | HFConfig, layout: Layout) -> int:
    """What the layers keep of a micro-batch, and the larger of two: what the head takes, or a layer's backward pass."""
    tokens, item = max(layout.microbatch_tokens, layout.row_tokens), 4 if layout.dtype == "float32" else 2
    if layout.base and isinstance(spec, ModelConfig):  # nothing of a matrix is kept
        arranged, work = 0, decoding_bytes_of(spec) + 4 * tokens * max(spec.width, spec.mlp_width)
    else:
        arranged, work = arranged_values_of(spec), item * layer_parameters_of(spec)
    layer = item * (tokens * layer_values_of(spec) + arranged)
    backward = 3 * layer // 2 + work
    if layout.recompute == "layers":
        kept, backward = spec.layers * item * tokens * spec.width, layer + backward
    else:
        kept = spec.layers * layer
    if tokens * spec.vocab_size <= HELD_LOGITS:
        logits = WHOLE_LOGIT_BYTES * tokens * spec.vocab_size
    else:
        logits = PIECE_LOGIT_BYTES * max(spec.vocab_size, HELD_LOGITS)
    gradients = 4 * spec.width * ((0 if layout.rank else spec.vocab_size) + 3 * tokens)  # of the head and its inputs
    return kept + max(logits + gradients, backward)
