"""The language model: a decoder-only transformer with the parameter names of the HuggingFace checkpoint.

It has no tokenizer, no sampling and no cache; the mathematics is in `layers`. Axes: B rows, T tokens, D width, H query
heads, K key/value heads, E head dimension, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.models import lora_config
from shoal.models.interface import Published
from shoal.models.layers import (
    Body,
    DenseMatrix,
    EmbeddingAndHead,
    LayerWeights,
    LoraPair,
    Matrix,
    ModelWeights,
    arranged_low,
    hidden_states,
    wide,
)
from shoal.models.lora_config import AdapterSpec, LoraBase, stored_name
from shoal.models.nf4 import CODE_DTYPES, Codes, Nf4Matrix
from shoal.models.nf4_layout import coded_forms
from shoal.models.packed_attention import SharedPrefixGroup, packed_hidden_states
from shoal.models.transformer_config import TransformerConfig


class Transformer(nn.Module):
    """Llama, Mistral, Qwen2 or Qwen3, as its spec says. `state_dict` is the checkpoint (without `lm_head.weight` if tied).

    A `models.interface.PolicyModel`.
    """

    after_head = None

    def __init__(
        self, spec: TransformerConfig, dtype: torch.dtype = torch.float32, coded: torch.dtype | None = None
    ) -> None:
        """Allocate without initialising: `load_policy` or `make_tiny` fill in the values. `coded`: what decoded
        weights are rounded to, if the layers' matrices are NF4 codes, which never learn; None: they are weights."""
        super().__init__()
        self.spec = spec
        self.recompute = False
        """Whether a backward pass computes each layer again instead of keeping what the layer computed."""
        self.model = _Stack(spec, dtype, coded)
        if not spec.tied:
            self.lm_head = _Linear(spec.vocab_size, spec.width, dtype)
        self.adapter: AdapterSpec | None = None
        self.base: LoraBase | None = None
        """What the adapter belongs to, if that is known."""

    def adapt(self, adapter: AdapterSpec, base: LoraBase | None = None) -> None:
        """Let only an adapter learn, which adds nothing yet: A is not initialised and B is 0."""
        self.adapter, self.base = adapter, base
        self.requires_grad_(False)
        for layer in self.model.layers:
            for name, matrix in layer.matrices().items():  # type: ignore[operator]
                if name in adapter.targets:
                    matrix.adapt(adapter)

    def forward(self, tokens_BT: Tensor, families: Sequence[SharedPrefixGroup] | None = None) -> Tensor:
        """Hidden states after the final norm, [B, T, D], of right-padded rows; see `layers.hidden_states`.

        With `families`, of the one row that holds these conversations; see `packed_attention`.
        """
        frame = self.frame()
        if families is None:
            return hidden_states(tokens_BT, frame, self._through)
        return packed_hidden_states(tokens_BT[0], families, frame, self._through)[None]

    def hidden(self, tokens_BT: Tensor, families: Sequence[SharedPrefixGroup] | None = None) -> Tensor:
        return self(tokens_BT, families)

    def logits(self, hidden_xD: Tensor) -> Tensor:
        """Logits over the vocabulary, [..., V], for chosen hidden states. The head is expensive, so choose first."""
        return F.linear(hidden_xD, self.head_weight())

    def head_weight(self) -> Tensor:
        """The output head, [V, D]: the embedding itself if they are tied."""
        return self.model.embed_tokens.weight if self.spec.tied else self.lm_head.weight

    def codes(self) -> dict[str, Codes]:
        """The matrices that are codes, by the names of their weights."""
        found = {name: one.codes() for name, one in self.named_modules() if isinstance(one, _Linear)}
        return {f"{name}.weight": codes for name, codes in found.items() if codes is not None}

    def trainable(self) -> dict[str, nn.Parameter]:
        """All parameters, by name; of an adapted policy, those of the adapter."""
        return {name: one for name, one in self.named_parameters() if self.adapter is None or one.requires_grad}

    def published(self) -> Published:
        """The policy as its files have it; if it is adapted, without the weights of its base."""
        assert self.adapter is not None or not self.codes(), (
            "codes do not learn, and are published as the base of adapters"
        )
        files = {"config.json": self.spec.to_hf(), "generation_config.json": self.spec.generation_to_hf()}
        if self.adapter is None:
            return Published(self.trainable(), files)
        files[lora_config.CONFIG] = self.adapter.to_peft(self.base)
        if self.base is not None:
            files[lora_config.BASE] = {"root": self.base.root, "source": self.base.source}
        tensors = {stored_name(name): one for name, one in self.trainable().items()}
        return Published(tensors, files, lora_config.WEIGHTS)

    def frame(self) -> EmbeddingAndHead:
        """What is before the layers and after them, as `layers` needs it."""
        floor, _ = _floors(self.spec, self.head_weight().device)
        return EmbeddingAndHead(self.spec, self.model.embed_tokens.weight, norm_weight(self.model.norm.weight), floor)

    def arranged(self, lay_out: Callable[[LayerWeights], LayerWeights], device: str) -> ModelWeights:
        """The weights as `layers` needs them, on a device; this model loses its layers' matrices.

        `lay_out` changes each layer as soon as it is arranged, and the layer's matrices go as soon as it is laid out: all
        three forms exist for one layer at a time.
        """
        self.model.embed_tokens.to(device)
        self.model.norm.to(device)
        if not self.spec.tied:
            self.lm_head.to(device)
        order, layers = head_order(self.spec).to(device), []
        for layer in self.model.layers:
            layer.to(device)
            layers.append(lay_out(_arrange(layer, self.spec, order)))  # type: ignore[arg-type]
            for matrix in layer.matrices().values():  # type: ignore[operator]
                matrix.forget()
        return ModelWeights(self.frame(), tuple(layers), self.head_weight().t())

    def _through(self, x_ND: Tensor, body: Body) -> Tensor:
        """See `layers.Layers`. Each layer is arranged when its turn comes."""
        order = head_order(self.spec).to(x_ND.device)
        for layer in self.model.layers:
            if self.recompute and torch.is_grad_enabled():
                # No layer draws random numbers, so their state need not be kept (arXiv:1604.06174).
                x_ND = checkpoint(layer, x_ND, body, self.spec, order, use_reentrant=False, preserve_rng_state=False)
            else:
                x_ND = layer(x_ND, body, self.spec, order)
        return x_ND


