"""Recordings: the rollouts that a run's policy plays here, as a worker would, with several numbers of threads.

A recording can be written to a file, and read on another machine that has the same policy.

Axes: P policy tokens of all rollouts, in order.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.chat.isolated import open_own
from shoal.chat.renderer import Renderer
from shoal.config import RunConfig, sampling_of
from shoal.engine.interface import Engine, ScoreRequest
from shoal.engine.open import EngineSpec, kind_for, open_engine
from shoal.envs.load import env_of
from shoal.envs.play_episodes import play_block
from shoal.errors import ConfigError, StateError
from shoal.models.device import CPU
from shoal.protocol.encoding import WireError, domain_hash, from_msgpack
from shoal.protocol.messages import Block, Group, Message, Rollout, Sampling, Slot
from shoal.protocol.rollout_validation import flaw_of
from shoal.protocol.task_draws import EnvDraw, draw_task
from shoal.protocol.tolerances import engine_kind
from shoal.verification.check_context import score_requests
from shoal.verification.encode_submission import prove_activations
from shoal.weights.manifest import weights_root

THREADS = (1, 2, 4)
"""Threads of the engines that play, in turn, and of those that recompute."""


class RecordedBlock(Message, frozen=True):
    """One block as a worker plays it."""

    threads: int
    slots: tuple[Slot, ...]
    groups: tuple[Group, ...]
    proofs: tuple[bytes, ...] = ()
    """Proofs of the activations, one for each group; empty unless the run asks for them."""


class Recording(Message, frozen=True):
    """Honest rollouts of one machine: what `--save` writes and `--with` reads."""

    machine: str
    root: str
    """Weights root of the policy that played."""
    dtype: str
    sampling: Sampling
    played: tuple[RecordedBlock, ...]

    @property
    def kind(self) -> str:
        """Kind of the engine that played."""
        return engine_kind(self.machine)

    def requests(self) -> list[ScoreRequest]:
        """One for each row of each rollout."""
        return [request for part in self.played for request in _requests(part.slots, part.groups)]

    def rollouts(self) -> list[Rollout]:
        return [rollout for part in self.played for group in part.groups for rollout in group.rollouts]

    def claimed_P(self) -> NDArray[np.float64]:
        """Log-probs as they were played."""
        return np.concatenate([rollout.logprobs_P() for rollout in self.rollouts()]).astype(np.float64)


def play(config: RunConfig, policy: Path, episodes: int, device: str = CPU, kind: str = "") -> Recording:
    """Play at least `episodes` episodes, as whole blocks, with each number of threads in turn. `kind` is of the engine;
    empty is the policy's.

    Raises `ConfigError` if every prompt is so long that the policy cannot write anything.
    """
    sampling = sampling_of(config)
    envs = {env.label: env_of(env) for env in config.envs}
    renderer = open_own(policy)
    engine = open_engine(
        EngineSpec(kind or kind_for(policy), config.sampled_dtype, device=device, noise=sampling.noise)
    )
    engine.load(policy, 0)
    size, num_blocks = config.rollouts.group_size, -(-episodes // config.rollouts.block_rollouts)
    played = []
    for index in range(num_blocks):
        progress("playing", index, num_blocks)
        threads = THREADS[index % len(THREADS)]
        torch.set_num_threads(threads)
        slots = tuple(_slots(config, [env.num_tasks for env in envs.values()], index))
        groups = tuple(play_block(engine, renderer, envs, Block(index, slots), size, sampling))
        proofs: tuple[bytes, ...] = ()
        if config.verify.proofs != "none":
            scores = engine.score(_requests(slots, groups), sampling.temperature, hidden=True)
            proofs = prove_activations(groups, scores)
        played.append(RecordedBlock(threads, slots, groups, proofs))
    progress("playing", num_blocks, num_blocks)
    recording = Recording(machine(engine), weights_root(policy), config.sampled_dtype, sampling, tuple(played))
    if not recording.rollouts():
        raise ConfigError(
            f"every prompt of {', '.join(envs)} fills sampling.max_tokens, so the policy can write nothing: raise it"
        )
    return recording


def machine(engine: Engine) -> str:
    """What this machine's noise depends on: implementation, device and instruction set."""
    facts = engine.facts
    return f"{facts.implementation} {facts.device} {torch.backends.cpu.get_cpu_capability()}"


def read(path: Path, config: RunConfig, policy: Path) -> Recording:
    """Read what another machine played with the same policy. Raises `StateError`."""
    try:
        recording = from_msgpack(path.read_bytes(), Recording)
    except (OSError, WireError) as error:
        raise StateError(f"{path} is not a recording of `shoal calibrate --save`: {error}") from None
    if (recording.root, recording.dtype) != (weights_root(policy), config.sampled_dtype):
        raise StateError(
            f"{path} was played by another policy or in another dtype ({recording.dtype}): make it with this run file. "
            "If policy.path is empty, fix the seed in the run file"
        )
    sampling = recording.sampling
    if sampling.noise != config.sampling.noise:
        raise StateError(
            f"{path} was played with the noise family {sampling.noise}, and this run file names {config.sampling.noise}: "
            "make it with this run file"
        )
    flaw = flaw_of(
        recording.rollouts(), vocabulary=Renderer.from_directory(policy).vocabulary, max_tokens=sampling.max_tokens,
        max_rollout_tokens=sampling.max_rollout_tokens,
    )  # fmt: skip
    if flaw is not None:
        raise StateError(f"{path} is damaged: {flaw}")
    if not all(rollout.num_policy_tokens() for rollout in recording.rollouts()):
        raise StateError(f"{path} is damaged: it holds rollouts in which the policy says nothing")
    if config.verify.proofs != "none" and any(len(part.proofs) != len(part.groups) for part in recording.played):
        raise StateError(f"{path} has no proofs of activations: make it again with this run file's verify.proofs")
    return recording


def _slots(config: RunConfig, num_tasks: list[int], block: int) -> Iterator[Slot]:
    per_block = config.rollouts.block_rollouts // config.rollouts.group_size
    table = [EnvDraw(env.label, env.weight, size) for env, size in zip(config.envs, num_tasks, strict=True)]
    for slot in range(block * per_block, (block + 1) * per_block):
        seed = domain_hash("calibrate", slot.to_bytes(8, "big"))
        yield Slot(slot, seed.hex(), *draw_task(seed, table))


def _requests(slots: tuple[Slot, ...], groups: tuple[Group, ...]) -> list[ScoreRequest]:
    return [request for slot, group in zip(slots, groups, strict=True) for request in score_requests(slot, group)]


# --- How far a calibration is: a counter in a terminal, one line elsewhere, both on stderr ---


def progress(what: str, done: int, total: int) -> None:
    """Show that `done` of `total` parts of the work are done."""
    if sys.stderr.isatty():
        print(f"\r\033[K{what}: {done} of {total}" if done < total else "\r\033[K", end="", file=sys.stderr, flush=True)
    elif done == 0:
        remark(f"{what} ...")


def remark(line: str) -> None:
    """Print a line that is not part of the tables."""
    print(line, file=sys.stderr, flush=True)
