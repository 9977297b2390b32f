"""How many numbers a policy of some shape consists of, and how many it makes of a token.

Pure and light. It does not know dtypes, devices or what an engine or a trainer holds at a time.
"""

import math
from collections.abc import Sequence

from shoal.models.config import ModelConfig
from shoal.models.hf_config import HFConfig
from shoal.models.lora_config import TARGETS, AdapterSpec
from shoal.models.nf4_config import weight_bytes_of

OUTSIDE = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
"""Tensors that belong to no layer."""

ANY_WIDTHS = 40
"""Numbers that a layer of another architecture makes of one token, in widths: residual, heads, an MLP of four
widths, and what its gate computes."""


def parameters_of(spec: ModelConfig | HFConfig) -> int:
    """All weights."""
    if isinstance(spec, HFConfig):
        return spec.parameters
    return sum(math.prod(shape) for shape in spec.tensor_shapes().values())


def weights_of(spec: ModelConfig | HFConfig, item: float, base: str = "") -> int:
    """The bytes of a policy whose weights take `item` each, with the layers as `policy.adapter.base` keeps them."""
    return weight_bytes_of(spec, item, base) if isinstance(spec, ModelConfig) else int(parameters_of(spec) * item)


def layer_parameters_of(spec: ModelConfig | HFConfig) -> int:
    """The weights of one layer."""
    if isinstance(spec, HFConfig):
        return spec.parameters // spec.layers
    shapes = spec.tensor_shapes().items()
    return sum(math.prod(shape) for name, shape in shapes if name not in OUTSIDE) // spec.layers


def critic_parameters_of(spec: ModelConfig | HFConfig) -> int:
    """The weights of the same layers below a head of one number; see `value_head`."""
    own_head = isinstance(spec, ModelConfig) and not spec.tied
    return parameters_of(spec) - (spec.vocab_size * spec.width if own_head else 0) + spec.width


def adapter_parameters_of(spec: ModelConfig | HFConfig, rank: int, targets: Sequence[str] = TARGETS) -> int:
    """The weights of a low-rank adapter (arXiv:2106.09685) of these matrices in every layer; of every matrix of another
    architecture."""
    if isinstance(spec, HFConfig):
        attention = 4 * spec.width + 2 * (spec.heads + spec.kv_heads) * spec.head_dim
        return spec.layers * rank * (attention + 3 * max(1, spec.experts) * (spec.width + spec.mlp_width))
    return sum(math.prod(shape) for shape in AdapterSpec(rank, 1.0, tuple(targets)).tensor_shapes(spec).values())


def cached_values_of(spec: ModelConfig) -> int:
    """Keys and values that a cache holds of one token."""
    return 2 * spec.layers * spec.kv_heads * spec.head_dim


def layer_values_of(spec: ModelConfig | HFConfig) -> int:
    """Numbers that one layer makes of one token and that its backward pass needs; see `layers`.

    The two normed inputs; query, key and value; queries and keys turned, and before that normed; queries apart from the
    keys that they share; what attention reads; gate and up; their product. Of another architecture they are estimated.
    """
    if isinstance(spec, HFConfig):
        return ANY_WIDTHS * max(spec.width, spec.heads * spec.head_dim)
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    attention = (queries + 2 * keys) + (1 + spec.qk_norm) * (queries + keys) + queries
    if spec.heads > spec.kv_heads:
        attention += queries
    return 2 * spec.width + attention + 3 * spec.mlp_width


def arranged_values_of(spec: ModelConfig | HFConfig) -> int:
    """Numbers of one layer's weights in the copies that a pass with gradients makes: each matrix behind a norm, before and
    after it is multiplied by the norm's weight. Another architecture makes none."""
    if isinstance(spec, HFConfig):
        return 0
    outputs = (spec.heads + 2 * spec.kv_heads) * spec.head_dim + 2 * spec.mlp_width
    return 2 * spec.width * outputs
