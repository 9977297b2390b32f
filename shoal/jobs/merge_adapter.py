"""A whole model from an adapter and its base, and what merging changed: the work of `shoal policy merge`.

Rounding to bfloat16 loses what is smaller than a 256th of a weight, so the merged model is another policy than the adapter
over its base, which a run publishes and verifies.

Axes: B rows, T tokens of a row, V vocabulary.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shoal.errors import ConfigError, StateError
from shoal.humanize import data_size
from shoal.models.checkpoint import load_policy, save_policy
from shoal.models.lora import decode, load_adapter, merge
from shoal.models.lora_config import AdapterSpec, LoraBase, demand_adapter, has_adapter
from shoal.models.nf4_layout import PARTS
from shoal.models.safetensors_header import files_of_base, read_header
from shoal.models.transformer import Transformer
from shoal.models.transformer_config import TransformerConfig
from shoal.weights.base_model import base_root
from shoal.weights.manifest import weights_root
from shoal.weights.memory_limit import free_bytes

ROWS, ROW_TOKENS = 4, 128
"""Conversations of random tokens on which the two are compared, and their tokens at most."""

LOGIT_COPIES = 7
"""While the two are compared, the memory holds this many copies of all logits: of both models, as log-probs, and what is
computed from these."""


@dataclass(frozen=True)
class MergeDifference:
    """How a merged model differs from the adapter over its base; both are computed in float32."""

    tokens: int
    largest_logit: float
    """Largest difference of a logit."""
    mean_nats: float
    """Mean KL divergence of the merged model's next-token distribution from the other's."""
    other_choices: float
    """Share of tokens at which another next token is the likeliest."""
    lost: float
    """Share of the change that rounding took away: the norm of what is missing, in parts of the adapter's change."""

    def in_words(self) -> str:
        return (
            f"on {self.tokens} random tokens: logits differ by at most {self.largest_logit:.2g}, {self.mean_nats:.2g} nats "
            f"on average; the likeliest token is another at {100 * self.other_choices:.2f} % of them; rounding changed "
            f"{100 * self.lost:.1f} % of what the adapter changes"
        )


def main(adapter: Path, base: Path | None, out: Path, dtype: str, threads: int) -> str:
    """Merge the adapter in a directory, write the whole model, and say how it differs. Raises `ConfigError`, `StateError`.

    `base` is the directory of its base, if that is not beside the adapter; `dtype` that of the files, or empty for the
    base's.
    """
    torch.set_num_threads(threads)
    demand_adapter(adapter)
    if out.exists():
        raise ConfigError(f"{out} exists already: give another --out")
    if base is None and not files_of_base(adapter):
        raise ConfigError(f"{adapter} holds an adapter without its base: name the base's directory with --base")
    model_in = adapter if base is None else base
    tensors = {name: one for file in files_of_base(model_in) for name, one in read_header(file).items()}
    stored = {one.dtype for name, one in tensors.items() if not name.endswith(PARTS)}
    dtype = dtype or ("bfloat16" if stored == {"BF16"} else "float32")
    demand_memory(TransformerConfig.from_directory(model_in), AdapterSpec.from_directory(adapter))
    demand_base(adapter, model_in)
    model = load_policy(model_in)
    if base is not None:
        load_adapter(model, adapter)
    decode(model)
    changes, before = _matrices(model), _logits(model)
    merge(model)
    save_policy(model, out, dtype, tokenizer_from=model_in)
    del model
    difference = compare(before, load_policy(out), changes)
    return f"{out}: a whole model in {dtype}. Against the adapter over its base, {difference.in_words()}"


def demand_memory(spec: TransformerConfig, adapter: AdapterSpec) -> None:
    """Raise `StateError` if merging takes more memory than is free."""
    need, free = needs_of_merge(spec, adapter), free_bytes()
    if need > free:  # guard: merge-fits-memory
        raise StateError(
            f"merging needs about {data_size(need)} of memory, most for {data_size(4 * spec.num_parameters())} of weights "
            f"in float32, and {data_size(free)} are free: close other programs, or merge on a machine with more memory"
        )


