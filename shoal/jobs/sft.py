"""Supervised fine-tuning: a cold start before RL, from games that a scripted player plays.

It plays the games, trains on them with `train/sft`, and writes a checkpoint in HF format. The same recipe and number of
threads give the same bytes, also if it was stopped and started again.
"""

import contextlib
import json
import logging
import math
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import msgspec
import psutil
import torch

from shoal.chat.isolated import open_own
from shoal.chat.renderer import Renderer
from shoal.config import SftConfig, changed_keys, load_sft
from shoal.config.load import env_at, resolve_path
from shoal.engine.interface import Engine
from shoal.engine.open import EngineSpec, kind_for, open_engine
from shoal.env import Env
from shoal.envs.evaluate import evaluate
from shoal.envs.load import env_of
from shoal.envs.prompt_preview import learned_row
from shoal.errors import ConfigError, StateError, cause_of, remedy_of
from shoal.evaluation_files import Evaluation, interval_of, why_not_comparable
from shoal.jobs.cold_start_examples import (
    Example,
    chosen_rows,
    demand_more_than_guessing,
    demand_positions,
    scripted_games,
)
from shoal.models.checkpoint import save_policy
from shoal.models.hub_download import Hub
from shoal.models.interface import PolicyModel
from shoal.models.open_model import open_policy
from shoal.models.random_model import make_tiny
from shoal.net.server_address import stop_requested
from shoal.protocol.encoding import digest, to_json
from shoal.protocol.hub_reference import is_hub
from shoal.protocol.messages import POLICY, Sampling
from shoal.run_folder import COLD_START_RECIPE, cold_start_folder, write_atomically
from shoal.terminal import command, printable
from shoal.train.dataset_files import Examples
from shoal.train.sft import FineTuning
from shoal.typed_toml import to_tree
from shoal.weights.manifest import weights_root

OVERSHOT = 0.15
"""An evaluation so far above stop_at leaves RL less to find than was meant."""

TRAINING_EPISODES = 64
"""On training tasks, which the last evaluation plays beside its held-out ones."""

BY_HEART, CERTAIN_NATS = 0.2, 0.1
"""Difference of the shares on training and held-out tasks, hardly chance in so few episodes, and entropy per token, from
which most groups of RL would be flat."""

log = logging.getLogger("sft")


def main(recipe: Path, out: Path, overrides: list[str]) -> None:
    """Make a checkpoint in `out` from a recipe. Raises `ConfigError` if recipe or environment cannot be used."""
    make(load_sft(recipe, overrides), recipe.parent, out)


def make(config: SftConfig, beside: Path, out: Path, examples: Examples | None = None) -> int:
    """Make a checkpoint in `out`; gives how many tokens it learned from, prompts and repetitions included. Paths of the
    recipe are relative to `beside`. `examples` take the place of scripted games.

    At the first SIGINT or SIGTERM it saves what was learned beside `out`, from where the next call continues, and raises
    KeyboardInterrupt. Raises as `main`.
    """
    torch.set_num_threads(config.threads)
    config = msgspec.structs.replace(config, env=env_at(config.env, beside))
    with _scratch(cold_start_folder(out)) as scratch:
        start = scratch / "model"
        if is_hub(config.policy.path):
            Hub().bring(config.policy.path, start)
        elif config.policy.path:
            resolve_path("policy.path", config.policy.path, beside)
            start = beside / config.policy.path
            demand_start(start)
        else:
            make_tiny(config.policy.tiny, start, config.seed, "float32")
        return _fine_tune(config, start, out, examples)


@contextlib.contextmanager
def _scratch(beside: Path) -> Iterator[Path]:
    """A folder for the policy to start from. Those that killed processes of this machine left are deleted."""
    name = f".start-{re.sub(r'[^A-Za-z0-9]', '_', socket.gethostname())}-"
    for left in beside.glob(f"{name}*"):
        number = left.name.removeprefix(name)
        if re.fullmatch(r"\d{1,9}", number) and (int(number) == os.getpid() or not psutil.pid_exists(int(number))):
            shutil.rmtree(left, ignore_errors=True)
    mine = beside / f"{name}{os.getpid()}"
    try:
        mine.mkdir(parents=True)
    except OSError as error:
        raise StateError(
            f"cannot make {mine}: {cause_of(error)}. {remedy_of(error)}, or choose another --out"
        ) from None
    try:
        yield mine
    finally:
        shutil.rmtree(mine, ignore_errors=True)
        with contextlib.suppress(OSError):  # what was saved stays
            beside.rmdir()


