"""The trainer's own state on disk: written whole or not at all, checked when read, with the last two states kept.

The state is never published: `models/checkpoint` writes policies for others.

    trainer/v000012/state.safetensors    weights and moments, float32; 8-bit moments as uint8 with float32 scales
    trainer/v000012/shard-*.safetensors  the same of several processes, below; either resumes either
    trainer/v000012/state.json           version and number of updates
    trainer/v000012/CRC32SUMS            of the others; written last

A save writes into `.writing`, flushes every file, then renames the folder. If it is killed at any point, the previous
state is still there. A folder never changes once it has its name. The next save deletes folders whose names start with a
dot. The sums find damage of the disk: CRC-32 takes less than half the CPU time of SHA-256.
"""

import contextlib
import fnmatch
import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from shoal.errors import DISK_FULL, StateError, cause_of, remedy_of
from shoal.run_folder import name_folder
from shoal.train.learner import Learner, LearnerState

T = TypeVar("T")
log = logging.getLogger(__name__)

KEPT = 2
"""States kept: the newest, and the previous one in case the newest cannot be read."""

TENSORS, NUMBERS, SUMS = "state.safetensors", "state.json", "CRC32SUMS"
_READ_BYTES = 1 << 20

_DTYPES = {torch.float32: "F32", torch.uint8: "U8"}
"""What a state may consist of, by safetensors' names."""

WRITING, DROPPED, UNREADABLE = ".writing", ".dropped", ".unreadable"


class Numbers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Contents of state.json."""

    version: int
    updates: int
    layout: str = ""
    """As of `LearnerState`."""
    critic_updates: int = 0
    """0 in runs without a critic."""


class States:
    """The states of a learner that has the whole policy, under a folder."""

    def __init__(self, folder: Path, learner: Learner) -> None:
        self.folder, self.learner = folder, learner

    def save(self, version: int) -> None:
        """Save the learner's state. Raises `StateError`."""
        save_state(self.folder, self.learner.state(version))

    def copy(self, version: int) -> Callable[[], None]:
        """What saves the state that is now, while the learner goes on. It raises as `save`."""
        state = self.learner.state(version)
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.tensors.items()}
        copied = replace(state, tensors=tensors)

        def save() -> None:
            save_state(self.folder, copied)

        return save

    def load(self) -> int | None:
        """Go on from the newest state. Returns its version; None: there is none. Raises `StateError`."""
        state = load_state(self.folder)
        if state is None:
            return None
        self.learner.restore(state)
        return state.version


def save_state(folder: Path, state: LearnerState) -> Path:
    """Write a state under `folder` and delete all but the last two. Returns its folder.

    If the version's state is already there, nothing is written. Raises `StateError` if the disk is full or not writable;
    earlier states are then untouched.
    """
    needed = sum(tensor.nbytes for tensor in state.tensors.values())
    numbers = Numbers(state.version, state.updates, state.layout, state.critic_updates)
    return keep(folder, numbers, needed, lambda writing: [_write(writing / TENSORS, _safetensors(state.tensors))])


def keep(folder: Path, numbers: Numbers, size: int, write: Callable[[Path], list[tuple[str, str]]]) -> Path:
    """As `save_state`, of a state of `size` bytes that `write` puts into a folder. It returns the CRC-32, in hex, and the
    name of each file."""
    writing, final = folder / WRITING, folder / f"v{numbers.version:06d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if final.exists():
            return final
        _clear(folder)
        writing.mkdir()
        sums = [*write(writing), _write(writing / NUMBERS, iter([msgspec.json.encode(numbers)]))]
        _write(writing / SUMS, iter(["".join(f"{digest}  {name}\n" for digest, name in sums).encode()]))
        name_folder(writing, final)
        for old in _versions(folder)[KEPT:]:
            os.rename(old, folder / DROPPED)
            shutil.rmtree(folder / DROPPED)
        _clear(folder)
    except OSError as error:
        shutil.rmtree(writing, ignore_errors=True)
        raise StateError(_write_fault(folder, numbers.version, size, error)) from None
    return final


def load_state(folder: Path) -> LearnerState | None:
    """The newest complete state under `folder`, or None if there are no states. Raises `StateError` as `newest`."""
    return newest(folder, _read)