def needs_of_merge(spec: TransformerConfig, adapter: AdapterSpec) -> int:
    """Bytes that merging takes beside Python and torch: the whole model in float32, and what it is compared by."""
    tensors = {name: math.prod(shape) for name, shape in spec.tensor_shapes().items()}
    ends = tuple(f"model.layers.{layer}." for layer in {0, spec.layers - 1})
    kept = [size for name, size in tensors.items() if name.startswith(ends) and name.split(".")[-2] in adapter.targets]
    tokens = ROWS * min(ROW_TOKENS, spec.max_positions)
    compared = tokens * (LOGIT_COPIES * spec.vocab_size + spec.layer_activations())
    learned = 2 * spec.adapter_parameters(adapter.rank, adapter.targets)  # as it is read, and in the model
    return 4 * (sum(tensors.values()) + learned + 2 * sum(kept) + compared + 2 * max(tensors.values())) * 9 // 8


def demand_base(adapter: Path, model_in: Path) -> None:
    """Raise `StateError` if an adapter says that it belongs to another base."""
    if model_in != adapter and has_adapter(model_in):
        raise StateError(f"{model_in} holds an adapter itself: merge it first, or name the base alone")
    named = LoraBase.from_directory(adapter)
    found = base_root(adapter) if model_in == adapter else weights_root(model_in)
    if named is not None and named.root != found:  # guard: adapter-names-its-base
        source = f" ({named.source[:100]})" if named.source else ""
        raise StateError(
            f"the adapter in {adapter} belongs to base {named.root[:12]}{source}, and "
            f"{model_in} holds base {found[:12]}: name the base that it was trained on with --base"
        )


def compare(before_BTV: Tensor, merged: Transformer, changes: dict[str, tuple[Tensor, Tensor]]) -> MergeDifference:
    """How a merged model differs from logits of the unmerged one. `changes` has the matrices of the base that the adapter
    changes, and what they should be."""
    after_BTV = _logits(merged)
    p_BTV, q_BTV = before_BTV.log_softmax(-1), after_BTV.log_softmax(-1)
    missing = wanted = 0.0
    for name, (base, whole) in changes.items():
        missing += float((merged.get_parameter(name).detach() - whole).square().sum())
        wanted += float((whole - base).square().sum())
    return MergeDifference(
        tokens=before_BTV.shape[0] * before_BTV.shape[1],
        largest_logit=float((after_BTV - before_BTV).abs().max()),
        mean_nats=float((p_BTV.exp() * (p_BTV - q_BTV)).sum(-1).mean().clamp_min(0)),
        other_choices=float((before_BTV.argmax(-1) != after_BTV.argmax(-1)).float().mean()),
        lost=(missing / wanted) ** 0.5 if wanted else 0.0,
    )


@torch.no_grad()
def _logits(model: Transformer) -> Tensor:
    """Of rows that follow from the shape alone."""
    generator = torch.Generator().manual_seed(0)
    length = min(ROW_TOKENS, model.spec.max_positions)
    tokens_BT = torch.randint(model.spec.vocab_size, (ROWS, length), generator=generator)
    return model.logits(model.hidden(tokens_BT))


@torch.no_grad()
def _matrices(model: Transformer) -> dict[str, tuple[Tensor, Tensor]]:
    """Matrices of the first and the last layer, as a sample of all layers: those of the base, and the same with the adapter
    added."""
    found = {}
    for name, matrix in model.named_modules():
        if getattr(matrix, "lora_A", None) is not None and name.split(".")[2] in ("0", str(model.spec.layers - 1)):
            weight, a, b = (matrix.get_parameter(one) for one in ("weight", "lora_A", "lora_B"))
            found[f"{name}.weight"] = (weight.clone(), torch.addmm(weight, b, a, alpha=float(matrix.scale)))
    return found
