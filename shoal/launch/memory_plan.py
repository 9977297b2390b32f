"""Whether a run fits into the memory of this machine: what each of its roles takes, and a layout of training that fits.

Called before the roles of a run start, and by `shoal doctor --recipe`. It reckons with the shape of the policy alone:
nothing is loaded, and torch is imported only if a role computes on a GPU. The disk is looked at, too. Processes that
cannot be on a GPU together may be there one after another (`roles/node/device_queue`): this file decides it.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shoal.config import RunConfig
from shoal.envs.evaluate import BATCH
from shoal.errors import StateError
from shoal.humanize import data_size
from shoal.models.config import ModelConfig
from shoal.models.device import AUTO, CPU, MPS, take_device
from shoal.models.memory import (
    ITEM_BYTES,
    EngineMemory,
    Layout,
    MemoryPart,
    engine_memory,
    judge_parts,
    played_on_gpu,
    scored_on_gpu,
    trainer_parts,
    trainer_state_bytes,
)
from shoal.models.open_model import spec_of
from shoal.plan.sizes import quota_mb_of, sizes_of
from shoal.protocol.algorithm_config import judge_named, needs_critic, needs_reference
from shoal.protocol.constants import COMPLETIONS
from shoal.run_folder import free_below, held_below
from shoal.weights.memory_limit import free_bytes

LIBRARY_BYTES = 150_000_000
"""What the processes of a run share: the code of torch and of other libraries."""

ENGINE_BYTES, TRAINER_BYTES = 200_000_000, 350_000_000
"""Of a process that has imported torch, beside what it shares and before it loads a policy. A trainer uses more of it."""

LIGHT_BYTES = 60_000_000
"""The same of a process without torch: coordinator, origin, stage."""

GPU_BYTES = 600_000_000
"""Of a process that uses a GPU, on the GPU, before it loads a policy."""

KEPT = (
    "weights", "adapter", "reference", "float32 weights", "moments", "critic", "critic's float32 weights",
    "critic's moments", "teacher", "reward_model",
)  # fmt: skip
"""What a process has on a device from one work to the next. Between its shifts the memory of the CPU keeps that."""

FULL_BYTES = 1_000_000
"""A disk with less than this free is full: submissions and events may not fit."""

LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"recompute": "layers"},
    {"recompute": "layers", "moments": "8bit"},
    {"recompute": "layers", "moments": "8bit", "dtype": "bfloat16"},
)
"""What `fits` tries in the place of a run's own layout, best first: keys of `train`."""


@dataclass(frozen=True)
class RoleNeeds:
    """What one role takes, in each of its processes."""

    name: str
    device: str
    parts: tuple[MemoryPart, ...]
    processes: int = 1
    own_gpus: bool = False
    """Whether each of its processes has a GPU of its own, if they compute on GPUs."""

    def count_on(self, device: str) -> int:
        """Processes that share the memory of one device."""
        return 1 if self.own_gpus and device != CPU else self.processes

    def on(self, device: str) -> int:
        """Bytes in the memory of one device, all processes together."""
        sizes = [part.size for part in self.parts if (CPU if part.on_cpu else self.device) == device]
        return self.count_on(device) * sum(sizes)

    def beside(self, device: str) -> int:
        """Bytes of a device that each process takes even while it has no shift there."""
        return (
            sum(part.size for part in self.parts if part.name == "process" and not part.on_cpu) if device != CPU else 0
        )

    def in_shifts(self) -> "RoleNeeds":
        """The same with what each process parks in the memory of the CPU. It loads nothing meanwhile."""
        parked = sum(part.size for part in self.parts if part.name in KEPT and not part.on_cpu)
        loading = sum(part.size for part in self.parts if part.name == "loading")
        rest = [part for part in self.parts if part.name != "loading"]
        return replace(self, parts=(*rest, MemoryPart("loading or parked", max(parked, loading), True)))


class Fit(NamedTuple):
    """What `fits` found."""

    keys: dict[str, Any]
    """Of `train`, which the run file lacks."""
    missing: int
    """Bytes that this layout still lacks; 0: it fits."""


