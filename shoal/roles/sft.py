"""Supervised fine-tuning: a cold start before RL, from games that a scripted player plays.

Called by `shoal sft RECIPE`, and by a stage of `shoal stages`, which may give it chosen rollouts instead. It plays the
games, trains on them with `train/sft`, and writes a checkpoint in HF format.
The same recipe and number of threads give the same bytes.
"""

import logging
import random
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch

from shoal.config import SftConfig, load_sft
from shoal.config.paths import env_at
from shoal.envs.base import players_of
from shoal.envs.load import env_of
from shoal.envs.play import play_scripted
from shoal.errors import ConfigError, StateError
from shoal.policy.files import save_policy
from shoal.policy.hub import Hub
from shoal.policy.kinds import open_policy
from shoal.policy.render import Renderer
from shoal.policy.tiny import make_tiny
from shoal.protocol.hubref import is_hub
from shoal.protocol.types import POLICY, Sampling
from shoal.train.chosen import Examples, tokenizer_digest
from shoal.train.sft import fine_tune

log = logging.getLogger("sft")


def main(recipe: Path, out: Path, overrides: list[str]) -> None:
    """Make a checkpoint in `out` from a recipe. Raises `ConfigError` if recipe or environment cannot be used."""
    make(load_sft(recipe, overrides), recipe.parent, out)


def make(config: SftConfig, beside: Path, out: Path, examples: Examples | None = None) -> int:
    """Make a checkpoint in `out`; gives how many tokens it learned from, prompts and repetitions included. Paths of the
    recipe are relative to `beside`. `examples` take the place of scripted games. Raises as `main`."""
    torch.set_num_threads(config.threads)
    config = msgspec.structs.replace(config, env=env_at(config.env, beside))
    with tempfile.TemporaryDirectory(prefix="shoal-sft-") as scratch:
        start = beside / config.policy.path if config.policy.path else Path(scratch) / "tiny"
        if is_hub(config.policy.path):
            start = Path(scratch) / "model"
            Hub().bring(config.policy.path, start)
        elif not config.policy.path:
            make_tiny(config.policy.tiny, start, config.seed, "float32")
        return _fine_tune(config, start, out, examples)


def _fine_tune(config: SftConfig, start: Path, out: Path, given: Examples | None) -> int:
    model = open_policy(start, torch.float32, config.policy.implementation)
    renderer = Renderer.from_directory(start)
    if given is None:
        games = scripted_games(config, renderer)
        log.info("played games=%d; learning for %d steps", len(games), config.steps)
    else:
        games = chosen_rows(given, start, config.max_tokens)
        log.info("chosen rows=%d; learning for %d steps", len(games), config.steps)
    tokens = 0

    def progress(step: int, metrics: dict[str, Any]) -> None:
        nonlocal tokens
        tokens += metrics["tokens"]
        if step % 20 == 0 or step + 1 == config.steps:
            speed = metrics["train_tokens_per_s"]
            log.info("step=%d/%d loss=%.4f nats speed=%.0f tokens/s", step + 1, config.steps, metrics["loss"], speed)

    fine_tune(model, games, config, progress)
    save_policy(model, out, config.publish_dtype, tokenizer_from=start)
    log.info("wrote %s (%s); next: shoal eval %s --env %s", out, config.publish_dtype, out, config.env.name)
    return tokens


def chosen_rows(given: Examples, start: Path, max_tokens: int) -> list[tuple[list[int], list[int]]]:
    """The rows of chosen rollouts that teach, without longer ones. Raises `StateError` if there are none, or if they were
    written with another tokenizer."""
    if given.tokenizer != tokenizer_digest(start):  # guard: chosen-with-one-tokenizer
        raise StateError(
            "the chosen rollouts have another tokenizer than the policy that is to learn them: start from the run's own "
            "policy, or from one that it began with"
        )
    rows = [row for row in given.read() if len(row[0]) <= max_tokens and POLICY in row[1]]
    if not rows:
        raise StateError(
            f"no rollout was chosen that has at most max_tokens = {max_tokens} tokens: choose more in the reject stage, or "
            "raise max_tokens"
        )
    return rows


def scripted_games(config: SftConfig, renderer: Renderer) -> list[tuple[list[int], list[int]]]:
    """Play the recipe's games with its scripted player; gives token ids and authors of each row that teaches."""
    env = env_of(config.env)
    players = players_of(env)
    if config.player not in players:
        known = ", ".join(players) or "none: give it players()"
        raise ConfigError(
            f"player = {config.player}: environment {env.name} has no such scripted player; it has {known}"
        )
    player = players[config.player]
    sampling = Sampling(1.0, config.max_tokens, config.max_tokens)
    rng = random.Random(config.seed)
    tasks = [env.task(i) for i in range(env.num_tasks)]
    if config.tasks == "all":
        tasks += [env.task(i, heldout=True) for i in range(env.num_heldout)]
    games = []
    for _ in range(config.episodes):
        talk = play_scripted(env, renderer, rng.choice(tasks), player, rng, sampling)
        games += [(list(row.tokens), list(row.author)) for row in talk.rows if POLICY in row.author]
    return games
