"""Numbers, sizes and times as people read them, the same on the terminal, on pages, in reports and in messages."""

import math
from datetime import UTC, datetime

UNKNOWN = "–"


def duration(seconds: float | None) -> str:
    """Such as 350ms, 7.5s, 42s, 2m03s, 1h02m, 3d04h. It has no space: lines of figures are cut at spaces."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if 0 < seconds < 1:
        return f"{1000 * seconds:.3g}ms"
    if seconds < 10:
        return f"{max(0.0, seconds):.2g}s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 2 * 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def data_size(size_bytes: float) -> str:
    """Such as 12 bytes, 1.5 kB, 4.9 MB, 14 GB."""
    return _scaled(size_bytes, ((1e12, " TB"), (1e9, " GB"), (1e6, " MB"), (1e3, " kB"), (1.0, " bytes")))


def count(number: float) -> str:
    """Such as 0.25, 123, 796,032, 7B."""
    return f"{number:,.0f}" if 10 <= number < 1e6 else _scaled(number, ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1.0, "")))


def figure(value: float | None, digits: int = 4) -> str:
    """A number with so many significant digits, or with all before its point."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if isinstance(value, int) or (value == int(value) and abs(value) < 1e6):
        return f"{int(value):,}"
    return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:,.0f}"


def percent(share: float | None) -> str:
    """Such as 12.3%."""
    return UNKNOWN if share is None or not math.isfinite(share) else f"{share:.1%}"


def moment(time_s: float | None, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """A time in UTC."""
    try:
        return datetime.fromtimestamp(time_s, UTC).strftime(form) if time_s is not None else UNKNOWN
    except (OverflowError, ValueError, OSError):
        return UNKNOWN


def _scaled(number: float, units: tuple[tuple[float, str], ...]) -> str:
    """In the largest unit of which there is one; three digits, or all before the point."""
    limit, unit = next((each for each in units if number >= 0.9995 * each[0]), units[-1])
    number /= limit
    return (f"{number:,.0f}" if number >= 99.95 else f"{round(number, 3):.3g}") + unit