def fits(spec: ModelConfig, layout: Layout, free: int, published: str = "float32") -> Fit:
    """The first of LAYOUTS with which a trainer alone fits into `free` bytes of its device, or the one that lacks least.

    A trainer computes in float32 or in the dtype that is `published`, also with an adapter, which itself is float32.
    """
    tried = []
    for keys in LAYOUTS:
        if keys.get("dtype") not in (None, published):
            continue
        if layout.processes > 1 and "moments" in keys:  # `config/validate` refuses it
            continue
        parts = trainer_parts(spec, replace(layout, **keys))
        tried.append(Fit(keys, max(0, sum(part.size for part in parts if not part.on_cpu) - free)))
        if not tried[-1].missing:
            return tried[-1]
    return min(tried, key=lambda fit: fit.missing)


def layout_of(config: RunConfig, spec: ModelConfig) -> Layout:
    """The run file's layout of training."""
    train = config.train
    longest = min(config.sampling.max_tokens, spec.max_positions)
    return Layout(
        dtype=train.dtype or "float32", moments=train.moments, recompute=train.recompute,
        rank=config.policy.adapter.rank, targets=config.policy.adapter.targets,
        microbatch_tokens=train.microbatch_tokens, row_tokens=longest, processes=train.processes,
        base=config.policy.adapter.base, reference=needs_reference(train.algorithm),
        critic=needs_critic(train.algorithm),
    )  # fmt: skip


def roles_of(config: RunConfig, spec: ModelConfig, with_workers: bool) -> Iterator[RoleNeeds]:
    """What the roles of a run take that the launcher starts."""
    light = ["coordinator", "origin", *(["stage"] if any(env.kind == COMPLETIONS for env in config.envs) else [])]
    yield RoleNeeds(
        "the rest", CPU, (MemoryPart("libraries", LIBRARY_BYTES), *(MemoryPart(name, LIGHT_BYTES) for name in light))
    )
    adapter, several = config.policy.adapter, config.train.processes > 1
    learned = 4 * spec.adapter_parameters(adapter.rank, adapter.targets)
    # Several processes gather one tensor at a time, and the embedding is the largest.
    values = spec.vocab_size * spec.width if several else spec.num_parameters()
    size = learned if adapter.rank else int(values * ITEM_BYTES[config.policy.kept_dtype])
    version = MemoryPart("version being published", size, True)
    parts = [*trainer_parts(spec, layout_of(config, spec)), *_judge_of(config, spec)]
    training = [*parts, version]
    if config.train.device != CPU and not several:  # guard: a-gpu-is-loaded-from-memory
        training.append(MemoryPart("loading", next(part.size for part in parts if part.name == "weights"), True))
    if config.storage.state_every > 1 and not several:  # guard: copied-state-takes-memory
        training.append(MemoryPart("state being saved", trainer_state_bytes(spec, layout_of(config, spec)), True))
    yield replace(
        _role("trainer", config.train.device, training, config.train.processes, own=TRAINER_BYTES), own_gpus=several
    )
    if several:
        yield RoleNeeds("torchrun's agent", CPU, (MemoryPart("process", ENGINE_BYTES),))
    needs = engine_memory(spec, config.sampled_dtype, adapter.rank, adapter.targets, adapter.base)
    rows = config.rollouts.block_rollouts
    longest = config.sampling.max_tokens
    if config.validators.count:
        judged = needs.score(rows * longest, longest, hidden=config.verify.proofs != "none")
        parts = _engine(needs, "scoring", judged, config.validators.device)
        yield _role("validator", config.validators.device, parts, config.validators.count)
    played = _engine(needs, "playing", needs.play(rows, longest, config.sampling.all_tokens), config.workers.device)
    if with_workers and (count := config.workers.count + config.workers.cheating):
        yield _role("worker", config.workers.device, played, count)
    if any(config.eval_episodes(env) for env in config.envs):
        needs = engine_memory(spec, config.eval.dtype, adapter.rank, adapter.targets, adapter.base)
        rows = config.eval.rows or BATCH
        size = needs.play(rows, longest, config.sampling.all_tokens)
        yield _role("evaluation", config.workers.device, _engine(needs, "playing", size, config.workers.device))


def _judge_of(config: RunConfig, spec: ModelConfig) -> list[MemoryPart]:
    """The trainer's teacher or reward model; nothing if its shape cannot be read, for the trainer is to say why."""
    named = judge_named(config.train.algorithm)
    if not named:
        return []
    with contextlib.suppress(StateError):
        return judge_parts(named, spec_of(Path(getattr(config.train, named))), layout_of(config, spec))
    return []


