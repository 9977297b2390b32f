"""What a process of a measurement takes and reports: memory from Linux's /proc, and the line of a side of a comparison.

Used on both sides of a measurement, so it imports nothing of shoal's.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any


def resident_mb() -> float:
    """What is resident now."""
    return _read("VmRSS")


def peak_mb(process: int | str = "self") -> float:
    """The most of a process that was resident since its start, or since `forget_peak`. Raises OSError if it has ended."""
    return _read("VmHWM", process)


def forget_peak() -> None:
    """Begin the peak again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def report_steps(take_step: Callable[[int], float], steps: int, before_mb: float, model: Any) -> None:
    """Take optimiser steps and print them as a line of JSON: CPU-seconds of each step after the first, peak memory of the
    steps, memory before the policy was loaded, and the loss of each step, which `take_step` returns."""
    forget_peak()
    cpu_s, losses = [], []
    for step in range(steps):
        began = process_time()
        losses.append(take_step(step))
        cpu_s.append(process_time() - began)
    print(
        json.dumps({
            "cpu_s": cpu_s[1:] or cpu_s, "peak_mb": peak_mb(), "before_mb": before_mb, "loss": losses[-1], "losses": losses,
            "parameters": sum(p.numel() for p in model.parameters()),
        })
    )  # fmt: skip


def _read(key: str, process: int | str = "self") -> float:
    found = re.search(rf"^{key}:\s+(\d+) kB$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    if found is None:
        raise ProcessLookupError(f"/proc/{process}/status has no {key}")  # a process that has ended and was not reaped
    return int(found[1]) / 1024
