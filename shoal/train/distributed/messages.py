"""What the processes of a trainer say to each other: orders of rank 0, numbers, and parts of tensors.

All processes are on one machine, and they reach each other over loopback, which no other machine can. Orders are msgpack,
so nothing is unpickled.

Every order is followed by the same collective operations in all processes. If one of them ends, the operations of the
others fail, and they end, too (`Lost`).
"""

import contextlib
import datetime
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import PeerError
from shoal.train.rows import RowBytes

NO_TIMEOUT = datetime.timedelta(days=365)
"""Others wait as long as rank 0 waits for a batch. A process that ends closes its connections, so nobody waits for it."""

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


class Lost(PeerError):
    """Another process of this trainer has ended."""


class LearnRequest(msgspec.Struct, frozen=True, tag=True):
    """Learn from rows, see `Learner.step`."""

    rows: tuple[RowBytes, ...]
    version: int
    budgets: tuple[int, ...]
    steps: int
    """Length of the schedule of learning rates."""
    lr_factor: float


class Predict(msgspec.Struct, frozen=True, tag=True):
    """Compute the log-probs of rows, see `Learner.logprobs`."""

    rows: tuple[RowBytes, ...]


class PredictAt(msgspec.Struct, frozen=True, tag=True):
    """Compute the log-probs of rows under the policy in a directory, see `RankLearner.logprobs_at`."""

    directory: str
    rows: tuple[RowBytes, ...]


class Gather(msgspec.Struct, frozen=True, tag=True):
    """Send rank 0 your part of a tensor."""

    name: str
    dtype: str
    """As torch names it."""


class Save(msgspec.Struct, frozen=True, tag=True):
    """Write your part of the state of a version into a folder."""

    folder: str
    version: int


class Load(msgspec.Struct, frozen=True, tag=True):
    """Read your part of a state from a folder."""

    folder: str
    updates: int


class End(msgspec.Struct, frozen=True, tag=True):
    """Nothing follows."""


Order = LearnRequest | Predict | PredictAt | Gather | Save | Load | End


class Channel:
    """The processes of a trainer, seen from one of them."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._turn = threading.Lock()
        """Rank 0 has several threads; what follows an order belongs together."""

    @contextlib.contextmanager
    def following(self, order: Order) -> Iterator[None]:
        """Of rank 0: give an order to the others, then do in here what it says. Raises `Lost`."""
        data = bytearray(msgspec.msgpack.encode(order))
        with self._turn, self.reached():
            dist.broadcast(torch.tensor([len(data)]), src=0)
            dist.broadcast(torch.frombuffer(data, dtype=torch.uint8), src=0)
            yield

    def hear(self) -> Order:
        """Of the others: wait for the next order. Raises `Lost`."""
        with self.reached():
            size = torch.zeros(1, dtype=torch.int64)
            dist.broadcast(size, src=0)
            data = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(data, src=0)
        order: Order = msgspec.msgpack.decode(data.numpy().tobytes(), type=Order)
        return order

    def all_numbers(self, own: Sequence[float]) -> list[list[float]]:
        """As many numbers from each process, in the order of ranks. A float64 is exact up to 2**53."""
        sent = torch.tensor(own, dtype=torch.float64)
        found = [torch.empty_like(sent) for _ in range(self.world)]
        dist.all_gather(found, sent)
        return [part.tolist() for part in found]

    def send(self, tensor: Tensor) -> None:
        """Send rank 0 a tensor of the CPU, whose shape and dtype it knows. Nothing is sent of an empty one."""
        if tensor.numel():
            dist.send(_bytes_of(tensor), dst=0)

    def receive(self, tensor: Tensor, source: int) -> None:
        """Of rank 0: fill a tensor with what another process sent."""
        if tensor.numel():
            dist.recv(_bytes_of(tensor), src=source)

    @contextlib.contextmanager
    def reached(self) -> Iterator[None]:
        """Raise `Lost` where another process ends while we work with it. Torch has no class of its own for that."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or "gloo/transport" in str(error):
                cause = str(error).partition("\n")[0]
                raise Lost(f"another process of this trainer has ended ({cause}): all start again") from None
            raise


@contextlib.contextmanager
def joined(rank: int, world: int, meeting: Path, device: str) -> Iterator[Channel]:
    """Meet the other processes at a file that exists for this start alone."""
    dist.init_process_group(
        BACKENDS[device], store=dist.FileStore(str(meeting), world), rank=rank, world_size=world, timeout=NO_TIMEOUT
    )
    try:
        yield Channel(rank, world)
    finally:
        dist.destroy_process_group()


def _bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: gloo does not send every dtype."""
    assert tensor.is_contiguous(), "only whole rows are sent"
    return tensor.view(-1).view(torch.uint8)