def demand_start(start: Path) -> None:
    """Raise `StateError` if the policy to start from is missing and a recipe beside it makes it."""
    recipe = start.with_name(f"{start.name}.toml")
    if start.exists() or not recipe.is_file():
        return
    with contextlib.suppress(ConfigError):
        load_sft(recipe)
        made = command("sft", str(recipe), "--out", str(start))
        raise StateError(f"there is no {start} to start from. Make it first: {made}")


def _fine_tune(config: SftConfig, start: Path, out: Path, given: Examples | None) -> int:
    model = open_policy(start, torch.float32, config.policy.implementation)
    renderer = (open_own if config.policy.path else Renderer.from_directory)(start)
    games = scripted_games(config, renderer) if given is None else chosen_rows(given, start, config.max_tokens)
    demand_positions(config, games, model.spec.max_positions)
    demand_more_than_guessing(config, games)
    tuning = FineTuning(model, games, config)
    config = tuning.config
    sampling = _sampling(config, games, model)
    checkpoints = SftCheckpoints(out, config, start, games, sampling)
    checkpoints.resume(tuning)
    log.info("%s", learned_row(games[0][0], [i for i, who in enumerate(games[0][1]) if who == POLICY], renderer))
    log.info("rows=%d; learning for %d steps", len(games), config.steps - tuning.steps_done)
    evaluation = SftEvaluation(config, renderer, sampling)
    metrics, reached, share, is_certain = dict[str, Any](), False, 0.0, False
    with stop_requested() as stopping:

        def stop_if_asked() -> None:
            if stopping() and tuning.steps_done:
                checkpoints.keep(tuning, model)
                log.info(
                    "stopped at step=%d/%d; so far: %s; the same command continues",
                    tuning.steps_done, config.steps, checkpoints.place(tuning.steps_done),
                )  # fmt: skip
            if stopping():
                raise KeyboardInterrupt

        while True:
            done, figures = tuning.steps_done, None
            if evaluation.is_due(done):
                checkpoints.keep(tuning, model)
                figures = evaluation.of(checkpoints.place(done), lambda episodes: stop_if_asked())
                share = evaluation.share(figures) if config.stop_at else 0.0
                reached = bool(config.stop_at) and share >= config.stop_at
            if figures or (metrics and (done <= 10 or done % 20 == 0 or done == config.steps)):
                _report(done, config.steps, metrics, figures)
            if reached or done == config.steps:
                if figures:
                    learned = evaluation.of_training(checkpoints.place(done), lambda episodes: stop_if_asked())
                    falls_short = bool(config.stop_at) and not reached
                    is_certain = _tell_certain(done, config, metrics, figures, learned, evaluation.bounds, falls_short)
                break
            stop_if_asked()
            metrics = tuning.step()
    save_policy(model, out, config.publish_dtype, tokenizer_from=start)
    checkpoints.finish()
    if config.stop_at and not reached:
        more = "episodes" if is_certain else "steps, episodes or lr"
        log.warning(
            "stop_at=%g was not reached in %d steps: raise %s, or take a larger policy",
            config.stop_at,
            config.steps,
            more,
        )
    if reached and share >= config.stop_at + OVERSHOT:
        every = config.evaluates_every
        gap = tuning.steps_done % every or every
        more_often = f"lower eval_every (now {every}) to {max(1, gap // 4)}"
        earlier = more_often if gap > 1 else f"lower lr (now {config.lr:g})"
        log.warning(
            "stop_at=%g was overshot: the share is %.2f at step=%d. To stop earlier, %s and start again",
            config.stop_at, share, tuning.steps_done, earlier,
        )  # fmt: skip
    log.info(
        "wrote %s (%s) after step=%d; next: %s", out, config.publish_dtype, tuning.steps_done, evaluation.command(out)
    )
    return tuning.tokens


