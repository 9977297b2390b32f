"""float32 masters of a policy that computes in another precision or on another device: what the optimiser changes.

The module's parameters are the masters rounded to its precision, so in bfloat16 they are exactly the bytes that are
published. A step is often smaller than a bfloat16 can show: the master keeps the rest (arXiv:1710.03740). For the same
reason, gradients of micro-batches are summed in float32, parameter by parameter while a backward pass goes on, so bfloat16
gradients of the whole model never exist.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from shoal.config import TrainConfig


def module_dtype(config: TrainConfig) -> torch.dtype:
    """The precision in which the trained policy computes."""
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


def layout_of(config: TrainConfig) -> str:
    """What a saved state's tensors are, if not float32 weights and moments of a float32 policy. Offloaded moments are the
    same tensors elsewhere."""
    return " ".join(filter(None, [config.dtype, "8bit" if config.moments == "8bit" else ""]))


class MasterWeights:
    """The masters of a module's parameters, with sums of gradients. As long as it exists, it takes all gradients."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], device: torch.device | None = None) -> None:
        """The masters begin with the values of the parameters; they are on `device`, or beside them."""
        self._parameters = dict(parameters)
        self.tensors = {name: nn.Parameter(_copied(one, device or one.device)) for name, one in parameters.items()}
        """By the names of the parameters. Their `grad` is None until `collect`."""
        self._sums: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(self._add, name))

    def collect(self) -> None:
        """Hand the sum of all gradients since the last `drop` over to the masters."""
        for name, master in self.tensors.items():
            found = self._sums.pop(name, None)
            master.grad = None if found is None else found.to(master.device)

    def drop(self) -> None:
        """Forget all gradients."""
        self._sums.clear()
        for master in self.tensors.values():
            master.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters to the module's parameters."""
        for name, parameter in self._parameters.items():
            parameter.copy_(self.tensors[name])

    def _add(self, name: str, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None, f"{name} has no gradient after its own accumulation"
        if name in self._sums:
            self._sums[name].add_(gradient)
        else:
            self._sums[name] = gradient.to(torch.float32)


def _copied(parameter: nn.Parameter, device: torch.device) -> Tensor:
    master = parameter.detach().to(device, torch.float32, copy=True)
    # Only pinned memory is copied to a GPU without another copy on the way.
    return master.pin_memory() if parameter.is_cuda and device.type == "cpu" else master
