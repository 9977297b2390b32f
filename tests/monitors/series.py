"""Metrics and digests of honest noisy runs, made from a seed, for tests of monitors: what must raise no alarm."""

import random

from shoal.monitors.monitor_inputs import MonitorInputs, around_best
from shoal.monitors.step_statistics import StepDigest

WORKERS = ("a" * 64, "b" * 64, "c" * 64)
NAMES = {key: ("worker", f"worker-{i}") for i, key in enumerate(WORKERS)}


def honest_lines(seed, steps=60):
    """A run that learns, with the noise of small batches: rewards of 128 rollouts, gradients that jump, uneven steps."""
    rng, lines = random.Random(seed), []
    for step in range(steps):
        solved = min(0.85, 0.2 + 0.65 * step / 40)
        rate = sum(rng.random() < solved for _ in range(128)) / 128
        lines.append({
            "step": step, "time_s": 1000.0 + 3 * step, "step_s": rng.lognormvariate(1.0, 0.5), "lr": 2e-4,
            "reward_all_mean": 0.05 + 0.9 * rate, "solve_rate": rate, "zero_signal_share": rng.uniform(0.0, 0.4),
            "entropy_nats": max(0.05, 1.0 - 0.9 * solved) * rng.uniform(0.7, 1.3),
            "log_ratio_abs_mean_nats": 0.0 if step == 0 else 0.03 * rng.lognormvariate(0.0, 0.5),
            "grad_norm": rng.lognormvariate(0.0, 0.7), "update_skipped": 0, "rollouts": 128, "policy_tokens": 640 + step,
            "waiting_share": rng.uniform(0.2, 0.95), "publish_s": 0.1, "publish_wait_s": 0.0,
            "repetition_share": rng.uniform(0.0, 0.1), "reward_length_correlation": rng.uniform(-0.2, 0.4),
        })  # fmt: skip
    return lines


def honest_digests(seed, steps=60):
    """Three workers with like rewards, of which one is three times slower and one lost a lease, and two validators."""
    rng, digests = random.Random(seed), []
    for step in range(steps):
        digest = StepDigest(step)
        for i, key in enumerate(WORKERS):
            node = digest.of(key)
            node.accepted, node.leases = 2, 2
            node.refused = int(i == 0 and step == 7)
            node.lapsed = int(i == 1 and step in (20, 21))
            node.rewards = [rng.gauss(0.5, 0.2) for _ in range(8)]
            node.influence = rng.uniform(50, 150)
            node.seconds = [rng.uniform(0.8, 1.2) * (3.0 if i == 2 else 1.0) for _ in range(2)]
            node.skews_s = [rng.uniform(-3.0, 0.5) for _ in range(2)]
        for key in ("v" * 64, "w" * 64):
            digest.of(key).compared, digest.of(key).differed = 1, int(step == 30)
        digests.append(digest)
    return digests


def views(lines, digests=(), **facts):
    """A view for each step."""
    for count in range(1, len(lines) + 1):
        done = [one for one in digests if one.step < count]
        at_best = around_best(lines[:count], facts.get("heldout", ()))
        yield MonitorInputs(lines=lines[:count], steps=done[-64:], names=NAMES, at_best=at_best, **facts)
