"""How a trainer that is killed comes back to the same bits: its state, saved after every step or every few steps.

Called by `role`. With `storage.state_every` = 1, a state is on the disk before its version is published. With more, a copy
of the state is written beside the next steps, and the journal has the steps since the last one that is on the disk; after a
kill they are repeated. It does not decide what is learned or published.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from shoal.errors import StateError
from shoal.roles.trainer.journal import Journal, journal_step
from shoal.train.checkpoint import States, kept_versions
from shoal.train.rows import Row

log = logging.getLogger("trainer")


class Saving:
    """Saves the states of one learner."""

    def __init__(self, states: States, every: int) -> None:
        self._states, self._every = states, every
        self._journal = Journal(states.folder / "journal")
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
            learner.steps = step.steps or schedule_steps  # guard: repeated-by-its-schedule
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

    def record(self, version: int, rows: Sequence[Row], budgets: Sequence[int]) -> Callable[[str], None]:
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
