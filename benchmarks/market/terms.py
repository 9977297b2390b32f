"""The circumstances of a run in the model of pay: its terms, the strategies of its workers, and all random draws.

Used by `market.py`, which plays them, by `economics.py`, which defines the strategies, and by the test that plays the
same runs by the real rules. It does not deal with verdicts or pay.

Axes: B blocks (turns) of a run, G groups of a block, V validators.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.ledger.constants import LAW, Law


class Terms(NamedTuple):
    """The circumstances of a run. Each probability is for one group and one validator."""

    blocks: int = 3000
    groups: int = 4
    validators: int = 3
    friends: int = 0
    """How many validators collude with the cheater. They come first."""
    sly: bool = False
    """How friends lie. They read the log, which names the validators of a submission, but not whether a recheck will
    follow. Sly friends lie if nobody can outvote them. Else they accept a friend's forgery in the first verdict, and
    refuse it softly in a later one, so that it is not slashed. Other friends accept all of the cheater's work and refuse
    everything else."""
    power: float = 0.95
    """Probability that an audited forged group is found."""
    alone: bool = False
    """Whether each validator draws independently. Otherwise all or none find a group, because they recompute the same
    tokens."""
    mild: bool = False
    """Findings are soft: no slash."""
    steady: float = 0.05
    alarm: float = 0.0
    """Probability that an audited honest group is found to be forged."""
    alike: float = 0.0
    """Share of the false alarms that are common to all validators."""
    lapses: float = 0.0
    """Share of the leases that lapse."""
    delay: int = 0
    """Turns by which validators are behind: from a submission to its first verdict, and from there to a recheck."""
    law: Law = LAW
    """Constants of the rules."""


NONE, ONE, ALL = 0, 1, 2
"""How many groups of a block are forged."""


class Sight(NamedTuple):
    """What a worker knows when it takes a lease."""

    valid: int
    """Valid blocks of the key whose turn it is."""
    turn: int
    slashes: int
    """Slashes of all its keys so far."""
    coin: float
    """A number in [0, 1)."""
    stake: float
    """The key's unvested pay, in units of the pay of `Law.vesting_blocks` honest blocks."""


class Move(NamedTuple):
    """The lease that a worker takes next: its blocks, and what is forged in each."""

    blocks: int
    forged: int
    leases: int = 1
    """How many such leases are filled in a row before the first is judged."""
    length: int = 1
    """Length of a forged group, and so its pay, in units of an honest one."""
    drop: bool = False
    """Whether the worker generates nothing and lets the lease lapse."""


Plan = Callable[[Sight], Move]


class Strategy(NamedTuple):
    """How a worker behaves."""

    name: str
    plan: Plan
    keys: int = 1
    """How many keys take turns."""
    renew: bool = True
    """Whether a new key replaces a slashed one."""
    patience: int = 1_000_000
    """A new key also replaces a key with this many refused submissions."""


HONEST = Strategy("honest", lambda see: Move(1, NONE), renew=False)


# --- the draws of a run ---


class Draws:
    """All randomness of a run. The first `terms.friends` validators are the cheater's."""

    def __init__(self, terms: Terms, seed: Sequence[int]) -> None:
        rng = np.random.default_rng(seed)
        shape_BG, shape_BVG = (terms.blocks, terms.groups), (terms.blocks, terms.validators, terms.groups)
        audit_BG = rng.random(shape_BG)
        self.audit = audit_BG.tolist()
        seen_BVG = rng.random(shape_BVG) < terms.power
        if not terms.alone:
            seen_BVG = np.broadcast_to(seen_BVG[:, :1], shape_BVG)
        common_BG = rng.random(shape_BG) < terms.alarm * terms.alike
        alarm_BVG = (rng.random(shape_BVG) < terms.alarm * (1 - terms.alike)) | common_BG[:, None]
        self.again = rng.random(terms.blocks).tolist()
        self.order = rng.random((terms.blocks, terms.validators)).argsort(axis=1).tolist()
        self.coin = rng.random(terms.blocks).tolist()
        self.late = (rng.random(terms.blocks) < terms.lapses).tolist()
        one_BVG = np.where(np.arange(terms.groups) == 0, seen_BVG, alarm_BVG)
        found = (alarm_BVG, one_BVG, seen_BVG)
        self.danger = [_danger(audit_BG, found_BVG[:, terms.friends :]) for found_BVG in found]
        """For NONE, ONE and ALL: the audit rate above which some honest validator finds something in the block."""
        self.found = found
        """For NONE, ONE and ALL: whether each validator finds each group of a block forged, if it audits it."""


def _danger(audit_BG: NDArray[np.float64], found_BVG: NDArray[np.bool_]) -> list[float]:
    if found_BVG.shape[1] == 0:
        return [1.0] * len(audit_BG)
    danger: list[float] = np.where(found_BVG.any(axis=1), audit_BG, 1.0).min(axis=1).tolist()
    return danger
