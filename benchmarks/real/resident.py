"""Memory of this process, from Linux's /proc. Used on both sides of a measurement, so it imports nothing of shoal's."""

import re
from pathlib import Path


def resident_mb() -> float:
    """What is resident now."""
    return _read("VmRSS")


def peak_mb() -> float:
    """The most that was resident since the start, or since `forget_peak`."""
    return _read("VmHWM")


def forget_peak() -> None:
    """Begin the peak again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def _read(key: str) -> float:
    found = re.search(rf"^{key}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, f"/proc/self/status has no {key}"
    return int(found[1]) / 1024
