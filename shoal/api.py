"""`import shoal` from a program or a notebook: run files, policies and audits as typed values.

It works in a program whose event loop is already running, such as a notebook: a run is a launcher thread without an event
loop, and processes; an audit, which needs a loop, gets one in a thread of its own.
"""

import contextlib
import json
import math
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from anyio.from_thread import start_blocking_portal

from shoal.config import RunConfig, load_run
from shoal.env import Env
from shoal.envs.evaluate import MAX_EVAL_TOKENS as MAX_EVAL_TOKENS
from shoal.envs.evaluate import eval_sampling
from shoal.errors import ConfigError
from shoal.evaluation_files import Evaluation
from shoal.models.open_model import spec_of
from shoal.roles.auditor.rejudge_groups import Findings, GroupChoice, examine
from shoal.typed_toml import read_toml
from shoal.views.notebook.data_frame import Frame as Frame
from shoal.views.notebook.rollout import Replay as Replay
from shoal.views.notebook.rollout import Rollout as Rollout
from shoal.views.notebook.run_tables import Opened

if TYPE_CHECKING:
    from shoal.launch.background_run import BackgroundRun
    from shoal.launch.train_here import Loss

Setting: TypeAlias = "str | int | float | PathLike[str] | Sequence[Setting] | Mapping[str, Setting]"
"""A value of a run file's key, or a table of them."""

Metric: TypeAlias = "str | int | float | Mapping[str, int] | None"
"""A value in a line of metrics.jsonl; None where it was not a finite number."""

_INSIDE = Path(__file__).parent / "recipes"
RECIPES = _INSIDE if _INSIDE.is_dir() else Path(__file__).parent.parent / "recipes"
"""Recipes that come with shoal: in an installed wheel inside the package, in the repository beside it."""


@dataclass(frozen=True)
class Step:
    """A finished training step."""

    number: int
    """From 1, as `shoal run` shows it; also the policy version that the step made."""
    reward: float
    """Mean reward of all rollouts accepted for the step, with or without signal (`reward_all_mean`)."""
    metrics: Mapping[str, Metric]
    """The step's line of metrics.jsonl."""


@dataclass(frozen=True)
class Run:
    """A checked run file, with the caller's changes."""

    path: Path
    config: RunConfig = field(repr=False)
    overrides: tuple[str, ...] = field(default=(), repr=False)
    """The changes, as `--set` has them."""

    def train(self, out: str | PathLike[str] | None = None) -> Generator[Step, None, None]:
        """Do the whole run on this machine, as `shoal run`: yields each step when it is done, and ends with the run.

        `out` is the run's folder (default runs/NAME). If it already holds this run, the run continues, and earlier steps
        are not yielded again. Nothing starts before the first step is asked for. Closing the generator, a `break` or
        Ctrl-C stops the run cleanly, and it can be resumed. Raises `ShoalError`.
        """
        started = self._start(out, with_workers=True)
        try:
            yield from map(_step, started.steps())
        finally:
            started.stop()

    def train_here(
        self, out: str | PathLike[str] | None = None, *, env: Env | None = None, loss: "Loss | None" = None,
        resume: bool = False,
    ) -> Generator[Step, None, None]:  # fmt: skip
        """Do the run in this process and thread, synchronously, with one core: yields each step when it is done.

        `env` is an environment that this program made, in the place of the run file's. `loss` takes the place of the
        algorithm's: a function of the batch's `TokenTerms` (see `shoal.train.loss`) and its number of policy tokens
        that gives a scalar tensor, or that and a dict of figures for each token.

        The policy is then in `out`/published; `out` is by default runs/NAME-here. There is no log, so nothing can be
        audited. What `train_here` left in `out` before is replaced. With `resume`, it continues after its last whole step:
        give the same `env` and `loss`. The first fault of `env`, or a call of it that takes 30 s, ends the training.
        Raises `ShoalError`.
        """
        from shoal.launch.train_here import steps_here

        folder = Path("runs") / f"{self.config.name}-here" if out is None else Path(out)
        with _threads_of_torch_kept():
            one_file, beside = RECIPES / "one_file.py", self.path.parent
            yield from map(_step, steps_here(one_file, self.config, beside, folder, env, loss, resume))

    def host(self, out: str | PathLike[str] | None = None) -> "Hosted":
        """Start the run without workers, as `shoal host`, and return once others can join. Use it in a `with` statement.

        `recipe(..., host={"bind": "0.0.0.0", "port": 8470})` says where it listens. Raises `ShoalError`.
        """
        started = self._start(out, with_workers=False)
        with contextlib.ExitStack() as stack:
            stack.callback(started.stop)
            hosted = Hosted(started.url(), started)
            stack.pop_all()
        return hosted

    def _start(self, out: str | PathLike[str] | None, with_workers: bool) -> "BackgroundRun":
        from shoal.launch.background_run import BackgroundRun

        folder = Path("runs") / self.config.name if out is None else Path(out)
        return BackgroundRun(self.config, self.path.parent, folder, with_workers, self.overrides)


class Hosted:
    """A run that others join. Leaving the `with` statement stops it."""

    def __init__(self, url: str, started: "BackgroundRun") -> None:
        self.url = url
        self.join_line = f"shoal join {url}"
        """What contributors type."""
        self._started = started

    def steps(self) -> Iterator[Step]:
        """Each step when it is done, until the run has ended. Raises `ShoalError` if the run fails."""
        return map(_step, self._started.steps())

    def stop(self) -> None:
        """Stop cleanly, as Ctrl-C stops `shoal host`, and wait for it. Raises what ended the run, unless raised before."""
        self._started.stop()

    def __enter__(self) -> "Hosted":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


