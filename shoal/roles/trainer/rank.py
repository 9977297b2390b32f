"""One of the processes of a trainer that has several: rank 0 is the trainer's role, the others obey it.

Only rank 0 speaks to the coordinator, publishes, and decides what is learned when.
"""

import asyncio
import logging
import signal
import sys
from pathlib import Path

import torch

from shoal.config import rank_here
from shoal.errors import EXIT_TRY_AGAIN, ConfigError
from shoal.models.device import CUDA, take_device
from shoal.net.client import Client
from shoal.net.key_files import load_or_make_key
from shoal.net.server_address import SIGNALS
from shoal.roles.trainer.models import start_policy
from shoal.roles.trainer.trainer import Learning, Trainer
from shoal.run_folder import RunFolder
from shoal.train.distributed.learner import follow, lead
from shoal.train.distributed.messages import End, Lost, joined

log = logging.getLogger("trainer")


def main(run_dir: Path, url: str, meeting: Path) -> None:
    """Take part in the training of the run in `run_dir`, with the processes that meet at a file."""
    try:
        take_part(run_dir, url, meeting)
    except Lost:
        sys.exit(EXIT_TRY_AGAIN)  # without a word: the one that ended first has said why


def take_part(run_dir: Path, url: str, meeting: Path) -> None:
    """As `main`. Raises `Lost` if another process ends."""
    folder = RunFolder(run_dir)
    config = folder.config()
    rank, world = rank_here()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # while we wait for the others, Python would not hear of it
    torch.set_num_threads(config.train.threads)
    device = take_device(config.train.device)
    if device == CUDA:
        take_gpu(rank, world)
    if not rank:
        start_policy(folder, config)  # before the others read it: they wait for us
    with joined(rank, world, meeting, device) as channel:
        if rank:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # rank 0 hears it, too, and tells us when to end
            follow(folder.policy, config, device, channel)
            return
        log.info("trains in %d processes", world)
        learner, states = lead(folder.policy, folder.trainer, config, device, channel)
        key = load_or_make_key(folder.keys / "trainer.key")
        trainer = Trainer(
            folder, config, Client(url, key), key, learning=Learning(learner, states, device, learner.logprobs_at)
        )
        asyncio.run(trainer.run())
        with channel.following(End()):
            pass


def take_gpu(rank: int, world: int) -> None:
    """Give this process a GPU of its own. Raises `ConfigError` if there are too few."""
    found = torch.cuda.device_count()
    if found < world:
        raise ConfigError(
            f"train.processes = {world}: each needs a GPU of its own, and torch finds {found}. Lower it to {found}, or set "
            'train.device = "cpu"'
        )
    torch.cuda.set_device(rank)
