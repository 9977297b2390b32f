"""A policy of which each process of a trainer has a part, by FSDP2 (arXiv:2304.11277, in torch: `fully_shard`).

Each tensor is cut along its first axis. A layer is gathered when its turn comes, in a forward and in a backward pass, and
its gradients are added up over all processes; embedding, head and last norm are gathered from the beginning of a forward to
the end of a backward pass. The parts are float32: what the optimiser changes. If `train.dtype` is bfloat16, they are
rounded on their way to the others, which has the same result as `master_weights`.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from shoal.config import TrainConfig
from shoal.errors import StateError
from shoal.models.checkpoint import policy_tensors
from shoal.models.interface import PolicyModel, Published
from shoal.models.load_tensors import read_rows
from shoal.models.packed_attention import SharedPrefixGroup
from shoal.models.transformer import Transformer
from shoal.models.transformer_config import TransformerConfig
from shoal.train.distributed.messages import Channel, Gather
from shoal.train.distributed.ranks import MicrobatchShare
from shoal.train.logprobs import predict
from shoal.train.master_weights import module_dtype
from shoal.train.microbatches import PADDED, Plan, plan
from shoal.train.rows import TrainingRow


class ShardedPolicy:
    """A policy whose parameters are parts of tensors. A `models.interface.PolicyModel`."""

    after_head = None

    def __init__(self, whole: Transformer, channel: Channel) -> None:
        """`whole` is sharded, and its parts are filled."""
        self.whole, self._channel = whole, channel
        # While a pass has gathered some, the module has others under these names.
        self._parts = dict(whole.named_parameters())

    @property
    def spec(self) -> TransformerConfig:
        """See `PolicyModel`."""
        return self.whole.spec

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return next(iter(self._parts.values())).device

    @property
    def recompute(self) -> bool:
        """See `PolicyModel`."""
        return self.whole.recompute

    @recompute.setter
    def recompute(self, wanted: bool) -> None:
        self.whole.recompute = wanted

    def hidden(self, tokens_BT: Tensor, families: Sequence[SharedPrefixGroup] | None = None) -> Tensor:
        """See `PolicyModel`. All processes compute as many of these, one after another."""
        hidden_BTD: Tensor = self.whole(tokens_BT, families)
        return hidden_BTD

    def head_weight(self) -> Tensor:
        """See `PolicyModel`. It is whole after `hidden` alone, until a backward pass or `let_go`."""
        return self.whole.head_weight()

    def logits(self, hidden_xD: Tensor) -> Tensor:
        """See `PolicyModel`, and `head_weight`."""
        return self.whole.logits(hidden_xD)

    def let_go(self) -> None:
        """Forget what a forward pass without a backward pass has gathered: it would not be gathered again after a step."""
        assert isinstance(self.whole, FSDPModule)
        self.whole.reshard()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """See `PolicyModel`."""
        return iter(self._parts.items())

    def trainable(self) -> dict[str, nn.Parameter]:
        """See `PolicyModel`."""
        return dict(self._parts)

    def published(self) -> Published:
        """See `PolicyModel`. Rank 0 gathers one tensor at a time, while the others obey `Gather`."""
        return Published(self._parts, self.whole.published().files, gather=self._gathered)

    def send(self, name: str, dtype: torch.dtype) -> None:
        """What `Gather` asks for."""
        self._channel.send(self._own(name, dtype))

    def float(self) -> Self:
        """The parts are float32."""
        return self

    def to(self, device: str) -> Self:
        """The parts are where their process computes."""
        return self

    def train(self, mode: bool = True) -> Self:
        """Nothing in it is random."""
        return self

    def _gathered(self, name: str, dtype: torch.dtype) -> Tensor:
        shape, world = self._parts[name].shape, self._channel.world
        gathered = torch.empty(shape, dtype=dtype)
        with self._channel.following(Gather(name, str(dtype).removeprefix("torch."))):
            for rank in range(world):
                begin, end = rows_of_rank(shape[0], rank, world)
                if rank == self._channel.rank:
                    gathered[begin:end] = self._own(name, dtype)
                else:
                    self._channel.receive(gathered[begin:end], rank)
        return gathered

    def _own(self, name: str, dtype: torch.dtype) -> Tensor:
        return _local(self._parts[name].detach()).to("cpu", dtype).contiguous()


def load_sharded(directory: Path, config: TrainConfig, device: str, channel: Channel) -> ShardedPolicy:
    """Load this process's part of the policy in a directory. Raises `StateError` as `load_policy`."""
    spec, stored = policy_tensors(directory)
    with torch.device("meta"):
        whole = Transformer(spec)
    mesh = init_device_mesh(device, (channel.world,))
    rounded = module_dtype(config)
    precision = MixedPrecisionPolicy(
        param_dtype=None if rounded == torch.float32 else rounded, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for module in (*whole.model.layers, whole):
        fully_shard(module, mesh=mesh, mp_policy=precision)
        assert isinstance(module, FSDPModule)
        # The loss divides by the tokens of the whole batch, so gradients are summed and not averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    whole.to_empty(device=device)
    # It warns of in-place operations on what the model returns. There are none.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    policy = ShardedPolicy(whole, channel)
    with torch.no_grad():
        for name, part in policy.trainable().items():
            own, (begin, end) = _local(part.detach()), rows_of_rank(part.shape[0], channel.rank, channel.world)
            assert len(own) == end - begin, f"{name}: {len(own)} rows instead of {begin} to {end}"
            own.copy_(read_rows(stored[name], begin, end, name).to(rounded))  # as one process would have loaded it
    return policy


class Sharded:
    """The processes that share a policy. A `train.distributed.ranks.Ranks`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def demand_dtype(self, model: PolicyModel, config: TrainConfig) -> None:
        """See `Ranks`. Parts are float32 in any run."""
        odd = [f"{name} is {p.dtype}" for name, p in model.trainable().items() if p.dtype != torch.float32]
        assert not odd, f"{odd[0]}: parts are float32"

    def settle(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """See `Ranks`. The parts are in memory of their own already."""

    def shares(self, packed: Sequence[Plan]) -> list[MicrobatchShare]:
        """See `Ranks`: in turn, the longest first. At the end, some compute what others have, too, so that all of them take
        part in gathering and adding up."""
        rank, world = self._channel.rank, self._channel.world
        own = [MicrobatchShare(planned) for planned in packed[rank::world]]
        rounds = math.ceil(len(packed) / world)
        return own + [MicrobatchShare(packed[-1], counts=False)] * (rounds - len(own))

    def add_up(self, sums: Mapping[str, float], largest: float) -> tuple[dict[str, float], float]:
        """See `Ranks`."""
        names = sorted(sums)
        found = self._channel.all_numbers([largest, *(sums[name] for name in names)])
        totals = [math.fsum(values) for values in zip(*found, strict=True)]
        return dict(zip(names, totals[1:], strict=True)), max(values[0] for values in found)

    def whole(self, norm: Tensor) -> Tensor:
        """See `Ranks`."""
        assert isinstance(norm, DTensor), f"gradients of parts have a norm of parts, not {type(norm)}"
        return norm.full_tensor()

    def demand_repeat(self, cause: str) -> None:
        """See `Ranks`. The others wait within the pass that failed here."""
        raise StateError(
            f"memory ran out in a micro-batch of one of the trainer's processes ({cause}), and several of them cannot "
            "repeat it with smaller ones: start a new run with a smaller train.microbatch_tokens or with "
            'train.recompute = "layers", or resume with more train.processes'
        )


@torch.no_grad()
def sharded_logprobs(
    policy: ShardedPolicy, rows: Sequence[TrainingRow], channel: Channel, *, temperature: float, microbatch_tokens: int,
    packing: str = PADDED,
) -> list[NDArray[np.float32]]:  # fmt: skip
    """As `logprobs_of`, of rows that all processes have. Each computes some; rank 0 gets all, and the others none."""
    planned, found, device = plan(rows, microbatch_tokens, packing), list[Tensor](), policy.device
    for share in Sharded(channel).shares(planned):
        logp_N, _ = predict(policy, share.plan.build(rows).on(device), temperature)
        if share.counts:
            found.append(logp_N.float().cpu())
    policy.let_go()
    if channel.rank:
        channel.send(torch.cat(found) if found else torch.empty(0))
        return []
    logp: dict[int, NDArray[np.float32]] = {}
    for rank in range(channel.world):
        members = [i for one in planned[rank :: channel.world] for i in one.members]
        counts = [len(rows[i].positions_P) for i in members]
        logp_N = torch.cat(found) if rank == 0 else torch.empty(sum(counts))
        if rank:
            channel.receive(logp_N, rank)
        logp |= dict(zip(members, (part.numpy() for part in logp_N.split(counts)), strict=True))
    return [logp[i] for i in range(len(rows))]


def rows_of_rank(rows: int, rank: int, world: int) -> tuple[int, int]:
    """The rows of a tensor that a process has, as FSDP2 cuts it: as many each, and fewer or none at the end."""
    each = math.ceil(rows / world)
    return min(rows, rank * each), min(rows, (rank + 1) * each)


def _local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, in the same memory."""
    assert isinstance(tensor, DTensor), f"a part of a tensor is a DTensor, not {type(tensor)}"
    return tensor.to_local()
