"""From a run file and a number of machines to a forecast: sizes, a simulation, and how many workers are enough.

Called by `shoal plan`, and by `shoal host` for its summary. What is not given is assumed, and named as such. It measures
nothing.
"""

import contextlib
import math
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.config import RunConfig
from shoal.plan.provision import Link, fetch_s, workers_needed
from shoal.plan.setting import Node, Outcome, Setting, Stalled
from shoal.plan.simulate import simulate
from shoal.plan.sizes import TOKEN_BYTES, Sizes, sizes_of
from shoal.protocol.types import Rules

MEGABIT = 1e6 / 8
"""Bytes per second."""

GENERATED = 7e12
"""Assumed tokens per second of a worker, times the parameters: 1,000 for 7e9 on one accelerator."""

MOST_TOKENS_PER_S = 5000.0
"""Of a small model on a CPU."""

TRAINED = 2e14
"""Assumed floating-point operations per second of a trainer; a step takes 6 for each parameter and token."""

WRITTEN = 400e6
"""Assumed bytes per second at which a version is written, hashed and handed over."""

READ = 1e9
"""Assumed bytes per second at which a version is verified and loaded."""

CHECKED = 20.0
"""A validator's prefill is assumed to be this many times as fast as a worker's generation."""

PATCH_SHARE = 1 / 150
"""Of a bfloat16 version: what a patch takes at lr 1e-6 (`benchmarks/patches.py`). Versions in float32 change whole."""


BUSY = 0.05
"""A trainer that waits for at most this share of its time is busy."""

TIMES = (1.0, 1.2, 1.5, 2.0, 3.0)
"""What is tried, as multiples of what ECHO-2's rule says."""

MOST_SIMULATED = 400
"""More workers are not simulated: it takes too long."""


@dataclass(frozen=True)
class Machines:
    """What the user says of the machines. 0 is assumed. Links are Mb/s."""

    workers: int
    downlink: float = 50.0
    """Of each worker."""
    worker_uplink: float = 20.0
    uplink: float = 200.0
    """Of the host."""
    relays: int = 0
    relay_uplink: float = 200.0
    tokens_per_s: float = 0.0
    """Of each worker."""
    also: tuple[tuple[int, float, float], ...] = ()
    """Other workers: how many, their downlink, their tokens per second."""
    rollout_tokens: float = 0.0
    step_s: float = 0.0
    check_s: float = 0.0
    """Of a block, by a validator."""
    patch_share: float = -1.0
    """Of a whole version; 0: no patches."""
    parameters: float = 0.0
    """Instead of the run file's model."""
    signal_share: float = 1.0


@dataclass(frozen=True)
class Forecast:
    """What is expected of a run."""

    sizes: Sizes
    setting: Setting
    outcome: Outcome | None
    """None if the run would not go on, or is not simulated."""
    needed: int | None
    """The fewest workers of the first kind that can keep the trainer busy, by ECHO-2's rule; None if no number can."""
    enough: int | None
    """How many do so in the simulation; None if none of `TIMES` as many do."""
    fetch_s: float
    """Until the last worker has a version, if all fetch at once."""
    assumed: tuple[str, ...]


def forecast(config: RunConfig, rules: Rules, recipe_dir: Path, machines: Machines) -> Forecast:
    """Raises `StateError`, `ConfigError` for a model that cannot be read."""
    found = bound(config, rules, recipe_dir, machines)
    with contextlib.suppress(Stalled):
        found = replace(found, outcome=simulate(found.setting))
    return replace(found, enough=enough_of(found.setting, found.needed))


def bound(config: RunConfig, rules: Rules, recipe_dir: Path, machines: Machines) -> Forecast:
    """The same without a simulation, in a moment."""
    sizes = sizes_of(config, recipe_dir, machines.parameters)
    setting, assumed = setting_of(config, rules, sizes, machines)
    size, sources_up = fetched_bytes(setting), sum(setting.relays_up) or setting.origin_up
    link = Link(machines.downlink * MEGABIT, load_s_of(setting, setting.workers[0]))
    needed = needed_by(setting, link, size, sources_up)
    broadcast_s = fetch_s(size, link, sources_up, len(setting.workers))
    return Forecast(sizes, setting, None, needed, None, broadcast_s, tuple(assumed))


