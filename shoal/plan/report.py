"""A forecast as text, for `shoal plan` and for the summary of `shoal host`."""

from collections.abc import Iterator

from shoal.humanize import count, data_size, duration
from shoal.plan.forecast import BUSY_SHARE, Forecast, fetched_bytes, fewest_of_share, has_patches, period_s
from shoal.plan.machines import Machines
from shoal.plan.simulation_input import Outcome
from shoal.plan.sizes import quota_mb_of


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
