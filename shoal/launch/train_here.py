"""A run in the caller's own process, with an environment or a loss that the caller holds: no network, no other processes.

It takes the steps of recipes/one_file.py, which the distributed run repeats byte for byte, and keeps their metrics and the
trainer's state in the run's folder. There is no log, so such a run cannot be audited.
"""

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import msgspec

from shoal.config import EnvConfig, RunConfig, check_run, difficulty_of
from shoal.config.load import resolve_path
from shoal.env import Env
from shoal.envs.env_from_file import MEMBERS
from shoal.envs.load import require_members
from shoal.envs.own_env import OwnEnv
from shoal.errors import ConfigError, ShoalError, StateError, no_torch
from shoal.run_folder import RunFolder
from shoal.step_metrics import METRICS, MetricsLog

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.train.loss import Objective, TokenTerms

    Loss = Callable[[TokenTerms, float], Tensor | tuple[Tensor, dict[str, Tensor]]]
    """(terms of the tokens, policy tokens of the batch) -> the loss to minimise, or that and figures of each token."""


def steps_here(
    one_file: Path, config: RunConfig, recipe_dir: Path, out: Path, env: Env | None = None, loss: "Loss | None" = None,
    resume: bool = False,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Train in `out` and give the metrics of each step; the policy is in `out/published`. A run that this made before in
    `out` is replaced, or gone on with after its last whole step (`resume`). Raises `ShoalError`."""
    if find_spec("torch") is None:
        raise ShoalError(no_torch())
    take_steps = _load(one_file).steps
    config = synchronous(config, env)
    folder = RunFolder(out)
    if folder.log.exists():  # guard: runs-with-a-log-are-kept
        raise StateError(f"{out} holds a run with a log, which training in this process has not: give another out")
    start = resolve_path("policy.path", config.policy.path, recipe_dir) if config.policy.path else None
    if start is not None and out.resolve() in start.parents:  # guard: first-policy-is-kept
        raise ConfigError(f"policy.path = {config.policy.path} is in {out}, which is replaced: give another out")
    if resume:
        _demand_no_memory(config)
    else:
        _clear(folder)
    own = None if env is None else {config.envs[0].label: cast(Env, OwnEnv(env))}
    objective = None if loss is None else _objective(loss)
    loop = take_steps(config, out, recipe_dir, own, objective, folder.trainer)
    kept = MetricsLog(folder.metrics)
    with contextlib.closing(loop):
        for metrics in loop:
            metrics["time_s"] = time.time()
            kept.write({name: value for name, value in metrics.items() if name in METRICS})
            yield metrics


def _clear(folder: RunFolder) -> None:
    """Delete what a call before made."""
    for path in (folder.policy, folder.root / "published", folder.trainer):
        shutil.rmtree(path, ignore_errors=True)
    for path in (folder.run_file, folder.metrics):
        path.unlink(missing_ok=True)


def _demand_no_memory(config: RunConfig) -> None:
    """Raise `ConfigError` for a run whose next step depends on more than the trainer's state."""
    if difficulty_of(config) is not None:
        raise ConfigError(
            "resume=True: this run file draws tasks by how often earlier steps solved them, and training in this process "
            "does not keep that. Leave resume out to begin anew, or use run.train()"
        )


def synchronous(config: RunConfig, env: Env | None = None) -> RunConfig:
    """The run file as one process can follow it, with the caller's environment in the place of its own. Raises
    `ConfigError`."""
    replace = msgspec.structs.replace
    rollouts, verify = replace(config.rollouts, max_staleness=0), replace(config.verify, audit_rate=1.0)
    config = replace(config, rollouts=rollouts, verify=verify)
    if env is not None:
        missing = [member for member in MEMBERS if not hasattr(env, member)]
        if missing:
            raise ConfigError(
                f"env is a {type(env).__name__} without {', '.join(missing)}: give an instance of a class that inherits "
                "from shoal.env.Env"
            )
        require_members(env, type(env).__name__)
        config = replace(config, envs=(EnvConfig(env.name, label=env.name),))
    check_run(config)
    return config


def _load(one_file: Path) -> ModuleType:
    """The file as a module. In the repository it is beside the package, for people to read; a wheel has it inside."""
    spec = spec_from_file_location("shoal_one_file", one_file)
    if not one_file.is_file() or spec is None or spec.loader is None:
        raise StateError(
            f"{one_file} is not there: training in this process needs the recipes that come with shoal. Install it again"
        )
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _objective(loss: "Loss") -> "Objective":
    from torch import Tensor

    def objective(terms: "TokenTerms", num_tokens: float) -> "tuple[Tensor, dict[str, Tensor]]":
        told = loss(terms, num_tokens)
        found, figures = (told, {}) if isinstance(told, Tensor) else told if _is_pair(told) else (None, {})
        if not isinstance(found, Tensor) or found.numel() != 1 or not found.requires_grad:
            raise ConfigError(
                f"the loss gave {_kind_of(told)}: return a scalar tensor that follows from terms.logp_N, or that and "
                "a dict of figures for each token"
            )
        if not found.isfinite():
            raise StateError(
                f"the loss is {found.item()}: nothing can be learned from that. Fix it, and run the cell again"
            )
        return found, figures

    return objective


def _is_pair(told: Any) -> bool:
    return isinstance(told, tuple) and len(told) == 2 and isinstance(told[1], dict)


def _kind_of(told: Any) -> str:
    from torch import Tensor

    if not isinstance(told, Tensor):
        return f"a {type(told).__name__}"
    return f"a tensor of shape {tuple(told.shape)}{'' if told.requires_grad else ' without a gradient'}"
