"""The forecast of `shoal plan`: how many workers keep the trainer busy, and what a run with so many takes.

The rule is that of ECHO-2 (arXiv:2602.02192), for workers on their own links.

We derived the rule from what the paper says it consists of, and have not compared it with the paper's formula. With a new
version every kappa steps, R rollouts a step, T seconds of training a step and B seconds of broadcast, the trainer never
waits if the workers' rate is

    mu >= kappa R / (kappa T - B),

and if a rollout may be at least a version old. Here kappa = 1: each step publishes. A worker of rate r makes r (T - B)
rollouts between two versions. The rule supposes that it makes none while it fetches. Ours fetch the next version while they
play, so they may be fewer: `forecast` simulates that. B grows with the number of workers where the sources' uplink is the
narrowest link.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from shoal.config import RunConfig
from shoal.errors import ConfigError
from shoal.humanize import count, data_size, duration
from shoal.ledger.batch_selection import groups_a_worker
from shoal.plan.machines import Machines
from shoal.plan.simulate import simulate
from shoal.plan.simulation_input import Outcome, SimulationInput, Stalled, WorkerMachine
from shoal.plan.sizes import TOKEN_BYTES, Sizes, UnknownShape, quota_mb_of, sizes_of
from shoal.protocol.algorithm_config import vine_of
from shoal.protocol.continuations import work_of_block
from shoal.protocol.messages import Rules
from shoal.protocol.tolerances import may_be_patched

MAX_PROVISIONED_WORKERS = 100_000


class Link(NamedTuple):
    """A worker's downlink in bytes per second (0: no limit), and how long it loads a version, seconds."""

    down: float
    load_s: float


class Sources(NamedTuple):
    """What serves versions: bytes per second of all uplinks together (0: no limit), and seconds until they have one."""

    up: float
    filled_s: float = 0.0


def fetch_s(size_bytes: float, link: Link, sources: Sources, workers: int) -> float:
    """Seconds until a worker has a version and has loaded it, if all workers fetch at once."""
    own = size_bytes / link.down if link.down else 0.0
    shared = size_bytes * workers / sources.up if sources.up else 0.0
    return max(own, shared, sources.filled_s) + link.load_s


