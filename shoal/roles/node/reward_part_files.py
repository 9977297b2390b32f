"""The named parts of rewards, and metrics, on their way from the processes that score rollouts to the trainer.

Each writer has a file in the run's folder. Nothing depends on these figures, so they are neither sent nor logged, and what
a kill or a full disk loses is not repaired. An environment's author chooses the names, so their number is limited.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from shoal.envs.interface import MAX_NAME, MAX_NAMED, Earned

MOST_BYTES = 8 << 20
"""Limit on a file that nobody reads, as when the trainer runs on another machine."""

Sums = dict[str, tuple[float, int]]
"""For each name the sum of its values, and how many there are."""


class Tally(msgspec.Struct):
    """What some rollouts of one environment scored."""

    parts: Sums = {}
    """Parts of the reward, before their weights."""
    metrics: Sums = {}
    faults: int = 0
    """Rollouts that are learned from although the environment failed on them."""

    def add(self, earned: Iterable[Earned]) -> "Tally":
        """Add what rollouts earned; returns this tally."""
        for one in earned:
            _join(self.parts, {name: (value, 1) for name, value in one.parts.items()})
            _join(self.metrics, {name: (value, 1) for name, value in one.metrics.items()})
        return self

    def join(self, other: "Tally") -> None:
        """Add another tally."""
        _join(self.parts, other.parts)
        _join(self.metrics, other.metrics)
        self.faults += other.faults

    @property
    def is_empty(self) -> bool:
        return not (self.parts or self.metrics or self.faults)


def _join(sums: Sums, more: Sums) -> None:
    for name, (value, count) in more.items():
        if len(name) <= MAX_NAME and (name in sums or len(sums) < MAX_NAMED):  # guard: few-names-of-scores
            before, counted = sums.get(name, (0.0, 0))
            sums[name] = before + value, counted + count


class ScoreFile:
    """The file of one writer. Threads may share it."""

    def __init__(self, folder: Path, writer: str) -> None:
        self._path = folder / f"{writer}.jsonl"

    def write(self, label: str, tally: Tally) -> None:
        """Append what rollouts of an environment scored. Faults of the disk are ignored."""
        if tally.is_empty:
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("ab", buffering=0) as file:
                if file.tell() < MOST_BYTES:  # guard: unread-scores-are-few
                    file.write(msgspec.json.encode((label, tally)) + b"\n")


def take_scores(folder: Path) -> dict[str, Tally]:
    """What all writers have written since the last call, by label. Lines that a kill cut are left out."""
    found: dict[str, Tally] = {}
    for path in sorted(folder.glob("*.jsonl")):
        taken = path.with_suffix(".taken")
        with contextlib.suppress(OSError):
            path.replace(taken)  # so that a writer begins a new file
            for line in taken.read_bytes().splitlines():
                with contextlib.suppress(msgspec.DecodeError):
                    label, tally = msgspec.json.decode(line, type=tuple[str, Tally])
                    found.setdefault(label, Tally()).join(tally)
            taken.unlink()
    return found


def means_of(scores: Mapping[str, Tally], labels: Sequence[str]) -> dict[str, float]:
    """The metrics of a step: the mean of each part and of each metric, named with the label if there are several."""
    means: dict[str, float] = {}
    for label in labels:
        tally, place = scores.get(label, Tally()), f"{label}/" if len(labels) > 1 else ""
        for kind, sums in (("reward_part", tally.parts), ("env_metric", tally.metrics)):
            means |= {f"{kind}/{place}{name}": value / count for name, (value, count) in sums.items() if count > 0}
    return means
