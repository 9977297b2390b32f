"""How much memory a node gives to somebody else's run: a limit that work is compared with before it begins, and that the
operating system enforces.

A host chooses policy, sampling limits and leases, so a few bytes of it can ask for any amount. It uses no network. The
memory of a GPU is compared, too, but only what is free there limits it.
"""

import contextlib
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from shoal.chat.isolated import RendererLimits
from shoal.engine.interface import Engine
from shoal.errors import Overreach, StateError
from shoal.models.device import CPU, CUDA
from shoal.weights.delta.tensor_codes import cores

THREAD_STACK_BYTES = 8 << 20
"""Address space of a thread's stack, of which little is used."""

THREADS = 4
"""Threads of a role beside torch's own and those that hash versions: the event loop, one that computes, and those that look
up host names."""

LEAST_MB = 400
"""Smallest limit: torch takes about 240 MB; the rest is for the process for tokenizers, with some room for both."""

CONTAINER = Path("/sys/fs/cgroup")
"""Where Linux tells a container how much memory it may use, and uses."""

FULL = ("can't allocate memory", "can't start new thread", "could not create a primitive")
"""What torch and Python say when an allocation fails, beside `MemoryError`."""

FULL_GPU = "out of memory"
"""What torch says when an allocation on a GPU fails."""


@dataclass(frozen=True)
class Memory:
    """The limit of a node, and what the node takes before it works."""

    limit_mb: int
    base_mb: int
    """What the process takes before it loads a policy, and the most that its child for tokenizers and the sandboxes of
    packages may take."""
    free_gpu: Callable[[], int] | None = None
    """Bytes that the GPU has for this process; None: there is none, or its memory is not reckoned here."""

    @staticmethod
    def of(max_memory_mb: int, reserved_mb: int = 0, device: str = CPU) -> "Memory":
        """The limit from now on; 0 is a share of what is free. Call it when torch is imported and no policy is loaded.
        `reserved_mb` is what the sandboxes of packages may take, `device` is what an engine of ours computes on."""
        limit_mb = max_memory_mb or share_of_free_mb()
        base_mb = taken_mb() + RendererLimits.within(limit_mb).memory_mb + reserved_mb
        return Memory(limit_mb, base_mb, free_on_gpu if device == CUDA else None)

    @property
    def left_bytes(self) -> int:
        """For a policy and for work with it."""
        return max(0, self.limit_mb - self.base_mb) * 1_000_000

    def demand(self, what: str, need_bytes: int, gpu_bytes: int = 0) -> None:
        """Raise `Overreach` if something needs more than is left, here or on the GPU. `what` begins the sentence."""
        if need_bytes > self.left_bytes:  # guard: memory-before-work
            need_mb = self.base_mb + -(-need_bytes // 1_000_000)
            raise Overreach(
                f"{what} needs about {need_mb} MB of memory, limit {self.limit_mb} (--max-memory, by default half of what "
                f"is free): allow {need_mb}, or leave this run"
            )
        if self.free_gpu is not None and gpu_bytes > (free := self.free_gpu()):  # guard: gpu-memory-before-work
            raise Overreach(
                f"{what} needs about {-(-gpu_bytes // 1_000_000)} MB of the GPU's memory, and {free // 1_000_000} are "
                "free: close what else uses it, work on the CPU (--device cpu), or leave this run"
            )

    def demand_within(self) -> None:
        """Raise `Overreach` if this process and its children take more than the limit now."""
        used_mb = taken_mb()
        if used_mb > self.limit_mb:
            raise Overreach(
                f"this node takes {used_mb} MB of memory, limit {self.limit_mb} (--max-memory): allow more, or leave "
                "this run"
            )

    def enforce(self, threads: int) -> None:
        """Let allocations of this process fail beyond the limit. Systems without such a limit ignore it."""
        stacks = (threads + cores() + THREADS) * THREAD_STACK_BYTES  # guard: stacks-of-hashing-threads
        # guard: memory-of-the-process
        with contextlib.suppress(OSError, StopIteration, ValueError):
            most = _private_bytes() + self.left_bytes + stacks
            resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))

    @contextlib.contextmanager
    def told(self, what: str) -> Iterator[None]:
        """Turn an allocation that fails into an `Overreach`. `what` begins the sentence."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if FULL_GPU in str(error):
                raise Overreach(
                    f"{what} took more memory than the GPU has free: close what else uses it, work on the CPU (--device "
                    "cpu), or leave this run"
                ) from None
            if isinstance(error, RuntimeError) and not any(text in str(error) for text in FULL):
                raise
            raise Overreach(
                f"{what} took more memory than the {self.limit_mb} MB that this node may use (--max-memory): allow "
                "more, or leave this run"
            ) from None


def limit_of(max_memory_mb: int) -> int:
    """The limit of a node in MB; 0 is a share of what is free. Raises `StateError` if no node fits into it."""
    limit_mb = max_memory_mb or share_of_free_mb()
    if limit_mb < LEAST_MB:
        raise StateError(
            f"this node may use {limit_mb} MB of memory (--max-memory, by default half of what is free), but torch and the "
            f"tokenizer's process need about {LEAST_MB} MB before any work: allow more, or close other programs"
        )
    return limit_mb


def enforced(make_engine: Callable[..., Engine], limit_mb: int, threads: int) -> Callable[..., Engine]:
    """`make_engine`, with the limit set anew after it. From now on, allocations of this process beyond the limit fail."""
    Memory.of(limit_mb).enforce(threads)  # what the run's description asks for, too

    def make(*asked: str, **named: str) -> Engine:
        engine = make_engine(*asked, **named)
        Memory.of(limit_mb).enforce(threads)  # torch's code is in memory now, and does not count as private
        return engine

    return make


def share_of_free_mb() -> int:
    """Half of the memory that is free, or that this process has already."""
    return max(0, free_bytes() + psutil.Process().memory_info().rss) // 2_000_000


def free_on_gpu() -> int:
    """Memory of the GPU that this process may still take, or has already."""
    import torch

    return int(torch.cuda.mem_get_info()[0]) + torch.cuda.memory_reserved()


def free_bytes() -> int:
    """Memory that this process may still take, here or in its container."""
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # no such files, or no limit: "max"
        limit, used = (int((CONTAINER / name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, limit - used + _cached_bytes())
    return int(free)


def _cached_bytes() -> int:
    """What the container is charged for copies of files that were not read lately: the system gives it up at once."""
    with contextlib.suppress(OSError, ValueError):
        fields = dict(line.split() for line in (CONTAINER / "memory.stat").read_text().splitlines())
        return int(fields.get("inactive_file", "0"))
    return 0


def taken_mb() -> int:
    """What this process and its children take now."""
    ours, taken = psutil.Process(), 0
    for process in (ours, *ours.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            taken += process.memory_info().rss
    return taken // 1_000_000


def memory_mb() -> tuple[int, int]:
    """What this process and its children take of the machine, and what this process takes of its GPU."""
    torch = sys.modules.get("torch")  # a process without it computes nothing
    on_gpu = torch.cuda.memory_reserved() // 1_000_000 if torch is not None and torch.cuda.is_initialized() else 0
    return taken_mb(), int(on_gpu)


def _private_bytes() -> int:
    """What counts for the limit of data: memory that is private and may be written. Raises `OSError`, `StopIteration`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
