"""A search for the strategy that earns most by cheating, over what a worker may do in each phase of its life.

Called by `economics.py`. `market.py` plays each candidate; this file knows only how candidates look, change and compare.
A round tries new candidates on one run, the better ones on more, and breeds the next from the best. All candidates meet
the same draws. The best ones are then played on fresh draws, so that luck in the search does not count.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.market.market import Outcome, play, play_beside_rival
from benchmarks.market.terms import ALL, NONE, ONE, Draws, Move, Sight, Strategy, Terms
from shoal.ledger.constants import LAW
from shoal.protocol.constants import MAX_LEASE_BLOCKS

FORGES_LEAST = 0.01
"""Share of its groups that a candidate must forge, or it is no cheat: honesty itself would be the best."""

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Of a forged group, in honest ones."""

SHARES = (0.0, 0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
COUNTS = (1, 1, 1, 4, 16, MAX_LEASE_BLOCKS)
FOR_EVER = 1_000_000

Score = Callable[[Outcome], float]


class Phase(NamedTuple):
    """What a worker does while it is in one phase."""

    share: float = 0.0
    """Of its blocks that hold forgeries."""
    forged: int = ALL
    length: int = 1
    blocks: int = 1
    """Of a lease that holds forgeries."""
    leases: int = 1
    """Filled with forgeries before the first is judged."""
    drop: float = 0.0
    """Share of its leases that it lets lapse."""


class Scheme(NamedTuple):
    """A way to cheat."""

    probation: Phase = Phase()
    young: Phase = Phase()
    """From the end of probation until its stake is full."""
    trusted: Phase = Phase()
    """From then until the audit rate is the run's."""
    steady: Phase = Phase()
    leaving: Phase = Phase()
    """In the last turns of the run, whatever its trust."""
    leaves: int = 0
    """How many turns these are."""
    wakes: float = 0.0
    """Share of the run that passes before it forges."""
    poorest: float = 0.0
    richest: float = 2.0
    """It forges only while its stake is in this range: 1 is that of an honest worker."""
    slashes: int = FOR_EVER
    """After so many it is honest."""
    keys: int = 1
    renew: bool = True
    patience: int = FOR_EVER
    sly: bool = True
    """How its friends among the validators lie, if it has any."""

    def phase(self, see: Sight, terms: Terms) -> Phase:
        """The phase of the key whose turn it is."""
        if see.turn >= terms.blocks - self.leaves:
            return self.leaving
        if see.turn < self.wakes * terms.blocks:
            return Phase()
        bounds = (LAW.probation_blocks, LAW.vesting_blocks, LAW.trust / terms.steady)
        return (self.probation, self.young, self.trusted, self.steady)[sum(see.valid >= bound for bound in bounds)]

    def strategy(self, terms: Terms) -> Strategy:
        """What the model plays."""
        return Strategy("best found", lambda see: self._move(see, terms), self.keys, self.renew, self.patience)

    def _move(self, see: Sight, terms: Terms) -> Move:
        phase = self.phase(see, terms)
        if see.coin >= 1.0 - phase.drop:
            return Move(1, NONE, drop=True)
        if see.coin >= phase.share or see.slashes >= self.slashes or not self.poorest <= see.stake <= self.richest:
            return Move(1, NONE)
        return Move(phase.blocks if see.valid else 1, phase.forged, phase.leases, phase.length)

    def __str__(self) -> str:
        said = [
            f"{name}: {_told(phase)}" for name, phase in zip(self._fields[:5], self[:5], strict=True) if _told(phase)
        ]
        own = Scheme()._asdict()
        said += [f"{name} {value:g}" for name, value in list(self._asdict().items())[5:] if value != own[name]]
        return "; ".join(said) or "honest"


def _told(phase: Phase) -> str:
    if not phase.share and not phase.drop:
        return ""
    forged = f"{'all' if phase.forged == ALL else 'one'} of {phase.share:.0%} of blocks, length {phase.length}"
    size = f", {phase.leases} leases of {phase.blocks}" if phase.leases * phase.blocks > 1 else ""
    return (forged + size if phase.share else "honest") + (f", drops {phase.drop:.0%}" if phase.drop else "")


LISTED = (
    Scheme(probation=Phase(1.0)),
    Scheme(young=Phase(1.0), trusted=Phase(1.0), steady=Phase(1.0)),
    Scheme(trusted=Phase(1.0, ONE), steady=Phase(1.0, ONE)),
    Scheme(trusted=Phase(1.0, blocks=MAX_LEASE_BLOCKS), steady=Phase(1.0, blocks=MAX_LEASE_BLOCKS)),
    Scheme(trusted=Phase(1.0, leases=MAX_LEASE_BLOCKS), steady=Phase(1.0, leases=MAX_LEASE_BLOCKS)),
    Scheme(steady=Phase(1.0), wakes=0.5, slashes=1),
    Scheme(steady=Phase(1.0), patience=1),
    Scheme(steady=Phase(0.1, ONE, 8)),
    Scheme(steady=Phase(0.1, ONE, 32)),
    Scheme(steady=Phase(1.0, ALL, 32)),
    Scheme(leaving=Phase(1.0), leaves=40),
)
"""Where a search begins: the strategies of `economics.py`, and long forgeries."""


class Found(NamedTuple):
    """The best cheat of a search, on fresh draws."""

    scheme: Scheme
    outcomes: list[Outcome]
    tried: int


def search(terms: Terms, score: Score, rounds: int, runs: int, seed: int = 0) -> Found:
    """The best of `rounds` rounds of 48 candidates, as fresh `runs` show it."""
    rng = np.random.default_rng((7, seed))
    table = _Table(terms, score)
    best: list[Scheme] = []
    fresh, tried = list(LISTED), 0
    for _ in range(rounds):
        while len(fresh) < 48:
            kind, parents = rng.random(), best or [Scheme()]
            one, other = (parents[int(rng.integers(len(parents)))] for _ in range(2))
            fresh.append(
                _random(rng) if kind < 0.25 else _changed(_crossed(one, other, rng) if kind < 0.5 else one, rng)
            )
        tried += len(fresh)
        pool = list(dict.fromkeys([*best, *fresh]))
        for few, runs_each in ((16, 1), (8, 4), (4, 12)):
            pool = sorted(pool, key=lambda scheme, n=runs_each: -table.mean(scheme, n))[:few]  # type: ignore[misc]
        best, fresh = pool, []
    last = [(scheme, [played(terms, scheme, (5, run)) for run in range(runs)]) for scheme in best]
    scheme, outcomes = max(last, key=lambda pair: worth(pair[1], score))
    return Found(scheme, outcomes, tried)


def played(terms: Terms, scheme: Scheme, seed: Sequence[int]) -> Outcome:
    """One run of a scheme; beside an honest rival if it has friends among the validators, who lie about both."""
    terms = terms._replace(sly=scheme.sly)
    if terms.friends:
        return play_beside_rival(terms, scheme.strategy(terms), seed)[0]
    return play(terms, scheme.strategy(terms), Draws(terms, seed))


def worth(outcomes: Sequence[Outcome], score: Score) -> float:
    """Mean score; that of a scheme which hardly forges does not count."""
    forged, honest = sum(outcome.forged for outcome in outcomes), sum(outcome.honest for outcome in outcomes)
    if forged < FORGES_LEAST * (forged + honest) or not forged:
        return -float("inf")
    return float(np.mean([score(outcome) for outcome in outcomes]))


class _Table:
    """Outcomes of the schemes that were tried."""

    def __init__(self, terms: Terms, score: Score) -> None:
        self.terms, self.score = terms, score
        self.outcomes: dict[Scheme, list[Outcome]] = {}

    def mean(self, scheme: Scheme, runs: int) -> float:
        """Worth over at least so many runs, the same for all."""
        outcomes = self.outcomes.setdefault(scheme, [])
        outcomes += [played(self.terms, scheme, (4, run)) for run in range(len(outcomes), runs)]
        return worth(outcomes, self.score)


# --- new candidates ---

_WHOLE: dict[str, Sequence[int | float]] = {
    "leaves": (0, 0, 10, 20, 40, 80, 200), "wakes": (0.0, 0.0, 0.1, 0.5, 0.9), "poorest": (0.0, 0.0, 0.5, 1.0, 1.2),
    "richest": (2.0, 64.0, 64.0, 1.0, 0.2, 0.02), "slashes": (1, 2, 5, FOR_EVER, FOR_EVER), "keys": (1, 1, 1, 4, 20),
    "renew": (True, False), "patience": (FOR_EVER, FOR_EVER, 1, 2, 4), "sly": (True, False),
}  # fmt: skip
_OF_PHASE: dict[str, Sequence[int | float]] = {
    "share": SHARES, "forged": (ONE, ALL), "length": LENGTHS, "blocks": COUNTS, "leases": COUNTS,
    "drop": (0.0, 0.0, 0.0, 0.05, 0.3),
}  # fmt: skip
_PHASES = Scheme._fields[:5]


def _pick(rng: np.random.Generator, values: Sequence[int | float]) -> int | float:
    return values[int(rng.integers(len(values)))]


def _random(rng: np.random.Generator) -> Scheme:
    """Some phases at random; the others are honest."""
    phases = {
        name: Phase(**{field: _pick(rng, values) for field, values in _OF_PHASE.items()})  # type: ignore[arg-type]
        for name in _PHASES
        if rng.random() < 0.5
    }
    return Scheme(**phases, **{name: _pick(rng, values) for name, values in _WHOLE.items()})  # type: ignore[arg-type]


def _changed(scheme: Scheme, rng: np.random.Generator) -> Scheme:
    """With one to three properties drawn anew."""
    for _ in range(int(rng.integers(1, 4))):
        if rng.random() < 0.6:
            name, field = (str(rng.choice(list(names))) for names in (_PHASES, _OF_PHASE))
            phase = getattr(scheme, name)._replace(**{field: _pick(rng, _OF_PHASE[field])})
            scheme = scheme._replace(**{name: phase})
        else:
            name = str(rng.choice(list(_WHOLE)))
            scheme = scheme._replace(**{name: _pick(rng, _WHOLE[name])})
    return scheme


def _crossed(one: Scheme, other: Scheme, rng: np.random.Generator) -> Scheme:
    """Each property from one of two."""
    return Scheme(*(mine if rng.random() < 0.5 else yours for mine, yours in zip(one, other, strict=True)))
