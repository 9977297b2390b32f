"""Recomputes honest rollouts in every way that an honest machine might, and measures how far the results differ.

`verification/fit_tolerances` turns the differences into bounds.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.algos.toploc import ChunkFigures, compare
from shoal.engine.interface import Engine, PolicyScore
from shoal.engine.open import EngineSpec, open_engine
from shoal.errors import StateError
from shoal.jobs.calibrate.progress import progress
from shoal.jobs.calibrate.recorded_rollouts import THREADS, Recording, machine
from shoal.terminal import say
from shoal.verification.context import by_group
from shoal.verification.fit_tolerances import FAR_PERCENTILE, MeasuredNoise, joined

SHAPES = ("whole", "alone", "threes", "mixed")
"""How the rollouts' rows are divided among the engine's calls: all in one, each alone, three at a time, or shuffled."""

MIXED_ROWS = 16
"""Rollouts in one call when they are shuffled."""


class RecomputeVariant(NamedTuple):
    """One way to recompute."""

    threads: int
    shape: str

    def __str__(self) -> str:
        return f"{self.threads} thread{'s' * (self.threads > 1)}, {self.shape}"


SETTINGS = (
    *(RecomputeVariant(threads, "whole") for threads in THREADS),
    *(RecomputeVariant(1, shape) for shape in SHAPES[1:]),
)


def measure(recordings: dict[str, Recording], policy: Path, spec: EngineSpec) -> dict[str, MeasuredNoise]:
    """Recompute all recordings in every setting with such an engine, and print a line for each. Returns the noise of each
    recording."""
    engine = open_engine(spec)
    engine.load(policy, 0)
    print(f"\nrecomputed in {spec.dtype} on {machine(engine)}")
    for name, recording in recordings.items():
        say(f"  {name}: played in {recording.dtype} on {recording.machine}")
    proven = any(part.proofs for recording in recordings.values() for part in recording.played)
    width = max(len("played"), *(len(name) for name in recordings)) + 2
    print(f"{'played':<{width}}{'recomputed by':<17}{'tokens':>8}{'not best':>10}   gap, nats: 99.9 %   99.99 %       max"
          f"   |d logp|: 99.99 %       max{'   activations: error  mismatched' * proven}")  # fmt: skip
    noise = {}
    for name, recording in recordings.items():
        parts = []
        for setting in SETTINGS:
            parts.append(_noise(engine, recording, setting))
            _line(f"{name:<{width}}{setting!s:<17}", parts[-1])
        noise[name] = joined(parts)
    _line(f"{'all':<{width + 17}}", joined([*noise.values()]))
    return noise


def _noise(engine: Engine, recording: Recording, setting: RecomputeVariant) -> MeasuredNoise:
    torch.set_num_threads(setting.threads)
    requests = recording.requests()
    proven = any(part.proofs for part in recording.played)
    scores: dict[int, PolicyScore] = {}
    calls = _calls(len(requests), setting.shape)
    for done, rows in enumerate(calls):
        if done % 50 == 0:
            progress(f"recomputing by {setting}", done, len(calls))
        of_rows = engine.score([requests[row] for row in rows], recording.sampling.temperature, hidden=proven)
        scores |= dict(zip(rows, of_rows, strict=True))
    progress(f"recomputing by {setting}", len(calls), len(calls))
    ordered = [scores[row] for row in range(len(requests))]
    off_P = recording.claimed_P() - np.concatenate([score.logprobs_P for score in ordered])
    figures = tuple(_figures(recording, ordered)) if proven else ()
    return MeasuredNoise(np.concatenate([score.gaps_P for score in ordered]), off_P, largest_logits(ordered), figures)


def largest_logits(scores: Sequence[PolicyScore]) -> NDArray[np.float32]:
    """Largest |logit / temperature| at each token, [N]."""
    return np.concatenate([score.largest_P for score in scores if score.largest_P is not None])


def _figures(recording: Recording, scores: Sequence[PolicyScore]) -> Iterator[ChunkFigures]:
    """How far each group's proof is from the recomputed hidden states. Raises `StateError` if it is not a proof."""
    proven = [pair for part in recording.played for pair in zip(part.groups, part.proofs, strict=True)]
    for (group, proof), of_group in zip(proven, by_group([group for group, _ in proven], scores), strict=True):
        figures = compare([score.hidden_PD for score in of_group if score.hidden_PD is not None], proof)
        if isinstance(figures, str):
            raise StateError(f"a recording is damaged: the proof of slot {group.slot}: {figures}")
        yield figures


def _calls(count: int, shape: str) -> list[list[int]]:
    """The rollouts of each call."""
    rows = list(range(count))
    if shape == "mixed":
        random.Random(0).shuffle(rows)
    size = {"whole": count, "alone": 1, "threes": 3, "mixed": MIXED_ROWS}[shape]
    return [rows[start : start + size] for start in range(0, count, size)]


def _line(label: str, noise: MeasuredNoise) -> None:
    p999, p9999 = np.quantile(noise.gaps_N, (0.999, FAR_PERCENTILE))
    off_N = np.abs(noise.off_N)
    activations = f"{noise.activation_error():>21.2g}{noise.mismatched():>12.1%}" if noise.figures else ""
    print(
        f"{label}{noise.gaps_N.size:>8}{np.mean(noise.gaps_N > 0):>10.3%}{p999:>20.2g}{p9999:>10.2g}"
        f"{noise.gaps_N.max():>10.2g}{np.quantile(off_N, FAR_PERCENTILE):>20.2g}{off_N.max():>10.2g}"
        f"{activations}",
        flush=True,
    )
