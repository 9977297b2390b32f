"""The draw table of each version, by the log.

Used by `seeds`, which draws from it, and by the rules of pools. Pure: it reads a state.
"""

from shoal.ledger.pools import Records, apply_change, table_after
from shoal.ledger.state import State
from shoal.ledger.state_records import StreamRecord
from shoal.protocol.draws import DrawTable, EnvDraw
from shoal.protocol.tasklists import TaskList

KEPT = 8
"""Tables that a state remembers: those of the versions in use, and of the one that is audited."""


def first_table(state: State) -> DrawTable:
    """The table of the run file."""
    lists = state.task_lists or {}
    return [env_draw(env.label, env.weight, env.num_tasks, lists.get(env.label)) for env in state.envs]


def env_draw(label: str, weight: float, num_tasks: int, listed: TaskList | None) -> EnvDraw:
    """One environment of the run file's table: all of its tasks, or those of a list."""
    if listed is None:
        return EnvDraw(label, weight, num_tasks)
    return EnvDraw(label, weight, len(listed.tasks), listed=listed.tasks)


def table_of(state: State, stream: StreamRecord, version: int) -> DrawTable:
    """What the slots of a version are drawn from: the table as it was when the version was published."""
    rule, first = state.difficulty, first_table(state)
    if rule is None:
        return first
    known: dict[tuple[str, int, int], DrawTable] = state.__dict__.setdefault(f"{__name__}.known", {})
    key = stream.name, version, len(stream.changes)
    if key not in known:
        records: Records = {}
        for changed, change in stream.changes.items():  # they are in the order of versions
            if changed <= version:  # guard: table-of-the-version
                apply_change(change, first, records)
        while len(known) >= KEPT:
            del known[next(iter(known))]
        known[key] = table_after(first, records, rule)
    return known[key]
