"""The steps since the trainer's last state was saved, each with all that is needed to repeat it.

Called by `saving`, in runs whose state is saved every few steps. A step is on the disk before its version is announced. It
has the rows that the learner was given, so a step is repeated without the coordinator, which may have deleted the bodies
and the versions that sampled them; the sizes of its micro-batches; and the root of what was published. It does not know the
learner.

    trainer/journal/v000013.step    CRC-32 of the rest, 4 bytes; then one `JournalStep` in msgpack: the step that made 13
"""

import contextlib
import logging
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from shoal.errors import StateError, cause_of
from shoal.folder import write_atomically
from shoal.train.row_bytes import RowBytes, bytes_of, row_of
from shoal.train.rows import Row

log = logging.getLogger("trainer")

_CRC_BYTES = 4


class JournalStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step."""

    version: int
    """The version that it made."""
    root: str
    """Weights root of that version, as it was published."""
    budgets: tuple[int, ...]
    """Tokens of a micro-batch, at most, in each update."""
    rows: tuple[RowBytes, ...]
    steps: int = 0
    """Length of the schedule of learning rates that it was taken by; 0: that of the run file."""
    lr_factor: float = 1.0
    """What the learning rate was multiplied by, as its batch said."""

    def learned(self) -> list[Row]:
        """The rows as the learner was given them."""
        return [row_of(row) for row in self.rows]


def journal_step(
    version: int, root: str, budgets: Sequence[int], rows: Sequence[Row], *, steps: int, lr_factor: float = 1.0
) -> JournalStep:
    """The entry of a step that made `version` from these rows, by a schedule of `steps` times a factor."""
    return JournalStep(version, root, tuple(budgets), tuple(bytes_of(row) for row in rows), steps, lr_factor)


class Journal:
    """The entries of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, step: JournalStep) -> None:
        """Keep a step, durable on return. Raises `StateError`."""
        data = msgspec.msgpack.encode(step)
        try:
            write_atomically(self.path_of(step.version), zlib.crc32(data).to_bytes(_CRC_BYTES, "little") + data)
        except OSError as error:
            raise StateError(
                f"cannot write the step of version {step.version} to {self.folder}: {cause_of(error)}. Free some space and "
                "start again: the run goes on from there"
            ) from None

    def after(self, version: int) -> Iterator[JournalStep]:
        """The steps that follow a version one by one, up to the first that is not there or cannot be read."""
        while (path := self.path_of(version + 1)).exists():
            try:
                step = _decode(path.read_bytes())
            except (OSError, ValueError, msgspec.DecodeError) as error:
                log.warning("the journal ends before this step, which cannot be read file=%s cause=%s", path, error)
                return
            version = step.version
            yield step

    def forget(self, version: int) -> None:
        """Delete the steps up to a version. What cannot be deleted stays."""
        for path in self.folder.glob("v*.step"):
            if path.name < self.path_of(version + 1).name:
                with contextlib.suppress(OSError):
                    path.unlink()

    def clear_leftovers(self) -> None:
        """Delete what a kill left of steps that were being written. Nothing may be written meanwhile."""
        for path in self.folder.glob(".v*.step.*"):
            path.unlink(missing_ok=True)

    def path_of(self, version: int) -> Path:
        """The file of the step that made a version."""
        return self.folder / f"v{version:06d}.step"


def _decode(data: bytes) -> JournalStep:
    if zlib.crc32(data[_CRC_BYTES:]) != int.from_bytes(data[:_CRC_BYTES], "little"):
        raise ValueError("its checksum is not that of its bytes")
    return msgspec.msgpack.decode(data[_CRC_BYTES:], type=JournalStep)
