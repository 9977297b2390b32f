"""How the draws of a version follow from the groups of the versions before, in runs that follow solve rates.

Called by `rules/versions` when a version is published. The groups of a version count when it retires. Then nothing can be
submitted for it, so its link tells nobody anything that is still secret; and the last batch that could use its groups has
waited for all of them, so a worker that holds a group back does not keep it out.
"""

from collections.abc import Iterator, Mapping

from shoal.ledger.drawn import first_table
from shoal.ledger.entry import Body
from shoal.ledger.facts.pools import PoolsChanged
from shoal.ledger.past import Table
from shoal.ledger.pools import TableChange, change_after
from shoal.ledger.seeds import solved_groups
from shoal.ledger.state import State
from shoal.ledger.state_records import StreamRecord


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


COMMANDS: Table = {}
CAUSES: Table = {}
LINES: Table = {}
