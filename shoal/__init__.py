"""shoal: reinforcement learning of language models on computers that do not trust each other.

From Python, `recipe` opens a run file to train or host, `policy` opens a checkpoint to evaluate, and `audit` checks a run.
`open` reads a run as tables and rollouts, and `live` draws steps as they come.
Importing shoal imports nothing heavy: each function imports `shoal/api.py` when it is called.
"""

from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.api import Evaluation, Findings, Frame, Hosted, Opened, Policy, Replay, Rollout, Run, Setting, Step
    from shoal.views.plots.live_plot import S

__version__ = "0.1.0"

__all__ = [
    "Evaluation", "Findings", "Frame", "Hosted", "Opened", "Policy", "Replay", "Rollout", "Run", "Step", "audit", "live",
    "open", "policy", "recipe",
]  # fmt: skip


def recipe(path: str | PathLike[str], /, *, quick: bool = False, **changes: "Setting") -> "Run":
    """Open a run file, to train or to host it.

    `path` is a run file, or the name of one that comes with shoal, in its folder `recipes`. `changes` replace its keys,
    as `--set` does: `recipe("wordle.toml", steps=20, rollouts={"max_staleness": 0})`. Tables are changed key by key,
    lists are replaced. `quick` takes the file's [quick] values. Raises `ConfigError`.
    """
    from shoal import api

    return api.open_recipe(path, quick, changes)


def policy(checkpoint: str | PathLike[str], /) -> "Policy":
    """Open a checkpoint, a directory in Hugging Face format, to evaluate it. Raises `StateError` if there is none."""
    from shoal import api

    return api.open_policy(checkpoint)


def audit(
    run: str | PathLike[str],
    /,
    *,
    sample: int = 0,
    rollout: str = "",
    seed: int | None = None,
    threads: int = 0,
    own_files: bool = False,
    evidence: Sequence[str | PathLike[str]] = (),
) -> "Findings":
    """Recompute rollouts of a run from public data, as `shoal audit` does, and say where the log disagrees.

    `run` is a run's folder or its URL. `sample` is a number of groups to draw; `seed` draws those of an earlier audit.
    `rollout` names one rollout (VERSION/SLOT/INDEX) or group (VERSION/SLOT). `evidence` are folders that nodes kept, such
    as ~/.shoal: what the host signed there is compared with the log, and the submissions in it are recomputed. Without
    these three, all groups are recomputed. `threads` 0 means all cores. `own_files` runs environment files of the run, its
    host's code. Raises `ShoalError`.
    """
    from shoal import api

    return api.audit(run, sample, rollout, seed, threads, own_files, evidence)


def open(where: str | PathLike[str], /, *, private: bool = False, own_files: bool = False) -> "Opened":
    """Read the run in a folder or at a URL, while it runs or later: `shoal.open("runs/wordle").metrics.polars()`.

    It has the tables `log`, `metrics`, `nodes`, `versions`, `groups`, `rollouts`, `evaluations`, `verdicts` and `refusals`,
    and `rollout("3/17/0")`. Hashes and signatures are verified; metrics and evaluations are the host's word. `private` also
    shows what is not public yet, which takes the host's folder with its run key. `own_files` lets rollouts be played again
    by environment files that the run names: its host's code, so read it first. Nothing is written. Raises `ShoalError`.
    """
    from shoal import api

    return api.open_reading(where, private, own_files)


def live(steps: "Iterable[S]", /, names: Sequence[str] = ("reward_all_mean", "entropy_nats")) -> "Iterator[S]":
    """Give steps on as they come, and draw these metrics: curves in a notebook, one line a step elsewhere.

    `for step in shoal.live(run.train()): ...`. Curves need the extra `notebook`.
    """
    from shoal.views.plots.live_plot import live as drawn

    return drawn(steps, names)


def __getattr__(name: str) -> Any:
    """The types, for annotations."""
    if name not in __all__:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    from shoal import api

    return getattr(api, name)
