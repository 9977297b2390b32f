"""Pages of the log and of held-out evaluations."""

from collections.abc import Mapping
from typing import Any

from shoal.errors import NothingYet, ShoalError
from shoal.views.web.charts import chart_of, picture_of
from shoal.views.web.page_request import LARGEST, NotHere, PageRequest, View

# --- The log as a timeline, and one event of it ---
#
# Sentences come from the index, as `words` made them; the bytes of an event are in the log itself.


def timeline(asked: PageRequest) -> tuple[str, Mapping[str, Any]]:
    """Events, newest first."""
    kinds = asked.look.kinds(asked.run)
    chosen = asked.words("kind")
    node, search = asked.word("node"), asked.word("q")
    page = asked.look.timeline(asked.run, chosen, node, search, asked.whole("after"))
    return "log.html", {"title": "Log", **page, "kinds": kinds, "chosen": chosen, "node": node, "search": search}


def event(asked: PageRequest) -> tuple[str, Mapping[str, Any]]:
    """One event, with what it is about."""
    seq = asked.path["seq"]
    found = asked.look.event(asked.run, seq) if seq < LARGEST else None
    if found is None:
        raise NotHere(f"the log has no event {seq}, or it is not indexed yet")
    about = asked.look.rows(
        "SELECT id, version, slot, status, worker FROM groups WHERE run = ? AND (seq = ? OR received_seq = ?) "
        "ORDER BY id LIMIT 200", asked.run, seq, seq,
    ) if found["kind"] in ("submission_received", "group_accepted", "decision", "slot_void") else []  # fmt: skip
    verdict = asked.look.rows("SELECT * FROM verdicts WHERE run = ? AND seq = ?", asked.run, seq)
    findings = asked.look.rows("SELECT * FROM refusals WHERE run = ? AND seq = ? ORDER BY place", asked.run, seq)
    acts = [act for act in asked.look.acts(asked.run) if act["seq"] == seq]
    return "event.html", {
        "title": f"Event {seq}", "act": acts[0] if acts else None, "place": "Log", "event": found, "groups": about,
        "verdict": verdict[0] if verdict else None, "findings": findings,
    }  # fmt: skip


LOG_VIEWS: dict[str, View] = {"/log": timeline, "/log/{seq:int}": event}


# --- Evaluations on held-out tasks ---
#
# Figures for everybody, and single episodes for the host.
#
# Nothing shows the host's tasks to others, who could train on them. Figures are the host's word. Texts are those of
# models and environments.


EPISODES = 10
"""Of one page."""


def heldout(asked: PageRequest) -> tuple[str, Mapping[str, Any]]:
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