def newest(folder: Path, read: Callable[[Path, Numbers], T]) -> T | None:
    """What `read` makes of the newest complete state under `folder`, or None if there are no states.

    If a state is incomplete, this logs its name and takes the previous one; the trainer then repeats a step, with the same
    result. Raises `StateError` if there are states but none can be read.
    """
    faults: dict[str, str] = {}
    for candidate in _versions(folder):
        try:
            found = read(candidate, _verified(candidate))
        except (OSError, ValueError, msgspec.DecodeError, SafetensorError) as error:
            faults[candidate.name] = str(error)
            log.warning("trainer state cannot be read, taking the previous one folder=%s cause=%s", candidate, error)
            continue
        _set_aside(folder, list(faults))
        return found
    if faults:
        causes = "; ".join(f"{name}: {cause}" for name, cause in faults.items())
        raise StateError(
            f"no trainer state under {folder} can be read ({causes}). Check the disk, then copy a good one "
            "back. Without one this run cannot continue: start a new run whose policy.path is its last checkpoint"
        )
    return None


def kept_versions(folder: Path) -> list[int]:
    """The versions whose states are under `folder`, newest first."""
    return [int(path.name[1:]) for path in _versions(folder)]


def _verified(candidate: Path) -> Numbers:
    """Verify the checksums of one state. Raises what `newest` catches."""
    sums = dict(line.split("  ")[::-1] for line in (candidate / SUMS).read_text().splitlines())
    tensors = sums.keys() - {NUMBERS}
    if NUMBERS not in sums or not (tensors == {TENSORS} or (tensors and all(map(is_shard, tensors)))):
        raise ValueError(f"{SUMS} names {sorted(sums)}, not {TENSORS} and {NUMBERS}")
    for name, expected in sums.items():
        found = crc32_of(candidate / name)
        if found != expected:
            raise ValueError(f"{name} hashes to {found}, {SUMS} says {expected[:12]}")
    return msgspec.json.decode((candidate / NUMBERS).read_bytes(), type=Numbers)


def _read(candidate: Path, numbers: Numbers) -> LearnerState:
    whole = candidate / TENSORS
    tensors = safetensors.torch.load_file(whole) if whole.exists() else joined(candidate)
    return LearnerState(numbers.version, numbers.updates, tensors, numbers.layout, numbers.critic_updates)


def crc32_of(path: Path) -> str:
    """CRC-32 of a file, in hex."""
    found = 0
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            found = zlib.crc32(data, found)
    return f"{found:08x}"


def _set_aside(folder: Path, names: list[str]) -> None:
    """Rename unreadable states, so that the repeated step can write its own."""
    for name in names:
        try:
            os.rename(folder / name, folder / f"{UNREADABLE}-{name}")
        except OSError as error:
            raise StateError(f"cannot rename {folder / name}: {cause_of(error)}. Make {folder} writable") from None


def _versions(folder: Path) -> list[Path]:
    """The folders of states, newest first."""
    found = [path for path in folder.glob("v*") if path.name[1:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[1:]), reverse=True)


def _clear(folder: Path) -> None:
    """Delete what an interrupted save, or the load of an unreadable state, left behind. Others write beside it."""
    for path in folder.glob(".*"):
        if path.name in (WRITING, DROPPED) or path.name.startswith(UNREADABLE):
            shutil.rmtree(path)


def _safetensors(tensors: dict[str, Tensor]) -> Iterator[memoryview | bytes]:
    """A safetensors file, piece by piece. The library would copy all tensors in memory. Those of bytes come last, so that
    the others are at whole multiples of their size."""
    header, offset = {}, 0
    tensors = dict(sorted(tensors.items(), key=lambda item: item[1].dtype != torch.float32))
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    yield len(encoded).to_bytes(8, "little") + encoded
    for tensor in tensors.values():
        yield tensor.detach().cpu().contiguous().numpy().reshape(-1).data.cast("B")


def _write(path: Path, pieces: Iterator[memoryview | bytes]) -> tuple[str, str]:
    """Write a file. Returns its CRC-32 in hex and its name."""
    crc32 = 0
    with path.open("xb") as file:
        for piece in pieces:
            file.write(piece)
            crc32 = zlib.crc32(piece, crc32)
    return f"{crc32:08x}", path.name


def _write_fault(folder: Path, version: int, size: int, error: OSError) -> str:
    fault = f"cannot save the trainer's state of version {version} ({size / 1e6:.1f} MB) under {folder}: "
    kept = ": the previous state is untouched, and the same command goes on from it" if _versions(folder) else ""
    if error.errno in DISK_FULL:
        free_mb = shutil.disk_usage(folder if folder.exists() else folder.parent).free / 1e6
        room = f"the disk is full ({free_mb:.1f} MB free). Free at least {KEPT + 1} times that and start again"
        return f"{fault}{room}{kept}"
    return f"{fault}{cause_of(error)}. {remedy_of(error)} and start again{kept}"


# --- A state in several files, of which each process of a trainer writes its own (`torch.distributed.checkpoint`) ---
#
# They are safetensors files whose metadata says which part of a tensor is where. So nothing is unpickled that was read
# from the disk; what torch's processes tell each other while they write or read is.


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