class SftCheckpoints:
    """What fine-tuning saves beside its result `OUT`: in `OUT-checkpoints`, a policy for each evaluation by its step,
    and in its folder `state` what the next start continues from, until all is done."""

    def __init__(self, out: Path, config: SftConfig, start: Path, games: Sequence[Example], sampling: Sampling) -> None:
        """`sampling` is that of evaluated episodes, which `shoal eval` finds beside the recipe."""
        self._folder = cold_start_folder(out)
        self._state, self._of = self._folder / "state", self._folder / COLD_START_RECIPE
        self._start, self._dtype = start, config.publish_dtype
        recipe = to_tree(msgspec.structs.replace(config, eval_every=0, eval_episodes=1, stop_at=0.0))
        policy, env = recipe.pop("policy"), recipe.pop("env")
        rows = {"env": env, "games": digest(to_json([list(map(list, game)) for game in games]))}
        self._sampling = msgspec.to_builtins(sampling)
        self._recipe = recipe | {"policy": policy, "policy's weights": weights_root(start)} | rows

    def place(self, step: int) -> Path:
        """The directory of the policy after so many steps."""
        return self._folder / f"step{step:06d}"

    def resume(self, tuning: FineTuning) -> None:
        """Go on from the saved state, if there is one; else delete the policies that a former call left here. Raises
        `StateError` if the state is of another recipe, or if what would be deleted is not known to be of a cold start."""
        try:
            before = json.loads(self._of.read_bytes())
        except (OSError, ValueError):
            before = None
        before = before if isinstance(before, dict) else {}
        before.pop("sampling", None)  # follows from the games
        if not self._state.is_dir():
            steps = sorted(path for path in self._folder.glob("step*") if re.fullmatch(r"step\d{6,}", path.name))
            found = [*steps, *([self._of] if self._of.exists() else [])]
            if found and before.keys() != self._recipe.keys():
                raise StateError(
                    f"{found[0]} would be replaced, but its folder has no {self._of.name} of a cold start by this version "
                    "of shoal: move it away, or choose another --out"
                )
            for path in steps:
                shutil.rmtree(path)
            self._of.unlink(missing_ok=True)
            return
        if changed := changed_keys(before, self._recipe):
            follow = ("policy's weights", "games")  # from other keys, if one has changed
            named = [key for key in changed if key not in follow] or changed
            values = ", ".join(f"{key} was {_value(before, key)} and is {_value(self._recipe, key)}" for key in named)
            differs = f"with another recipe: {values}"
            if named == ["games"]:
                name = self._recipe["env"]["name"]
                differs = (
                    f"and {name} now gives other games: its file, its data, or the version of a package or of shoal has "
                    "changed"
                )
            # What a recipe of this version has or lacks by itself, nobody can restore.
            own = [key for key in named if not key.startswith("env.args")]
            is_of_version = any("missing" in (_value(before, key), _value(self._recipe, key)) for key in own)
            restore = f"Restore {'it' if len(named) == 1 else 'them'} to go on, or delete"
            raise StateError(
                f"{self._folder} is of a cold start that was stopped, {differs}. "
                f"{'Delete' if is_of_version else restore} {self._folder} to begin anew"
            )
        tuning.resume(self._state)
        log.info("going on after step=%d, saved in %s", tuning.steps_done, self._state)

    def keep(self, tuning: FineTuning, model: PolicyModel) -> None:
        """Save the policy and the state that it is now. Raises `StateError`."""
        self._keep_recipe()
        if not self.place(tuning.steps_done).exists():
            save_policy(model, self.place(tuning.steps_done), self._dtype, tokenizer_from=self._start)
        tuning.save(self._state)

    def finish(self) -> None:
        """Nothing is left to go on with: delete the state. The policies stay, and the recipe, which says what they play."""
        self._keep_recipe()
        shutil.rmtree(self._state, ignore_errors=True)

    def _keep_recipe(self) -> None:
        if not self._of.exists():
            write_atomically(self._of, json.dumps(self._recipe | {"sampling": self._sampling}, indent=1).encode())


def _value(tree: Any, key: str) -> str:
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return "missing" if tree is None else str(tree)[:100]


