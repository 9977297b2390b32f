"""A list of tasks that a run draws from, in the place of all tasks of an environment: its form, its bytes and its digest.

Written by a filter stage, named by a run file, and held by the first event of a run's log. So anyone who replays the log
draws from the same list. It names the environment that it was measured on, and knows nothing else of it.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from shoal.protocol.types import Message
from shoal.protocol.wire import WireError, digest, from_json, to_json

MAX_LISTED = 1 << 16
"""Limit on the tasks of a list: the first event of a log, which holds it, stays below a megabyte."""


class TaskList(Message, frozen=True):
    """Tasks of one environment."""

    source: str
    """SHA-256 of the environment's source, as in the first event."""
    args: dict[str, Any]
    """Its arguments: with others, the same index is another task."""
    num_tasks: int
    """Tasks of the environment."""
    tasks: tuple[int, ...]
    """Indices, ascending."""

    @property
    def digest(self) -> str:
        """SHA-256, hex, of its bytes: the name by which a run file and a log pin it."""
        return digest(to_json(self))

    def flaw(self, source: str, args: Mapping[str, Any], num_tasks: int) -> str:
        """The reason why it does not fit this environment; empty if it fits."""
        if (self.source, self.args, self.num_tasks) != (source, dict(args), num_tasks):
            return "it was measured on another environment, or with other args"
        return flaw_of(self)


def flaw_of(found: TaskList) -> str:
    """What is wrong with a list in itself; empty if nothing."""
    tasks = found.tasks
    if not 0 < len(tasks) <= MAX_LISTED:
        return f"it has {len(tasks)} tasks, and a list has 1 to {MAX_LISTED}"
    if any(a >= b for a, b in pairwise(tasks)) or not 0 <= tasks[0] <= tasks[-1] < found.num_tasks:
        return f"its tasks are not ascending, from 0 to {found.num_tasks - 1}"
    return ""


def read_task_list(data: bytes) -> TaskList:
    """The list that these bytes are. Raises `WireError`."""
    found = from_json(data, TaskList)
    if flaw := flaw_of(found):
        raise WireError(flaw)
    if to_json(found) != data:  # guard: one-spelling-of-a-task-list
        raise WireError("it is not written in the one way that its digest is made from")
    return found
