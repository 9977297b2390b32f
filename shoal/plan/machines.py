"""The machines of a run, as its planner is told."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Machines:
    """Links are Mb/s; 0 is no limit. The other figures are assumed if they are 0."""

    workers: int
    downlink: float = 50.0
    """Of each worker."""
    worker_uplink: float = 20.0
    uplink: float = 200.0
    """Of the host."""
    relays: int = 0
    relay_uplink: float = 200.0
    tokens_per_s: float = 0.0
    """Of each worker."""
    also: tuple[tuple[int, float, float], ...] = ()
    """Other workers: how many, their downlink, their tokens per second."""
    rollout_tokens: float = 0.0
    train_s: float = 0.0
    check_s: float = 0.0
    """Of a block, by a validator."""
    patch_share: float = -1.0
    """Of a whole version; 0: no patches; below 0: assumed."""
    parameters: float = 0.0
    """Of another model; 0: that of the run file."""
    signal_share: float = 1.0

    @property
    def all_workers(self) -> int:
        """Workers of all kinds."""
        return self.workers + sum(count for count, _, _ in self.also)
