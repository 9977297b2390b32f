"""The processes that take a training step together, as the step sees them: which micro-batches each computes, and how their
sums become those of all.

`SingleProcess` is the only process of its step. `distributed.fsdp` has those that share a policy.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from shoal.config import TrainConfig
from shoal.models.interface import PolicyModel
from shoal.train.master_weights import module_dtype
from shoal.train.microbatches import Plan


class MicrobatchShare(NamedTuple):
    """A micro-batch that a process computes."""

    plan: Plan
    counts: bool = True
    """False: another process computes it, too, and it counts there."""


class Ranks(Protocol):
    """The processes of a step, seen from one of them."""

    def demand_dtype(self, model: PolicyModel, config: TrainConfig) -> None:
        """Assert that a policy was loaded in the dtype that the run file names."""
        ...

    def settle(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Prepare parameters for an optimiser, before their first gradient."""
        ...

    def shares(self, packed: Sequence[Plan]) -> list[MicrobatchShare]:
        """What this process computes of a step's micro-batches: each process has as many."""
        ...

    def add_up(self, sums: Mapping[str, float], largest: float) -> tuple[dict[str, float], float]:
        """The sums of all processes, and the largest of their numbers."""
        ...

    def whole(self, norm: Tensor) -> Tensor:
        """The norm of all gradients, from what torch gives for those of this process."""
        ...

    def demand_repeat(self, cause: str) -> None:
        """Raise `StateError` if an update in which memory ran out cannot begin again."""
        ...


class SingleProcess:
    """One process has the whole policy."""

    def demand_dtype(self, model: PolicyModel, config: TrainConfig) -> None:
        """See `Ranks`. An adapter is float32 beside any base."""
        wanted, learned = module_dtype(config), model.trainable()
        frozen = [(name, p) for name, p in model.named_parameters() if name not in learned]
        odd = [f"{name} is {p.dtype}" for name, p in frozen or learned.items() if p.dtype != wanted]
        assert not odd, f"{odd[0]}, but the trainer computes in {wanted}: load the policy so"

    def settle(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """See `Ranks`."""
        for parameter in parameters.values():
            # Copy into torch's own allocation: weights read from a file may be at odd addresses, and MKL's sums depend on
            # alignment, so a resumed run would differ in the last bit.
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)

    def shares(self, packed: Sequence[Plan]) -> list[MicrobatchShare]:
        """See `Ranks`."""
        return [MicrobatchShare(planned) for planned in packed]

    def add_up(self, sums: Mapping[str, float], largest: float) -> tuple[dict[str, float], float]:
        """See `Ranks`."""
        return dict(sums), largest

    def whole(self, norm: Tensor) -> Tensor:
        """See `Ranks`."""
        return norm

    def demand_repeat(self, cause: str) -> None:
        """See `Ranks`."""


ALONE = SingleProcess()
