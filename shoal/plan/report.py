"""A forecast as text, for `shoal plan` and for the summary of `shoal host`."""

from shoal.plan.forecast import TIMES, Forecast, Machines, fetched_bytes
from shoal.plan.setting import Outcome


def report(found: Forecast, machines: Machines) -> str:
    """A line for each thing that is planned."""
    sizes, setting = found.sizes, found.setting
    patch = f", {amount(setting.patch_bytes)} as a patch" if setting.patch_bytes else ""
    exact = "" if sizes.is_exact else " (of the weights alone)"
    lines = [
        f"version    {amount(sizes.version)} whole{patch}; {count(sizes.parameters)} parameters",
        f"memory     a worker {amount(sizes.worker_memory)}, a validator {amount(sizes.validator_memory)}{exact}; the "
        f"trainer {amount(sizes.trainer_memory)} and its activations",
        f"disk       a worker {amount(sizes.worker_disk)}; the host {amount(sizes.host_disk)}",
        f"broadcast  {duration(found.fetch_s)} until the last of {len(setting.workers)} workers has a version, if all "
        "fetch at once",
    ]
    lines += _simulated(found.outcome) if found.outcome else ["step       the run does not go on with these machines"]
    lines.append(f"needed     {_needed(found, machines)}")
    at_once = most_at_once(found)
    if at_once < max(len(setting.workers), found.needed or 0):
        lines.append(
            f"note       at most {at_once} workers have work at once: that many blocks fill the batches that may be open. "
            "A smaller rollouts.block_rollouts makes more of them"
        )
    blocks = setting.rules.batch_groups / setting.rules.block_groups / setting.signal_share
    check_s = setting.check_s * blocks / setting.validators
    if check_s > setting.step_s / 2:
        who = "1 validator needs" if setting.validators == 1 else f"{setting.validators} validators need"
        lines.append(
            f"note       {who} {duration(check_s)} for the "
            f"groups of a batch, and the trainer {duration(setting.step_s)} for a step"
        )
    lines += [f"assumed    {what}" for what in found.assumed]
    return "\n".join(lines)


def _simulated(outcome: Outcome) -> list[str]:
    return [
        f"bytes      the host sends {amount(outcome.origin_bytes)} for each step; a worker fetches "
        f"{amount(outcome.worker_bytes)}",
        f"step       {duration(outcome.step_s)}; the trainer waits {outcome.idle_share:.0%} of its time",
        f"staleness  {outcome.staleness:.2f} versions on average; a worker has a version {duration(outcome.lag_s)} after "
        f"it is published, and fetches {outcome.followed:.0%} of them",
        f"workers    fetch and load {outcome.worker_fetch:.0%} of their time, and wait for work {outcome.worker_idle:.0%}",
    ]


def _needed(found: Forecast, machines: Machines) -> str:
    kind = f"of {count(found.setting.workers[0].tokens_per_s)} tokens/s and {machines.downlink:g} Mb/s"
    if found.needed is None:
        return f"no number {kind} keeps the trainer busy: fetching a version takes too much of a step (ECHO-2's rule)"
    least = f"at least {found.needed} {kind} keep the trainer busy (ECHO-2's rule)"
    if found.outcome is None:
        return least
    if found.enough is None:
        return f"{least}; in the simulation it waits even for {TIMES[-1]:g} times as many"
    return f"{least}; in the simulation, {found.enough} do"


def most_at_once(found: Forecast) -> int:
    """Blocks that may be in the hands of workers at one time, about."""
    rules = found.setting.rules
    return max(1, (rules.max_staleness + 1) * rules.batch_groups // rules.block_groups)


def summary(found: Forecast, machines: Machines) -> str:
    """Two lines for somebody who starts a run."""
    setting = found.setting
    return (
        f"Plan: a version has {amount(fetched_bytes(setting))} to fetch; a worker with {machines.downlink:g} Mb/s needs "
        f"{amount(found.sizes.worker_memory)} of memory and {amount(found.sizes.worker_disk)} of disk.\n"
        f"By assumed speeds, {_needed(found, machines)}. More: shoal plan."
    )


def amount(size_bytes: float) -> str:
    """Bytes for a person."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= limit:
            return (
                f"{size_bytes / limit:.3g} {unit}" if size_bytes < 1000 * limit else f"{size_bytes / limit:,.0f} {unit}"
            )
    return f"{size_bytes:.0f} bytes"


def duration(seconds: float) -> str:
    """Seconds for a person."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def count(number: float) -> str:
    """A number for a person."""
    for limit, unit in ((1e9, "B"), (1e6, "M")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:,.0f}"
