"""Engines that lie, so that a run can show how it catches them: for the demo's cheating worker, and for tests.

Each wraps an honest engine and has the same interface, so the rest of the worker is unchanged: only the engine's output is
wrong, as with a real cheat.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from shoal.engine.interface import Continuation, Engine, EngineRequest, PolicyScore, ScoreRequest
from shoal.errors import ConfigError
from shoal.protocol.encoding import domain_hash


def cheating(name: str, engine: Engine) -> Engine:
    """Wrap an engine in a cheat. Raises `ConfigError` for an unknown name."""
    if name not in CHEATS:
        raise ConfigError(f"unknown cheat {name!r}: {', '.join(CHEATS)}")
    return CHEATS[name](engine)


class Cheat:
    """An honest engine, for subclasses to alter."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.facts = engine.facts

    @property
    def version(self) -> int:
        return self.engine.version

    def load(self, directory: Path, version: int) -> None:
        self.engine.load(directory, version)

    def extend(self, requests: Sequence[EngineRequest], temperature: float) -> list[Continuation]:
        return self.engine.extend(requests, temperature)

    def forget(self, rollouts: Iterable[str]) -> None:
        self.engine.forget(rollouts)

    def score(self, requests: Sequence[ScoreRequest], temperature: float, hidden: bool = False) -> list[PolicyScore]:
        return self.engine.score(requests, temperature, hidden)


class OldWeights(Cheat):
    """Saves the download: samples every version with the first one that it loaded."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._claimed = -1

    @property
    def version(self) -> int:
        return self._claimed

    def load(self, directory: Path, version: int) -> None:
        if self._claimed < 0:
            self.engine.load(directory, version)
        self._claimed = version


class LowTemperature(Cheat):
    """Wants higher rewards: samples at a third of the temperature, and claims the run's temperature."""

    def extend(self, requests: Sequence[EngineRequest], temperature: float) -> list[Continuation]:
        return self.engine.extend(requests, temperature / 3)


class OtherSeed(Cheat):
    """Picks its luck: samples honestly, but with its own seeds."""

    def extend(self, requests: Sequence[EngineRequest], temperature: float) -> list[Continuation]:
        return self.engine.extend([r._replace(seed=domain_hash("luck", r.seed)) for r in requests], temperature)


class Fabricate(Cheat):
    """Saves the work: never runs the model, and writes random tokens with plausible log-probs."""

    def extend(self, requests: Sequence[EngineRequest], temperature: float) -> list[Continuation]:
        continuations = []
        for request in requests:
            rng = np.random.default_rng(int.from_bytes(request.seed[:8], "big") + len(request.token_ids))
            length = int(rng.integers(1, max(2, request.max_new)))
            words = sorted(set(request.token_ids) - request.stop_ids) or [0]
            token_ids = [*(int(x) for x in rng.choice(words, length - 1)), min(request.stop_ids)]
            continuations.append(Continuation(token_ids, [float(x) for x in -rng.exponential(0.5, length)]))
        return continuations


CHEATS: dict[str, type[Cheat]] = {
    "other-seed": OtherSeed,
    "fabricate": Fabricate,
    "low-temperature": LowTemperature,
    "old-weights": OldWeights,
}
"""The cheats that `workers.cheating` uses, in turn. The last is honest, and paid, for one version."""
