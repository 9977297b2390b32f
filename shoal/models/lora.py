"""Adapters of our own models: how a new one begins, and how one is read from files that a stranger may have written.

The format is that of `peft`: `lora_config` has the config. It does not deal with publication.
"""

import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from shoal.errors import StateError
from shoal.models.layers import LoraPair
from shoal.models.load_tensors import demand_floats, demand_same_shapes, fill_all
from shoal.models.lora_config import WEIGHTS, AdapterSpec, LoraBase, stored_name
from shoal.models.safetensors_header import read_header
from shoal.models.transformer import Transformer
from shoal.models.transformer_config import TransformerConfig


@torch.no_grad()
def begin_adapter(model: Transformer, adapter: AdapterSpec, seed: int, base: LoraBase | None = None) -> None:
    """Give a model an adapter that changes nothing yet: B is 0, and A is uniform within 1 / sqrt(inputs), as in `peft`.

    Each matrix has a generator of its own, so the same seed gives a matrix the same A whatever else is adapted.
    """
    model.adapt(adapter, base)
    for name, parameter in model.trainable().items():
        if name.endswith("lora_A"):
            drawn = hashlib.sha256(f"{seed} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(drawn[:8], "big") >> 1)
            values = torch.empty(parameter.shape, dtype=torch.float32)
            values.uniform_(-1 / math.sqrt(parameter.shape[1]), 1 / math.sqrt(parameter.shape[1]), generator=generator)
            parameter.copy_(values)


def read_adapter(directory: Path, spec: TransformerConfig) -> tuple[AdapterSpec, dict[str, Tensor]]:
    """The adapter in a directory, float32, for a policy of this shape; its tensors by their names in the file.

    Raises `StateError` if it is missing, damaged or hostile, for a policy of another shape, or not of finite numbers.
    """
    adapter = AdapterSpec.from_directory(directory)
    stored, shapes = read_header(Path(directory) / WEIGHTS), adapter.tensor_shapes(spec)
    demand_same_shapes(stored, shapes, directory)  # guard: adapter-fits-its-base
    demand_floats(stored, directory)
    tensors = {name: torch.empty(shape, dtype=torch.float32) for name, shape in shapes.items()}
    fill_all(tensors, stored, directory)
    return adapter, tensors


@torch.no_grad()
def load_adapter(model: Transformer, directory: Path) -> None:
    """Give a model the adapter in a directory. Raises as `read_adapter`."""
    adapter, tensors = read_adapter(directory, model.spec)
    model.adapt(adapter, LoraBase.from_directory(directory))
    for name, parameter in model.trainable().items():
        parameter.copy_(tensors[stored_name(name)])


@contextlib.contextmanager
def adapted_by(model: Transformer, directory: Path) -> Iterator[None]:
    """Give a model the adapter in a directory for a moment, and then its own again. Raises as `read_adapter`."""
    adapter, tensors = read_adapter(directory, model.spec)
    if adapter != model.adapter:
        raise StateError(f"{directory} holds an adapter of another rank, alpha or targets than the run learns")
    with _for_a_moment(model, {name: tensors[stored_name(name)] for name in model.trainable()}):
        yield


@contextlib.contextmanager
def base_alone(model: Transformer) -> Iterator[None]:
    """Take a model's adapter away for a moment: with B = 0, every product is 0."""
    B_only = {name: torch.zeros_like(one) for name, one in model.trainable().items() if name.endswith("lora_B")}
    with _for_a_moment(model, B_only):
        yield


@contextlib.contextmanager
def _for_a_moment(model: Transformer, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Give some of a model's trainable parameters other values, and then their own again."""
    learned = {name: one for name, one in model.trainable().items() if name in tensors}
    own = {name: parameter.detach().clone() for name, parameter in learned.items()}
    try:
        with torch.no_grad():
            for name, parameter in learned.items():
                parameter.copy_(tensors[name])
        yield
    finally:
        with torch.no_grad():
            for name, parameter in learned.items():
                parameter.copy_(own[name])  # guard: own-adapter-again


@torch.no_grad()
def merge(model: Transformer) -> None:
    """Add the adapter to the matrices, in float32, and round each once to the model's dtype: small changes are lost there.
    The model is then whole. Its matrices must not be codes: see `decode`."""
    for matrix in model.modules():
        a_rI, b_Or = getattr(matrix, "lora_A", None), getattr(matrix, "lora_B", None)
        if a_rI is not None and b_Or is not None:
            weight_OI, scale = matrix.get_parameter("weight"), float(matrix.scale)  # type: ignore[arg-type]
            weight_OI.copy_(torch.addmm(weight_OI.to(a_rI.dtype), b_Or, a_rI, alpha=scale))
            matrix.lora_A = matrix.lora_B = None  # type: ignore[assignment]
    model.adapter = model.base = None
    model.requires_grad_(True)


@torch.no_grad()
def decode(model: Transformer) -> None:
    """Turn matrices in NF4 to the weights that they are, one after the other."""
    for layer in model.model.layers:
        for matrix in layer.matrices().values():  # type: ignore[operator]
            matrix.decode()


def pairs_of(
    adapter: AdapterSpec, tensors: dict[str, Tensor], spec: TransformerConfig
) -> Iterator[dict[str, LoraPair]]:
    """The adapters of each layer's matrices, layer by layer."""
    for index in range(spec.layers):
        layer = {}
        for part, name in (*(("self_attn", f"{one}_proj") for one in "qkvo"),
                           *(("mlp", f"{one}_proj") for one in ("gate", "up", "down"))):  # fmt: skip
            if name in adapter.targets:
                matrix = f"model.layers.{index}.{part}.{name}"
                a_rI, b_Or = (tensors[stored_name(f"{matrix}.lora_{one}")] for one in "AB")
                layer[name] = LoraPair(a_rI, b_Or, adapter.scale)
        yield layer
