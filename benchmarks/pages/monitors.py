"""The table of `docs/how-to/alarms.md` from a result of `benchmarks/monitors.py`."""

from collections.abc import Mapping
from typing import Any

from benchmarks.pages.markdown import table


def tables(faults: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """One row a fault: how it was made, the alarm that names it, and what was raised."""
    rows = [
        (name, row["made"], row["expected"], ", ".join(row["raised"]) or "none", "yes" if row["named"] else "no")
        for name, row in faults.items()
    ]
    return {"injected": table(("fault", "made by", "expected", "raised", "named rightly"), rows)}
