"""The trainer's state on disk: the learner's, and the journal of the step that is being made."""

import asyncio
import contextlib
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from shoal.errors import StateError, cause_of
from shoal.run_folder import write_atomically
from shoal.train.checkpoint import States, kept_versions
from shoal.train.rows import RowBytes, TrainingRow, bytes_of, row_of

# --- The steps since the trainer's last state was saved, each with all that is needed to repeat it ---
#
# A step is on the disk before its version is announced. It has the rows that the learner was given, so a step is repeated
# without the coordinator, which may have deleted the bodies and the versions that sampled them; the sizes of its micro-
# batches; and the root of what was published.
#
#     trainer/journal/v000013.step    CRC-32 of the rest, 4 bytes; then, in msgpack, the `JournalStep` that made 13

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
    steps: int
    """Length of the schedule of learning rates that it was taken by."""
    lr_factor: float
    """What the learning rate was multiplied by, as its batch said."""

    def learned(self) -> list[TrainingRow]:
        """The rows as the learner was given them."""
        return [row_of(row) for row in self.rows]


def journal_step(
    version: int, root: str, budgets: Sequence[int], rows: Sequence[TrainingRow], *, steps: int, lr_factor: float = 1.0
) -> JournalStep:
    """The entry of a step that made `version` from these rows, by a schedule of `steps` times a factor."""
    return JournalStep(version, root, tuple(budgets), tuple(bytes_of(row) for row in rows), steps, lr_factor)


class StepJournal:
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


# --- How a trainer that is killed comes back to the same bits ---
#
# Its state, saved after every step or every few steps.
#
# With `storage.state_every` = 1, a state is on the disk before its version is published. With more, a copy of the state
# is written beside the next steps, and the journal has the steps since the last one that is on the disk; after a kill
# they are repeated.


class TrainerState:
    """Saves the states of one learner."""

    def __init__(self, states: States, every: int) -> None:
        self._states, self._every = states, every
        self._journal = StepJournal(states.folder / "journal")
        self._writing: asyncio.Task[None] | None = None
        self._saved = -1
        """Version of the newest state that was saved, or is being written."""

    def restore(self, root_of: Callable[[], str]) -> int | None:
        """Load the newest state, if there is one, and repeat the steps of the journal that follow it. Returns the version
        that they led to.

        `root_of` gives the weights root of the learner's policy as it is published. Raises `StateError` if a step has
        another result than it had.
        """
        version = self._states.load()
        if version is None:
            return None
        self._saved = version
        self._journal.clear_leftovers()
        learner = self._states.learner
        schedule_steps = learner.steps
        for step in self._journal.after(version):
            learner.steps = step.steps  # guard: repeated-by-its-schedule
            learner.lr_factor = step.lr_factor  # guard: repeated-by-its-rate
            learner.step(step.learned(), version, step.budgets)
            version, root = step.version, root_of()
            if root != step.root:  # guard: replayed-step-has-its-root
                raise StateError(
                    f"the trainer repeated the step that made version {version} and came to weights {root[:12]} instead of "
                    f"{step.root[:12]}: this machine computes other bits than the one that trained, has less memory, or "
                    "train.threads, train.processes or train.device is another now. Set them as they were. Resume "
                    "there, or start a new run from the last checkpoint (policy.path)"
                )
            log.info("repeated the step that made version=%d root=%s", version, root[:12])
        learner.steps = schedule_steps
        return version

    async def save(self, version: int) -> None:
        """Save the learner's state, or begin to, if it is due. Raises `StateError`, also of a state before."""
        due = version % self._every == 0
        if due or (self._writing is not None and self._writing.done()):
            await self.written()
        if self._every == 1:
            await asyncio.to_thread(self._write, partial(self._states.save, version))
        elif due:
            copy = await asyncio.to_thread(self._states.copy, version)
            self._writing = asyncio.create_task(asyncio.to_thread(self._write, copy))
        self._saved = version if due else self._saved

    def record(self, version: int, rows: Sequence[TrainingRow], budgets: Sequence[int]) -> Callable[[str], None]:
        """What must be done with the root of a version before it is announced: the step goes into the journal."""
        if self._every == 1:
            return lambda root: None
        steps, lr_factor = self._states.learner.steps, self._states.learner.lr_factor
        return lambda root: self._journal.write(
            journal_step(version, root, budgets, rows, steps=steps, lr_factor=lr_factor)
        )

    def place_of(self, version: int) -> Path:
        """Where the step that made a version would be."""
        return self._journal.path_of(version)

    async def finish(self, version: int) -> None:
        """Save the newest state, so that nothing is repeated after this stop."""
        await self.written()
        if version != self._saved:
            await asyncio.to_thread(self._write, partial(self._states.save, version))

    async def written(self) -> None:
        """Wait until the state that is being written is on the disk. Raises `StateError` if it cannot be."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing

    def _write(self, save: Callable[[], None]) -> None:
        save()
        self._journal.forget(min(kept_versions(self._states.folder)))  # guard: journal-reaches-back-to-each-state
