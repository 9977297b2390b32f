"""The views of a run as a whole: overview, figures, nodes, validators, versions, alarms, log, evaluations; and of several.

What the log decides is in rows with the number of its event; what the trainer says has its step.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from shoal.errors import NothingYet, ShoalError
from shoal.runs.csv_tables import Row
from shoal.runs.run_status import TREND_STEPS, trend_of
from shoal.step_metrics import mean_of_counts, meaning_of
from shoal.views.web.chart_data import (
    BY_VERSION,
    REWARD,
    Chart,
    chart_of,
    compared,
    empty_chart,
    family_of,
    has_chart,
    of_task,
    overview_charts,
    rewards_of,
)
from shoal.views.web.index.group_queries import OF_A_BATCH
from shoal.views.web.index.queries import PAGE, RANKINGS, RefusalFilter
from shoal.views.web.index.schema import values_of
from shoal.views.web.page_request import ANY_PLACE, LARGEST, NotHere, PageRequest, View, asked_nodes, asked_refusals
from shoal.views.web.template_filters import query

MOST_CHARTS = 9
"""Of one page of figures."""

EPISODES = 10
"""Of one page of held-out tasks."""

MOST_ALARMS = 5
"""Of an overview, the critical ones first."""


def overview(asked: PageRequest) -> tuple[str, Mapping[str, Any]]:
    """How the run does."""
    look, run = asked.look, asked.run
    found = look.overview(run)
    raised = sorted(asked.alarms(only_open=True), key=lambda alarm: alarm["level"] != "critical")
    return "overview.html", {
        **found, "spreads": _spreads(asked, found["metrics_step"], found["metrics"]),
        "trouble": asked.served_runs.trouble(run),
        "alarms": raised[:MOST_ALARMS], "more_alarms": len(raised[MOST_ALARMS:]),
        "charts": _charts(asked, overview_charts(look, run)),
        "refused": look.refusal_counts(run, 5), "ages": look.ages(run, 5),
        "top": look.nodes(run, "worker", limit=5)["rows"], "title": "Overview",
        "disk": asked.served_runs.free_bytes(run) if asked.is_host else None,
        "staleness": mean_of_counts(found["metrics"].get("staleness_rollouts")),
        "reward": found["metrics"].get(REWARD), "first_reward": _first_reward(asked), "trend": _trend(asked),
        "last_verdict": _last_verdict(asked),
        "failed": look.rows("SELECT total(faults) AS rollouts FROM groups WHERE run = ?", run)[0]["rollouts"],
        "per_env": {name.partition("/")[2]: value for name, value in sorted(values_of(found["metrics"]))
                    if name.startswith("reward_mean/")},
    }  # fmt: skip


def figures(asked: PageRequest) -> tuple[str, Mapping[str, Any]]:
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


def figure(asked: PageRequest) -> tuple[str, Mapping[str, Any]]:
    """One metric with its newest values: the address of a figure."""
    name = asked.word("name")
    found = chart_of(asked.look, asked.run, name, asked.smooth())
    if not found.lines:
        raise NotHere(f"the run has no numbers of a metric {name[:60]!r}")
    chart = {"place": "Figures", "name": name, "one_chart": found, "smooth": asked.smooth()}
    if name == "heldout" or name.partition("/")[0] == BY_VERSION:
        return "figure.html", {**chart, "title": found.title, **_by_version(asked, name)}
    family = family_of(asked.look, asked.run, name)[: len(found.lines)]
    lines = asked.look.rows("SELECT step, line FROM metrics WHERE run = ? ORDER BY step DESC LIMIT 50", asked.run)
    told = [(row["step"], dict(values_of(json.loads(row["line"])))) for row in lines]
    return "figure.html", {
        **chart, "title": name, "told": "Newest steps", "labels": [line.label for line in found.lines], "point": "steps/",
        "rows": [{"at": at, "values": [values.get(metric) for metric in family]} for at, values in told],
        "table": "metrics", "csv_query": query({"name": name}),
    }  # fmt: skip


def _by_version(asked: PageRequest, name: str) -> Mapping[str, Any]:
    """The rows of a figure that the log or evaluations say by version, newest first."""
    env, point = name.partition("/")[2], "groups?version="
    columns: tuple[str, ...] = ("groups", "mean", "spread")
    if name == "heldout":
        columns = ("env", "mean", "low95", "high95", "episodes", "faults", "measure", "tasks")
        found, table, told = asked.look.heldout(asked.run), "heldout", "All evaluations"
    else:
        found, table, told = rewards_of(asked.look, asked.run, env)[-50:], "rewards", "Newest versions"
    rows, newest = list[dict[str, Any]](), -1
    for row in reversed(found):
        rows.append({"at": row["version"], "values": [row[column] for column in columns]})
        if not row.get("env") and row["version"] != newest:  # an address that ends in #v12 leads here
            newest = rows[-1]["id"] = row["version"]
    return {
        "told": told,
        "labels": columns,
        "rows": rows,
        "point": point,
        "table": table,
        "csv_query": query({"env": env}),
    }


def step(asked: PageRequest) -> tuple[str, Mapping[str, Any]]:
    """The metrics of one step: the line that the trainer wrote."""
    number = asked.path["step"]
    found = asked.look.rows("SELECT line FROM metrics WHERE run = ? AND step = ?", asked.run, min(number, 1 << 62))
    if not found:
        raise NotHere(f"the run has no metrics of step {number}")
    values = dict(values_of(json.loads(found[0]["line"])))
    told = {name: meaning_of(name) for name in values}
    return "step.html", {"title": f"Step {number}", "place": "Figures", "step": number, "values": values, "told": told}


def nodes(asked: PageRequest) -> tuple[str, Mapping[str, Any]]:
    """Nodes in order of a ranking. A volunteer finds its own by the start of its key: the page of the only one found."""
    role, by, search = asked_nodes(asked)
    page = asked.look.nodes(asked.run, role, by, search, asked.whole("after", 0) or 0)
    if asked.word("find") and page["total"] == 1:
        return node(replace(asked, path={"key": page["rows"][0]["key"]}))
    return "nodes.html", {
        "title": "Nodes", **page, "role": role, "by": by, "search": search, "rankings": RANKINGS,
        "usual_pace_s": asked.look.usual_pace_s(asked.run),
    }  # fmt: skip


def node(asked: PageRequest) -> tuple[str, Mapping[str, Any]]:
    """What one node did, and what it helped with."""
    key = asked.path["key"]
    found = asked.look.node(asked.run, key)
    if found is None:
        raise NotHere("the run has no node with this key: search for the start of it among the nodes")
    events = asked.look.timeline(asked.run, node=key, limit=20)["rows"]
    helped = asked.look.rows(
        "SELECT count(*) AS groups, sum(status = 'signal') AS signal, sum(step >= 0) AS used, total(tokens) AS tokens, "
        "count(DISTINCT CASE WHEN step >= 0 THEN step END) AS steps FROM groups WHERE run = ? AND worker = ?",
        asked.run, key,
    )[0]  # fmt: skip
    peers = asked.look.rows("SELECT count(*) AS peers FROM nodes WHERE run = ? AND role = ?", asked.run, found["role"])[
        0
    ]
    return "node.html", {
        "title": found["name"] or "Node",
        "place": "Nodes",
        "node": {**found, **peers},
        "events": events,
        "helped": helped,
        "usual_pace_s": asked.look.usual_pace_s(asked.run),
    }


def validators(asked: PageRequest) -> tuple[str, Mapping[str, Any]]:
    """What each validator judged, and where they differed."""
    validator = asked.word("validator")
    differences = asked.look.differences(asked.run, asked.whole("after"), validator=validator)
    return "validators.html", {
        "validator": validator,
        "title": "Validators", "rows": asked.look.validators(asked.run), "differences": differences,
        "counts": asked.look.refusal_counts(asked.run),
    }  # fmt: skip


def refusals(asked: PageRequest) -> tuple[str, Mapping[str, Any]]:
    """Refused groups, with the check, its reason and its figures."""
    only = asked_refusals(asked)
    page = asked.look.refusals(asked.run, only, asked.whole("after"))
    return "refusals.html", {
        "title": "Refusals", **page, "only": only, "is_filtered": only != RefusalFilter(),
        "counts": asked.look.refusal_counts(asked.run),
    }  # fmt: skip


def versions(asked: PageRequest) -> tuple[str, Mapping[str, Any]]:
    """Policy versions and how they spread."""
    page = asked.look.versions(asked.run, asked.whole("after"))
    numbers = [row["version"] for row in page["rows"]] or [0]
    steps = asked.look.rows(
        "SELECT step FROM metrics WHERE run = ? AND step BETWEEN ? AND ?", asked.run, min(numbers), max(numbers)
    )
    return "versions.html", {
        "title": "Versions", **page, "ages": asked.look.ages(asked.run), "stepped": {row["step"] for row in steps},
    }  # fmt: skip


def alarms(asked: PageRequest) -> tuple[str, Mapping[str, Any]]:
    """What monitors found."""
    rows, at = asked.alarms(), asked.whole("at", 0) or 0
    return "alarms.html", {
        "title": "Alarms", "rows": rows[at : at + PAGE], "at": at, "next": at + PAGE if len(rows) > at + PAGE else None,
    }  # fmt: skip


def comparison(asked: PageRequest) -> tuple[str, Mapping[str, Any]]:
    """Several runs beside each other."""
    runs = asked.runs()
    drawn = _drawn_runs(asked)
    labels = _labels(runs, drawn)
    names = sorted({name for row in runs for name in asked.look.names(row["run"])} - {"step", "time_s"})
    chosen = [name for name in asked.words("metric") if name in names] or [
        name for name in (REWARD, "entropy_nats") if name in names
    ]
    charts = [compared(asked.look, labels, name, asked.smooth()) for name in chosen[:12]]
    figures = [
        {
            **row,
            **(of_run := asked.look.overview(row["run"])),
            "reward": of_run["metrics"].get(REWARD),
            "unread": asked.served_runs.unread(row["run"]),
            "raised": len(replace(asked, run=row["run"]).alarms(only_open=True)),
        }
        for row in runs
    ]
    return "compare.html", {
        "title": "Compare", "rows": figures, "charts": charts, "names": names, "chosen": chosen,
        "smooth": asked.smooth(), "drawn": drawn, "of": "&of=all" + "".join(f"&run={run}" for run in drawn),
    }  # fmt: skip


def _labels(runs: Sequence[Row], drawn: Sequence[int]) -> dict[int, str]:
    """What the line of each drawn run is called. Runs of one name are told apart by their folders or addresses where a
    viewer may know these, else by their ids. Copies of one run have one id: then by their numbers on this page."""
    named, ids = Counter(row["name"] for row in runs), Counter(row["id"] for row in runs)
    ends = _ends([row["place"] for row in runs])
    apart = {
        row["run"]: ends[row["place"]] if row["place"] != ANY_PLACE
        else row["id"][:8] if ids[row["id"]] == 1 else f"folder {row['run']}"
        for row in runs
    }  # fmt: skip
    return {
        row["run"]: f"{apart[row['run']]} ({row['name']})" if named[row["name"]] > 1 else row["name"]
        for row in runs
        if row["run"] in drawn
    }


def _ends(places: Sequence[str]) -> dict[str, str]:
    """The shortest end of each path or address that no other has."""
    parts = {place: PurePath(place).parts for place in places}

    def end(place: str) -> str:
        own = parts[place]
        others = [parts[other] for other in parts if other != place]
        sizes = (size for size in range(1, len(own)) if all(own[-size:] != other[-size:] for other in others))
        return "/".join(own[-next(sizes, len(own)) :])

    return {place: end(place) for place in parts}


def _drawn_runs(asked: PageRequest) -> list[int]:
    """The runs that a comparison draws: those that are chosen, else all."""
    known = [row["run"] for row in asked.runs()]
    return [run for run in known if str(run) in asked.words("run")] or known


# --- numbers for the script ---


def chart(asked: PageRequest) -> Mapping[str, Any]:
    """The numbers of one chart; with `of=all`, of all runs."""
    name = asked.word("name")
    if asked.word("of") == "all":
        drawn = _drawn_runs(asked)
        found = compared(asked.look, _labels(asked.runs(), drawn), name, asked.smooth())
    elif name == "task":
        found = of_task(asked.look, asked.run, asked.word("env"), asked.whole("task", 0) or 0)
    else:
        found = chart_of(asked.look, asked.run, name, asked.smooth())
    return {"x": found.x, "unit": found.unit, "x_label": found.x_label, "lines": [
        {"label": line.label, "values": line.values, "edge": line.is_edge} for line in found.lines
    ]}  # fmt: skip


def _charts(asked: PageRequest, names: Sequence[str]) -> list[Chart]:
    smooth, known = asked.smooth(), asked.look.names(asked.run)
    if asked.is_poll():
        return [empty_chart(name) for name in names if has_chart(asked.look, asked.run, name, known)]
    return [found for name in names if (found := chart_of(asked.look, asked.run, name, smooth, known)).lines]


def _spreads(asked: PageRequest, step: int | None, metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """How far the rewards of a group differ, the mean over the groups behind a reward of the newest step: of all by the
    empty label; by environment over the groups of its batch, if the viewer may know of which environment each is."""
    look, run = asked.look, asked.run
    if step is None:
        return {}
    mean = "avg(spread) AS spread FROM groups WHERE run = ?"
    of_batch = f"avg(spread) AS spread FROM groups WHERE {OF_A_BATCH}"
    batch = look.rows(f"SELECT env, min(public) AS public, {of_batch} GROUP BY env", run, step)
    are_known = all(row["env"] is not None and (row["public"] or asked.is_host) for row in batch)
    spreads = {row["env"]: row["spread"] for row in batch if are_known}
    if metrics.get(REWARD) is None:
        return spreads | {"": look.rows(f"SELECT {of_batch}", run, step)[0]["spread"]}
    ends = {row["version"]: row["batch_seq"] for row in look.rows(
        "SELECT version, batch_seq FROM versions WHERE run = ? AND version IN (?, ?)", run, step - 1, step
    )} | ({-1: -1} if step == 0 else {})  # fmt: skip
    since = f"SELECT {mean} AND status IN ('signal', 'flat') AND seq > ? AND seq < ?"
    return spreads | {"": look.rows(since, run, ends.get(step - 1), ends.get(step))[0]["spread"]}


def _first_reward(asked: PageRequest) -> float | None:
    found = asked.look.rows("SELECT value FROM series WHERE run = ? AND name = ? AND step = 0", asked.run, REWARD)
    return found[0]["value"] if found else None


def _trend(asked: PageRequest) -> str:
    """The same sentence as in the terminal of `shoal join`."""
    newest = asked.look.rows(
        "SELECT value FROM series WHERE run = ? AND name = ? ORDER BY step DESC LIMIT ?", asked.run, REWARD,
        2 * TREND_STEPS,
    )  # fmt: skip
    return trend_of([row["value"] for row in newest[::-1] if row["value"] is not None])


def _last_verdict(asked: PageRequest) -> Row | None:
    """The newest of all validators: whether they are alive."""
    found = asked.look.rows("SELECT seq, time_s FROM verdicts WHERE run = ? ORDER BY seq DESC LIMIT 1", asked.run)
    return found[0] if found else None


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


# --- Evaluations on held-out tasks ---
#
# Figures for everybody, and single episodes for the host.
#
# Nothing shows the host's tasks to others, who could train on them. Figures are the host's word. Texts are those of
# models and environments.


def heldout(asked: PageRequest) -> tuple[str, Mapping[str, Any]]:
    """All evaluations, and to the host the episodes of one."""
    rows = asked.look.heldout(asked.run)
    found, why = {}, ""
    try:
        found = asked.served_runs.transcripts(asked.run, asked.is_host)
    except (NothingYet, ShoalError) as error:
        why = asked.excuse(error)
    kept = [row for row in rows if (row["name"], row["env"]) in found]
    named = (asked.word("name"), asked.word("env"))
    chosen = named if named in found else (kept[-1]["name"], kept[-1]["env"]) if kept else ("", "")
    episodes, at = found.get(chosen, ()), asked.whole("at", 0) or 0
    return "heldout.html", {
        "title": "Held-out", "rows": rows, "faulted": any(row["faults"] for row in rows),
        "judged": any(row["judge"] is not None for row in rows),
        "kept": kept, "chosen": chosen, "why": why, "at": at,
        "episodes": list(enumerate(episodes))[at : at + EPISODES], "total": len(episodes),
        "next": at + EPISODES if at + EPISODES < len(episodes) else None,
        "charts": _charts(asked, ["heldout"]),
    }  # fmt: skip


VIEWS: dict[str, View] = {
    "/": overview, "/figures": figures, "/figure": figure, "/steps/{step:int}": step, "/nodes": nodes, "/nodes/{key}": node,
    "/validators": validators, "/refusals": refusals, "/versions": versions, "/alarms": alarms,
    "/log": timeline, "/log/{seq:int}": event, "/heldout": heldout,
}  # fmt: skip