def workers_needed(
    rollouts: float, step_s: float, rate: float, size_bytes: float, link: Link, sources: Sources
) -> int | None:
    """The fewest equal workers with which the trainer never waits; None if no number is enough.

    `step_s` is the time from one version to the next while the trainer does not wait, `rate` one worker's rollouts per
    second. More workers make more and share the sources' uplink, so beyond some number they make less.
    """
    best, count = 0.0, 1
    while count <= MAX_PROVISIONED_WORKERS:
        made = count * rate * max(0.0, step_s - fetch_s(size_bytes, link, sources, count))
        if made >= rollouts:
            return count
        if made < best or (made == 0.0 and count > 1):
            return None
        best, count = max(best, made), count + max(1, count // 200)
    return None


# --- from a run file and a number of machines to a forecast ---


BYTES_PER_S = 1e6 / 8
"""Of 1 Mb/s."""

WORKER_PARAMETERS_PER_S = 7e12
"""Assumed of a worker: tokens per second times the parameters. 1,000 tokens/s for 7e9, on one accelerator."""

MOST_TOKENS_PER_S = 5000.0
"""Of a worker with a small model, on a CPU."""

TRAINER_FLOP_PER_S = 2e14
"""Assumed of a trainer: floating-point operations, of which a step takes 6 for each parameter and token, and 1 s more."""

PUBLISHED_BYTES_PER_S = 400e6
"""Assumed: a version is written, hashed and handed over."""

LOADED_BYTES_PER_S = 1e9
"""Assumed: a version is verified and loaded; also, a patch is applied to a version of this size."""

CHECKS_PER_PLAY = 20.0
"""A validator's prefill is assumed to be this many times as fast as a worker's generation."""

BUSY_SHARE = 0.05
"""A trainer that waits for at most this share of its time is busy."""

MOST_WORKERS = 400
"""Most workers that are simulated: more take too long."""

MOST_TIMES = 4.0
"""At most this many times the workers that would be enough if nothing ever waited are tried."""


@dataclass(frozen=True)
class Forecast:
    """What is expected of a run."""

    sizes: Sizes
    setting: SimulationInput
    outcome: Outcome | None
    """None if the run would not go on, or is not simulated."""
    needed: int | None
    """The fewest workers of the first kind that can keep the trainer busy, by ECHO-2's rule; None if no number can."""
    enough: int | None
    """How many do so in the simulation; None if as many as were tried do not."""
    tried: int
    """The most that were tried."""
    fetch_s: float
    """Until the last worker has a version, if all fetch at once."""
    quota_mb: int
    """Of the run file."""
    assumed: tuple[str, ...]


def forecast(config: RunConfig, rules: Rules, recipe_dir: Path, machines: Machines) -> Forecast:
    """Raises `StateError`, `ConfigError` for a model that cannot be read, or for too many workers."""
    if machines.all_workers > MOST_WORKERS:
        raise ConfigError(
            f"{machines.all_workers:,} workers are too many to simulate, limit {MOST_WORKERS}: plan for fewer, faster ones"
        )
    found = forecast_by_rule(config, rules, recipe_dir, machines)
    with contextlib.suppress(Stalled):
        found = replace(found, outcome=simulate(found.setting))
    enough, tried = enough_of(found.setting)
    return replace(found, enough=enough, tried=tried)


def forecast_by_rule(config: RunConfig, rules: Rules, recipe_dir: Path, machines: Machines) -> Forecast:
    """The same without a simulation, in a moment."""
    if machines.rollout_tokens > config.sampling.all_tokens:
        raise ConfigError(
            f"--rollout-tokens {machines.rollout_tokens:,.0f} is more than the run allows: a rollout has at most "
            f"{config.sampling.all_tokens:,} tokens. Set sampling.max_tokens, too (--set)"
        )
    if machines.patch_share > 0 and not may_be_patched(config.policy.dtype):
        raise ConfigError(
            f"--patch-share: versions in {config.policy.dtype} change whole, so there are no patches. Leave it out, or "
            "--set 'policy.dtype=\"bfloat16\"'"
        )
    try:
        sizes = sizes_of(config, recipe_dir, machines.parameters, machines.patch_share)
    except UnknownShape as error:
        raise ConfigError(f"{error}. To plan without the model: --parameters, such as 7e9") from None
    setting, assumed = setting_of(config, rules, sizes, machines)
    size, sources = fetched_bytes(setting), sources_of(setting)
    link = Link(setting.workers[0].down, load_s_of(setting, setting.workers[0]))
    slowest = Link(min((machine.down for machine in setting.workers if machine.down), default=0.0), link.load_s)
    broadcast_s = fetch_s(size, slowest, sources, len(setting.workers))
    return Forecast(
        sizes=sizes, setting=setting, outcome=None, needed=needed_by(setting, link, size, sources), enough=None, tried=0,
        fetch_s=broadcast_s, quota_mb=config.storage.quota_mb, assumed=tuple(assumed),
    )  # fmt: skip


def enough_of(setting: SimulationInput) -> tuple[int | None, int]:
    """The fewest workers like the first one with which the simulated trainer is busy, and the most that were tried.

    The rule does not know that blocks are whole, that leases and checks take a moment, how far workers may run ahead, and
    that they fetch while they play. In a synchronous run the trainer waits in any case.
    """
    if setting.rules.max_staleness == 0:
        return None, 0

    def is_busy(number: int) -> bool:
        some = replace(setting, workers=setting.workers[:1] * number, measured_steps=6)
        with contextlib.suppress(Stalled):
            return simulate(some).idle_share <= BUSY_SHARE
        return False

    rollouts, rate = rates_of(setting)
    fewest = max(math.ceil(rollouts / (rate * period_s(setting))), fewest_of_share(setting))
    too_few, number, tried = fewest - 1, fewest, 0
    while number <= min(MOST_WORKERS, MOST_TIMES * fewest):
        tried = number
        if is_busy(number):
            break
        too_few, number = number, max(number + 1, round(1.4 * number))
    else:
        return None, tried
    while number - too_few > max(1, number // 20):
        middle = (too_few + number) // 2
        too_few, number = (too_few, middle) if is_busy(middle) else (middle, number)
    return number, tried


def needed_by(setting: SimulationInput, link: Link, size_bytes: float, sources: Sources) -> int | None:
    """Workers like the first one that keep the trainer busy, by ECHO-2's rule."""
    if setting.rules.max_staleness == 0:
        return None
    rollouts, rate = rates_of(setting)
    return workers_needed(rollouts, period_s(setting), rate, size_bytes, link, sources)


def rates_of(setting: SimulationInput) -> tuple[float, float]:
    """Rollouts that a step needs, and those that the first worker makes in a second. Continuations count as many rollouts
    as have their tokens; groups without signal have none."""
    rules, vine = setting.rules, vine_of(setting.rules.algorithm)
    for_each = 1 / setting.signal_share + (work_of_block(vine) if vine else 0.0)
    rollouts = rules.batch_groups * rules.group_size * for_each
    return rollouts, setting.workers[0].tokens_per_s / setting.rollout_tokens


def fewest_of_share(setting: SimulationInput) -> int:
    """The fewest workers that may fill a batch: one worker may have only a share of it."""
    return math.ceil(setting.rules.batch_groups / groups_a_worker(setting.rules))


def period_s(setting: SimulationInput) -> float:
    """From one version to the next, if no batch is waited for: the trainer publishes beside the next step."""
    return max(setting.train_s, setting.publish_s)


def sources_of(setting: SimulationInput) -> Sources:
    """What workers fetch from. Each relay takes a copy from the origin first, and passes it on meanwhile."""
    if not setting.relays_up:
        return Sources(setting.origin_up)
    copies = fetched_bytes(setting) * len(setting.relays_up)
    return Sources(sum(setting.relays_up), copies / setting.origin_up if setting.origin_up else 0.0)


def fetched_bytes(setting: SimulationInput) -> float:
    """What a worker fetches that follows each version."""
    return setting.patch_bytes if has_patches(setting) else setting.full_bytes


def load_s_of(setting: SimulationInput, machine: WorkerMachine) -> float:
    """How long it then needs."""
    return machine.load_s + (setting.apply_s if has_patches(setting) else 0.0)


def has_patches(setting: SimulationInput) -> bool:
    """Whether workers follow by patches."""
    return 0 < setting.patch_bytes < setting.full_bytes


def setting_of(config: RunConfig, rules: Rules, sizes: Sizes, machines: Machines) -> tuple[SimulationInput, list[str]]:
    """What is simulated, and what of it is assumed."""
    assumed = []

    def given(value: float, guess: float, what: str, text: Callable[[float], str] = duration) -> float:
        if value > 0:
            return value
        assumed.append(what.format(text(guess)))
        return guess

    speed = given(
        machines.tokens_per_s, min(MOST_TOKENS_PER_S, WORKER_PARAMETERS_PER_S / sizes.parameters),
        "a worker generates {} tokens/s (--tokens-per-s)", count,
    )  # fmt: skip
    tokens = given(
        machines.rollout_tokens,
        max(1.0, config.sampling.all_tokens / 2),
        "a rollout has {} tokens (--rollout-tokens)",
        count,
    )
    learned = rules.batch_groups * rules.group_size * tokens
    guess_s = 1.0 + 6 * sizes.parameters * learned / TRAINER_FLOP_PER_S
    train_s = given(machines.train_s, guess_s, "the trainer computes {} for a step (--train-s)")
    block_tokens = rules.block_groups * rules.group_size * tokens
    guess_s = block_tokens / speed / CHECKS_PER_PLAY
    check_s = given(machines.check_s, guess_s, "a validator checks a block in {} (--check-s)")
    if sizes.patch and machines.patch_share < 0:
        assumed.append(f"a patch has 1/{sizes.version / sizes.patch:.0f} of a version (--patch-share)")
    load_s = sizes.version / LOADED_BYTES_PER_S
    kinds = ((machines.workers, machines.downlink, speed), *machines.also)
    workers = tuple(
        WorkerMachine(rate, down * BYTES_PER_S, machines.worker_uplink * BYTES_PER_S, load_s)
        for number, down, rate in kinds for _ in range(number)
    )  # fmt: skip
    setting = SimulationInput(
        rules=rules, workers=workers, rollout_tokens=tokens, train_s=train_s,
        publish_s=sizes.version / PUBLISHED_BYTES_PER_S, check_s=check_s, full_bytes=sizes.version,
        validators=max(1, config.validators.count), patch_bytes=sizes.patch, anchor_every=config.storage.anchor_every,
        apply_s=load_s, origin_up=machines.uplink * BYTES_PER_S,
        relays_up=(machines.relay_uplink * BYTES_PER_S,) * machines.relays, token_bytes=TOKEN_BYTES,
        signal_share=machines.signal_share,
    )  # fmt: skip
    return setting, assumed


# --- as text ---


def report(found: Forecast, machines: Machines) -> str:
    """A line for each thing that is planned."""
    sizes, setting = found.sizes, found.setting
    patch = f", {data_size(sizes.patch)} as a patch" if sizes.patch else ""
    exact = "" if sizes.is_exact else " (of the weights alone)"
    who = "all workers have" if len(setting.workers) > 1 else "the worker has"
    lines = [
        f"version    {data_size(sizes.version)} whole{patch}; {count(sizes.parameters)} parameters",
        f"memory     a worker {data_size(sizes.worker_memory)}, a validator {data_size(sizes.validator_memory)}{exact}; "
        f"the trainer {data_size(sizes.trainer_memory)} and its activations; each beside Python and torch",
        f"disk       a worker {data_size(sizes.worker_disk)}; the host {data_size(sizes.host_disk)}",
        f"broadcast  {duration(found.fetch_s)} until {who} a version{' by its patch' if has_patches(setting) else ''}, "
        "loaded, if all fetch at once",
    ]
    stuck = (
        "step       the run does not go on with these machines: see the notes, or give more time with rollouts.lease_s"
    )
    lines += _simulated(found.outcome) if found.outcome else [stuck]
    lines.append(f"needed     {_needed(found, machines)}")
    lines += [f"note       {note}" for note in _notes(found)]
    lines += [f"assumed    {what}" for what in found.assumed]
    return "\n".join(lines)


def _simulated(outcome: Outcome) -> list[str]:
    return [
        f"bytes      the host sends {data_size(outcome.origin_bytes)} for each step; a worker fetches "
        f"{data_size(outcome.worker_bytes)}",
        f"step       {duration(outcome.step_s)} from version to version; the trainer waits for rollouts "
        f"{outcome.idle_share:.0%} of its time",
        f"staleness  {outcome.staleness:.2f} versions on average; a worker has a version {duration(outcome.lag_s)} after "
        f"it is published, and fetches {outcome.followed:.0%} of them",
        f"workers    fetch and load {outcome.worker_fetch:.0%} of their time, and wait for work {outcome.worker_idle:.0%}",
    ]


def _needed(found: Forecast, machines: Machines) -> str:
    kind = f"of {count(found.setting.workers[0].tokens_per_s)} tokens/s and {link(machines.downlink)}"
    if found.setting.rules.max_staleness == 0:
        return "the trainer waits while workers play, however many there are: rollouts.max_staleness is 0"
    by_rule = (
        f"at least {found.needed} by ECHO-2's rule"
        if found.needed
        else "no number by ECHO-2's rule, which lets no worker play while it fetches: a version takes too much of a step"
    )
    if found.enough is not None:
        who = f"1 worker {kind} keeps" if found.enough == 1 else f"{found.enough} workers {kind} keep"
        return f"{who} the trainer busy in the simulation; {by_rule}"
    return f"up to {found.tried} workers {kind} do not keep the trainer busy in the simulation; {by_rule}"


def _notes(found: Forecast) -> Iterator[str]:
    """What limits the run, and what to change."""
    setting, outcome = found.setting, found.outcome
    rules = setting.rules
    at_once = most_at_once(found)
    if at_once < max(len(setting.workers), found.needed or 0):
        yield (
            f"at most {at_once} workers have work at once: that many blocks fill the batches that may be open. A smaller "
            "rollouts.block_rollouts makes more of them"
        )
    if len(setting.workers) < (least := fewest_of_share(setting)):
        yield f"a batch needs {least} workers: one may fill {rules.worker_share:.0%} of it (verify.worker_share)"
    slowest = min(machine.tokens_per_s for machine in setting.workers)
    play_s = rules.block_groups * rules.group_size * setting.rollout_tokens / slowest
    if play_s > rules.lease_s:
        yield (
            f"a worker of {count(slowest)} tokens/s plays {duration(play_s)} for a block, and rollouts.lease_s gives it "
            f"{duration(rules.lease_s)}: raise that, or make rollouts.block_rollouts smaller"
        )
    if outcome is None and found.fetch_s > rules.lease_s:
        yield (
            f"rollouts.lease_s ends a lease after {duration(rules.lease_s)}, before its worker has the version: raise it, "
            "or plan for faster links or relays"
        )
    check_s = setting.check_s * rules.batch_groups / rules.block_groups / setting.signal_share / setting.validators
    if check_s > setting.train_s / 2:
        who = "1 validator needs" if setting.validators == 1 else f"{setting.validators} validators need"
        yield (
            f"{who} {duration(check_s)} for the groups of a batch, and the trainer {duration(setting.train_s)} for a step: "
            "more validators take the work in turns"
        )
    if outcome is not None and outcome.publish_wait_share > BUSY_SHARE:
        yield (
            f"the trainer waits {outcome.publish_wait_share:.0%} of its time until the version before is published: that "
            f"takes {duration(setting.publish_s)}, and a step {duration(setting.train_s)}"
        )
    if note := _quota_note(found):
        yield note
    if setting.relays_up and has_patches(setting) and setting.anchor_every == 1:
        yield (
            f"every version is published whole, too, so each relay fetches {data_size(setting.full_bytes)} for each: "
            "storage.anchor_every = 16 makes that rare"
        )


def _quota_note(found: Forecast) -> str:
    needed = found.sizes.needed_blobs
    if needed <= found.quota_mb * 1e6:
        return ""
    return (
        f"the host must keep {data_size(needed)} for its nodes, and storage.quota_mb is {found.quota_mb}: above it, no "
        f"worker gets work. Set it to {quota_mb_of(found.sizes)} or more"
    )


def most_at_once(found: Forecast) -> int:
    """Blocks that may be in the hands of workers at one time, about."""
    rules = found.setting.rules
    return max(1, (rules.max_staleness + 1) * rules.batch_groups // rules.block_groups)


def _in_short(found: Forecast) -> str:
    """How many workers the run needs, for somebody who has measured nothing yet."""
    if found.setting.rules.max_staleness == 0:
        return "The trainer waits while workers play, however many there are: rollouts.max_staleness is 0"
    if found.needed is None:
        return (
            f"The trainer will at times wait for rollouts: a worker is assumed to need {duration(found.fetch_s)} to fetch "
            f"a version, and a step {duration(period_s(found.setting))}. The run works all the same"
        )
    workers = "1 worker keeps" if found.needed == 1 else f"{found.needed} workers keep"
    return f"{workers} the trainer from waiting, at assumed speeds"


def summary(found: Forecast, machines: Machines) -> str:
    """Two lines for somebody who starts a run; a third one if its disk quota is too small."""
    setting, note = found.setting, _quota_note(found)
    return (
        f"Plan: a worker fetches {data_size(fetched_bytes(setting))} for each version, and needs "
        f"{data_size(found.sizes.worker_memory)} of memory beside Python and torch, and "
        f"{data_size(found.sizes.worker_disk)} of disk.\n"
        f"{_in_short(found)}. `shoal plan` reckons with your own speeds and links." + (f"\nBut {note}." if note else "")
    )


def link(mbps: float) -> str:
    """The speed of a link."""
    return f"{mbps:g} Mb/s" if mbps else "no limit of the link"
