"""Evaluation: how good a checkpoint is on held-out tasks, as a file or on the terminal.

Called by `shoal eval` and `shoal.policy`, and by the launcher before, during and after a run. `envs/evaluate` plays the
episodes; this role gives it the checkpoint, the environment and the threads.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from shoal.config import node_home, sampling_of
from shoal.engine.open import EngineSpec, kind_for, open_engine
from shoal.envs.base import Env
from shoal.envs.contained.open import in_sandbox, show
from shoal.envs.evaluate import BATCH, Evaluation, as_text, evaluate, mixed
from shoal.envs.load import env_of, is_package, load_env
from shoal.errors import ConfigError, StateError
from shoal.folder import RunFolder, write_atomically
from shoal.hub.catalogue import Release
from shoal.hub.names import Reference, read_reference
from shoal.hub.notes import Solved, add_note, find_release, histogram_of
from shoal.hub.registry import FolderRegistry, own_registry
from shoal.hub.store import PackageStore
from shoal.ledger.log.creation import creation_of
from shoal.net.keys import load_or_make_key
from shoal.policy.contained import Limits
from shoal.policy.device import CPU, demand_device
from shoal.policy.render import Renderer
from shoal.protocol.constants import MODEL_STOPS
from shoal.protocol.types import Sampling
from shoal.protocol.types.message import fact
from shoal.roles.loading import Loaded, contained
from shoal.roles.shifts import Alone, Shift, shift_of
from shoal.terminal import printable
from shoal.weights.manifest import weights_root

MIN_EPISODES = 32
"""Of each environment, in an evaluation with fewer episodes than the run file names."""


def main(
    checkpoint: Path,
    env: str,
    env_args: dict[str, Any],
    episodes: int,
    seed: int,
    samples: int,
    sampling: Sampling,
    out: Path | None = None,
    as_json: bool = False,
    threads: int = 1,
    note: str = "",
    device: str = CPU,
) -> None:
    """Evaluate a checkpoint; write the figures to `out` if given, and print them as text or JSON otherwise. `note` is a
    registry's folder, where the solve rates are noted on the package that was played.

    Raises `StateError` if the directory is not a checkpoint, `ConfigError` if the environment is unknown or the device is
    not there.
    """
    demand_device(device)
    game = load_env(env, env_args, partial(in_sandbox, tell=show))
    noted = _noted(env, note) if note else None
    shown = sys.stderr if sys.stderr.isatty() else None

    def progress(done: int) -> None:
        if shown:
            print(f"\r{done} of {episodes} episodes", end="" if done < episodes else "\n", file=shown, flush=True)

    figures = figures_of(checkpoint, game, episodes, seed, samples, sampling, threads, progress, device)
    if out is not None:
        write_atomically(out, msgspec.json.encode(figures))
    elif as_json:
        print(json.dumps(msgspec.to_builtins(figures), indent=1))
    else:
        print(in_words(figures, game.name))
    if noted is not None:
        registry, name, release = noted
        said = _solved(figures, checkpoint)
        add_note(registry, name, release, said, load_or_make_key(node_home() / "node.key"), time.time())
        print(f"noted on {name} {release.version}", file=sys.stderr)


def _noted(env: str, place: str) -> tuple[FolderRegistry, str, Release]:
    """What the solve rates of an environment are noted on. Raises `ConfigError` if it is not a version in the registry."""
    if not is_package(env):
        raise ConfigError(f"--note is for packages, and {env} is not one: write --env OWNER/NAME@VERSION")
    registry, home = own_registry(place), node_home()
    package = PackageStore(home / "envs").find(read_reference(env))
    release = find_release(registry, Reference(package.name, package.version), home)
    if release.digest != package.digest:  # guard: notes-on-what-was-played
        raise ConfigError(f"{package.name} {package.version} in {place} is another package than the one installed here")
    return registry, package.name, release


def _solved(figures: Evaluation, checkpoint: Path) -> Solved:
    rates = figures.solve_rates
    policy = fact(f"{checkpoint.name[:40]} {weights_root(checkpoint)[:12]}")
    return Solved(policy, figures.episodes, sum(rates) / len(rates), histogram_of(rates))


def figures_of(
    checkpoint: Path,
    env: Env,
    episodes: int,
    seed: int,
    samples: int,
    sampling: Sampling,
    threads: int,
    progress: Callable[[int], None] = lambda done: None,
    device: str = CPU,
) -> Evaluation:
    """Play the episodes; calls `progress` with how many are done. Raises as `main`."""
    policy = _load(checkpoint, EngineSpec(threads=threads, device=device), contained(Limits()))
    return evaluate(policy.engine, policy.renderer, env, episodes, seed, sampling, samples, progress)


def for_run(run_dir: Path, checkpoint: Path, one_in: int, out: Path, threads: int, shifts: Path | None = None) -> None:
    """Evaluate a run's checkpoint on each of its environments, with the run's sampling and one in so many of its episodes,
    but MIN_EPISODES if there are so many. Raises as `main`.

    Each environment is evaluated by itself, so `shoal eval` gives the same figures if the run file leaves `eval.rows` and
    `eval.dtype` as they are. A judge of the run file scores the same episodes again. `shifts` is the folder in which the
    processes queue that share the device, if any do.
    """
    folder = RunFolder(run_dir)
    config = folder.config()
    sampling, seed, samples = sampling_of(config), max(0, config.seed), config.eval.samples
    stops = creation_of(folder.log).sampling.stops if folder.log.exists() else MODEL_STOPS
    spec = EngineSpec(dtype=config.eval.dtype, threads=threads, device=config.workers.device)
    shift = shift_of(shifts, "evaluation")
    episodes = {env.label: config.eval_episodes(env) for env in config.envs}
    some = {label: min(most, max(MIN_EPISODES, most // one_in)) for label, most in episodes.items()}
    chosen = [env for env in config.envs if episodes[env.label]]
    judge = load_env(config.eval.judge.name, config.eval.judge.args) if config.eval.judge.name else None
    with shift.held():
        policy = _load(checkpoint, spec, partial(Renderer.from_directory, stops=stops), shift)
        envs = {
            env.label: evaluate(
                policy.engine, policy.renderer, env_of(env), some[env.label], seed, sampling, samples,
                lambda done: shift.pause(), config.eval.rows or BATCH, judge,
            )
            for env in chosen
        }  # fmt: skip
    figures = mixed(envs, [env.weight for env in chosen]) if len(config.envs) > 1 else envs[chosen[0].label]
    write_atomically(out, msgspec.json.encode(figures))


def _load(
    checkpoint: Path,
    spec: EngineSpec,
    open_renderer: Callable[[Path], Renderer] = Renderer.from_directory,
    shift: Shift | None = None,
) -> Loaded:
    if not (checkpoint / "config.json").is_file():
        raise StateError(f"{checkpoint} is not a checkpoint: give a directory with config.json, weights and tokenizer")
    policy = Loaded(open_engine(replace(spec, kind=kind_for(checkpoint))), open_renderer)
    (shift or Alone()).keeps(policy.engine)
    policy.load(checkpoint, 0)
    return policy


def in_words(figures: Evaluation, name: str) -> str:
    """The transcripts and figures as text."""
    what = "wins" if figures.measure == "success" else "mean reward"
    which = "held-out" if figures.tasks == "heldout" else "training (this environment has no held-out ones)"
    lines = [as_text(transcript) + "\n" for transcript in figures.transcripts]
    lines.append(
        f"{name}: {what} {figures.mean:.1%} (95 % interval {figures.low95:.1%} to {figures.high95:.1%}) "
        if what == "wins"
        else f"{name}: {what} {figures.mean:.3f} (95 % interval {figures.low95:.3f} to {figures.high95:.3f}) "
    )
    endings = ", ".join(f"{count} {ending}" for ending, count in figures.endings.items())
    lines.append(f"over {figures.episodes} episodes on {which} tasks; endings: {endings}")
    for what, named in (("reward", figures.parts), ("metric", figures.metrics)):
        lines += [f"{what} {printable(name)}: mean {value:.3f}" for name, value in named.items()]
    if figures.fault:
        lines.append(f"the environment raised: {figures.fault}")
    return "\n".join(lines)
