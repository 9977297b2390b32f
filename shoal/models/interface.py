"""The interface to a policy that learns: what training and its files see of a model, whatever computes it.

It has no tokenizer and no cache.

Axes: B rows, T tokens of a row, D width, V vocabulary; x any axes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from shoal.models.config import ModelConfig
from shoal.models.packed_attention import SharedPrefixGroup

WEIGHTS = "model.safetensors"
"""The file with a policy's weights, unless it is an adapter or in shards."""


@dataclass(frozen=True)
class Published:
    """What the files of a policy hold: its tensors by their names there, and the JSON files beside them."""

    tensors: Mapping[str, Tensor]
    """The model's own, or views of them: learning changes them."""
    files: Mapping[str, Any]
    """Contents of the JSON files by name, such as config.json. Its dtype is added when it is written."""
    weights: str = WEIGHTS
    gather: Callable[[str, torch.dtype], Tensor] | None = None
    """If this process has only parts of the tensors: gives a whole one by name, on the CPU, in a dtype."""

    def whole(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor on the CPU, in a dtype."""
        return self.gather(name, dtype) if self.gather else self.tensors[name].detach().to("cpu", dtype)


class PolicyModel(Protocol):
    """A model with its parameters. It draws no random numbers: the same tokens always have the same hidden states."""

    recompute: bool
    """Whether a backward pass computes each layer again instead of keeping what the layer computed."""

    @property
    def spec(self) -> ModelConfig:
        """What it reads and writes."""

    @property
    def after_head(self) -> Callable[[Tensor], Tensor] | None:
        """What turns hidden @ head, [..., V], into logits, such as a bias or a soft cap; None if nothing does."""

    def hidden(self, tokens_BT: Tensor, families: Sequence[SharedPrefixGroup] | None = None) -> Tensor:
        """Hidden states after the final norm, [B, T, D], of right-padded rows.

        With `families`, of the one row that holds these conversations; see `packed_attention`.
        """

    def head_weight(self) -> Tensor | None:
        """The output head, [V, D]. None: `hidden` gives logits, [B, T, V], because the head is of no known kind."""

    def logits(self, hidden_xD: Tensor) -> Tensor:
        """Logits, [..., V], of what `hidden` gives. The head is expensive, so choose first."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters, by the names that the trainer's state has."""

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that learn, by the same names. The others never change."""

    def published(self) -> Published:
        """The policy as its files have it."""

    def float(self) -> Self:
        """Turn the parameters to float32 in place."""

    def to(self, device: str) -> Self:
        """Move the parameters to a device, in place."""

    def train(self, mode: bool = True) -> Self:
        """Keep what a backward pass needs. It turns on nothing random, such as dropout."""