@dataclass(frozen=True)
class Policy:
    """A checkpoint."""

    path: Path
    max_positions: int
    """Its longest sequence, tokens."""

    def evaluate(
        self,
        env: str | Env,
        episodes: int = 512,
        *,
        env_args: Mapping[str, Setting] | None = None,
        seed: int = 0,
        temperature: float = 1.0,
        max_turn_tokens: int = 64,
        max_tokens: int = 0,
        samples: int = 2,
        threads: int = 0,
        device: str = "auto",
    ) -> Evaluation:
        """Play sampled episodes on held-out tasks: the figures of `shoal eval`, whose options are these keyword arguments.

        `env` is a built-in environment, a .py file, or this program's own. `max_tokens` 0 is 512, or the policy's longest
        sequence if that is shorter; `threads` 0 all cores. `device`: cpu, cuda, mps or auto. Raises `ShoalError`.
        """
        from shoal.envs.isolated.environment import in_child
        from shoal.envs.load import load_env
        from shoal.jobs.evaluate import EvalPlan, figures_of

        sampling = eval_sampling(temperature, max_turn_tokens, max_tokens, self.max_positions)
        with _threads_of_torch_kept():
            game = load_env(env, dict(env_args or {}), own=in_child) if isinstance(env, str) else env
            return figures_of(
                EvalPlan(self.path, (), (episodes,), sampling, seed, samples), game, threads or _cores(), device
            )


def open_recipe(path: str | PathLike[str], quick: bool, changes: Mapping[str, Setting]) -> Run:
    """`shoal.recipe`."""
    found, overrides = _find(Path(path)), [*_settings(changes)]
    return Run(found, load_run(found, overrides, quick), tuple(overrides))


def open_policy(checkpoint: str | PathLike[str]) -> Policy:
    """`shoal.policy`."""
    path = Path(checkpoint)
    return Policy(path, spec_of(path).max_positions)


def open_reading(where: str | PathLike[str], private: bool, own_files: bool) -> Opened:
    """`shoal.open`."""
    return Opened(where, private, own_files)


def audit(
    run: str | PathLike[str],
    sample: int,
    rollout: str,
    seed: int | None,
    threads: int,
    own_files: bool,
    evidence: Sequence[str | PathLike[str]],
) -> Findings:
    """`shoal.audit`."""
    if sample < 0:
        raise ConfigError(f"sample = {sample}: give a number of groups above 0, or leave it out")
    folders = tuple(
        Path(folder).expanduser() for folder in ([evidence] if isinstance(evidence, str | PathLike) else evidence)
    )
    if sum(map(bool, (sample, rollout, folders))) > 1:
        raise ConfigError(
            f"sample={sample}, rollout={rollout!r}, evidence={list(map(str, folders))}: give one of them, or none to audit "
            "every group"
        )
    choice = GroupChoice(rollout, sample, seed, folders)
    with _threads_of_torch_kept(), start_blocking_portal(name="shoal") as portal:  # the caller may have an event loop
        return portal.call(examine, os.fspath(run), choice, threads or _cores(), own_files)


def _step(metrics: dict[str, Any]) -> Step:
    reward = metrics.get("reward_all_mean", metrics.get("reward_mean"))
    return Step(metrics["step"] + 1, math.nan if reward is None else float(reward), MappingProxyType(metrics))


def _find(path: Path) -> Path:
    """A run file, or one of that name that comes with shoal. Raises `ConfigError`."""
    beside = RECIPES / path
    if path.exists() or path.is_absolute() or not RECIPES.is_dir():
        return path
    if not beside.is_file():
        run_files = (file for file in sorted(RECIPES.glob("*.toml")) if "envs" in read_toml(file))
        names = ", ".join(file.name for file in run_files)
        raise ConfigError(f"no run file {path}: give its path, or a name from {RECIPES}: {names}")
    return beside


def _settings(changes: Mapping[str, Setting], prefix: str = "") -> Iterator[str]:
    """Nested tables as arguments of `--set`."""
    for key, value in changes.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={_toml(value, prefix + key)}"


def _toml(value: Setting, key: str) -> str:
    """A value as TOML writes it."""
    match value:
        case bool():
            return str(value).lower()
        case Integral():
            return str(int(value))
        case Real():
            return repr(float(value))
        case str() | PathLike():
            return json.dumps(os.fspath(value), ensure_ascii=False).replace("\x7f", "\\u007f")
        case Mapping():
            return "{" + ", ".join(f"{_toml(name, key)} = {_toml(one, key)}" for name, one in value.items()) + "}"
        case Sequence():
            return "[" + ", ".join(_toml(one, key) for one in value) + "]"
    raise ConfigError(f"{key} = {value!r}: give a string, a number, True or False, a list or a dict")


@contextlib.contextmanager
def _threads_of_torch_kept() -> Iterator[None]:
    """Set torch's number of threads back: roles change it for their process, but this process is the caller's."""
    if find_spec("torch") is None:
        yield  # what needs torch says that it is missing
        return
    import torch  # here, before a role imports it: its first number of threads is the one to set back

    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _cores() -> int:
    return os.cpu_count() or 1