def enough_of(setting: Setting, needed: int | None) -> int | None:
    """The first of some numbers of workers, from `needed` on, with which the simulated trainer is busy.

    The rule does not know that blocks are whole, that leases and checks take a moment, and how far workers may run ahead.
    """
    counts = [math.ceil(needed * times) for times in TIMES] if needed is not None else []
    for count in counts:
        if count <= MOST_SIMULATED:
            with contextlib.suppress(Stalled):
                some = replace(setting, workers=setting.workers[:1] * count, measured_steps=6)
                if simulate(some).idle_share <= BUSY:
                    return count
    return None


def needed_by(setting: Setting, link: Link, size_bytes: float, sources_up: float) -> int | None:
    """Workers like the first one that keep the trainer busy, by ECHO-2's rule."""
    rules, node = setting.rules, setting.workers[0]
    rollouts = rules.batch_groups * rules.group_size / setting.signal_share
    rate = node.tokens_per_s / setting.rollout_tokens
    return workers_needed(rollouts, setting.step_s + setting.publish_s, rate, size_bytes, link, sources_up)


def fetched_bytes(setting: Setting) -> float:
    """What a worker fetches that follows each version."""
    return min(setting.patch_bytes, setting.full_bytes) if setting.patch_bytes else setting.full_bytes


def load_s_of(setting: Setting, node: Node) -> float:
    """How long it then needs."""
    return setting.apply_s if 0 < setting.patch_bytes < setting.full_bytes else node.load_s


def setting_of(config: RunConfig, rules: Rules, sizes: Sizes, machines: Machines) -> tuple[Setting, list[str]]:
    """What is simulated, and what of it is assumed."""
    assumed = []

    def given(value: float, guess: float, what: str) -> float:
        if value > 0:
            return value
        assumed.append(what.format(guess))
        return guess

    speed = given(
        machines.tokens_per_s, min(MOST_TOKENS_PER_S, GENERATED / sizes.parameters),
        "a worker generates {:,.0f} tokens/s (--tokens-per-s)",
    )  # fmt: skip
    tokens = given(
        machines.rollout_tokens,
        max(1.0, config.sampling.all_tokens / 2),
        "a rollout has {:,.0f} tokens (--rollout-tokens)",
    )
    learned = rules.batch_groups * rules.group_size * tokens
    step_s = given(
        machines.step_s, 1.0 + 6 * sizes.parameters * learned / TRAINED, "a training step takes {:,.0f} s (--step-s)"
    )
    block_tokens = rules.block_groups * rules.group_size * tokens
    check_s = given(
        machines.check_s, block_tokens / speed / CHECKED, "a validator checks a block in {:,.1f} s (--check-s)"
    )
    share = machines.patch_share
    if share < 0:
        share = PATCH_SHARE if config.policy.dtype == "bfloat16" else 0.0
        if share:
            assumed.append(f"a patch has 1/{1 / share:.0f} of a version (--patch-share)")
    load_s = sizes.version / READ
    kinds = ((machines.workers, machines.downlink, speed), *machines.also)
    nodes = tuple(
        Node(rate, down * MEGABIT, machines.worker_uplink * MEGABIT, load_s)
        for count, down, rate in kinds for _ in range(count)
    )  # fmt: skip
    setting = Setting(
        rules=rules, workers=nodes, rollout_tokens=tokens, step_s=step_s, publish_s=sizes.version / WRITTEN,
        check_s=check_s, full_bytes=sizes.version, validators=max(1, config.validators.count),
        patch_bytes=share * sizes.version, apply_s=load_s, origin_up=machines.uplink * MEGABIT,
        relays_up=(machines.relay_uplink * MEGABIT,) * machines.relays, token_bytes=TOKEN_BYTES,
        signal_share=machines.signal_share,
    )  # fmt: skip
    return setting, assumed
