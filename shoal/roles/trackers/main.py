"""The logger: copies the figures of a run into W&B, trackio and TensorBoard, as `logging.to` of the run file says.

It reads what the trainer and the evaluations leave in the run's folder, so nothing waits for it: neither training nor
another logger is held up by one that fails or hangs. It decides nothing.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path, PurePath

from shoal.config import RunConfig, settle_loggers
from shoal.protocol.hub_reference import is_hub
from shoal.roles.trackers.feed import Follower, Logger
from shoal.run_folder import RunFolder

log = logging.getLogger(__name__)

FINISH_S = 25.0
"""After the run's end the loggers may take this long for what is left. The launcher waits a little longer."""


def main(run_dir: Path) -> None:
    """Follow a run until told to stop by SIGTERM."""
    folder = RunFolder(run_dir)
    config = folder.config()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    settle_loggers(folder.loggers)
    if follow(followers(folder, config), stop):
        return
    os._exit(0)  # a thread of a logger that hangs would keep the process


def followers(folder: RunFolder, config: RunConfig) -> list[Follower]:
    """One for each logger that the run file names, but `jsonl`, which is what the trainer writes."""
    makers: dict[str, Callable[[], Logger]] = {
        "wandb": partial(_wandb, folder, config),
        "trackio": partial(_trackio, folder, config),
        "tensorboard": partial(_tensorboard, folder),
    }
    return [Follower(name, makers[name], folder) for name in dict.fromkeys(config.logging.to) if name in makers]


def follow(all_: Iterable[Follower], stop: threading.Event, finish_s: float = FINISH_S) -> bool:
    """Run each in a thread until `stop`; returns whether all came to their end in time."""
    threads = [threading.Thread(target=one.run, args=(stop,), name=one.name, daemon=True) for one in all_]
    for thread in threads:
        thread.start()
    log.info("loggers=%s", ",".join(thread.name for thread in threads))
    while not stop.wait(1.0):  # without a timeout, the signal's handler would not be called
        pass
    deadline = time.monotonic() + finish_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            log.warning("logger=%s did not finish in time after_s=%.0f", thread.name, finish_s)
    return not any(thread.is_alive() for thread in threads)


def _wandb(folder: RunFolder, config: RunConfig) -> Logger:
    from shoal.roles.trackers.to_wandb import WandB

    return WandB(folder.loggers, config.logging.project, config.name, folder.run_id(), _about(config))


def _trackio(folder: RunFolder, config: RunConfig) -> Logger:
    from shoal.roles.trackers.to_trackio import Trackio

    return Trackio(config.logging.project, config.name, folder.run_id(), _about(config))


def _tensorboard(folder: RunFolder) -> Logger:
    from shoal.roles.trackers.to_tensorboard import TensorBoard

    return TensorBoard(folder.loggers / "tensorboard")


def _about(config: RunConfig) -> dict[str, object]:
    """What loggers show of the run file: enough to tell runs apart. Not its seed: secrets may follow from it.
    Of a model's folder only the name: the others tell about the host's machine."""
    train, rollouts = config.train, config.rollouts
    return {
        "name": config.name,
        "steps": config.steps,
        "envs": ", ".join(env.label for env in config.envs),
        "policy": config.policy.path if is_hub(config.policy.path) else PurePath(config.policy.path).name,
        "lr": train.lr,
        "group_size": rollouts.group_size,
        "batch_groups": rollouts.batch_groups,
        "max_staleness": rollouts.max_staleness,
    }
