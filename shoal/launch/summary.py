"""The end of a run as one file, summary.json; and the times that it needs, added up over restarts of the launcher.

It reads the run's folder and the last snapshot. It is a digest for people and benchmarks: only the ledger proves who earned
which credits.
"""

import contextlib
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import UNSET

from shoal.config import RunConfig, preset_lr
from shoal.errors import ShoalError, StateError, cause_of
from shoal.evaluation_files import AFTER, BEFORE, Evaluation, Transcript, read_evaluation
from shoal.launch.role_process import RoleUsage, own_use
from shoal.launch.sizing import first_spec, learned_parameters_of
from shoal.ledger.batches import BY_ENVIRONMENT, GroupAccepted, SlotVoid
from shoal.ledger.fault_rate import most_frequent_error
from shoal.monitors.reward_diagnosis import LearningSetup, diagnose
from shoal.protocol.messages import NodeState
from shoal.run_folder import RunFolder, write_atomically
from shoal.runs.log_follower import LogFollower
from shoal.runs.run_status import RunStatus, names_apart, own_keys
from shoal.terminal import as_called
from shoal.views.terminal.end_screen import RunEnd
from shoal.weights.manifest import weights_root


class UsageBook:
    """Wall time and use of the machine by role, kept in usage.json so that a resumed run counts from its start."""

    def __init__(self, path: Path, has_ended: bool = False) -> None:
        """`has_ended`: the run had ended before, and this start only shows its end."""
        self._path, self._has_ended = path, has_ended
        self._started = time.monotonic()
        self._wall_before_s = 0.0
        self._before: dict[str, RoleUsage] = {}
        self._now: dict[str, RoleUsage] = {}
        try:
            found = json.loads(path.read_bytes())
            self._wall_before_s = float(found["wall_s"])
            self._before = {
                role: RoleUsage(float(cpu_s), float(found["peak_rss_mb"][role]))
                for role, cpu_s in found["cpu_s"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return

    def wall_s(self) -> float:
        """Seconds that the run was live, over all its starts."""
        return self._wall_before_s + (0.0 if self._has_ended else time.monotonic() - self._started)

    def by_role(self) -> dict[str, RoleUsage]:
        """Sums over all processes of a role: `worker-0`, `worker-1` and `cheater-0` are workers."""
        total = dict(self._before)
        for name, use in self._now.items():
            role = name.split("-")[0].replace("cheater", "worker")
            total[role] = total.get(role, RoleUsage()) + use
        return total

    def save(self, by_process: dict[str, RoleUsage]) -> None:
        """Take over this launch's figures, and write them. A failed write, as on a full disk, is ignored."""
        if self._has_ended:
            return
        self._now = by_process | {"launcher": own_use()}
        total = self.by_role()
        tree = {
            "wall_s": round(self.wall_s(), 3),
            "cpu_s": {role: round(use.cpu_s, 3) for role, use in sorted(total.items())},
            "peak_rss_mb": {role: round(use.peak_rss_mb, 1) for role, use in sorted(total.items())},
        }
        try:
            write_atomically(self._path, json.dumps(tree, indent=1).encode())
        except OSError:
            return


def write_summary(folder: RunFolder, config: RunConfig, snapshot: RunStatus, usage: UsageBook) -> RunEnd:
    """Gather the figures of a run that has ended, write summary.json, and return them for the last table."""
    before, after = (read_evaluation(folder.evaluations / f"{when}.json") for when in (BEFORE, AFTER))
    staleness: Counter[str] = Counter()
    for line in snapshot.metrics:
        ages = line.get("staleness_rollouts")
        staleness.update(ages if isinstance(ages, dict) else {})
    unbegun, why, fault = _troubles(folder.log)
    workers = [node for node in snapshot.nodes if node.role == "worker"]
    called = names_apart(workers)
    own = own_keys(folder, (f"worker-{i}" for i in range(config.workers.count))).values()  # guard: role-by-key
    roles = dict.fromkeys(own if snapshot.cheaters else (), "honest") | dict.fromkeys(snapshot.cheaters, "cheating")
    summary = {
        "heldout": {"before": _figures(before), "after": _figures(after)},
        "steps": snapshot.step,
        "tokens": sum(node.credits for node in snapshot.nodes),
        "accepted": snapshot.status.accepted,
        "refused": snapshot.status.refused,
        "env_faults": sum(int(count) for count in snapshot.series("fault_rollouts")),
        "unbegun": unbegun,
        "unbegun_cause": why,
        "credits": {called[node.key]: {"credits": node.credits, "role": roles.get(node.key, "")} for node in workers},
        "influence": influence_shares(workers, called),
        "staleness": dict(sorted(staleness.items(), key=lambda item: int(item[0]))),
        "wall_s": round(usage.wall_s(), 3),
        "cpu_s": {role: round(use.cpu_s, 3) for role, use in sorted(usage.by_role().items())},
        "weights_hash": weights_root(folder.checkpoints / "final"),
    }
    try:
        write_atomically(folder.summary, json.dumps(summary, indent=1).encode())
    except OSError as error:
        raise StateError(
            f"cannot write {folder.summary}: {cause_of(error)}. Free some disk space, then run again"
        ) from None
    return RunEnd(
        summary,
        folder.root,
        snapshot,
        config.envs,
        _games(after, config),
        called,
        _diagnosis(folder, config, snapshot, before, after),
        fault=fault,
    )


def _troubles(log: Path) -> tuple[int, str, str]:
    """Groups of which the task could never begin, why the newest could not, and the error that most groups share on which
    an environment failed. What a log does not hold, or cannot be read of it, is 0 or empty."""
    count, why, said = 0, "", list[str]()
    with contextlib.suppress(ShoalError, OSError):
        for entry in LogFollower(log).events(having=(b"faults", BY_ENVIRONMENT.encode())):
            if isinstance(body := entry.body, SlotVoid) and body.unbegun():
                count, why = count + len(body.slots), body.unbegun()
            elif isinstance(body, GroupAccepted) and body.faults is not UNSET and body.faults.said:
                said.append(body.faults.said)
    return count, why, most_frequent_error(said) if said else ""


def _diagnosis(
    folder: RunFolder, config: RunConfig, snapshot: RunStatus, before: Evaluation | None, after: Evaluation | None
) -> tuple[str, ...]:
    spec, rollouts = first_spec(folder, config), config.rollouts
    preset = preset_lr(learned_parameters_of(spec, config)) if spec else 0.0
    moving = config.difficulty.curriculum or config.difficulty.pools
    setup = LearningSetup(
        preset,
        rollouts.group_size,
        rollouts.batch_groups,
        rollouts.max_staleness,
        config.train.lr or preset,
        config.steps,
        config.train.updates_per_batch,
        bool(moving),
    )
    endings = Counter[str]()
    for one in () if after is None else after.envs.values() or (after,):
        endings.update(one.endings)
    return tuple(as_called(line, folder.root) for line in diagnose(snapshot.metrics, setup, before, after, endings))


def influence_shares(workers: Sequence[NodeState], called: Mapping[str, str]) -> dict[str, float]:
    """Each worker's share of what the trainer learned from, by what it is called, see
    `protocol.audit_and_pay.influence`."""
    total = sum(node.influence for node in workers)
    return {called[node.key]: node.influence / total if total else 0.0 for node in workers}


def _figures(one: Evaluation | None) -> dict[str, Any] | None:
    """The main figures, with what the mean is of, the first fault, and the means of the reward's parts and of metrics if
    there are any; if there are several environments, those of each, too."""
    if one is None:
        return None
    figures = {key: getattr(one, key) for key in ("mean", "low95", "high95", "episodes", "faults")}
    figures |= {key: value for key in ("measure", "fault", "parts", "metrics") if (value := getattr(one, key))}
    return figures | ({"envs": {label: _figures(part) for label, part in one.envs.items()}} if one.envs else {})


def _games(one: Evaluation | None, config: RunConfig) -> tuple[tuple[str, Transcript], ...]:
    by_label = {} if one is None else one.envs or {config.envs[0].label: one}
    return tuple((label, game) for label, part in by_label.items() for game in part.transcripts[: config.eval.samples])
