"""A learner in several processes: rank 0 has the one that its role calls, and tells the others, which do the same.

All take every step, with the same rows; `distributed.fsdp` says who computes what. So each process is a function of the
state and of the orders, and processes that are started again after a kill come to the same bits. The same number of
processes gives the same bits; another number gives other last bits, because sums are in another order.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.config import RunConfig
from shoal.train.checkpoint import (
    Numbers,
    States,
    crc32_of,
    keep,
    newest,
    read_shards,
    shapes_of,
    shard_of,
    write_shards,
)
from shoal.train.distributed.fsdp import Sharded, ShardedPolicy, load_sharded, sharded_logprobs
from shoal.train.distributed.messages import Channel, End, Gather, LearnRequest, Load, Predict, PredictAt, Save
from shoal.train.learner import Learner
from shoal.train.master_weights import layout_of
from shoal.train.microbatches import PADDED
from shoal.train.rows import TrainingRow, bytes_of, row_of


class RankLearner(Learner):
    """The learner of any of the processes, which has a part of the policy."""

    def __init__(self, policy: ShardedPolicy, config: RunConfig, channel: Channel) -> None:
        super().__init__(policy, config.train, config.sampling, steps=config.steps, ranks=Sharded(channel))
        self.policy, self.channel = policy, channel

    def logprobs(self, rows: Sequence[TrainingRow]) -> list[NDArray[np.float32]]:
        """See `Learner`. Rank 0 gets them, and the others none."""
        return self._logprobs_of(self.policy, rows, self.config.packing)

    def logprobs_at(self, directory: Path, rows: Sequence[TrainingRow]) -> list[NDArray[np.float32]]:
        """The same under a published policy, for `with_own_denominators`."""
        published = load_sharded(directory, self.config, self.policy.device.type, self.channel)
        return self._logprobs_of(published, rows, PADDED)

    def _logprobs_of(
        self, policy: ShardedPolicy, rows: Sequence[TrainingRow], packing: str
    ) -> list[NDArray[np.float32]]:
        return sharded_logprobs(
            policy, rows, self.channel, temperature=self.temperature,
            microbatch_tokens=self.config.microbatch_tokens, packing=packing,
        )  # fmt: skip


class Leader(RankLearner):
    """The learner of rank 0, for the trainer's role."""

    def step(self, rows: Sequence[TrainingRow], version: int, budgets: Sequence[int] = ()) -> dict[str, Any]:
        """See `Learner`."""
        order = LearnRequest(tuple(map(bytes_of, rows)), version, tuple(budgets), self.steps, self.lr_factor)
        with self.channel.following(order):
            return super().step(rows, version, budgets)

    def logprobs(self, rows: Sequence[TrainingRow]) -> list[NDArray[np.float32]]:
        """See `Learner`."""
        with self.channel.following(Predict(tuple(map(bytes_of, rows)))):
            return super().logprobs(rows)

    def logprobs_at(self, directory: Path, rows: Sequence[TrainingRow]) -> list[NDArray[np.float32]]:
        """See `RankLearner`."""
        with self.channel.following(PredictAt(str(directory), tuple(map(bytes_of, rows)))):
            return super().logprobs_at(directory, rows)


class LeaderStates(States):
    """The states of all processes, for the trainer's role."""

    def __init__(self, folder: Path, learner: Leader) -> None:
        super().__init__(folder, learner)
        self._channel = learner.channel

    def save(self, version: int) -> None:
        """See `States`."""
        numbers = Numbers(version, self.learner.updates, layout_of(self.learner.config))
        size = sum(tensor.nbytes for tensor in self.learner.state(version).tensors.values())
        keep(self.folder, numbers, size, lambda writing: self._write(writing, version))

    def copy(self, version: int) -> Callable[[], None]:
        """See `States`. What all processes must do cannot be done beside the next step: it is done now."""
        self.save(version)
        return lambda: None

    def load(self) -> int | None:
        """See `States`."""
        found = newest(self.folder, lambda folder, numbers: (folder, numbers))
        if found is None:
            return None
        folder, numbers = found
        self.learner.demand_fit(numbers.version, numbers.layout, shapes_of(folder))
        with self._channel.following(Load(str(folder), numbers.updates)):
            _load_part(folder, self.learner, numbers.updates)
        return numbers.version

    def _write(self, writing: Path, version: int) -> list[tuple[str, str]]:
        with self._channel.following(Save(str(writing), version)):
            return _save_part(writing, self.learner, version, self._channel)


def lead(
    directory: Path, states: Path, config: RunConfig, device: str, channel: Channel
) -> tuple[Leader, LeaderStates]:
    """The learner and the states of rank 0, which begins with the policy in a directory."""
    learner = Leader(load_sharded(directory, config.train, device, channel), config, channel)
    return learner, LeaderStates(states, learner)


def follow(directory: Path, config: RunConfig, device: str, channel: Channel) -> None:
    """What all processes but rank 0 do: obey until the end."""
    learner = RankLearner(load_sharded(directory, config.train, device, channel), config, channel)
    while not isinstance(order := channel.hear(), End):
        with channel.reached():
            match order:
                case LearnRequest(rows, version, budgets, steps, lr_factor):
                    learner.steps, learner.lr_factor = steps, lr_factor
                    learner.step([row_of(row) for row in rows], version, budgets)
                case Predict(rows):
                    learner.logprobs([row_of(row) for row in rows])
                case PredictAt(directory_there, rows):
                    learner.logprobs_at(Path(directory_there), [row_of(row) for row in rows])
                case Gather(name, dtype):
                    learner.policy.send(name, getattr(torch, dtype))
                case Save(folder, version):
                    with contextlib.suppress(OSError):  # rank 0 has the same error, and says so
                        _save_part(Path(folder), learner, version, channel)
                case Load(folder, updates):
                    _load_part(Path(folder), learner, updates)


def _save_part(writing: Path, learner: Learner, version: int, channel: Channel) -> list[tuple[str, str]]:
    """Write this process's part of a state. Returns the CRC-32 in hex and the name of each file of all processes."""
    write_shards(writing, learner.state(version).tensors)
    own = shard_of(writing, channel.rank)
    found = channel.all_numbers([int(crc32_of(own), 16) if own else -1])
    files = [shard_of(writing, rank) for rank in range(channel.world)]
    return [(f"{int(crc):08x}", file.name) for (crc,), file in zip(found, files, strict=True) if file]


def _load_part(folder: Path, learner: Learner, updates: int) -> None:
    read_shards(folder, learner.state(0).tensors)
    learner.resume(updates)
