"""The shape of a low-rank adapter, and the file that describes it in the format of `peft`.

Light: it imports no torch and reads no weights. An adapter (arXiv:2106.09685) adds (alpha / rank) B A x to what a matrix
makes of x. A and B are float32, whatever the policy's precision, and the product is never merged into the matrix: in
bfloat16, merging rounds small changes away.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import ConfigError, StateError
from shoal.models.config import TARGETS
from shoal.models.safetensors_header import ADAPTER_WEIGHTS, read_capped
from shoal.models.transformer_config import TransformerConfig
from shoal.protocol.constants import MAX_ADAPTER_RANK, MAX_JSON_BYTES

CONFIG, WEIGHTS, BASE = "adapter_config.json", ADAPTER_WEIGHTS, "base.json"
"""The files of an adapter. `peft` reads the first two; the third says which model it belongs to."""

PREFIX = "base_model.model."
"""Begins the name of each tensor in `peft`'s files."""


@dataclass(frozen=True)
class AdapterSpec:
    """Which matrices an adapter changes, and how."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = TARGETS

    @property
    def scale(self) -> float:
        """What B A x is multiplied by."""
        return self.alpha / self.rank

    def flaw(self) -> str:
        """What is wrong with it; empty if nothing is."""
        unknown = [target for target in self.targets if target not in TARGETS]
        if not 1 <= self.rank <= MAX_ADAPTER_RANK:  # guard: adapter-rank
            return f"rank = {self.rank}: must be between 1 and {MAX_ADAPTER_RANK}"
        if not 0 < self.alpha < math.inf:
            return f"alpha = {self.alpha}: must be above 0, and finite"
        if unknown:
            return f"targets has {unknown[0]!r:.60}; known are {', '.join(TARGETS)}"
        if not self.targets or len(set(self.targets)) != len(self.targets):
            return "targets is empty, or names a matrix twice"
        return ""

    def tensor_shapes(self, spec: TransformerConfig) -> dict[str, tuple[int, int]]:
        """The name and shape of every tensor in an adapter of this policy, as `peft` names them."""
        shapes: dict[str, tuple[int, int]] = {}
        for name, shape in spec.layer_matrices().items():
            matrix = name.removesuffix(".weight")
            if matrix.rpartition(".")[2] in self.targets:
                shapes[stored_name(f"{matrix}.lora_A")] = (self.rank, shape[1])
                shapes[stored_name(f"{matrix}.lora_B")] = (shape[0], self.rank)
        return shapes

    def to_peft(self, base: "LoraBase | None" = None) -> dict[str, Any]:
        """The `adapter_config.json` with which `peft` opens it."""
        name, _, revision = (base.source.removeprefix("hf:") if base else "").partition("@")
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": name or None,
            "revision": revision or None,
            "r": self.rank,
            "lora_alpha": int(self.alpha) if self.alpha == int(self.alpha) else self.alpha,
            "lora_dropout": 0.0,
            "target_modules": list(self.targets),
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "inference_mode": True,
            "use_rslora": False,
            "use_dora": False,
        }

    @staticmethod
    def from_directory(directory: Path) -> "AdapterSpec":
        """Read `adapter_config.json`. Raises `StateError` if it is malformed, or asks for what we do not compute."""
        path = Path(directory) / CONFIG
        try:
            config = msgspec.json.decode(read_capped(path, MAX_JSON_BYTES).decode(), type=_PeftConfig)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise StateError(
                f"{path} is not an adapter's config: {error}. Copy or download the adapter again"
            ) from None
        targets = config.target_modules if isinstance(config.target_modules, list) else [config.target_modules]
        spec = AdapterSpec(config.r, config.lora_alpha, tuple(sorted(targets, key=_place)))
        fault = config.unknown() or spec.flaw()
        if fault:
            raise StateError(f"{path}: {fault}. Use another adapter")
        return spec


@dataclass(frozen=True)
class LoraBase:
    """The model that an adapter belongs to."""

    root: str
    """Weights root of its tensors."""
    source: str = ""
    """hf:OWNER/NAME@REVISION if nodes get it from a hub; else empty."""

    @staticmethod
    def from_directory(directory: Path) -> "LoraBase | None":
        """What the adapter in a directory says; None if it does not say it. Raises `StateError` if that is damaged."""
        path = Path(directory) / BASE
        if not path.exists():
            return None
        try:
            return msgspec.json.decode(read_capped(path, MAX_JSON_BYTES).decode(), type=LoraBase)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise StateError(f"{path} is damaged: {error}. Copy the adapter again") from None


def has_adapter(directory: Path) -> bool:
    """Whether a directory holds an adapter, alone or beside its base."""
    return (Path(directory) / CONFIG).exists() or (Path(directory) / WEIGHTS).exists()


def demand_adapter(directory: Path) -> None:
    """Raise `ConfigError` if a directory that is to be merged holds no adapter."""
    if not has_adapter(directory):
        raise ConfigError(f"{directory} holds no adapter (adapter_config.json): there is nothing to merge")


def stored_name(parameter: str) -> str:
    """The name in `peft`'s files of a parameter such as model.layers.0.mlp.up_proj.lora_A."""
    return f"{PREFIX}{parameter}.weight"


def _place(target: str) -> int:
    return TARGETS.index(target) if target in TARGETS else len(TARGETS)


class _PeftConfig(msgspec.Struct):
    """The keys of an `adapter_config.json` that decide what is computed. Other keys are ignored."""

    peft_type: str
    r: int
    lora_alpha: float
    target_modules: list[str] | str
    bias: str = "none"
    fan_in_fan_out: bool = False
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    modules_to_save: list[str] | None = None
    layers_to_transform: list[int] | int | None = None
    target_parameters: list[str] | None = None
    trainable_token_indices: Any = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None

    def unknown(self) -> str:
        """What it asks for that we do not compute; empty if nothing."""
        asks: Sequence[tuple[str, bool]] = (
            (f"peft_type = {self.peft_type!r:.40}", self.peft_type != "LORA"),
            (f"bias = {self.bias!r:.40}", self.bias != "none"),
            *(
                (name, bool(getattr(self, name)))
                for name in (
                    "fan_in_fan_out", "use_rslora", "use_dora", "lora_bias", "modules_to_save", "target_parameters",
                    "trainable_token_indices", "rank_pattern", "alpha_pattern",
                )
            ),
            ("layers_to_transform", self.layers_to_transform is not None),
        )  # fmt: skip
        return next((f"it asks for {name}, which is not supported" for name, asked in asks if asked), "")
