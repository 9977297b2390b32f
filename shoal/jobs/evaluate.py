"""Evaluation: how good a checkpoint is on held-out tasks, as a file or on the terminal.

`envs/evaluate` plays the episodes; this job gives it the checkpoint, the environment and the threads.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from shoal.chat.isolated import RendererLimits
from shoal.chat.renderer import Renderer
from shoal.config import EnvConfig, sampling_of
from shoal.config.env_settings import JudgeConfig
from shoal.config.role_options import EvalOptions
from shoal.engine.open import EngineSpec, kind_for, open_engine
from shoal.env import Env
from shoal.envs.evaluate import BATCH, as_text, eval_sampling, evaluate, mixed
from shoal.envs.isolated.environment import in_child, in_sandbox, show
from shoal.envs.load import env_of, load_env
from shoal.errors import ConfigError, StateError
from shoal.evaluation_files import Evaluation, interval_of
from shoal.models.device import CPU, demand_device
from shoal.models.open_model import spec_of
from shoal.protocol.constants import MODEL_STOPS
from shoal.protocol.messages import Sampling
from shoal.roles.node.device_queue import Shift, shift_of
from shoal.run_folder import RunFolder, cold_start_of, write_atomically
from shoal.runs.log_follower import creation_of
from shoal.terminal import printable
from shoal.weights.engine_loader import LoadedEngine, contained

MIN_EPISODES = 32
"""Of each environment, in an evaluation with fewer episodes than the run file names."""

EPISODES, MAX_EVAL_TURN_TOKENS = 512, 64
"""Of an evaluation, unless a run or the caller says otherwise."""


NO_JUDGE = JudgeConfig()


@dataclass(frozen=True)
class EvalPlan:
    """A policy, and what it plays how."""

    checkpoint: Path
    envs: tuple[EnvConfig, ...]
    episodes: tuple[int, ...]
    """Of each environment."""
    sampling: Sampling
    seed: int = 0
    samples: int = 2
    """Transcripts of each environment."""
    rows: int = BATCH
    """Episodes at a time."""
    dtype: str = "float32"
    stops: str = MODEL_STOPS
    """Rule that says which tokens end a turn."""
    judge: JudgeConfig = NO_JUDGE
    by_label: bool = False
    """Whether the file has a table of environments, even of one: a run with several may evaluate only some."""


def plan_of_run(folder: RunFolder, checkpoint: Path, one_in: int = 1) -> EvalPlan:
    """What a run evaluates, with one in so many of its episodes, but MIN_EPISODES if there are so many."""
    config = folder.config()
    episodes = {env.label: config.eval_episodes(env) for env in config.envs}
    some = {label: min(most, max(MIN_EPISODES, most // one_in)) for label, most in episodes.items()}
    chosen = tuple(env for env in config.envs if episodes[env.label])
    return EvalPlan(
        checkpoint, chosen, tuple(some[env.label] for env in chosen), sampling_of(config), max(0, config.seed),
        config.eval.samples, config.eval.rows or BATCH, config.eval.dtype,
        creation_of(folder.log).sampling.stops if folder.log.exists() else MODEL_STOPS, config.eval.judge,
        by_label=len(config.envs) > 1,
    )  # fmt: skip


def run_at(place: Path) -> tuple[RunFolder, Path] | None:
    """The run of a folder, and its newest policy; or of a directory in a run's folder, and that policy. None: neither.

    Raises `StateError` if the run has made no policy yet.
    """
    if (place / "run.json").is_file():
        folder = RunFolder(place)
        kept = sorted(path for path in folder.checkpoints.glob("v*") if (path / "config.json").is_file())
        found = [path for path in (folder.checkpoints / "final", *reversed(kept), folder.policy) if path.is_dir()]
        if not found:
            raise StateError(f"the run in {place} has made no policy yet: wait for its first step")
        return folder, found[0]
    for parent in place.absolute().parents[:2]:
        if (parent / "run.json").is_file():
            return RunFolder(parent), place
    return None


@dataclass(frozen=True)
class EvalChanges:
    """What takes the place of a run's own values in an evaluation; None leaves them."""

    env: str = ""
    """A label of the run's environments, or any other environment."""
    env_args: dict[str, Any] | None = None
    episodes: int | None = None
    seed: int | None = None
    samples: int | None = None
    temperature: float | None = None
    max_turn_tokens: int | None = None
    max_tokens: int | None = None


UNCHANGED = EvalChanges()