class _Stack(nn.Module):
    def __init__(self, spec: TransformerConfig, dtype: torch.dtype, coded: torch.dtype | None) -> None:
        super().__init__()
        self.embed_tokens = _Linear(spec.vocab_size, spec.width, dtype)
        self.layers = nn.ModuleList(_Layer(spec, dtype, coded) for _ in range(spec.layers))
        self.norm = _Vector(spec.width, dtype)


class _Layer(nn.Module):
    def __init__(self, spec: TransformerConfig, dtype: torch.dtype, coded: torch.dtype | None) -> None:
        super().__init__()
        self.input_layernorm = _Vector(spec.width, dtype)
        self.self_attn = _Attention(spec, dtype, coded)
        self.post_attention_layernorm = _Vector(spec.width, dtype)
        self.mlp = _Mlp(spec, dtype, coded)

    def forward(self, x_ND: Tensor, body: Body, spec: TransformerConfig, order: Tensor) -> Tensor:
        """What `body` does with the hidden states before this layer."""
        return body(x_ND, _arrange(self, spec, order))

    def matrices(self) -> "dict[str, _Linear]":
        """All that an adapter may change, by name."""
        return {name: one for part in (self.self_attn, self.mlp) for name, one in part.named_children()
                if isinstance(one, _Linear)}  # fmt: skip

    def pairs(self) -> dict[str, LoraPair]:
        """The adapters of its matrices."""
        return {name: LoraPair(matrix.lora_A, matrix.lora_B, matrix.scale) for name, matrix in self.matrices().items()
                if matrix.lora_A is not None and matrix.lora_B is not None}  # fmt: skip

    def norms(self) -> tuple[Tensor, Tensor]:
        """What the inputs of attention and of the MLP are multiplied by."""
        return norm_weight(self.input_layernorm.weight), norm_weight(self.post_attention_layernorm.weight)


