"""What a run file leaves open and the policy's size decides: the learning rate, the tokens of a micro-batch, the episodes
that an evaluation plays at a time, and the devices that processes share.

It tries sizes with the reckoning of `memory_plan`, so nothing is loaded. The launcher keeps what is found in the run's
folder: bits depend on it, so a resumed run keeps it.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from shoal.config import PRESET_LR, RunConfig, preset_lr
from shoal.envs.evaluate import BATCH
from shoal.errors import ShoalError, StateError
from shoal.launch.memory_plan import reports, settled, shared_devices
from shoal.models.config import ModelConfig
from shoal.models.open_model import spec_of
from shoal.models.random_model import tiny_spec
from shoal.run_folder import RunFolder

MOST_TOKENS = 16_384
"""Of a micro-batch that is sized here: more do not make a GPU faster."""

SPARE = 0.1
"""Share of a device's memory that such micro-batches leave free: other programs and later steps may need more."""

LEAST_ROWS = 8
"""Episodes that an evaluation plays at a time, at least: fewer are slow, and hardly smaller than the policy."""


class ResolvedSizes(NamedTuple):
    """A run file without open sizes."""

    config: RunConfig
    lines: tuple[str, ...]
    """What to say about the sizes that were found."""


def learned_parameters_of(spec: ModelConfig, config: RunConfig) -> int:
    """Parameters of a policy that learn: those of the adapter, if the run has one."""
    adapter = config.policy.adapter
    return spec.adapter_parameters(adapter.rank, adapter.targets) if adapter.rank else spec.num_parameters()


def with_preset_lr(config: RunConfig, spec: ModelConfig | None) -> RunConfig:
    """The run file with the learning rate that it leaves open; as it is without a known shape, and the trainer counts."""
    if config.train.lr != PRESET_LR or spec is None:
        return config
    return _with_train(config, lr=preset_lr(learned_parameters_of(spec, config)))


def first_spec(folder: RunFolder, config: RunConfig) -> ModelConfig | None:
    """The shape of the run's first policy; None if it is not known here, and the trainer is to say why."""
    with contextlib.suppress(ShoalError):
        if config.policy.path:
            return spec_of(folder.policy if folder.policy.exists() else Path(config.policy.path))
        return tiny_spec(config.policy.tiny)
    return None


def resolve_sizes(config: RunConfig, spec: ModelConfig, with_workers: bool, free: int = 0) -> ResolvedSizes:
    """Find the sizes that a run file leaves open. `free` is as in `memory_plan.reports`.

    Training comes first: its micro-batches are sized beside an evaluation of LEAST_ROWS episodes at a time.
    """
    lines = []

    def largest(sizes: Sequence[int], changed: Callable[[int], RunConfig], device: str, spare: float = 0.0) -> int:
        def tried(size: int) -> tuple[bool, bool]:
            found = reports(changed(size), spec, with_workers, free)
            report = next(one for one in found if one.device == device)
            return report.need <= (1 - spare) * report.free, report.shared

        return _largest(sizes, tried)

    here = settled(config)
    if config.train.lr == PRESET_LR:
        config = with_preset_lr(config, spec)
        lines.append(
            f"The learning rate is {config.train.lr:g} in this run: the preset for {learned_parameters_of(spec, config):,} "
            "parameters that learn (train.lr)"
        )
    if not config.train.microbatch_tokens:
        longest = min(config.sampling.max_tokens, spec.max_positions)
        sizes = _halves(MOST_TOKENS, min(MOST_TOKENS, 1 << (longest - 1).bit_length()))
        lean, device = _with_rows(config, config.eval.rows or LEAST_ROWS), here.train.device
        tokens = largest(sizes, lambda tokens: _with_train(lean, microbatch_tokens=tokens), device, SPARE)
        config = _with_train(config, microbatch_tokens=tokens)
        lines.append(
            f"A micro-batch has {tokens} tokens in this run: as many as fit the memory of {device} "
            "(train.microbatch_tokens)"
        )
    if not config.eval.rows and any(config.eval_episodes(env) for env in config.envs):
        open_rows, device = config, here.workers.device
        rows = largest(_halves(BATCH, LEAST_ROWS), lambda rows: _with_rows(open_rows, rows), device)
        config = _with_rows(config, rows)
        if rows < BATCH:
            lines.append(
                f"An evaluation plays {rows} episodes at a time in this run: {BATCH} do not fit the memory of {device} "
                "(eval.rows)"
            )
    return ResolvedSizes(config, tuple(lines))


def _largest(sizes: Sequence[int], tried: Callable[[int], tuple[bool, bool]]) -> int:
    """The first size with which all processes fit at once, or else in shifts; the last one if none fits. `tried` says of a
    size whether it fits and whether the processes then take shifts."""
    for in_shifts in (False, True):
        for size in sizes:
            if tried(size) == (True, in_shifts):
                return size
    return sizes[-1]


def _halves(most: int, least: int) -> list[int]:
    """`most`, its half, and so on, down to `least`."""
    sizes = [most]
    while sizes[-1] // 2 >= least:
        sizes.append(sizes[-1] // 2)
    return sizes


def _with_train(config: RunConfig, **changes: float) -> RunConfig:
    return msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, **changes))


def _with_rows(config: RunConfig, rows: int) -> RunConfig:
    return msgspec.structs.replace(config, eval=msgspec.structs.replace(config.eval, rows=rows))


SECTIONS = {"train": "trainer", "validators": "validators", "workers": "workers and evaluations"}
"""Of a run file, with the processes whose device each names."""


@dataclass(frozen=True)
class Shifts:
    """The devices whose memory processes have one after another."""

    config: RunConfig
    folder: RunFolder
    devices: frozenset[str] = frozenset()

    def folder_of(self, section: str) -> str:
        """The folder in which a section's processes queue; empty if none of them share a device."""
        device = self._device(section) if self.devices else ""
        return str(self.folder.shifts / device) if device in self.devices else ""

    def in_words(self) -> list[str]:
        """A line for each device."""
        return [
            f"These take shifts on {device}: {', '.join(name for key, name in SECTIONS.items() if self.folder_of(key))}. "
            'host.shifts = "off" lets all of them have its memory at once'
            for device in sorted(self.devices)
        ]

    def _device(self, section: str) -> str:
        return str(getattr(settled(self.config), section).device)


def shifts_of(config: RunConfig, folder: RunFolder, spec: ModelConfig | None, with_workers: bool) -> Shifts:
    """How a run's processes share devices. A shape that is not known shares none. Raises `StateError` if one that would
    take shifts cannot leave its device."""
    devices = shared_devices(config, spec, with_workers) if spec is not None else frozenset()
    found = Shifts(config, folder, devices)
    if with_workers and config.workers.count and config.workers.engine and found.folder_of("workers"):
        raise StateError(
            f'workers.engine = "{config.workers.engine}" keeps its memory on the device, and these processes must take '
            "shifts there: leave it out, set workers.count = 0, or give workers another device"
        )
    return found
