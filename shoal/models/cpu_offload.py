"""Tensors that leave a device for the memory of the CPU, and come back with the same bits.

A tensor stays the object that it was: only the memory behind it is given back, as FSDP does. So views, tied weights, the
optimiser's own references and hooks all hold when it is back. While it is away, nothing may read it: there is no memory
behind it.

The bytes are copied, never computed again, and torch puts them at addresses with the same alignment as before.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

GONE_S = 10.0
"""The driver may need so long to give back the memory of a process that was killed."""


class Parked:
    """What is parked, or nothing."""

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self._sleep = sleep
        self._kept: list[tuple[torch.UntypedStorage, Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._kept)

    @torch.no_grad()
    def park(self, *things: Any, device: str) -> None:
        """Move all tensors of a device in these things away. Raises `RuntimeError` if the CPU has no memory for them."""
        for storage in storages_in(things, device):
            kept = torch.empty(storage.nbytes(), dtype=torch.uint8)
            kept.copy_(_bytes_of(storage))
            self._kept.append((storage, kept))
            storage.resize_(0)
        _free_cached()

    @torch.no_grad()
    def come_back(self) -> None:
        """Move them back. Raises `torch.OutOfMemoryError`."""
        deadline = time.monotonic() + GONE_S
        while self._kept:
            storage, kept = self._kept[-1]
            try:
                storage.resize_(kept.numel())
            except torch.OutOfMemoryError:
                if time.monotonic() > deadline:
                    raise
                _free_cached()
                self._sleep(0.2)
                continue
            _bytes_of(storage).copy_(kept)
            self._kept.pop()


class Resting:
    """A frozen model that leaves a shared device between shifts: a `Parkable` of `roles/node/device_queue`."""

    def __init__(self, frozen: Any) -> None:
        self._resting, self._parked = frozen, Parked()

    def park(self) -> None:
        """Leave the device's memory."""
        _, parameter = next(iter(self._resting.named_parameters()))
        self._parked.park(self._resting, device=parameter.device.type)

    def come_back(self) -> None:
        """Be there again, with the same bits."""
        self._parked.come_back()


def storages_in(things: Any, device: str) -> Iterator[torch.UntypedStorage]:
    """The memory of all tensors of a device in these things, each piece once."""
    seen: set[int] = set()
    for tensor in _tensors_in(things):
        if tensor.device.type != device or tensor.layout is not torch.strided:
            continue  # an opaque layout of the CPU
        storage = tensor.untyped_storage()
        # A file that is mapped is not ours to free.
        if storage._cdata not in seen and storage.nbytes() and storage.resizable():
            seen.add(storage._cdata)
            yield storage


def _tensors_in(things: Any) -> Iterator[Tensor]:
    """All tensors that are reached from here through containers, modules, optimisers, and objects of ours."""
    seen: dict[int, Any] = {}
    left = [things]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one  # kept, so that its id is no other's
        if isinstance(one, Tensor):
            yield one
            left.append(one.grad if one.is_leaf else None)
        elif isinstance(one, Mapping):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            left += one
        elif _is_looked_into(one):
            left += vars(one).values()


def _is_looked_into(one: Any) -> bool:
    ours = type(one).__module__.startswith("shoal.") and hasattr(one, "__dict__") and not isinstance(one, type)
    return ours or isinstance(one, nn.Module | torch.optim.Optimizer)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _free_cached() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
