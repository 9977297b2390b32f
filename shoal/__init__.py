"""shoal: reinforcement learning of language models on computers that do not trust each other.

From Python, a run file is trained on with `recipe`, a checkpoint is evaluated with `policy`, and a run is audited with
`audit`. Importing shoal is quick and imports no torch: each function imports `shoal/api.py` when it is called.
"""

from os import PathLike
from typing import TYPE_CHECKING, Any

# Loaded before the function `policy` is defined: importing this package later would put the package in its place.
import shoal.policy  # noqa: F401

if TYPE_CHECKING:
    from shoal.api import Evaluation, Findings, Hosted, Policy, Run, Setting, Step

__version__ = "0.1.0"

__all__ = ["Evaluation", "Findings", "Hosted", "Policy", "Run", "Step", "audit", "policy", "recipe"]


def recipe(path: str | PathLike[str], /, *, quick: bool = False, **changes: "Setting") -> "Run":
    """A run file, to train on or to host.

    `path` is a run file, or the name of one in the `recipes` folder beside the package. `changes` replace keys of it,
    as `--set` does: `recipe("wordle.toml", steps=20, rollouts={"max_staleness": 0})`. Tables are changed key by key,
    lists are replaced. `quick` takes the file's [quick] values. Raises `ConfigError`, naming the nearest known key.
    """
    from shoal import api

    return api.open_recipe(path, quick, changes)


def policy(checkpoint: str | PathLike[str], /) -> "Policy":
    """A checkpoint, a directory in Hugging Face format, to evaluate. Raises `StateError` where there is none."""
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
) -> "Findings":
    """Make rollouts of a run again from public data, as `shoal audit` does, and say where the log disagrees.

    `run` is a run's folder or its URL. `sample` groups are drawn, with `seed` as an earlier audit drew them; `rollout`
    names one rollout (VERSION/SLOT/INDEX) or group (VERSION/SLOT); with neither, all are made again. `threads` 0 takes
    all cores. `own_files` runs environment files that the run names: its host's code. Raises `ShoalError`.
    """
    from shoal import api

    return api.audit(run, sample, rollout, seed, threads, own_files)


def __getattr__(name: str) -> Any:
    """The types, for annotations."""
    if name not in __all__:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    from shoal import api

    return getattr(api, name)
