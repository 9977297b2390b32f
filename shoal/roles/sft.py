"""Supervised fine-tuning: a cold start before RL, from games that a scripted player plays.

Called by `shoal sft RECIPE`. It plays the games, trains on them with `train/sft`, and writes a checkpoint in HF format.
The same recipe and number of threads give the same bytes.
"""

import logging
import random
import tempfile
from pathlib import Path
from typing import Any

import torch

from shoal.config import SftConfig, load_sft
from shoal.envs.base import players_of
from shoal.envs.load import env_of
from shoal.envs.play import play_scripted
from shoal.errors import ConfigError
from shoal.policy.files import save_policy
from shoal.policy.hub import Hub
from shoal.policy.kinds import open_policy
from shoal.policy.render import Renderer
from shoal.policy.tiny import make_tiny
from shoal.protocol.hubref import is_hub
from shoal.protocol.types import POLICY, Sampling
from shoal.train.sft import fine_tune

log = logging.getLogger("sft")


def main(recipe: Path, out: Path, overrides: list[str]) -> None:
    """Make a checkpoint in `out` from a recipe. Raises `ConfigError` if recipe or environment cannot be used."""
    config = load_sft(recipe, overrides)
    torch.set_num_threads(config.threads)
    with tempfile.TemporaryDirectory(prefix="shoal-sft-") as scratch:
        start = recipe.parent / config.policy.path if config.policy.path else Path(scratch) / "tiny"
        if is_hub(config.policy.path):
            start = Path(scratch) / "model"
            Hub().bring(config.policy.path, start)
        elif not config.policy.path:
            make_tiny(config.policy.tiny, start, config.seed, "float32")
        _fine_tune(config, start, out)


def _fine_tune(config: SftConfig, start: Path, out: Path) -> None:
    model = open_policy(start, torch.float32, config.policy.implementation)
    renderer = Renderer.from_directory(start)
    examples = scripted_games(config, renderer)
    log.info("played games=%d; learning for %d steps", len(examples), config.steps)

    def progress(step: int, metrics: dict[str, Any]) -> None:
        if step % 20 == 0 or step + 1 == config.steps:
            speed = metrics["train_tokens_per_s"]
            log.info("step=%d/%d loss=%.4f nats speed=%.0f tokens/s", step + 1, config.steps, metrics["loss"], speed)

    fine_tune(model, examples, config, progress)
    save_policy(model, out, config.publish_dtype, tokenizer_from=start)
    log.info("wrote %s (%s); next: shoal eval %s --env %s", out, config.publish_dtype, out, config.env.name)


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
