"""The log as a timeline, and one event of it.

Called by `app`. Sentences come from the index, as `words` made them; the bytes of an event are in the log itself.
"""

from collections.abc import Mapping
from typing import Any

from shoal.watch.page.asked import LARGEST, Asked, NotHere, View


def timeline(asked: Asked) -> tuple[str, Mapping[str, Any]]:
    """Events, newest first."""
    kinds = asked.look.kinds(asked.run)
    chosen = asked.words("kind")
    node, search = asked.word("node"), asked.word("q")
    page = asked.look.timeline(asked.run, chosen, node, search, asked.whole("after"))
    return "log.html", {"title": "Log", **page, "kinds": kinds, "chosen": chosen, "node": node, "search": search}


def event(asked: Asked) -> tuple[str, Mapping[str, Any]]:
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
