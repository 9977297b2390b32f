"""A model whose head gives one number instead of a vocabulary: a critic's value of a state, or a reward model's score.

The files are those of a Hugging Face model for sequence classification with one label: the tensors of a policy's layers,
and one named score.weight, [1, D], in the place of the head over the vocabulary. So `transformers` opens what is written
here, and a reward model from elsewhere is read strictly, as a stranger's policy is. The number of a text is that at its
last token.

Axes: B rows, T tokens of a row, D width; x any axes.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import StateError
from shoal.models.checkpoint import find_tensors, policy_tensors, save_policy
from shoal.models.config import NO_CONFIG
from shoal.models.interface import Published
from shoal.models.load_tensors import demand_floats, demand_same_shapes, fill_all
from shoal.models.lora_config import has_adapter
from shoal.models.safetensors_header import decode_strictly, read_capped
from shoal.models.transformer import Transformer
from shoal.models.transformer_config import ARCHITECTURES, TransformerConfig
from shoal.protocol.constants import MAX_JSON_BYTES

HEAD = "score.weight"
"""The tensor that a policy lacks."""

OF_POLICY = "ForCausalLM"
WITH_HEAD = "ForSequenceClassification"


class TransformerWithValueHead(Transformer):
    """The layers of a policy below a head of one number. It has no head over the vocabulary, so it writes nothing."""

    def __init__(self, spec: TransformerConfig, dtype: torch.dtype = torch.float32) -> None:
        """Allocate without initialising, except the head, which begins at 0. It is float32 whatever the layers are."""
        super().__init__(replace(spec, tied=True), dtype)
        self.score = _Head(spec.width)

    def values(self, hidden_xD: Tensor) -> Tensor:
        """The number, float32 [...], after each token whose state `hidden` gave."""
        return F.linear(hidden_xD.to(self.score.weight.dtype), self.score.weight).squeeze(-1)

    def scores(self, tokens_BT: Tensor, last_B: Tensor) -> Tensor:
        """The number of each right-padded row, float32 [B]; `last_B` is the place of its last token."""
        hidden_BTD = self.hidden(tokens_BT)
        return self.values(hidden_BTD[torch.arange(len(last_B), device=last_B.device), last_B])

    def published(self) -> Published:
        """As of `PolicyModel`: the model as its files have it."""
        files = {"config.json": config_of(self.spec), "generation_config.json": self.spec.generation_to_hf()}
        return Published(self.trainable(), files)


class _Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width))


class _Labels(msgspec.Struct):
    """The keys of a `config.json` that decide what is above the layers. Other keys are ignored."""

    architectures: list[str] | None = None
    id2label: dict[str, str] | None = None


def config_of(spec: TransformerConfig) -> dict[str, Any]:
    """The `config.json` with which `transformers` opens a model of this shape with a head of one number."""
    return spec.to_hf() | {
        "architectures": [architecture_of(spec)],
        "tie_word_embeddings": False,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }


def architecture_of(spec: TransformerConfig) -> str:
    """The name of the class of `transformers` that has these layers below a head of labels."""
    return ARCHITECTURES[spec.family].removesuffix(OF_POLICY) + WITH_HEAD


def begin_valued(directory: Path, dtype: torch.dtype = torch.float32) -> TransformerWithValueHead:
    """The layers of the policy in a directory, below a head of zeros: it gives 0 for everything, and learns from there.

    Raises `StateError` as `load_policy`, and if the policy is in int8 or NF4, or has an adapter beside it.
    """
    if has_adapter(directory):
        raise StateError(f"{directory} holds an adapter: `shoal policy merge` makes a whole model of it")
    spec, stored = policy_tensors(directory)
    model = TransformerWithValueHead(spec, dtype)
    layers = {name: one for name, one in model.named_parameters() if name != HEAD}
    fill_all(layers, {name: one for name, one in stored.items() if name in layers}, directory)
    return model


def load_valued(directory: Path, dtype: torch.dtype = torch.float32) -> TransformerWithValueHead:
    """Load a directory with layers of `dtype` below a head of one number, ready to learn.

    Raises `StateError` if a file is missing, damaged or hostile, if the tensors do not match the config, if a weight is not
    a finite number, or if the model has another head.
    """
    spec = valued_spec_of(directory)
    stored = {
        name: one for name, one in find_tensors(directory).items() if not name.endswith("rotary_emb.inv_freq")
    }  # which some files store besides
    shapes = replace(spec, tied=True).tensor_shapes() | {HEAD: (1, spec.width)}
    demand_same_shapes(stored, shapes, directory)  # guard: valued-has-its-shapes
    demand_floats(stored, directory)
    model = TransformerWithValueHead(spec, dtype)
    fill_all(dict(model.named_parameters()), stored, directory)
    return model


def valued_spec_of(directory: Path) -> TransformerConfig:
    """The shape of the model with a head of one number in a directory. Raises `StateError` if it holds another model."""
    spec, path = TransformerConfig.from_directory(directory), Path(directory) / "config.json"
    labels = decode_strictly(read_capped(path, MAX_JSON_BYTES), _Labels, path, NO_CONFIG)
    wanted, found = architecture_of(spec), (labels.architectures or ["none"])[0]
    if found != wanted:  # guard: a-policy-is-no-reward-model
        raise StateError(
            f"{path}: its architecture is {found[:60]!r}, and a model that gives a text one number is {wanted!r}: choose a "
            "reward model of that architecture"
        )
    if len(labels.id2label or {}) != 1:  # without the key, transformers means two
        raise StateError(
            f"{path}: id2label names {len(labels.id2label or {}) or 2} labels, and a reward model gives one number: choose "
            "one with a single label"
        )
    return spec


def save_valued(
    model: TransformerWithValueHead, directory: Path, dtype: str, tokenizer_from: Path | None = None
) -> None:
    """Write a directory in `dtype` (float32 or bfloat16), with the tokenizer files of another. Raises as `save_policy`."""
    assert dtype in ("float32", "bfloat16"), f"a model with a head of one number is not written in {dtype}"
    save_policy(model, directory, dtype, tokenizer_from)
