"""Figures in words, for the texts of `shoal plan`."""


def link(mbps: float) -> str:
    """A link for a person."""
    return f"{mbps:g} Mb/s" if mbps else "no limit of the link"


def amount(size_bytes: float) -> str:
    """Bytes for a person."""
    return _scaled(size_bytes, ((1e12, " TB"), (1e9, " GB"), (1e6, " MB"), (1e3, " kB"), (1.0, " bytes")))


def duration(seconds: float) -> str:
    """Seconds for a person."""
    if seconds < 99.5:
        return f"{_digits(seconds)} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 3 * 86400 else f"{seconds / 86400:,.0f} days"


def count(number: float) -> str:
    """A number for a person."""
    return f"{number:,.0f}" if 10 <= number < 1e6 else _scaled(number, ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1.0, "")))


def _scaled(number: float, units: tuple[tuple[float, str], ...]) -> str:
    """In the largest unit of which there is one."""
    limit, unit = next((each for each in units if number >= 0.9995 * each[0]), units[-1])
    return _digits(number / limit) + unit


def _digits(number: float) -> str:
    """Three digits, or all before the point."""
    return f"{number:,.0f}" if number >= 99.95 else f"{round(number, 3):.3g}"
