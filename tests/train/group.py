"""Several processes that train together, for tests: each runs the same function, and rank 0's result comes back."""

import multiprocessing
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shoal.config import RunConfig, stay_on_this_machine
from shoal.train.distributed.learner import Leader, LeaderStates, follow, lead
from shoal.train.distributed.messages import Channel, End, joined

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.train.group"])

Led = Callable[..., Any]
"""What rank 0 does, given its learner and states."""


def together(world: int, directory: Path, config: RunConfig, states: Path, led: Led, *args: Any) -> Any:
    """Start a trainer's processes, let rank 0 do something, and end them. Fails if one of them fails."""
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder)
        processes = [
            _CONTEXT.Process(target=_member, args=(rank, world, there, directory, config, states, led, args))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(240)
        assert [process.exitcode for process in processes] == [0] * world
        return pickle.loads((there / "result").read_bytes())


def _member(
    rank: int,
    world: int,
    there: Path,
    directory: Path,
    config: RunConfig,
    states: Path,
    led: Led,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    stay_on_this_machine()
    with joined(rank, world, there / "meeting", "cpu") as channel:
        if rank:
            follow(directory, config, "cpu", channel)
            return
        learner, kept = lead(directory, states, config, "cpu", channel)
        result = led(learner, kept, *args)
        with channel.following(End()):
            pass
        (there / "result").write_bytes(pickle.dumps(result))


__all__ = ["Channel", "Leader", "LeaderStates", "together"]