class _Attention(nn.Module):
    def __init__(self, spec: TransformerConfig, dtype: torch.dtype, coded: torch.dtype | None) -> None:
        super().__init__()
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q_proj = _Linear(queries, spec.width, dtype, coded, bias=spec.qkv_bias)
        self.k_proj = _Linear(keys, spec.width, dtype, coded, bias=spec.qkv_bias)
        self.v_proj = _Linear(keys, spec.width, dtype, coded, bias=spec.qkv_bias)
        self.o_proj = _Linear(spec.width, queries, dtype, coded)
        if spec.qk_norm:
            self.q_norm = _Vector(spec.head_dim, dtype)
            self.k_norm = _Vector(spec.head_dim, dtype)


class _Mlp(nn.Module):
    def __init__(self, spec: TransformerConfig, dtype: torch.dtype, coded: torch.dtype | None) -> None:
        super().__init__()
        self.gate_proj = _Linear(spec.mlp_width, spec.width, dtype, coded)
        self.up_proj = _Linear(spec.mlp_width, spec.width, dtype, coded)
        self.down_proj = _Linear(spec.width, spec.mlp_width, dtype, coded)


class _Linear(nn.Module):
    """A weight, [outputs, inputs], and perhaps a bias, named as in the checkpoint. The weight may be NF4 codes instead."""

    weight: nn.Parameter
    bias: Tensor | None
    lora_A: nn.Parameter | None
    lora_B: nn.Parameter | None
    """Of the adapter, named as `peft` does."""

    def __init__(
        self, outputs: int, inputs: int, dtype: torch.dtype, coded: torch.dtype | None = None, bias: bool = False
    ) -> None:
        super().__init__()
        self.dtype, self.coded = dtype, coded
        if coded is None:
            self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))
        else:
            self.register_parameter("weight", None)
            for name, form in coded_forms("weight", (outputs, inputs)).items():
                self.register_buffer(name, torch.empty(form.shape, dtype=CODE_DTYPES[form.dtype]))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype)) if bias else None
        self.register_parameter("lora_A", None)
        self.register_parameter("lora_B", None)
        self.scale = 1.0

    def adapt(self, adapter: AdapterSpec) -> None:
        """Add a low-rank product, [rank, inputs] and [outputs, rank], at least float32."""
        codes, self.scale = self.codes(), adapter.scale
        outputs, inputs = self.weight.shape if codes is None else (codes.outputs, codes.inputs)
        device = (self.weight if codes is None else codes.pairs_OP).device
        dtype = wide(self.dtype)
        self.lora_A = nn.Parameter(torch.empty(adapter.rank, inputs, dtype=dtype, device=device))
        self.lora_B = nn.Parameter(torch.zeros(outputs, adapter.rank, dtype=dtype, device=device))

    def codes(self) -> Codes | None:
        """What it has in the place of a weight."""
        if self.coded is None:
            return None
        pairs_OP, constants_Ob, scales_g, mean_1 = (one for _, one in self.named_buffers())
        return Codes(pairs_OP, constants_Ob, scales_g, mean_1, self.coded)

    def decode(self) -> None:
        """Have a plain weight in the place of codes."""
        codes = self.codes()
        if codes is not None:
            self.forget()
            self.weight, self.coded = nn.Parameter(codes.whole().to(self.dtype), requires_grad=False), None

    def forget(self) -> None:
        """Drop the weight, or its codes: others have them."""
        self.register_parameter("weight", None)
        for name, _ in list(self.named_buffers()):
            delattr(self, name)


class _Vector(nn.Module):
    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))


