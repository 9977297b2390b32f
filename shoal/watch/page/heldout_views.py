"""Evaluations on held-out tasks: figures for everybody, and single episodes for the host.

Called by `app`. Nothing shows the host's tasks to others, who could train on them. Figures are the host's
word. Texts are those of models and environments.
"""

from collections.abc import Mapping
from typing import Any

from shoal.errors import NothingYet, ShoalError
from shoal.watch.page.asked import Asked, View
from shoal.watch.page.charts import chart_of, picture_of

EPISODES = 10
"""Of one page."""


def heldout(asked: Asked) -> tuple[str, Mapping[str, Any]]:
    """All evaluations, and to the host the episodes of one."""
    rows = asked.look.heldout(asked.run)
    found, why = {}, ""
    try:
        found = asked.shelf.transcripts(asked.run, asked.is_host)
    except (NothingYet, ShoalError) as error:
        why = asked.excuse(error)
    kept = [row for row in rows if (row["name"], row["env"]) in found]
    named = (asked.word("name"), asked.word("env"))
    chosen = named if named in found else (kept[-1]["name"], kept[-1]["env"]) if kept else ("", "")
    episodes, at = found.get(chosen, ()), asked.whole("at", 0) or 0
    drawn = chart_of(asked.look, asked.run, "heldout", 0.0)
    return "heldout.html", {
        "title": "Held-out", "rows": rows, "faulted": any(row["faults"] for row in rows),
        "judged": any(row["judge"] is not None for row in rows),
        "kept": kept, "chosen": chosen, "why": why, "at": at,
        "episodes": list(enumerate(episodes))[at : at + EPISODES], "total": len(episodes),
        "next": at + EPISODES if at + EPISODES < len(episodes) else None,
        "picture": {"chart": drawn, "picture": picture_of(drawn)} if drawn.lines else None,
    }  # fmt: skip


HELDOUT_VIEWS: dict[str, View] = {"/heldout": heldout}
