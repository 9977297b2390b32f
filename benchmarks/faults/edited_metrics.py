"""Faults that are cheaper to write into a recorded run than to cause: its metrics are changed from one step on, as the
fault would.

Each takes an honest run's metrics and gives those of the same run with the fault. `monitors.py` puts them beside the
run's own log.
"""

from collections.abc import Callable, Sequence
from typing import Any

from shoal.monitors.monitor_inputs import HeldoutResult

Lines = Sequence[dict[str, Any]]
LEARNED = ("reward_all_mean", "reward_mean", "solve_rate")


def reward_falls(lines: Lines) -> list[dict[str, Any]]:
    """From the middle on, reward and solve rate fall to nearly nothing within five steps."""
    return _from(lines, 1 / 2, lambda line, age: _scaled(line, max(0.02, 1 - age / 5), "reward_all_mean", "solve_rate"))


def gradient_explodes(lines: Lines) -> list[dict[str, Any]]:
    """In the last third, the norm of the gradient triples with each step."""
    return _from(lines, 2 / 3, lambda line, age: _scaled(line, 3.0 ** (age + 1), "grad_norm"))


def entropy_vanishes(lines: Lines) -> list[dict[str, Any]]:
    """Nothing is learned: rewards and solve rates stay as in the first sixth. From the middle on, entropy halves with each
    step."""
    start = lines[: max(3, len(lines) // 6)]
    rewards = [{name: start[i % len(start)].get(name) for name in LEARNED} for i in range(len(lines))]
    stuck = [line | reward for line, reward in zip(lines, rewards, strict=True)]
    return _from(stuck, 1 / 2, lambda line, age: _scaled(line, 0.5 ** (age + 1), "entropy_nats"))


def steps_starve(lines: Lines) -> list[dict[str, Any]]:
    """In the last third, most workers are gone: a step takes a minute, of which the trainer waits for nearly all."""
    return _from(lines, 2 / 3, lambda line, age: line | {"step_s": 60.0 + age, "waiting_share": 0.97})


def publishing_slows(lines: Lines) -> list[dict[str, Any]]:
    """In the last third, a version takes a minute to publish, and each step waits for most of that."""
    return _from(
        lines,
        2 / 3,
        lambda line, age: line | {"publish_s": 60.0, "publish_wait_s": 40.0, "step_s": 55.0, "waiting_share": 0.1},
    )


def not_finite(lines: Lines) -> list[dict[str, Any]]:
    """In the last third, every gradient is not a number."""
    return _from(lines, 2 / 3, lambda line, age: line | {"update_skipped": 1, "grad_norm": None})


def selfcheck_differs(lines: Lines) -> list[dict[str, Any]]:
    """From the middle on, as after a restart on another engine, a completion that is computed again differs by 0.4 nats."""
    return _from(lines, 1 / 2, lambda line, age: line | {"selfcheck_gap_nats": 0.4})


def solved_falls(lines: Lines) -> list[dict[str, Any]]:
    """Reward rises, and from the middle on the share of solved tasks falls to nearly nothing within five steps."""
    return _from(reward_rises(lines), 1 / 2, lambda line, age: _scaled(line, max(0.02, 1 - age / 5), "solve_rate"))


def reward_rises(lines: Lines) -> list[dict[str, Any]]:
    """Reward in training rises by a half over the run, whatever the policy learned."""
    return [
        line | {"reward_all_mean": (line.get("reward_all_mean") or 0.0) + 0.5 * i / len(lines)}
        for i, line in enumerate(lines)
    ]


def heldout_falls(lines: Lines) -> list[HeldoutResult]:
    """Evaluations of such a run, in which held-out tasks are solved less and less."""
    last = int(lines[-1]["step"])
    return [HeldoutResult(0, 0.6, 0.55, 0.65), HeldoutResult(last - 5, 0.4, 0.35, 0.45)]


CHANGES: dict[str, tuple[Callable[[Lines], list[dict[str, Any]]], str]] = {
    "reward falls": (reward_falls, "collapse"),
    "gradient explodes": (gradient_explodes, "collapse"),
    "gradient is not a number": (not_finite, "collapse"),
    "entropy vanishes": (entropy_vanishes, "entropy"),
    "workers leave": (steps_starve, "starved"),
    "publishing slows": (publishing_slows, "publishing"),
    "self-check differs": (selfcheck_differs, "drift"),
    "solve rate falls": (solved_falls, "hacking"),
}
"""By fault: the change, and the alarm that names it."""


def _from(lines: Lines, share: float, change: Callable[[dict[str, Any], int], dict[str, Any]]) -> list[dict[str, Any]]:
    first = int(len(lines) * share)
    return [change(dict(line), i - first) if i >= first else dict(line) for i, line in enumerate(lines)]


def _scaled(line: dict[str, Any], factor: float, *names: str) -> dict[str, Any]:
    return line | {name: line[name] * factor for name in names if isinstance(line.get(name), int | float)}
