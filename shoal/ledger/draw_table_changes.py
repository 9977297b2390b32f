"""Draw tables: what each version's draws differ in from those of the version before, in runs that follow solve rates."""

from collections.abc import Iterator, Mapping

from shoal.ledger.event import Body, Entry
from shoal.ledger.slot_draws import first_table, solved_groups
from shoal.ledger.state import State
from shoal.ledger.state_records import StreamRecord
from shoal.ledger.task_difficulty import TableChange, add_groups, change_after
from shoal.protocol.constants import MAIN_STREAM
from shoal.protocol.messages import Message


class PoolsChanged(Message, frozen=True):
    """A version was published, and another one retired: the groups of that one are counted."""

    version: int
    """Whose slots are the first that are drawn from the changed table."""
    link: str
    """The link of the version that retired. It shows which tasks its slots were, so that anyone can count its groups."""
    weights: dict[str, float]
    """Of environments, by label; those that did not change are left out."""
    moved: dict[str, dict[str, tuple[int, ...]]]
    """By label and pool: tasks that are now in this pool, ascending."""
    stream: str = MAIN_STREAM


def apply_pools_changed(body: PoolsChanged, state: State, entry: Entry) -> None:
    stream, rule = state.streams[body.stream], state.difficulty
    if rule is None or body.version in stream.changes:
        raise ValueError("draws change once a version, and only in runs that follow solve rates")
    retired = body.version - state.rules.max_staleness - 1
    groups = solved_groups(state, stream, retired, bytes.fromhex(body.link))
    change = TableChange(body.weights, body.moved)
    add_groups(groups, change, first_table(state), stream.solved, rule)
    stream.changes[body.version] = change


EVENTS = {"pools_changed": (PoolsChanged, apply_pools_changed)}


# --- How the draws of a version follow from the groups of the versions before, in runs that follow solve rates ---
#
# The groups of a version count when it retires. Then nothing can be submitted for it, so its link tells nobody anything
# that is still secret; and the last batch that could use its groups has waited for all of them, so a worker that holds a
# group back does not keep it out.


def change_pools(
    state: State, stream: StreamRecord, version: int, links: Mapping[int, tuple[str, str]]
) -> Iterator[Body]:
    """What publishing a version changes in the draws. The first versions have the table of the run file, and the last one
    has no slots."""
    rule, retired = state.difficulty, version - state.rules.max_staleness - 1
    if rule is None or retired < 0 or version >= state.rules.steps:
        return
    link, change = links.get(retired, ("", ""))[0], TableChange()
    if link:  # who decides again without the link knows at least that an event is due
        groups = solved_groups(state, stream, retired, bytes.fromhex(link))
        change = change_after(groups, first_table(state), stream.solved, rule)
    yield PoolsChanged(version, link, change.weights, change.moved, stream.name)
