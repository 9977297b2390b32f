"""What `shoal plan` predicts beside what small real runs do: steps, bytes, lags, staleness and the trainer's waits.

    python benchmarks/planning.py [--repeats 3] [--steps 8] [--case NAME]

Each case is a run of `planning_run.py`, with its own links and machines. What the simulator must be told (how long saving,
publishing, loading, checking and requests take) is measured in the case `open`, without limits; the other cases are
predicted with it. Repeats have other seeds. In `relays`, a version is cut into many chunks, as a large one is. The last
line is JSON: for each case the measured median and spread, and the prediction; and the errors, relative, or for a share the
difference.
"""

import asyncio
import logging
import os
from collections import defaultdict
from collections.abc import Iterable
from statistics import mean, median
from typing import Any

from benchmarks.measure import arguments, report
from benchmarks.planning_run import WARMUP_STEPS, Case, Seen, config_of, measured
from shoal.plan.simulate import simulate
from shoal.plan.simulation_input import SimulationInput, WorkerMachine
from shoal.roles.coordinator.main import rules_of

SEEDS = 8
"""Simulations of each measured run: their mean is the prediction."""

REQUESTS_S = (0.02, 0.05, 0.08, 0.12, 0.16, 0.2, 0.25, 0.3)
"""What a request may take with all that a role does around it; the one that explains the open case best is told."""

CASES = (
    Case("open", (0.0, 0.0, 0.0)),
    Case("uplink", (0.0, 0.0, 0.0), origin_up=0.6e6),
    Case("downlinks", (0.4e6, 0.4e6, 0.2e6)),
    Case("mixed", (0.3e6, 0.0, 0.0), origin_up=0.9e6, tokens_per_s=(60.0, 120.0, 180.0), train_s=3.0),
    Case("synchronous", (0.0, 0.0, 0.0), origin_up=0.6e6, staleness=0),
    Case("relays", (0.0, 0.0, 0.0), origin_up=0.8e6, relays_up=(0.8e6, 0.8e6), chunk_bytes=32 << 10),
)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="steps measured, after the warm-up")
    parser.add_argument("--case", action="append", default=[], help="only these; `open` is always there")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    cases = [case for case in CASES if not options.case or case.name in ("open", *options.case)]
    seen: dict[str, list[Seen]] = defaultdict(list)
    for repeat in range(options.repeats):
        for case in cases:
            seen[case.name].append(asyncio.run(measured(case, options.steps, repeat)))
            last = seen[case.name][-1]
            print(f"{case.name:12} {last.step_s:6.2f} s/step, idle {last.idle_share:4.0%}, lag {last.lag_s:5.2f} s, "
                  f"staleness {last.staleness:.2f}, {last.origin_bytes / 1e6:.2f} MB/step", flush=True)  # fmt: skip
    report("planning", compared(cases, seen, options.steps))


def request_s(base: Seen, steps: int) -> float:
    """What a request takes on this machine, so that steps of the open case take as long as they did."""

    def error(request_s: float) -> float:
        told = [simulate(setting_of(CASES[0], base, base, steps, seed, request_s)) for seed in range(SEEDS)]
        return abs(mean(one.step_s for one in told) - base.step_s)

    return min(REQUESTS_S, key=error)


def setting_of(case: Case, base: Seen, own: Seen, steps: int, seed: int, request_s: float) -> SimulationInput:
    """What the simulator is told: times from the open case of the same repeat, because they depend on what else this
    machine does; tokens and signal of the case itself, which follow from what its policy learns."""
    machines = tuple(
        WorkerMachine(speed, down, 0.0, base.load_s) for speed, down in zip(case.tokens_per_s, case.downs, strict=True)
    )  # fmt: skip
    return SimulationInput(
        rules=rules_of(config_of(case, steps, 0)), workers=machines,
        rollout_tokens=own.rollout_tokens, train_s=case.train_s + base.save_s, publish_s=base.publish_s,
        check_s=base.check_s, full_bytes=base.full_bytes, origin_up=case.origin_up, relays_up=case.relays_up,
        chunk_bytes=case.chunk_bytes, request_s=request_s, signal_share=own.signal_share,
        warmup_steps=WARMUP_STEPS, measured_steps=steps, seed=seed,
    )  # fmt: skip


FIGURES = ("step_s", "lag_s", "origin_bytes", "idle_share", "staleness")
"""What is compared."""


def compared(cases: Iterable[Case], seen: dict[str, list[Seen]], steps: int) -> dict[str, Any]:
    """Measured and predicted, by case and figure."""
    found: dict[str, Any] = {"load": round(os.getloadavg()[0], 2)}
    errors: dict[str, dict[str, float]] = {}
    requests_s = [request_s(base, steps) for base in seen["open"]]
    for case in cases:
        told = [
            [simulate(setting_of(case, base, own, steps, seed, took_s)) for seed in range(SEEDS)]
            for base, own, took_s in zip(seen["open"], seen[case.name], requests_s, strict=True)
        ]
        of_case = errors[case.name] = {}
        for name in FIGURES:
            values = sorted(getattr(one, name) for one in seen[case.name])
            middle, said = median(values), median(mean(getattr(one, name) for one in ones) for ones in told)
            relative = name not in ("idle_share", "staleness")
            of_case[name] = round(abs(said - middle) / (middle if relative else 1.0), 3)
            found[f"{case.name}.{name}"] = {
                "measured": round(middle, 3), "low": round(values[0], 3), "high": round(values[-1], 3),
                "predicted": round(said, 3),
            }  # fmt: skip
            print(f"{case.name:12} {name:13} measured {middle:12.3f} ({values[0]:.3f} to {values[-1]:.3f})  predicted "
                  f"{said:12.3f}  error {of_case[name]:.3f}")  # fmt: skip
    found["error_share"] = {
        name: {figure: error for figure, error in of.items() if figure != "staleness"} for name, of in errors.items()
    }
    found["largest_error_share"] = max(
        (max(of.values()) for name, of in found["error_share"].items() if name != "open"), default=0.0
    )
    found["largest_error_versions"] = max((of["staleness"] for of in errors.values()), default=0.0)
    return found


if __name__ == "__main__":
    main()
