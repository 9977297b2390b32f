"""Make the first policy of a run with `--random-policy`, and say what it is.

Memory and disk are reckoned first. Weights are made in a process of their own, so that the launcher stays small.
"""

import multiprocessing
import secrets
from pathlib import Path

import msgspec

from shoal.config import RunConfig
from shoal.config.load import resolve_path
from shoal.errors import ConfigError, StateError
from shoal.humanize import count
from shoal.launch.memory_plan import demand_fit
from shoal.launch.preflight import demand_computable
from shoal.launch.sizing import resolve_sizes
from shoal.models.random_model import demand_shape, make_shaped
from shoal.run_folder import RunFolder


def random_policy(config: RunConfig, recipe_dir: Path, folder: RunFolder, with_workers: bool) -> str:
    """Make the first policy in a run's folder, in the shape that policy.path names, if it is not there; returns what the
    user is told.

    The run file keeps the path of the shape, so the folder may be moved. Raises `ConfigError`, and `StateError` if the
    shape cannot be used or the run does not fit.
    """
    shape = resolve_path("policy.path", config.policy.path, recipe_dir)
    if not (shape / "config.json").is_file():
        raise ConfigError(
            f"policy.path = {config.policy.path}: --random-policy needs a model's shape, and {shape} has no config.json"
        )
    spec = demand_shape(shape)
    if not folder.policy.exists():
        demand_computable(shape, config)
        named = msgspec.structs.replace(config, policy=msgspec.structs.replace(config.policy, path=str(shape)))
        demand_fit(resolve_sizes(named, spec, with_workers).config, spec, folder.root, with_workers)
        _make(shape, folder.policy, config)
    return (
        f"Random policy: {count(spec.num_parameters())} weights in the shape of {shape.name}, and a tokenizer of bytes and "
        f"made-up words, in {folder.policy}. Nothing was downloaded, and the policy knows no language"
    )


def _make(shape: Path, directory: Path, config: RunConfig) -> None:
    seed = config.seed if config.seed >= 0 else secrets.randbits(32)
    child = multiprocessing.get_context("spawn").Process(
        target=make_shaped, args=(shape, directory, seed, config.policy.kept_dtype)
    )
    child.start()
    child.join()
    if child.exitcode:
        raise StateError(
            f"no random policy of the shape of {shape} could be made: exit code {child.exitcode}, see above"
        )
