"""The views of a run as a whole: overview, figures, nodes, validators, versions, alarms, and several runs compared.

Called by `app`: each takes a request and gives a template with its values. What the log decides is in rows with the
number of its event; what the trainer says has its step.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from shoal.metrics import METRICS
from shoal.watch.index.look import RANKINGS
from shoal.watch.page.asked import Asked, NotHere
from shoal.watch.page.charts import HEIGHT, OVERVIEW, WIDTH, Chart, chart_of, compared, picture_of

View = Callable[[Asked], tuple[str, Mapping[str, Any]]]

MOST_CHARTS = 60
"""Of one page of figures."""

FREE_DISK = "disk_free_gb"


def overview(asked: Asked) -> tuple[str, Mapping[str, Any]]:
    """How the run does."""
    look, run = asked.look, asked.run
    found = look.overview(run)
    return "overview.html", {
        **found, "alarms": look.alarms(run, only_open=True), "charts": _charts(asked, OVERVIEW),
        "refused": look.refusal_counts(run, 5), "ages": look.ages(run, 5),
        "top": look.nodes(run, "worker", limit=5)["rows"], "title": "Overview",
        "per_env": {name.partition("/")[2]: value for name, value in sorted(_numbers(found["metrics"]).items())
                    if name.startswith("reward_mean/")},
    }  # fmt: skip


def figures(asked: Asked) -> tuple[str, Mapping[str, Any]]:
    """All metrics of the run, or those that a search finds."""
    names, search = asked.look.names(asked.run), asked.word("q")
    if search:
        known = set(asked.look.metric_names(asked.run, search))
        names = [name for name in names if name in known or search.lower() in name.lower()]
    families = list(dict.fromkeys(name.partition("/")[0] for name in names if name not in ("step", "time_s")))
    at = asked.whole("at", 0) or 0
    return "figures.html", {
        "title": "Figures", "charts": _charts(asked, families[at : at + MOST_CHARTS]), "search": search,
        "smooth": asked.smooth(), "next": at + MOST_CHARTS if len(families) > at + MOST_CHARTS else None,
    }  # fmt: skip


def step(asked: Asked) -> tuple[str, Mapping[str, Any]]:
    """The metrics of one step: the line that the trainer wrote."""
    number = asked.path["step"]
    found = asked.look.rows("SELECT line FROM metrics WHERE run = ? AND step = ?", asked.run, min(number, 1 << 62))
    if not found:
        raise NotHere(f"the run has no metrics of step {number}")
    values = _numbers(json.loads(found[0]["line"]))
    told = {name: METRICS.get(name) or METRICS.get(name.partition("/")[0]) for name in values}
    return "step.html", {"title": f"Step {number}", "step": number, "values": values, "told": told}


def nodes(asked: Asked) -> tuple[str, Mapping[str, Any]]:
    """Nodes in order of a ranking. A volunteer finds its own by the start of its key."""
    role, by, search = asked.word("role"), asked.word("by") or "credits", asked.word("q")
    by = by if by in RANKINGS else "credits"
    page = asked.look.nodes(asked.run, role, by, search, asked.whole("after", 0) or 0)
    facts = asked.look.overview(asked.run)["facts"]
    return "nodes.html", {
        "title": "Nodes", **page, "role": role, "by": by, "search": search, "rankings": RANKINGS,
        "checks": asked.look.refusal_counts(asked.run), "facts": facts,
    }  # fmt: skip


def node(asked: Asked) -> tuple[str, Mapping[str, Any]]:
    """What one node did, and what it helped with."""
    key = asked.path["key"]
    found = asked.look.node(asked.run, key)
    if found is None:
        raise NotHere("the run has no node with this key: search for the start of it among the nodes")
    events = asked.look.timeline(asked.run, node=key, limit=20)["rows"]
    helped = asked.look.rows(
        "SELECT count(*) AS groups, sum(status = 'signal') AS signal, sum(step >= 0) AS used, sum(tokens) AS tokens, "
        "count(DISTINCT CASE WHEN step >= 0 THEN step END) AS steps FROM groups WHERE run = ? AND worker = ?",
        asked.run, key,
    )[0]  # fmt: skip
    return "node.html", {"title": "Node", "node": found, "events": events, "helped": helped}


def validators(asked: Asked) -> tuple[str, Mapping[str, Any]]:
    """What each validator judged, and where they differed."""
    differences = asked.look.differences(asked.run, asked.whole("after"))
    return "validators.html", {
        "title": "Validators", "rows": asked.look.validators(asked.run), "differences": differences,
        "counts": asked.look.refusal_counts(asked.run),
    }  # fmt: skip


def refusals(asked: Asked) -> tuple[str, Mapping[str, Any]]:
    """Refused groups, with the check, its reason and its figures."""
    check, worker = asked.word("check"), asked.word("worker")
    page = asked.look.refusals(asked.run, check, worker, asked.whole("after"))
    return "refusals.html", {
        "title": "Refusals", **page, "check": check, "worker": worker, "counts": asked.look.refusal_counts(asked.run),
    }  # fmt: skip


def versions(asked: Asked) -> tuple[str, Mapping[str, Any]]:
    """Policy versions and how they spread."""
    page = asked.look.versions(asked.run, asked.whole("after"))
    numbers = [row["version"] for row in page["rows"]] or [0]
    steps = asked.look.rows(
        "SELECT step FROM metrics WHERE run = ? AND step BETWEEN ? AND ?", asked.run, min(numbers), max(numbers)
    )
    return "versions.html", {
        "title": "Versions", **page, "ages": asked.look.ages(asked.run), "stepped": {row["step"] for row in steps},
    }  # fmt: skip


def alarms(asked: Asked) -> tuple[str, Mapping[str, Any]]:
    """What monitors found."""
    return "alarms.html", {"title": "Alarms", "rows": asked.look.alarms(asked.run)}


def comparison(asked: Asked) -> tuple[str, Mapping[str, Any]]:
    """Several runs beside each other."""
    runs = asked.runs()
    labels = {row["run"]: row["name"] or row["place"] for row in runs}
    names = sorted({name for row in runs for name in asked.look.names(row["run"])} - {"step", "time_s"})
    chosen = [name for name in asked.words("metric") if name in names] or [
        name for name in ("reward_mean", "entropy_nats") if name in names
    ]
    charts = [_drawn(compared(asked.look, labels, name, asked.smooth())) for name in chosen[:12]]
    figures = [{**row, **asked.look.overview(row["run"])} for row in runs]
    return "compare.html", {
        "title": "Runs", "rows": figures, "charts": charts, "names": names, "chosen": chosen, "smooth": asked.smooth(),
        "width": WIDTH, "height": HEIGHT,
    }  # fmt: skip


VIEWS: dict[str, View] = {
    "/": overview, "/figures": figures, "/steps/{step:int}": step, "/nodes": nodes, "/nodes/{key}": node,
    "/validators": validators, "/refusals": refusals, "/versions": versions, "/alarms": alarms,
}  # fmt: skip


# --- numbers for the script ---


def chart(asked: Asked) -> Mapping[str, Any]:
    """The numbers of one chart; with `of=all`, of all runs."""
    name = asked.word("name")
    if asked.word("of") == "all":
        labels = {row["run"]: row["name"] or row["place"] for row in asked.runs()}
        found = compared(asked.look, labels, name, asked.smooth())
    else:
        found = chart_of(asked.look, asked.run, name, asked.smooth())
    return {"x": found.x, "unit": found.unit, "x_label": found.x_label, "lines": [
        {"label": line.label, "values": line.values, "edge": line.is_edge} for line in found.lines
    ]}  # fmt: skip


def live(asked: Asked) -> Mapping[str, Any]:
    """The snapshot that the script polls: it says whether the page is to be asked for again."""
    found = asked.look.overview(asked.run)
    condition = found["condition"]
    return {
        "seq": found["seq"], "phase": condition.get("phase"), "version": condition.get("version"),
        "step": found["metrics_step"], "change": asked.shelf.change,
    }  # fmt: skip


def _charts(asked: Asked, names: Any) -> list[dict[str, Any]]:
    smooth = asked.smooth()
    return [_drawn(found) for name in names if (found := chart_of(asked.look, asked.run, name, smooth)).lines]


def _drawn(found: Chart) -> dict[str, Any]:
    return {"chart": found, "picture": picture_of(found)}


def _numbers(line: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a metrics line, those of a table within it by NAME/KEY."""
    values = dict[str, Any]()
    for name, value in line.items():
        if isinstance(value, dict):
            values |= {f"{name}/{inner}": part for inner, part in value.items()}
        else:
            values[name] = value
    return values
