"""What is simulated, and what a simulation gives: values that `simulate`, `forecast` and `report` pass on."""

from dataclasses import dataclass

from shoal.protocol.types import Rules


@dataclass(frozen=True)
class Node:
    """A worker's machine. Rates are bytes per second; 0 is no limit."""

    tokens_per_s: float
    down: float = 0.0
    up: float = 0.0
    load_s: float = 0.0
    """From the last byte of a version to its first token."""


@dataclass(frozen=True)
class Setting:
    """What is simulated. Times are seconds, rates bytes per second (0: no limit), sizes bytes."""

    rules: Rules
    workers: tuple[Node, ...]
    rollout_tokens: float
    """Policy tokens of a rollout, on average."""
    step_s: float
    publish_s: float
    """From the end of a step until its version can be fetched."""
    check_s: float
    """A validator's, for each block."""
    full_bytes: float
    validators: int = 1
    patch_bytes: float = 0.0
    """Of a version against the one before; 0: there are no patches."""
    apply_s: float = 0.0
    """Of a patch, until its version is ready."""
    ahead: bool = True
    """Whether a worker fetches the version of its next lease while it plays the one before."""
    origin_up: float = 0.0
    relays_up: tuple[float, ...] = ()
    relay_down: float = 0.0
    chunk_bytes: float = 1 << 20
    token_bytes: float = 16.0
    """Of a submission, for each policy token."""
    request_s: float = 0.05
    """From a request to its answer."""
    signal_share: float = 1.0
    """Of the accepted groups, those that a batch may take."""
    spread: float = 0.0
    """Standard deviation of the logarithm of how long a lease takes."""
    warmup_steps: int = 4
    """Not measured: new workers are audited fully, and fetch the first version whole."""
    measured_steps: int = 12
    seed: int = 0


@dataclass
class Outcome:
    """What a simulation gave, after its first steps."""

    step_s: float
    """From one version to the next, on average."""
    idle_share: float
    """Of the trainer's time, what it waits for batches."""
    staleness: float
    """Mean number of versions between a group's policy and the one that learns from it."""
    broadcast_s: float
    """From a version's publication until the last worker that fetched it has it; median over the versions."""
    lag_s: float
    """The same, on average over the workers."""
    followed: float
    """Share of the versions that a worker fetched, on average over the workers."""
    origin_bytes: float
    """That the host sends for each step."""
    worker_bytes: float
    """That a worker fetches for each step, on average."""
    worker_idle: float
    """Share of the workers' time in which they have no lease."""
    worker_fetch: float
    """Share of their time in which they fetch and load."""


class Stalled(Exception):
    """A simulated run does not go on."""