def planned(place: Path, changes: EvalChanges = UNCHANGED) -> EvalPlan:
    """What `shoal eval` plays: of a run its own evaluation, with these changes.

    Of the result of a cold start it plays the recipe's environment within its limits. Raises `ConfigError` if it is not
    clear which environment is meant, or `StateError` if there is no policy.
    """
    of_run = run_at(place)
    plan = _outside_runs(place, changes) if of_run is None else _of_run(*of_run, changes)
    given = {
        "temperature": changes.temperature,
        "max_turn_tokens": changes.max_turn_tokens,
        "max_tokens": changes.max_tokens,
    }
    sampling = msgspec.structs.replace(plan.sampling, **{key: one for key, one in given.items() if one is not None})
    if sampling.max_turn_tokens > sampling.max_tokens:
        sampling = msgspec.structs.replace(sampling, max_turn_tokens=sampling.max_tokens)
    return replace(
        plan, sampling=sampling,
        episodes=tuple(changes.episodes or count for count in plan.episodes),
        seed=plan.seed if changes.seed is None else changes.seed,
        samples=plan.samples if changes.samples is None else changes.samples,
    )  # fmt: skip


def _outside_runs(place: Path, changes: EvalChanges) -> EvalPlan:
    if not (place / "config.json").is_file():
        raise StateError(f"{place} is neither a run's folder nor a model's directory")
    sampling, cold_start = _sampling(place, changes.max_tokens), cold_start_of(place)
    if not changes.env and cold_start is None:
        raise ConfigError(f"{place} is not of a run that says what it plays: add --env NAME_OR_FILE")
    played = EnvConfig(changes.env)
    if cold_start is not None and changes.env in ("", cold_start.env.label):
        played, sampling = cold_start.env, cold_start.sampling
    if changes.env_args:
        played = msgspec.structs.replace(played, args=changes.env_args)
    return EvalPlan(place, (played,), (EPISODES,), sampling)


def _of_run(folder: RunFolder, checkpoint: Path, changes: EvalChanges) -> EvalPlan:
    config, plan, env = folder.config(), plan_of_run(folder, checkpoint), changes.env
    envs = tuple(one for one in (plan.envs or config.envs if not env else config.envs) if env in ("", one.label))
    if changes.env_args and len(envs) > 1:
        labels = ", ".join(one.label for one in envs)
        raise ConfigError(f"--env-args: the run has several environments: add --env with one of {labels}")
    if not envs:  # the run's limits are for its own environments
        envs, plan = (
            (EnvConfig(env),),
            replace(plan, judge=NO_JUDGE, sampling=_sampling(checkpoint, changes.max_tokens)),
        )
    if changes.env_args:
        envs = (msgspec.structs.replace(envs[0], args=changes.env_args),)
    counts = dict(zip((one.label for one in plan.envs), plan.episodes, strict=True))
    each = tuple(counts.get(one.label, EPISODES) for one in envs)
    return replace(plan, envs=envs, episodes=each, by_label=plan.by_label and not env)


def _sampling(checkpoint: Path, max_tokens: int | None) -> Sampling:
    """How an episode of an environment outside of a run is sampled."""
    return eval_sampling(1.0, MAX_EVAL_TURN_TOKENS, max_tokens or 0, spec_of(checkpoint).max_positions)


def main(
    plan: EvalPlan,
    out: Path | None = None,
    as_json: bool = False,
    threads: int = 1,
    device: str = CPU,
) -> None:
    """Evaluate a checkpoint; write the figures to `out` if given, and print them as text or JSON otherwise.

    Raises `StateError` if the directory is not a checkpoint, `ConfigError` if the environment is unknown or the device is
    not there.
    """
    demand_device(device)
    games = {env.label: env_of(env, partial(in_sandbox, tell=show)) for env in plan.envs}
    shown = sys.stderr if sys.stderr.isatty() else None
    before, total = 0, sum(plan.episodes)

    def progress(done: int) -> None:
        if shown:
            print(f"\r{before + done} of {total} episodes", end="", file=shown, flush=True)

    spec = EngineSpec(dtype=plan.dtype, threads=threads, device=device)
    policy = _load(plan.checkpoint, spec, contained(RendererLimits(), plan.stops))
    figures = dict[str, Evaluation]()
    for label, one in _play(plan, policy, games, progress):
        figures[label] = one
        before += one.episodes
    if shown:
        print(file=shown)
    whole = _whole(plan, figures)
    if out is not None:
        write_atomically(out, msgspec.json.encode(whole.as_file()))
    elif as_json:
        print(json.dumps(msgspec.to_builtins(whole.as_file()), indent=1))
    else:
        print(
            "\n".join(in_words(one, label if len(games) > 1 else games[label].name) for label, one in figures.items())
        )


