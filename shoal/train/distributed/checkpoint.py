"""A state in several files, of which each process of a trainer writes its own (`torch.distributed.checkpoint`).

They are safetensors files whose metadata says which part of a tensor is where. So nothing is unpickled that was read from
the disk; what torch's processes tell each other while they write or read is.
"""

import contextlib
import fnmatch
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

_PATTERN = "shard-*.safetensors"


def is_shard(name: str) -> bool:
    """Whether a state's file has a part of its tensors."""
    return fnmatch.fnmatchcase(name, _PATTERN) and "/" not in name


def shard_of(folder: Path, rank: int) -> Path | None:
    """The file that a process wrote; None if it has no part of any tensor."""
    return next(folder.glob(f"shard-{rank + 1:05d}-*.safetensors"), None)


def write_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write the parts of these tensors that are here; all processes do so at once. Raises OSError."""
    from torch.distributed import checkpoint as dcp

    with _os_errors():
        dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True))


def read_shards(folder: Path, into: dict[str, Tensor]) -> None:
    """Fill tensors, or the parts of them that are here, from the files of a state; all processes do so at once."""
    from torch.distributed import checkpoint as dcp

    with _os_errors():
        dcp.load(into, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the whole tensors of a state, all of them float32."""
    from torch.distributed import checkpoint as dcp

    found = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: tuple(kept.size) for name, kept in found.items() if isinstance(kept, dcp.TensorStorageMetadata)}


def joined(folder: Path) -> dict[str, Tensor]:
    """The whole tensors of a state, for a process that is alone."""
    from torch.distributed import checkpoint as dcp

    tensors = {name: torch.empty(shape) for name, shape in shapes_of(folder).items()}
    with _os_errors():
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    return tensors


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    """Raise the first OSError of any process in the place of torch's collection of errors."""
    from torch.distributed.checkpoint import CheckpointException

    try:
        yield
    except CheckpointException as error:
        faults = [fault for fault, _ in error.failures.values()]
        raise next((fault for fault in faults if isinstance(fault, OSError)), faults[0]) from None
