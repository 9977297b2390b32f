"""The parts of a batch that an update learns from, if a step takes several updates from different groups.

Called by `train/step`. The order depends only on the rows, so a repeated step has the same parts. It uses neither model nor
formulas.
"""

from collections.abc import Hashable, Sequence

from shoal.train.rows import Row


def minibatches(rows: Sequence[Row], count: int) -> list[Sequence[Row]]:
    """At most `count` parts of whole groups, as equal in groups as can be; each row exactly once.

    Groups are dealt out in turn, because neighbours in a batch are alike: they were accepted one after another.
    """
    if count == 1:
        return [rows]
    groups: dict[Hashable, list[Row]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(i if row.group is None else row.group, []).append(row)
    dealt = list(groups.values())
    parts = [[row for group in dealt[k::count] for row in group] for k in range(count)]
    return [part for part in parts if part]
