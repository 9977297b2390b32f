"""The input of a simulated run: machines, links and sizes."""

from dataclasses import dataclass

from shoal.protocol.constants import MAX_CHUNK_BYTES
from shoal.protocol.messages import Rules


@dataclass(frozen=True)
class WorkerMachine:
    """A worker's machine and its links. Rates are bytes per second; 0 is no limit."""

    tokens_per_s: float
    down: float = 0.0
    up: float = 0.0
    load_s: float = 0.0
    """From the last byte of a version to its first token."""


@dataclass(frozen=True)
class SimulationInput:
    """What is simulated. Times are seconds, rates bytes per second (0: no limit), sizes bytes."""

    rules: Rules
    workers: tuple[WorkerMachine, ...]
    rollout_tokens: float
    """Policy tokens of a rollout, on average."""
    train_s: float
    """The trainer's, for a step, with saving its own state."""
    publish_s: float
    """From the end of a step until its version can be fetched. The trainer takes the next step meanwhile, and begins to
    publish that one when the version before is published."""
    check_s: float
    """A validator's, for each block."""
    full_bytes: float
    validators: int = 1
    patch_bytes: float = 0.0
    """Of a version against the one before; 0: there are no patches."""
    anchor_every: int = 1
    """With patches: versions between those that are published whole, too. Relays fetch all that is published."""
    apply_s: float = 0.0
    """Of a patch, until the version is on the worker's disk."""
    origin_up: float = 0.0
    relays_up: tuple[float, ...] = ()
    relay_ask_s: float = 0.5
    """From a chunk's arrival at a relay until a client knows: half of the time between two questions."""
    chunk_bytes: float = MAX_CHUNK_BYTES
    """A relay passes on whole chunks."""
    token_bytes: float = 16.0
    """Of a submission, for each policy token."""
    request_s: float = 0.05
    """From a request to its answer."""
    signal_share: float = 1.0
    """Of the accepted groups, those that a batch may take."""
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
    publish_wait_share: float
    """Of the trainer's time, what it waits until the version before is published."""
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
