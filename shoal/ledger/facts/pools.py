"""Draw tables: what each version's draws differ in from those of the version before, in runs that follow solve rates."""

from shoal.ledger.drawn import first_table
from shoal.ledger.entry import Entry
from shoal.ledger.pools import TableChange, book
from shoal.ledger.seeds import solved_groups
from shoal.ledger.state import State
from shoal.protocol.constants import MAIN_STREAM
from shoal.protocol.types import Message


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
    book(groups, change, first_table(state), stream.solved, rule)
    stream.changes[body.version] = change


EVENTS = {"pools_changed": (PoolsChanged, apply_pools_changed)}
