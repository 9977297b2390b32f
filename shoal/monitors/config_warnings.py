"""What the launcher advises before and during a run: numbers that work, and yet rarely teach a policy anything.

None of it stops a run. All functions are pure: of the run's log and rollouts they are given a reader, which is called if
something is to be said of them.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from shoal.config import RunConfig, WorkersConfig, preset_lr
from shoal.config.validate_algorithm import MIN_STEP_ROLLOUTS, lr_misfit
from shoal.evaluation_files import Evaluation, why_not_comparable
from shoal.ledger.run_events import RunCreated
from shoal.monitors.reward_diagnosis import MIN_GROUP_ROLLOUTS, SOLVED, UNSOLVED
from shoal.protocol.rollout_validation import unbegun_remedy
from shoal.step_metrics import is_number
from shoal.terminal import command, printable

MAX_TASK_GROUPS = 10.0
"""Groups of one task in a run, on average: above it, a small policy learns the answers by heart."""

MAX_WINS = 0.8
"""Share of held-out tasks that the first policy wins."""

MAX_FLAT_SHARE = 0.8
"""Of the first step's groups, without signal. A policy that wins one rollout in fifty, whatever the task, is below it."""

MAX_REASON_CHARS = 300
"""Of a refusal."""

MIN_REFUSED = 2
"""Submissions, of which every group was refused."""

MANY_OVERLONG = 0.1
"""Share of a step's rollouts that a token limit ended, above which it is said: what they would have scored is not known."""

OVERLONG_STEPS = 5
"""Newest steps, or all of a shorter run, whose mean share counts for advice."""

MIN_FLAT_GROUPS = 64
"""In a row and before any step, that are worth a line; the run pauses at rollouts.max_flat_groups."""


def config_warnings(config: RunConfig, learned_parameters: int) -> list[str]:
    """Advice on the numbers of a run file, for a policy with so many parameters that learn."""
    rollouts, lr, lines = config.rollouts, config.train.lr, list[str]()
    preset = preset_lr(learned_parameters)
    if misfit := lr_misfit(lr, preset):
        side = "slowly" if misfit == "low" else "unstably"
        lines.append(
            f"train.lr = {lr:g}, and the preset for {learned_parameters:,} parameters that learn is {preset:g}: the policy "
            f"may learn {side}. Leave train.lr out to have the preset"
        )
    if rollouts.group_size < MIN_GROUP_ROLLOUTS:
        lines.append(
            f"rollouts.group_size = {rollouts.group_size}: in small groups, rewards are often all equal, and then nothing "
            f"is learned. Take {MIN_GROUP_ROLLOUTS} or more; 16 is the default"
        )
    step = rollouts.group_size * rollouts.batch_groups
    if step < MIN_STEP_ROLLOUTS:
        lines.append(
            f"A step learns from {step} rollouts (rollouts.batch_groups = {rollouts.batch_groups} groups of "
            f"{rollouts.group_size}): so few say little about what is better. Take {MIN_STEP_ROLLOUTS} or more; the "
            "defaults are 16 groups of 16"
        )
    return lines


def role_warnings(config: RunConfig, with_workers: bool, url: str, run_dir: Path) -> list[str]:
    """Advice for a run that starts no validator, or not the workers that its run file asks for."""
    lines = list[str]()
    asked = {"cheating": config.workers.cheating, "count": config.workers.count}
    usual = {"cheating": 0, "count": WorkersConfig().count}
    if not with_workers:
        lines += [
            f"`shoal host` starts no workers of its own, so workers.{key} = {asked[key]} adds none"
            for key in asked
            if asked[key] not in (0, usual[key])
        ]
    if not config.validators.count:
        admit = command("admin", "admit", str(run_dir), "KEY")
        lines.append(
            f"validators.count = 0, so nobody judges until you admit a validator: `{command('validate', url)}` prints its "
            f"key on its machine, and `{admit}` admits it here"
        )
    if with_workers and not config.workers.count:
        lines.append(
            f"workers.count = 0, so no worker of this machine plays: type `{command('join', url)}` in another terminal, "
            "or set workers.count"
        )
    return lines


def task_warnings(created: RunCreated) -> list[str]:
    """Advice on environments with few tasks."""
    groups = created.rules.steps * created.rules.batch_groups
    weights, lines = sum(env.weight for env in created.envs), list[str]()
    for env in created.envs:
        listed = created.task_lists.get(env.label)
        tasks = max(1, len(listed.tasks) if listed else env.num_tasks)
        each = groups * env.weight / weights / tasks
        if each > MAX_TASK_GROUPS:
            lines.append(
                f"{env.label} has {tasks:,} training tasks, so each comes about {each:.0f} times in this run: a small "
                "policy learns such answers by heart, and held-out tasks gain little. Let the environment make more tasks"
            )
    return lines


def token_limit_warning(metrics: Sequence[Mapping[str, Any]], config: RunConfig) -> str:
    """Advice on newest steps of which a token limit ended many rollouts, on average; empty if it did not, or if there are
    fewer steps than count."""
    steps = min(OVERLONG_STEPS, config.steps)
    shares = [share for line in metrics[-steps:] if is_number(share := line.get("overlong_share"))]
    if len(shares) < steps or (share := fmean(shares)) <= MANY_OVERLONG:
        return ""
    sampling, own = config.sampling, any(env.max_turn_tokens or env.max_tokens for env in config.envs)
    return (
        f"A token limit ended {share:.0%} of the rollouts of the newest {steps} steps: raise "
        f"sampling.max_turn_tokens = {sampling.max_turn_tokens} or sampling.max_tokens = {sampling.max_tokens}, which is "
        f"with the prompt{', or those of [[envs]]' if own else ''}"
        + ("; nothing is learned from such rollouts (mask_overlong)" if config.train.algorithm.mask_overlong else "")
    )


