"""Why the reward did not rise: what a run's metrics show, and what to change, in the order in which to try it.

Pure: metrics, evaluations and settings in, sentences out. The page that `PAGE` names has the same order. Of a run
whose reward fell, the rate is named first.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from shoal.config.validate_algorithm import MIN_STEP_ROLLOUTS, lr_misfit
from shoal.evaluation_files import Evaluation, interval_of, why_not_comparable
from shoal.monitors.learning import began_below_limit
from shoal.step_metrics import mean_of_counts, series_of
from shoal.terminal import docs_page

PAGE = "docs/how-to/the-reward-does-not-rise.md"

MIN_STEPS, WINDOW_STEPS = 6, 20
"""Fewer steps show no trend; the means of at most so many steps are compared, those of the start and of the end."""
UNEVALUATED = (
    "held-out tasks were not evaluated before and after: compare `shoal eval RUN/policy` with `shoal eval RUN`"
)

UNSOLVED, SOLVED = 0.02, 0.9
"""Solve rates at the start below which nothing is found, and above which little is left to find."""
MIN_GROUP_ROLLOUTS = 8
"""Of one task: a task that is solved one time in eight has all rewards equal in a third of groups of 8."""
FLAT = 0.5
"""Share of groups without signal from which most of the work teaches nothing."""
CUT_OFF = 0.1
"""Share of held-out episodes, or else of rollouts, that a token limit or a fault ended."""
CLIPPED = 0.05
"""Share of tokens. Runs that learn stay below 0.03."""
LOST = 0.5
"""Share of what the reward had gained that it lost again."""
CERTAIN_NATS, ENTROPY_SHARE = 0.1, 0.3
"""Entropy per token of a policy that always writes the same; share of the entropy at the start that is left."""
STALE = 1.5
"""Versions, mean age of the rollouts: one version, the default of a run, costs nothing that shows."""
FEW_STEPS, MANY_STEPS = 40, 100


@dataclass(frozen=True)
class LearningSetup:
    """Settings of a run on which learning depends."""

    preset_lr: float
    """Learning rate that fits the number of parameters that learn; 0: not known."""
    group_size: int
    batch_groups: int
    max_staleness: int
    lr: float = 0.0
    """As the run file says, which a schedule may never reach; 0: the highest of the metrics stands for it."""
    steps: int = 0
    """That the run was to take; 0: not known."""
    updates: int = 1
    """Of a batch."""
    moving_tasks: bool = False
    """Whether tasks become harder as the policy improves, so that the reward alone shows nothing."""


def diagnose(
    lines: Sequence[Mapping[str, Any]],
    setup: LearningSetup,
    before: Evaluation | None = None,
    after: Evaluation | None = None,
    endings: Mapping[str, int] | None = None,
) -> tuple[str, ...]:
    """Sentences about a run that ended without a gain: what it reached, then each cause that shows with its remedy.

    `lines` are the run's metrics, oldest first; `endings` counts how the episodes of the last evaluation ended. RUN in
    commands is the run's folder. Empty if held-out results or the reward of training rose, or if too little is known to
    say: held-out results with many faults say nothing.
    """
    outcomes = [one for one in (_heldout(before, after), None if setup.moving_tasks else _reward(lines)) if one]
    if not outcomes or any(trend > 0 for trend, _ in outcomes):
        return ()
    fell = any(trend < 0 for trend, _ in outcomes)
    causes = [f"- {saw}: {change}" for saw, change in _causes(lines, setup, endings or {}, fell)]
    if not causes:
        causes = [f"- no usual cause shows in its metrics: read what the policy writes, and see {docs_page(PAGE)}"]
    said = [words for _, words in outcomes]
    if not (before and after):
        said.append(UNEVALUATED)
    elif why := why_not_comparable(before, after):
        said.append(f"held-out tasks: {why}")
    moved = "fell" if fell else "did not rise"
    return (
        f"The reward {moved} beyond chance: {'; '.join(said)}. What the run saw, and what to change ({docs_page(PAGE)}):",
        *causes,
    )


def _heldout(before: Evaluation | None, after: Evaluation | None) -> tuple[int, str] | None:
    """1 or -1 if held-out results rose or fell by more than their noise, else 0; and what they were."""
    first, last = interval_of(before), interval_of(after)
    if before is None or after is None or first is None or last is None or why_not_comparable(before, after):
        return None
    (was, was_low, was_high), (now, now_low, now_high) = first, last
    trend = _trend(now - was, math.hypot(was_high - was, now - now_low), math.hypot(was - was_low, now_high - now))
    parts = [part for one in (before, after) for part in (one.envs.values() or [one])]
    form = ".1%" if all(part.measure == "success" for part in parts) else ".3f"
    words = f"held-out {'tasks' if form == '.1%' else 'reward'} {was:{form}} before, {now:{form}} after"
    return trend, words


def _reward(lines: Sequence[Mapping[str, Any]]) -> tuple[int, str] | None:
    """The same of the reward of training: of the line through all steps, if the means of start and end move as it does."""
    rewards = _rewards(lines)
    if len(rewards) < MIN_STEPS:
        return None
    size = min(WINDOW_STEPS, len(rewards) // 3)
    first, last = rewards[:size], rewards[-size:]
    from_middle = [i - (len(rewards) - 1) / 2 for i in range(len(rewards))]
    spread = sum(x * x for x in from_middle)
    slope = sum(x * reward for x, reward in zip(from_middle, rewards, strict=True)) / spread
    noise = 2 * math.sqrt(_variance_of_neighbours(rewards) / spread)
    trend = _trend(slope, noise, noise)
    words = f"reward {fmean(first):.3f} in the first {size} steps, {fmean(last):.3f} in the last"
    return trend if trend * (fmean(last) - fmean(first)) > 0 else 0, words


def _trend(gain: float, noise_up: float, noise_down: float) -> int:
    return (gain > noise_up) - (gain < -noise_down)


def _causes(
    lines: Sequence[Mapping[str, Any]], setup: LearningSetup, endings: Mapping[str, int], fell: bool
) -> Iterator[tuple[str, str]]:
    """What was seen, and what to change, the first to try first."""
    if not lines:
        yield (
            "the run took no step, because no batch of groups whose rewards differ came together before it ended",
            "if the policy is never right, make a cold start (`shoal sft --stop-at 0.4`), use easier tasks, or give "
            "partial rewards; if it always is, use harder tasks; if the run paused for another reason, follow what it said"
            + _of_small_groups(setup),
        )
        return
    skipped = sum(series_of(lines, "update_skipped"))
    if skipped:
        yield (
            f"{skipped:.0f} of {len(lines)} steps were skipped, because their gradient was not finite",
            "lower train.lr",
        )
    tasks, rate = tuple(_of_tasks(lines, setup, endings, fell)), tuple(_of_rate(lines, setup, fell))
    entropy = tuple(_of_entropy(series_of(lines, "entropy_nats")))
    yield from (*rate, *tasks) if fell else (*tasks, *rate)
    yield from entropy
    lr = _lr(lines, setup)
    if fell and lr and not (skipped or tasks or rate or entropy):
        yield f"the policy became worse at train.lr = {lr:g}", "halve it, even if it is the preset"
    stale = [age for line in lines if (age := mean_of_counts(line.get("staleness_rollouts"))) is not None]
    if stale and fmean(stale) >= STALE:
        yield (
            f"rollouts were {fmean(stale):.1f} versions old on average, limit {setup.max_staleness}",
            f"set rollouts.max_staleness = {min(1, setup.max_staleness - 1)}",
        )
    rollouts = setup.group_size * setup.batch_groups
    if rollouts < MIN_STEP_ROLLOUTS:
        yield (
            f"a step learned from {setup.batch_groups} x {setup.group_size} = {rollouts} rollouts, so gradients were noisy",
            f"raise rollouts.batch_groups to {math.ceil(2 * MIN_STEP_ROLLOUTS / setup.group_size)}",
        )
    if len(lines) < FEW_STEPS and not fell:
        stopped = len(lines) < setup.steps
        enough = "" if setup.steps >= MANY_STEPS else f"raise steps to {MANY_STEPS} or more"
        yield (
            f"the run took {len(lines)}{f' of its {setup.steps}' if stopped else ''} steps",
            enough or "start it anew, and let it take them all",
        )


def _of_tasks(
    lines: Sequence[Mapping[str, Any]], setup: LearningSetup, endings: Mapping[str, int], fell: bool
) -> Iterator[tuple[str, str]]:
    solved, flat = series_of(lines, "solve_rate"), series_of(lines, "zero_signal_share")
    share = f"{fmean(flat):.0%} of groups were flat (all rewards equal)" if flat else ""
    if solved and median(solved[:WINDOW_STEPS]) >= SOLVED:
        yield (
            f"the policy solved {median(solved[:WINDOW_STEPS]):.0%} of its rollouts from the start"
            + (share and f", and {share}"),
            "use harder tasks, or stop the cold start earlier (`shoal sft --stop-at 0.4`)"
            + (_of_small_groups(setup) if flat and fmean(flat) >= FLAT else ""),
        )
    elif solved and fmean(solved) <= UNSOLVED and flat and fmean(flat) >= FLAT:
        yield (
            f"the policy solved {fmean(solved):.1%} of its rollouts, and {share}",
            "make a cold start (`shoal sft --stop-at 0.4`), use easier tasks, or give partial rewards"
            + _of_small_groups(setup),
        )
    elif flat and fmean(flat) >= FLAT:
        size = setup.group_size
        larger = f"to {MIN_GROUP_ROLLOUTS} or more (was {size})" if size < MIN_GROUP_ROLLOUTS else f"above {size}"
        yield share, f"raise rollouts.group_size {larger}, or draw tasks by solve rate ([difficulty])"
    episodes, of = sum(endings.values()), "held-out episodes"
    failed, cut = (endings.get(name, 0) / max(1, episodes) for name in ("error", "length"))
    if not episodes and (overlong := series_of(lines, "overlong_share")):
        cut, of = fmean(overlong), "rollouts"
    if failed >= CUT_OFF:
        yield f"the environment failed in {failed:.0%} of held-out episodes", "run `shoal env check` and repair it"
    if cut >= CUT_OFF and not (fell and began_below_limit(lines)):
        yield (
            f"a token limit ended {cut:.0%} of {of}",
            "raise sampling.max_turn_tokens and sampling.max_tokens, or teach the policy to be brief",
        )


def _of_small_groups(setup: LearningSetup) -> str:
    """What else makes groups flat: that they are small."""
    size, least = setup.group_size, MIN_GROUP_ROLLOUTS
    return f"; raise rollouts.group_size, too, to {least} or more (was {size})" if size < least else ""


def _lr(lines: Sequence[Mapping[str, Any]], setup: LearningSetup) -> float:
    return setup.lr or max(series_of(lines, "lr"), default=0.0)


def _of_rate(lines: Sequence[Mapping[str, Any]], setup: LearningSetup, fell: bool) -> Iterator[tuple[str, str]]:
    """Whether the updates were too small or too large."""
    lr = _lr(lines, setup)
    clipped, rewards = series_of(lines, "clip_share"), _rewards(lines)
    preset = setup.preset_lr
    much_clipped = bool(clipped) and fmean(clipped) >= CLIPPED
    misfit = lr_misfit(lr, preset)
    if misfit == "high" or (misfit and not much_clipped and not fell):
        yield (
            f"train.lr was {lr:g}, and the preset for a policy of this size is {preset:g}",
            f"set train.lr = {preset:g}",
        )
    if much_clipped and misfit != "high":
        other = ", or set rollouts.max_staleness = 0" if setup.max_staleness else ""
        other = f", or lower train.updates_per_batch (was {setup.updates})" if setup.updates > 1 else other
        yield (
            f"{fmean(clipped):.1%} of tokens were clipped, and runs that learn stay below 3%",
            f"halve train.lr (was {lr:g}){other}",
        )
    size = min(WINDOW_STEPS, len(rewards) // 6)
    if size >= 2 and misfit != "low":
        means = [fmean(rewards[i : i + size]) for i in range(len(rewards) - size + 1)]
        start, end, best = means[0], means[-1], max(means)
        noise = 2 * math.sqrt(2 * _variance_of_neighbours(rewards) / size)
        if best - start > 2 * noise and best - end > max(noise, LOST * (best - start)):
            step = means.index(best) + size
            yield (
                f"the reward rose to {best:.3f} until step {step}, and fell to {end:.3f}",
                "start from the checkpoint nearest to that step"
                + (" with half of train.lr" if misfit != "high" else ""),
            )


def _of_entropy(entropy: Sequence[float]) -> Iterator[tuple[str, str]]:
    if not entropy:
        return
    start, end = median(entropy[:WINDOW_STEPS]), median(entropy[-WINDOW_STEPS:])
    if start < CERTAIN_NATS:
        yield (
            f"the entropy was {start:.3f} nats a token from the start: the policy always writes the same",
            "stop the cold start earlier (`shoal sft --stop-at 0.4`), or raise sampling.temperature",
        )
    elif end < ENTROPY_SHARE * start:
        yield (
            f"the entropy fell from {start:.3f} to {end:.3f} nats a token",
            "lower train.lr, or add an entropy bonus (train.algorithm.entropy_bonus)",
        )
    elif end > start / ENTROPY_SHARE:
        yield f"the entropy rose from {start:.3f} to {end:.3f} nats a token", "lower train.lr: the policy falls apart"


def _rewards(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    return series_of(lines, "reward_all_mean") or series_of(lines, "reward_mean")


def _variance_of_neighbours(values: Sequence[float]) -> float:
    """The variance of the noise alone, of which a slow trend has no part: from the differences of neighbours."""
    return fmean((after - before) ** 2 for before, after in pairwise(values)) / 2