def _role(
    name: str, device: str, parts: Sequence[MemoryPart], processes: int = 1, own: int = ENGINE_BYTES
) -> RoleNeeds:
    process = [MemoryPart("process", own, True)]
    if device != CPU:
        process.append(MemoryPart("process", GPU_BYTES))
    return RoleNeeds(name, device, (*process, *parts), processes)


def _engine(needs: EngineMemory, work: str, size: int, device: str) -> list[MemoryPart]:
    """An engine while it loads a version, or while it works: it needs the larger of the two."""
    if device == CPU:
        return [MemoryPart("weights", needs.loaded), MemoryPart(work, max(size, needs.load() - needs.loaded))]
    size = played_on_gpu(size) if work == "playing" else scored_on_gpu(size)
    return [
        MemoryPart("loading", needs.load_for_gpu(), True),
        MemoryPart("weights", needs.loaded),
        MemoryPart(work, size),
    ]


def demand_fit(config: RunConfig, spec: ModelConfig, root: Path, with_workers: bool) -> None:
    """Raise `StateError` if the run in the folder `root` needs more memory or more disk than this machine has free."""
    demand_memory(config, spec, with_workers)
    demand_disk(config, root, with_workers)
    demand_quota(config)


def demand_quota(config: RunConfig) -> None:
    """Raise `StateError` if the run's quota has no room for the weights that the run never deletes: no worker would ever
    get a lease. The config's paths are absolute."""
    storage, sizes = config.storage, sizes_of(config, Path())
    if storage.quota_mb * 1e6 >= sizes.least_blobs:
        return
    kept = "of all versions" if storage.retain == "all" else "that its nodes may still need"
    instead = ', or storage.retain = "window"' if storage.retain == "all" else ""
    raise StateError(
        f"storage.quota_mb = {storage.quota_mb}, and this run keeps {data_size(sizes.needed_blobs)}, of which "
        f"{data_size(sizes.least_blobs)} are weights {kept} ({data_size(sizes.version)} each): above the quota no "
        f"worker gets a lease, so it would wait for ever. Set storage.quota_mb = {quota_mb_of(sizes)} or more{instead}"
    )


def demand_disk(config: RunConfig, root: Path, with_workers: bool) -> None:
    """Raise `StateError` if the run's folder may grow by more than is free on its disk. The config's paths are absolute."""
    held = held_below(
        root, without="*.sqlite*"
    )  # the log, the page's index and the env server's replies are not planned
    need, free = disk_of(config, Path(), with_workers) - held, free_below(root)
    if need > free:
        raise StateError(
            f"this run needs about {data_size(need)} of disk in {root}, and {data_size(free)} are free: free some space, "
            "give --out on another disk, lower storage.quota_mb or storage.window_steps by --set, or raise "
            "storage.checkpoint_every"
        )


def full_disk(root: Path) -> str:
    """What the view says while the disk of a run's folder is full; empty if it is not."""
    if free_below(root) >= FULL_BYTES:
        return ""
    return f"the disk of {root} is full: free some space. Senders try again, and nothing that was answered is lost"


def disk_of(config: RunConfig, recipe_dir: Path, with_workers: bool) -> float:
    """Bytes that the run's folder holds when it holds most, with the versions of workers that are started here."""
    sizes = sizes_of(config, recipe_dir)
    workers = config.workers.count + config.workers.cheating if with_workers else 0
    return sizes.host_disk + workers * sizes.worker_disk


def demand_memory(config: RunConfig, spec: ModelConfig, with_workers: bool) -> None:
    """Raise `StateError` if the run's roles together need more memory than this machine has free."""
    for report in reports(config, spec, with_workers):
        if report.need > report.free:
            raise StateError(f"{report.in_words()}. {report.advice}")


