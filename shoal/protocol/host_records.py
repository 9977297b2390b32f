"""Whether a submitted group is the one that the host's stage played.

Pure. It plays nothing: a `Record` says what the stage has played.
"""

from collections.abc import Sequence
from typing import NamedTuple

from shoal.protocol.encoding import domain_hash
from shoal.protocol.messages import Group, GroupRecord, Rollout


class RecordDifference(NamedTuple):
    """Why a group is not the recorded one."""

    rollout: int
    """Index of the rollout; -1 for the whole group."""
    detail: str


def rollout_digest(token_ids: bytes, author: bytes, ending: str, starts: Sequence[int] = ()) -> str:
    """The name of a rollout in a record: a hash of all that the environment and the policy decide."""
    rows = b"".join(start.to_bytes(8, "big", signed=True) for start in starts)
    return domain_hash("record", token_ids, author, ending.encode(), rows).hex()


def differs(rollout: Rollout, digest: str) -> bool:
    """Whether a rollout is not the one with this name."""
    try:
        name = rollout_digest(rollout.token_ids, rollout.author, rollout.ending, rollout.starts)
    except OverflowError:  # a start that no number of eight bytes holds
        return True
    return name != digest


def difference(group: Group, record: GroupRecord) -> RecordDifference | None:
    """The first difference between a group and its record; None if there is none."""
    if group.slot != record.slot:
        return RecordDifference(-1, f"a group of slot {group.slot} where the record has slot {record.slot}")
    if len(group.rollouts) != len(record.rollouts):
        return RecordDifference(-1, f"{len(group.rollouts)} rollouts where the record has {len(record.rollouts)}")
    for index, (rollout, recorded) in enumerate(zip(group.rollouts, record.rollouts, strict=True)):
        if differs(rollout, recorded.digest):
            return RecordDifference(index, "other tokens, authors or another ending than the host's stage recorded")
    return None
