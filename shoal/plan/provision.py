"""How many workers keep a trainer busy: the rule of ECHO-2 (arXiv:2602.02192), for workers on their own links.

Used by `forecast`. The paper's rule, as we read it: with a new version every kappa steps, R rollouts a step, T seconds of
training a step and B seconds of broadcast, the trainer never waits if the workers' rate is

    mu >= kappa R / (kappa T - B).

A worker of rate r makes r (T - B) rollouts between two versions: while it fetches it makes none. Here kappa = 1: each step
publishes. B is each worker's own, and it grows with the number of workers where the source's uplink is the narrowest link.
"""

from collections.abc import Sequence
from typing import NamedTuple

MOST_WORKERS = 100_000


class Link(NamedTuple):
    """A worker's downlink in bytes per second (0: no limit), and how long it loads a version, seconds."""

    down: float
    load_s: float


def fetch_s(size_bytes: float, link: Link, sources_up: float, workers: int) -> float:
    """Seconds until a worker has a version and has loaded it, if all workers fetch at once. `sources_up`: bytes per second
    of all sources together, 0 is no limit."""
    own = size_bytes / link.down if link.down else 0.0
    shared = size_bytes * workers / sources_up if sources_up else 0.0
    return max(own, shared) + link.load_s


def rollouts_made(step_s: float, rates: Sequence[float], lost_s: Sequence[float]) -> float:
    """Rollouts that workers make in one step, with what each loses to fetching; never below 0."""
    return sum(rate * max(0.0, step_s - lost) for rate, lost in zip(rates, lost_s, strict=True))


def workers_needed(
    rollouts: float, step_s: float, rate: float, size_bytes: float, link: Link, sources_up: float
) -> int | None:
    """The fewest equal workers with which the trainer never waits; None if no number is enough.

    `rate`: rollouts per second of one worker. More workers make more and share the sources' uplink, so beyond some number
    they make less.
    """
    best, count = 0.0, 1
    while count <= MOST_WORKERS:
        made = count * rate * max(0.0, step_s - fetch_s(size_bytes, link, sources_up, count))
        if made >= rollouts:
            return count
        if made < best or (made == 0.0 and count > 1):
            return None
        best, count = max(best, made), count + max(1, count // 200)
    return None