class StartWarnings:
    """Advice on the policy that a run begins with, each piece once: look at a run's figures as they come."""

    def __init__(self) -> None:
        self._measured = self._played = False
        """Whether its wins, and the signal of its groups, are known."""
        self._judged = False
        """Whether a group was accepted, or it was said that none is."""
        self._refused = 0
        """Groups that were refused when the log was read."""
        self._unbegun = set[str]()
        """What to change so that tasks can begin, as far as it was said."""

    def look(
        self, before: Evaluation | None, metrics: Sequence[Mapping[str, Any]], flat_groups: int, flat_reward: float,
        why_flat: Callable[[], str] = str,
    ) -> list[str]:  # fmt: skip
        """New advice. `before` is the first policy's evaluation; `flat_groups` were accepted in a row without signal.
        `why_flat` is asked what ended their rollouts, if that is to be said."""
        lines = list[str]()
        if before is not None and not self._measured:
            self._measured = True
            lines += success_rate_warning(before)
        if not self._played:
            line = zero_signal_warning(metrics, flat_groups, flat_reward, why_flat)
            lines += [line] if line else []
            self._played = bool(line or metrics)
        return lines

    def look_at_unbegun(self, groups: int, cause: str) -> list[str]:
        """New advice on tasks that can never begin, the last of them for this cause: once for each thing to change."""
        remedy = unbegun_remedy(cause)
        if not groups or remedy in self._unbegun:
            return []
        self._unbegun.add(remedy)
        last = printable(cause)[:MAX_REASON_CHARS]
        return [f"Not played, because their tasks can never begin: {groups} groups so far; the last: {last}. {remedy}"]

    def look_at_refusals(
        self, accepted: int, refused: Mapping[str, int], newest_refusal: Callable[[], tuple[int, str]]
    ) -> list[str]:
        """New advice on a run of which validators have accepted no group. `refused` counts groups by check."""
        line, total = "", sum(refused.values())
        if not (self._judged or accepted) and total > self._refused:
            line, self._refused = refused_warning(refused, *newest_refusal()), total
        self._judged |= bool(accepted or line)
        return [line] if line else []


def refused_warning(refused: Mapping[str, int], submissions: int, detail: str) -> str:
    """Advice on a run of which so many submissions and nothing else were judged, all refused, the newest for `detail`;
    empty for fewer than MIN_REFUSED."""
    if submissions < MIN_REFUSED or not detail:
        return ""
    checks = ", ".join(f"{groups} by {check}" for check, groups in refused.items())
    return (
        f"No group was accepted so far, and {sum(refused.values())} failed a check ({checks}); the newest: "
        f"{printable(detail)[:MAX_REASON_CHARS]}. If your own workers made them, validators cannot repeat what they "
        "do: look for chance or the time in the environment (`shoal env check`) and in the chat template, and for another "
        "version of a package on one of the machines"
    )


def success_rate_warning(before: Evaluation) -> list[str]:
    """Advice on a first policy that wins nearly all held-out tasks."""
    return [
        f"The first policy already wins {one.mean:.0%} of the held-out tasks{f' of {label}' if label else ''}: little is "
        "left to learn. Begin from an earlier checkpoint of the cold start, or take harder tasks"
        for label, one in (before.envs or {"": before}).items()
        if one.measure == "success" and one.mean is not None and one.mean > MAX_WINS and not why_not_comparable(one)
    ]


def zero_signal_warning(
    metrics: Sequence[Mapping[str, Any]], flat_groups: int, flat_reward: float, why_flat: Callable[[], str] = str
) -> str:
    """Advice on a first policy whose groups rarely have signal, from the metrics of the steps so far, or from the groups
    in a row without signal and their mean reward; empty if there is none yet."""
    if metrics:
        share, reward = metrics[0].get("zero_signal_share", 0.0), metrics[0].get("reward_all_mean", 0.0)
        which = f"In {share:.0%} of the first step's groups"
    else:
        share, reward = float(flat_groups >= MIN_FLAT_GROUPS), flat_reward
        which = f"In each of the first {flat_groups} groups"
    if share <= MAX_FLAT_SHARE:
        return ""
    solved = metrics[0].get("solve_rate") if metrics else None
    lowest = "see that `shoal env check` passes, then give the policy a longer cold start or easier tasks"
    highest = "begin from an earlier checkpoint of the cold start, or take harder tasks"
    between = "raise rollouts.group_size, or draw tasks by solve rate ([difficulty])"
    if why := why_flat():
        then = f". {why}"
    elif is_number(solved):
        change = lowest if solved <= UNSOLVED else highest if solved >= SOLVED else between
        then = f", {solved:.0%} of rollouts are solved: {change}"
    else:
        then = f". If that is near the lowest, {lowest}; if near the highest, {highest}; in between, {between}"
    return f"{which}, all rewards are equal, and nothing is learned from them; the mean reward is {reward:.3g}{then}"
