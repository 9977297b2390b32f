"""How many workers keep a trainer busy: the rule of ECHO-2 (arXiv:2602.02192), for workers on their own links.

Used by `forecast`. We derived the rule from what the paper says it consists of, and have not compared it with the paper's
formula. With a new version every kappa steps, R rollouts a step, T seconds of training a step and B seconds of broadcast,
the trainer never waits if the workers' rate is

    mu >= kappa R / (kappa T - B),

and if a rollout may be at least a version old. Here kappa = 1: each step publishes. A worker of rate r makes r (T - B)
rollouts between two versions. The rule supposes that it makes none while it fetches. Ours fetch the next version while they
play, so they may be fewer: `forecast` simulates that. B grows with the number of workers where the sources' uplink is the
narrowest link.
"""

from typing import NamedTuple

MAX_PROVISIONED_WORKERS = 100_000


class Link(NamedTuple):
    """A worker's downlink in bytes per second (0: no limit), and how long it loads a version, seconds."""

    down: float
    load_s: float


class Sources(NamedTuple):
    """What serves versions: bytes per second of all uplinks together (0: no limit), and seconds until they have one."""

    up: float
    filled_s: float = 0.0


def fetch_s(size_bytes: float, link: Link, sources: Sources, workers: int) -> float:
    """Seconds until a worker has a version and has loaded it, if all workers fetch at once."""
    own = size_bytes / link.down if link.down else 0.0
    shared = size_bytes * workers / sources.up if sources.up else 0.0
    return max(own, shared, sources.filled_s) + link.load_s


def workers_needed(
    rollouts: float, step_s: float, rate: float, size_bytes: float, link: Link, sources: Sources
) -> int | None:
    """The fewest equal workers with which the trainer never waits; None if no number is enough.

    `step_s` is the time from one version to the next while the trainer does not wait, `rate` one worker's rollouts per
    second. More workers make more and share the sources' uplink, so beyond some number they make less.
    """
    best, count = 0.0, 1
    while count <= MAX_PROVISIONED_WORKERS:
        made = count * rate * max(0.0, step_s - fetch_s(size_bytes, link, sources, count))
        if made >= rollouts:
            return count
        if made < best or (made == 0.0 and count > 1):
            return None
        best, count = max(best, made), count + max(1, count // 200)
    return None
