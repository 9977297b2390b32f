"""How the draws of a run follow solve rates: what the first event of its log says, if its run file asks for it.

`config` makes it from a run file. The rules that it gives numbers to are in `ledger/task_difficulty`.
"""

from shoal.protocol.messages import Message


class Difficulty(Message, frozen=True):
    """A curriculum over environments, pools of tasks, or both."""

    curriculum: bool
    """Whether the weights of environments follow how much can be learned from their groups."""
    floor: float
    """Smallest share of its weight in the run file that an environment keeps."""
    window_groups: int
    """Groups over which the measurements of an environment are smoothed."""
    pools: bool
    """Whether tasks are in pools by their solve rates."""
    easy: float
    """A task is easy if at least this share of its latest group is solved."""
    hard: float
    """A task is hard if at most this share of its latest group is solved."""
    easy_weight: float
    """Weight of an easy task. Other tasks have 1."""
    hard_weight: float
    """Weight of a hard task."""
    retire_after: int
    """A task is retired after this many groups in a row that are solved whole; 0 retires none."""
    solved: dict[str, float]
    """By label: a rollout with at least this reward is solved."""
