"""Tables from a result of `benchmarks/monitors.py`."""

from collections.abc import Mapping
from typing import Any

from benchmarks.pages.markdown import table


def tables(faults: Mapping[str, Mapping[str, Any]], honest: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """One row a fault: how it was had, the alarm that names it, and what was raised. One row an honest run: evaluations,
    looks of the launcher between its steps, and what was raised."""
    rows = [
        (name, row["made"], row["expected"], ", ".join(row["raised"]) or "none", "yes" if row["named"] else "no")
        for name, row in faults.items()
    ]
    calm = [
        (name, str(row["evaluations"]), str(row["looks"]), ", ".join(row["raised"]) or "none")
        for name, row in honest.items()
    ]
    return {
        "injected": table(("fault", "how", "expected", "raised", "named rightly"), rows),
        "honest": table(("honest run, seed", "evaluations", "looks between steps", "raised"), calm),
    }