def _arrange(layer: _Layer, spec: TransformerConfig, order: Tensor) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    floor, head_floor = _floors(spec, order.device)
    return LayerWeights(
        qkv_DX=_together(projections, layer.input_layernorm.weight, order),
        qkv_bias_X=torch.cat([p.bias for p in projections if p.bias is not None])[order] if spec.qkv_bias else None,
        heads_norm_KJE=heads_norm(attention.q_norm.weight, attention.k_norm.weight, spec, order)
        if spec.qk_norm
        else None,
        out_XD=_together([attention.o_proj]),
        gate_up_DX=_together([mlp.gate_proj, mlp.up_proj], layer.post_attention_layernorm.weight),
        down_FD=_together([mlp.down_proj]),
        floor=floor,
        head_floor=head_floor,
        low=arranged_low(layer.pairs(), spec, layer.norms(), order),
    )


def _together(matrices: Sequence[_Linear], norm_D: Tensor | None = None, order: Tensor | None = None) -> Matrix:
    """Matrices side by side, multiplied by the weight of the norm before them, with their outputs in this order."""
    codes = [found for one in matrices if (found := one.codes()) is not None]
    if codes:
        norm_D = None if norm_D is None else norm_weight(norm_D)
        return Nf4Matrix(codes, matrices[0].dtype, norm_D, None if order is None else order.argsort())
    matrix_XD = matrices[0].weight if len(matrices) == 1 else torch.cat([one.weight for one in matrices])
    matrix_XD = matrix_XD if order is None else matrix_XD[order]
    return DenseMatrix(matrix_XD.t() if norm_D is None else _behind(norm_D, matrix_XD))


def _behind(norm_D: Tensor, matrix_XD: Tensor) -> Tensor:
    norm_D = norm_weight(norm_D)
    if norm_D.dtype == matrix_XD.dtype or torch.is_grad_enabled() or matrix_XD.device.type != "cpu":
        return scaled(matrix_XD, norm_D).t()
    # By some rows at a time: the wide products of a whole matrix would take new memory, and four times as long.
    scaled_XD, rows = torch.empty_like(matrix_XD), max(1, _WIDE_VALUES // len(norm_D))
    for start in range(0, len(matrix_XD), rows):
        scaled_XD[start : start + rows] = scaled(matrix_XD[start : start + rows], norm_D)
    return scaled_XD.t()


_WIDE_VALUES = 1 << 17
"""Values of a narrow matrix that are multiplied at a time."""


def scaled(values: Tensor, norm: Tensor) -> Tensor:
    """Weights times what `norm_weight` gives for the norm before them, in the weights' dtype."""
    return (values * norm).to(values.dtype)


def norm_weight(weight_xD: Tensor) -> Tensor:
    """A norm's weight, at least float32, times the sqrt(D) that `unit` leaves out."""
    return weight_xD.to(wide(weight_xD.dtype)) * weight_xD.shape[-1] ** 0.5


def heads_norm(query_E: Tensor, key_E: Tensor, spec: TransformerConfig, order: Tensor) -> Tensor:
    """The weights of the norms of a layer's queries and keys, [K, J, E], as `LayerWeights` has them."""
    norms_HE = torch.cat((*[query_E] * spec.heads, *[key_E] * spec.kv_heads))
    return norm_weight(norms_HE[order[: len(norms_HE)]].view(spec.kv_heads, -1, spec.head_dim))


def _floors(spec: TransformerConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Terms that keep the norms of the width and of a head from dividing by zero: sqrt(size * eps), [1]."""
    width, head = (torch.tensor([(n * spec.norm_eps) ** 0.5], device=device) for n in (spec.width, spec.head_dim))
    return width, head


def head_order(spec: TransformerConfig) -> Tensor:
    """Order of the outputs of query, key and value: each key head after the G queries that share it, then the values.

    Within a query or key head, element i is next to i + E / 2, with which it rotates. Scores do not change, because queries
    and keys have the same order.
    """
    H, K, E = spec.heads, spec.kv_heads, spec.head_dim
    heads_KJ = torch.cat([torch.arange(H).view(K, -1), torch.arange(H, H + K).view(K, 1)], 1)
    within_E = torch.arange(E).view(2, -1).t().reshape(-1)
    return torch.cat([(heads_KJ[..., None] * E + within_E).reshape(-1), torch.arange((H + K) * E, (H + K + K) * E)])