def _play(
    plan: EvalPlan, policy: LoadedEngine, games: Mapping[str, Env], progress: Callable[[int], None]
) -> Iterator[tuple[str, Evaluation]]:
    """Label and figures of each environment."""
    judge = load_env(plan.judge.name, plan.judge.args, own=in_child) if plan.judge.name else None
    for env, episodes in zip(plan.envs, plan.episodes, strict=True):
        yield env.label, evaluate(
            policy.engine, policy.renderer, games[env.label], episodes, plan.seed, plan.sampling, plan.samples, progress,
            plan.rows, judge,
        )  # fmt: skip


def _whole(plan: EvalPlan, figures: dict[str, Evaluation]) -> Evaluation:
    by_label = plan.by_label or len(plan.envs) > 1
    return mixed(figures, [env.weight for env in plan.envs]) if by_label else figures[plan.envs[0].label]


def figures_of(plan: EvalPlan, env: Env, threads: int, device: str) -> Evaluation:
    """Play the episodes of a plan in one environment, which the caller made. Raises as `main`."""
    policy = _load(plan.checkpoint, EngineSpec(threads=threads, device=device), contained(RendererLimits()))
    return evaluate(
        policy.engine, policy.renderer, env, plan.episodes[0], plan.seed, plan.sampling, plan.samples, lambda done: None
    )


def for_run(run_dir: Path, options: EvalOptions) -> None:
    """Evaluate a run's checkpoint on each of its environments, with the run's sampling. Raises as `main`.

    Each environment is evaluated by itself, so `shoal eval` gives the same figures if the run file leaves `eval.rows` and
    `eval.dtype` as they are. A judge of the run file scores the same episodes again.
    """
    folder, checkpoint = RunFolder(run_dir), Path(options.checkpoint)
    plan, device = plan_of_run(folder, checkpoint, options.one_in), folder.config().workers.device
    shift = shift_of(Path(options.shifts) if options.shifts else None, "evaluation")
    with shift.held():
        spec = EngineSpec(dtype=plan.dtype, threads=options.threads, device=device)
        policy = _load(checkpoint, spec, partial(Renderer.from_directory, stops=plan.stops), shift)
        games = {env.label: env_of(env) for env in plan.envs}
        figures = dict(_play(plan, policy, games, lambda done: shift.pause()))
    write_atomically(Path(options.out), msgspec.json.encode(_whole(plan, figures).as_file()))


def _load(
    checkpoint: Path,
    spec: EngineSpec,
    open_renderer: Callable[[Path], Renderer] = Renderer.from_directory,
    shift: Shift | None = None,
) -> LoadedEngine:
    if not (checkpoint / "config.json").is_file():
        raise StateError(f"{checkpoint} is not a checkpoint: give a directory with config.json, weights and tokenizer")
    policy = LoadedEngine(open_engine(replace(spec, kind=kind_for(checkpoint))), open_renderer)
    (shift or Shift()).keeps(policy.engine)
    policy.load(checkpoint, 0)
    return policy


def in_words(figures: Evaluation, name: str) -> str:
    """The transcripts and figures as text."""
    what = "wins" if figures.measure == "success" else "mean reward"
    which = "held-out" if figures.tasks == "heldout" else "training (this environment has no held-out ones)"
    lines = [as_text(transcript) + "\n" for transcript in figures.transcripts]
    form = ".1%" if what == "wins" else ".3f"
    if (found := interval_of(figures)) is not None:
        mean, low, high = found
        lines.append(f"{name}: {what} {mean:{form}} (95 % interval {low:{form}} to {high:{form}}) ")
    else:
        lines.append(f"{name}: no {what}, because the environment failed on all episodes ")
    endings = ", ".join(f"{count} {ending}" for ending, count in figures.endings.items())
    over = (
        f"{figures.episodes - figures.faults} of {figures.episodes}" if figures.faults and found else figures.episodes
    )
    lines.append(f"over {over} episodes on {which} tasks; endings: {endings}")
    for what, named in (("reward", figures.parts), ("metric", figures.metrics)):
        lines += [f"{what} {printable(name)}: mean {value:.3f}" for name, value in named.items()]
    if figures.fault:
        share = f" on {figures.faults} episodes, which have no score" if figures.faults else ""
        lines.append(f"the environment failed{share}: {printable(figures.fault)}")
    return "\n".join(lines)
