"""The runs of a grid, each in a process of its own, kept in a folder: what is there is never run again.

Called by `part`. A run's file is named by a key: the hash of all that decides its curve. So a grid can be computed in many
sittings, and a change of one number of the grid leaves the other runs as they are. A file is written whole or not at all,
so a kill costs the run that was at work.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.claims.curves.beside import Beside
from benchmarks.claims.curves.harness import Curve, trained
from benchmarks.claims.curves.preferred import preferred
from benchmarks.claims.curves.starts import make_start
from shoal.protocol.encoding import domain_hash

FORM = 1
"""Part of every key: raise it when a change of the code changes all curves."""

VINE_FORM = 2
"""Part of the keys of runs that learn from continuations: raise it when a change of the code changes their curves alone."""


class Run(NamedTuple):
    """A run, before it is made."""

    start: str
    """Name of the policy that it begins with."""
    recipe: dict[str, Any]
    """How that policy is made."""
    tree: dict[str, Any]
    """Its run file."""
    beside: dict[str, Any] = {}
    """What it has beside that, as a tree of `Beside`."""

    @property
    def key(self) -> str:
        """Names it in the folder."""
        vine = self.tree["train"].get("algorithm", {}).get("credit")
        more = ([self.beside] if self.beside else []) + ([VINE_FORM] if vine else [])
        return _digest([FORM, self.recipe, self.tree, *more])


class Kept:
    """A folder of runs, and of the policies that they begin with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def curve(self, run: Run) -> Curve:
        """The curve of a run that was made."""
        return msgspec.json.decode(self.file_of(run).read_bytes(), type=Curve)

    def file_of(self, run: Run) -> Path:
        """Where its curve is."""
        return self.folder / f"{run.key}.json"

    def missing(self, runs: Sequence[Run]) -> list[Run]:
        """Those that were not made, each once."""
        return [run for run in {run.key: run for run in runs}.values() if not self.file_of(run).exists()]

    def make(
        self, runs: Sequence[Run], say: Callable[[str], None], make_one: Callable[[Run, Path, Path], None] | None = None
    ) -> None:
        """Make those that are missing, one after another. `make_one` makes a run; by default in a process of its own."""
        missing = self.missing(runs)
        for number, run in enumerate(missing, 1):
            (make_one or make_apart)(run, self.start_of(run), self.file_of(run))
            curve = self.curve(run)
            ends = f"reward {curve.tested['reward'][0]:.3f} to {curve.tested['reward'][-1]:.3f}"
            say(f"{number}/{len(missing)} {run.tree['name']}: {ends}, {curve.cpu_s:.1f} CPU-s")

    def start_of(self, run: Run) -> Path:
        """The policy that a run begins with, made if it is not there."""
        return self._policy(run.start, run.recipe)

    def teacher_of(self, run: Run) -> Path | None:
        """The teacher of a run, made if it is not there; None if it has none."""
        recipe = run.beside.get("teacher")
        return self._policy(recipe["name"], recipe) if recipe else None

    def _policy(self, name: str, recipe: dict[str, Any]) -> Path:
        folder = self.folder / f"start-{name}-{_digest([FORM, recipe])[:8]}"
        if not (folder / "config.json").exists():
            make_start(recipe, folder)
        return folder


def make_apart(run: Run, start: Path, file: Path) -> None:
    """Train a run in a process of its own."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo"])  # AdamW imports it: 2 s once, not once a run
    with ProcessPoolExecutor(1, context) as pool:
        pool.submit(make_here, run, start, file).result()


def make_here(run: Run, start: Path, file: Path) -> None:
    """Train a run in this process, and write its curve."""
    beside = msgspec.convert(run.beside, Beside)
    make = preferred if beside.preferences else trained
    curve = make(run.tree, start, beside, Kept(file.parent).teacher_of(run), key=run.key, begun=run.start)
    new = file.with_suffix(".new")
    new.write_bytes(msgspec.json.encode(curve))
    os.replace(new, file)


def _digest(parts: list[Any]) -> str:
    return domain_hash("shelf/run", msgspec.json.encode(parts, order="deterministic")).hex()[:24]
