"""Shows on which device tensors are, on a machine without a GPU.

Tensors on torch's device `meta` have a place and no values. `OneDevice` fails when an operation takes some of them together
with tensors of the CPU, as CUDA does; torch itself lets `meta` pass. What reads values finds zeros.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.models import layers

COPIES = ("copy_", "_to_copy", "_copy_from")
"""Operations that bring values from one device to another."""

INDEXED = ("index", "index_put_")
"""Operations that take their indices from the CPU."""


class MixedDevices(AssertionError):
    """An operation took tensors of several devices."""


class OneDevice(TorchDispatchMode):
    """Lets no operation mix `meta` with the CPU. A number without axes is taken anywhere."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        used = args[:1] if name in INDEXED else [args, kwargs]
        found = {leaf.device.type for leaf in tree_leaves(used) if isinstance(leaf, Tensor) and leaf.dim()}
        if len(found) > 1 and name not in COPIES:
            raise MixedDevices(f"{name} takes tensors of {sorted(found)}")
        return func(*args, **(kwargs or {}))


@contextmanager
def values_are_zeros(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within it, values that are read from `meta` are zeros, and no operation mixes devices."""

    def zeros(tensor: Tensor) -> Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor

    def patched(name: str) -> Callable[..., Any]:
        usual = getattr(Tensor, name)
        return lambda tensor: usual(zeros(tensor))

    for name in ("tolist", "item", "cpu", "__int__", "__bool__"):
        monkeypatch.setattr(Tensor, name, patched(name))
    monkeypatch.setattr(layers, "_num_shared", lambda tokens_BT: 3)
    with OneDevice():
        yield
