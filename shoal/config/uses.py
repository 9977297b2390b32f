"""What a run file may not say about groups that several batches take.

Called by `check` for every run file.
"""

from collections.abc import Iterator

from shoal.config.sections import RunConfig
from shoal.protocol.constants import MAX_GROUP_USES


def uses_fit(config: RunConfig) -> Iterator[tuple[bool, str]]:
    """Whether groups can be used as often as the run file says; each with what to do if not."""
    uses, repeated, rollouts = config.train.group_uses, config.train.repeated_groups, config.rollouts
    where = f"train.group_uses = {uses}"
    yield 1 <= uses <= MAX_GROUP_USES, f"{where}: must be between 1 and {MAX_GROUP_USES}"
    yield (
        0 <= repeated < max(1, rollouts.batch_groups),
        f"train.repeated_groups = {repeated}: must be at least 0 and below rollouts.batch_groups = "
        f"{rollouts.batch_groups}, because each batch has new groups",
    )
    yield (
        uses == 1 or rollouts.max_staleness > 0,
        f"{where}: with rollouts.max_staleness = 0 a batch takes groups of its own version alone, so no group can be in "
        "two. Raise max_staleness, or leave group_uses out",
    )
    yield (
        uses <= rollouts.max_staleness + 1,
        f"{where}: with rollouts.max_staleness = {rollouts.max_staleness} a group is too old after "
        f"{rollouts.max_staleness + 1} batches. Raise max_staleness, or lower group_uses",
    )
    yield (
        uses == 1 or repeated > 0,
        f"{where} with train.repeated_groups = 0: no place of a batch is for a repeated group. Raise repeated_groups, or "
        "leave group_uses out",
    )
    yield (
        uses > 1 or repeated == 0,
        f"train.repeated_groups = {repeated} with train.group_uses = 1: a group is in one batch only. Raise group_uses, or "
        "leave repeated_groups out",
    )