class MemoryReport(NamedTuple):
    """The memory of one device, and what a run takes of it."""

    device: str
    free: int
    roles: list[RoleNeeds]
    advice: str
    """What to change if it does not fit."""
    shared: bool = False
    """Whether the processes that compute on it have its memory one after another."""

    @property
    def need(self) -> int:
        return _taken(self.roles, self.device, self.shared)

    def in_words(self) -> str:
        """How much is needed, and what for."""
        ordered = sorted(self.roles, key=lambda role: -role.on(self.device))
        parts = [part for part in ordered[0].parts if part.size > self.need / 100]
        first = ", ".join(f"{part.name} {data_size(part.size)}" for part in parts)
        others = "".join(
            f"; {role.name} {data_size(role.on(self.device))}" for role in ordered[1:] if role.on(self.device)
        )
        where = "" if self.device == CPU else f" on {self.device}"
        how = " with one process at a time" if self.shared else ""
        return (
            f"this run needs about {data_size(self.need)} of memory{where}{how}, and {data_size(self.free)} are free: "
            f"{ordered[0].name} {data_size(ordered[0].on(self.device))} ({first}){others}"
        )


def reports(config: RunConfig, spec: ModelConfig, with_workers: bool, free: int = 0) -> Iterator[MemoryReport]:
    """What the run takes of each memory here. `free` replaces what is free in the memory of the device that trains."""
    config = settled(config)
    shared = shared_devices(config, spec, with_workers, free)
    roles = [
        role.in_shifts() if role.device in shared and role.device != CPU else role
        for role in roles_of(config, spec, with_workers)
    ]
    trainer = next(role for role in roles if role.name == "trainer")
    layout = sum(part.size for part in trainer_parts(spec, layout_of(config, spec)) if not part.on_cpu)
    for device in dict.fromkeys([CPU, *(role.device for role in roles)]):
        has = free if free and device == trainer.device else free_on(device)
        count, in_shifts = trainer.count_on(device), device in shared and device != CPU
        if in_shifts:
            others = sum(role.processes * role.beside(device) for role in roles)
        else:
            others = sum(role.on(device) for role in roles) - count * layout
        left = (has - others) // count if device == trainer.device else 0
        yield MemoryReport(device, has, roles, _advice(config, spec, left), in_shifts)


def shared_devices(config: RunConfig, spec: ModelConfig, with_workers: bool, free: int = 0) -> frozenset[str]:
    """The devices whose memory the run's processes have one after another, as `host.shifts` says; `free` is as in
    `reports`. auto: GPUs that cannot hold all of them at once."""
    config = settled(config)
    if config.host.shifts == "off" or config.train.processes > 1:
        return frozenset()
    roles = list(roles_of(config, spec, with_workers))
    computing = [role for role in roles if role.name != "the rest"]
    several = {
        role.device for role in computing if sum(one.processes for one in computing if one.device == role.device) > 1
    }
    if config.host.shifts == "on":
        return frozenset(several)
    has = {device: free if free and device == config.train.device else free_on(device) for device in several - {CPU}}
    return frozenset(device for device in has if _taken(roles, device, shared=False) > has[device])


def _taken(roles: Sequence[RoleNeeds], device: str, shared: bool) -> int:
    """Bytes of a device that roles take, all at once or one process after another."""
    if not shared:
        return sum(role.on(device) for role in roles)
    there = [role for role in roles if role.device == device]
    largest = max(role.on(device) // role.count_on(device) - role.beside(device) for role in there)
    return largest + sum(role.processes * role.beside(device) for role in there)


def settled(config: RunConfig) -> RunConfig:
    """The config with the devices that `auto` is here. The GPU of a Mac has no memory of its own."""
    sections = {}
    for name in ("train", "workers", "validators"):
        section = getattr(config, name)
        device = take_device(section.device) if section.device == AUTO else section.device
        sections[name] = msgspec.structs.replace(section, device=CPU if device == MPS else device)
    return msgspec.structs.replace(config, **sections)


def _advice(config: RunConfig, spec: ModelConfig, left: int) -> str:
    """What to change, with `left` bytes for what depends on the layout of training."""
    fit = fits(spec, layout_of(config, spec), left, config.policy.dtype)
    keys = ", ".join(f'train.{key} = "{value}"' for key, value in fit.keys.items())
    if keys and not fit.missing:
        return f"It fits with {keys}"
    return (
        f"{f'Set {keys} and f' if keys else 'F'}ree {data_size(fit.missing)}, lower train.microbatch_tokens, "
        "rollouts.block_rollouts or eval.rows, start fewer processes, or take a smaller policy"
    )


def free_on(device: str) -> int:
    """Bytes that are free in the memory of a device. Of a GPU it is all, because to ask what is free takes some."""
    if device == CPU:
        return free_bytes()
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory)