class SftEvaluation:
    """Evaluations on held-out tasks between steps. `command` gives the same figures of the same checkpoint."""

    def __init__(self, config: SftConfig, renderer: Renderer, sampling: Sampling) -> None:
        self._config, self._renderer, self._sampling = config, renderer, sampling
        self._env = env_of(config.env) if config.evaluates_every else None
        self._engine: Engine | None = None

    def is_due(self, step: int) -> bool:
        """Whether the policy after so many steps is evaluated."""
        every = self._config.evaluates_every
        return bool(every and step and (step % every == 0 or step == self._config.steps))

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest reward."""
        assert self._env is not None, "nothing is evaluated"
        return self._env.reward_bounds

    def of(self, checkpoint: Path, progress: Callable[[int], None]) -> Evaluation:
        """Play the episodes. Raises `ShoalError`, and what `progress` raises."""
        assert self._env is not None, "no evaluation is due"
        return self._played(self._env, self._config.eval_episodes, checkpoint, progress)

    def of_training(self, checkpoint: Path, progress: Callable[[int], None]) -> Evaluation | None:
        """Play some on training tasks; None without held-out tasks, whose place they have then. Raises as `of`."""
        assert self._env is not None, "no evaluation is due"
        if not self._env.num_heldout:
            return None
        return self._played(cast(Env, _TrainingTasks(self._env)), TRAINING_EPISODES, checkpoint, progress)

    def _played(self, env: Env, episodes: int, checkpoint: Path, progress: Callable[[int], None]) -> Evaluation:
        if self._engine is None:
            self._engine = open_engine(EngineSpec(kind=kind_for(checkpoint), threads=self._config.threads))
        self._engine.load(checkpoint, 0)
        return evaluate(self._engine, self._renderer, env, episodes, self._config.seed, self._sampling, 0, progress)

    def share(self, figures: Evaluation) -> float:
        """The share of wins, or where the mean reward is within its range; 0 if too many episodes have no score."""
        assert self._env is not None
        low, high = self._env.reward_bounds
        if figures.mean is None:
            return 0.0
        if why := why_not_comparable(figures):
            log.warning("the share of wins counts as 0: %s", why)
            return 0.0
        return figures.mean if figures.measure == "success" else (figures.mean - low) / (high - low)

    def command(self, checkpoint: Path) -> str:
        """The command that evaluates a checkpoint in the same way: it finds the environment in the recipe beside it."""
        config, sampling = self._config, self._sampling
        numbers = {
            "episodes": config.eval_episodes, "seed": config.seed, "max-turn-tokens": sampling.max_turn_tokens,
            "max-tokens": sampling.max_tokens, "threads": config.threads,
        }  # fmt: skip
        return command(
            "eval", str(checkpoint), *(part for name in numbers for part in (f"--{name}", str(numbers[name])))
        )


class _TrainingTasks:
    """An environment as if it had no held-out tasks, so that an evaluation plays those for training."""

    num_heldout = 0

    def __init__(self, env: Env) -> None:
        self._env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


def _tell_certain(
    step: int, config: SftConfig, metrics: dict[str, Any], figures: Evaluation, learned: Evaluation | None,
    bounds: tuple[float, float], falls_short: bool,
) -> bool:  # fmt: skip
    """Say how the policy does on training tasks, and whether it is too certain for RL, which is the result: it knows tasks
    by heart, or always writes the same. One that also falls short of `stop_at` is not advised to take fewer steps."""
    found, entropy = list[str](), metrics.get("entropy_nats", math.inf)
    if learned is not None:
        _report(step, config.steps, {}, learned)
        scale = 1.0 if figures.measure == "success" else bounds[1] - bounds[0]
        known, new = learned.mean, figures.mean
        if known is not None and new is not None and (known - new) / scale > BY_HEART:
            found.append("it does much better on training tasks than on held-out ones")
    if entropy < CERTAIN_NATS:
        found.append(f"its entropy is {entropy:.3f} nats a token, below {CERTAIN_NATS:g}")
    if found:
        log.warning(
            "the policy is too certain for RL, where most groups would be flat: %s. Let the player play more different "
            "tasks%s",
            ", and ".join(found), "" if falls_short else ", or take fewer steps",
        )  # fmt: skip
    return bool(found)


def _report(step: int, steps: int, metrics: dict[str, Any], figures: Evaluation | None) -> None:
    parts = [f"step={step}/{steps}"]
    if metrics:
        parts.append(f"loss={metrics['loss']:.4f} nats")
    if figures:
        unit = "%" if figures.measure == "success" else ""
        name, which = "wins" if unit else "reward", "held-out" if figures.tasks == "heldout" else "training"
        found = interval_of(figures)
        mean, low, high = (f"{100 * one:.1f}" if unit else f"{one:.3f}" for one in found or (0.0, 0.0, 0.0))
        result = f"{name}={mean}{unit} (95 %: {low} to {high})" if found else f"{name}=none"
        parts.append(f"{result} of {figures.episodes - figures.faults} episodes on {which} tasks")
        if figures.faults:
            parts.append(f"faults={figures.faults} (the environment failed: {printable(figures.fault)})")
    if metrics:
        parts.append(f"entropy={metrics['entropy_nats']:.3f} nats speed={metrics['train_tokens_per_s']:.0f} tokens/s")
    log.info("%s", " ".join(parts))


def _sampling(config: SftConfig, games: Sequence[Example], model: PolicyModel) -> Sampling:
    """The limits of evaluated episodes: no turn is longer than the longest that was learned from."""
    turns = (len(list(run)) for _, author in games for who, run in groupby(author) if who == POLICY)
    most = min(config.max_tokens, model.spec.max_positions)
    return Sampling(1.0, min(max(turns, default=most), most), most)
