"""The report on a run: what it says, as plain values, and one HTML file of that without scripts, which loads nothing.

It reads a run that was replayed to its end (`RunReader.catch_up`), and from a folder also what is beside the log: alarms,
time and use of the machine. Every text is strangers' and goes through `printable` and Jinja2's escaping; only the pictures,
which are paths by matplotlib, are markup. The policy in the file's head forbids scripts, requests and forms, in case
anything was missed.
"""

import contextlib
import json
import shlex
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from shoal import __version__
from shoal.alarms import AlarmLine, standing
from shoal.envs.load import files_needed
from shoal.errors import NothingYet, ShoalError, StateError
from shoal.evaluation_files import Evaluation, JudgeResult, interval_of, why_not_comparable
from shoal.humanize import duration, figure, moment, percent
from shoal.ledger.run_events import RulesChanged, RunCreated
from shoal.models.config import ModelConfig
from shoal.models.open_model import spec_of
from shoal.protocol import messages as t
from shoal.protocol.encoding import digest
from shoal.runs.csv_tables import node_note
from shoal.runs.redact import public_alarms, without_folders
from shoal.runs.run_reader import RunReader, Version
from shoal.runs.run_status import USAGE
from shoal.terminal import printable
from shoal.views.plots.render import draw_inline
from shoal.views.plots.series import picture_of, read_run, sentence_of
from shoal.views.report.samples import ReportSample, samples_of

CSP = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'none'; base-uri 'none'"

MOST_ROWS = 100
"""Of a table of nodes, versions or alarms: the rest is counted in a line below it."""

MAX_CONFIG_BYTES = 1 << 20
"""Of a policy's config.json, which may be a stranger's."""

MOST_CONFIG_CHARS, MOST_LINE_CHARS = 40_000, 500


@dataclass(frozen=True)
class ReportContent:
    run: str
    name: str
    command: str
    """How the run is named on a command line: its URL, or the place where a reader has its folder."""
    is_url: bool
    needs_files: bool
    """Whether an audit executes files of the host, so that it needs `--own-files`."""
    status: t.Status
    is_live: bool
    is_stopped: bool
    """As `Condition` has them."""
    began: float
    ended: float
    """Of the first and the newest event, seconds since the epoch."""
    config: str
    """The resolved run file as JSON, as the log's first event has it."""
    config_changes: list[str]
    """What the host changed in it later: key, old value, new value."""
    policy: str
    algorithm: str
    law: int
    envs: list[tuple[str, str]]
    """Label and name."""
    heldout: list[Evaluation]
    gain: str
    """What training changed on held-out tasks, in a sentence; empty if there are not two evaluations."""
    nodes: list[t.NodeState]
    notes: dict[str, str]
    """Of a node by key, what its standing does not say."""
    more_nodes: int
    refused: list[tuple[str, int]]
    """Groups by check, most first."""
    failed: int
    """Rollouts on which an environment failed, so that they count in nothing."""
    influence: dict[str, float]
    """Share of each node by key."""
    versions: list[Version]
    more_versions: int
    alarms: list[AlarmLine]
    standing: int
    wall_s: float
    use: list[tuple[str, float, float | None]]
    """Role, CPU seconds, and the largest process in MB."""
    samples: list[ReportSample]
    why_no_samples: str
    seq: int
    head: str
    run_key: str


def report_of(run: RunReader, now: float) -> str:
    """The report on a run that was replayed to its end. `now`, seconds since the epoch, is printed in it.

    What is private is in it only if the reading was opened so.
    """
    facts = facts_of(run)
    curves: list[tuple[str, str, Markup]] = []
    with contextlib.suppress(NothingYet):
        picture = picture_of([read_run(run)], [])
        curves = [
            (panel.metric, sentence_of(panel.metric), Markup(draw_inline(panel, picture))) for panel in picture.panels
        ]
    template = _environment().get_template("report.html")
    return template.render(facts=facts, curves=curves, made=now, shoal=__version__, csp=CSP)


def facts_of(run: RunReader) -> ReportContent:
    """Everything that the report says. Raises `StateError` if the log has not begun, `ShoalError` as `RunReader` does."""
    first = next(run.events(), None)
    if first is None:
        raise StateError(f"{run.name} has no log yet: ask for a report when its coordinator has started")
    begun = first.body
    assert isinstance(begun, RunCreated), "a log that was replayed begins so"
    condition, state = run.condition(), run.state
    nodes = sorted(run.nodes(), key=lambda node: (-node.credits, -node.refused, node.name))
    shown = nodes[:MOST_ROWS]
    shown += [node for node in nodes[MOST_ROWS:] if node.refused][: MOST_ROWS // 2]
    total = sum(node.influence for node in nodes)
    versions, heldout = run.versions(), run.evaluations()
    kept = versions if len(versions) <= 20 else [*versions[:10], *versions[-10:]]
    raised = run.alarms() or []
    private, uncleared = run.shows_private(), standing(raised)
    alarms = raised if private else public_alarms(raised)  # guard: report-accuses-nobody
    wall_s, use = _use(run)
    config = dict(without_folders(begun.config))
    train = config.get("train")
    samples, why = samples_of(run)
    later = [entry.body.config for entry in run.events() if isinstance(entry.body, RulesChanged) and entry.body.config]
    return ReportContent(
        run=run.run, name=begun.name, command="RUN_FOLDER" if run.folder else shlex.quote(run.name),
        needs_files=bool(files_needed(state.envs)),
        is_url=run.folder is None, status=condition.status, is_live=condition.is_live,
        is_stopped=condition.is_stopped, began=first.time, ended=state.time, config=_config(config),
        config_changes=_changes([config, *map(without_folders, later)]),
        policy=policy_of(run, config.get("policy")),
        algorithm=_said(train.get("algorithm") if isinstance(train, dict) else None), law=state.law.version,
        envs=[(env.label, without_folders(env.name)) for env in begun.envs],
        heldout=heldout, gain=gain_of(heldout), nodes=shown,
        notes={node.key: node_note(state.members[node.key], state) for node in shown},
        more_nodes=len(nodes) - len(shown), refused=Counter(condition.status.refused).most_common(),
        failed=sum(len(faults.rollouts) for faults in run.marks.faults.values()),
        influence={node.key: node.influence / total if total else 0.0 for node in nodes}, versions=kept,
        more_versions=len(versions) - len(kept), alarms=alarms[-MOST_ROWS:],
        standing=len(uncleared if private else {(one.cause, one.since) for one in uncleared}),
        wall_s=wall_s, use=use, samples=samples, why_no_samples=why, seq=state.seq, head=state.head, run_key=state.run_key,
    )  # fmt: skip


def gain_of(heldout: Sequence[Evaluation]) -> str:
    """From the first evaluation to the last, and whether their intervals overlap; the same of a held-out judge. Or why they
    are not compared."""
    if len(heldout) < 2:
        return ""
    first, last = heldout[0], heldout[-1]
    said = [
        _change((last.measure or "The mean").capitalize(), first, last, f" in version {first.version}", last.version)
    ]
    if first.judge is not None and last.judge is not None:
        said.append(_change("The judge's mean", first.judge, last.judge, "", last.version))
    return " ".join(filter(None, said))


def _change(
    what: str, first: Evaluation | JudgeResult, last: Evaluation | JudgeResult, since: str, version: int
) -> str:
    if why := why_not_comparable(first, last):
        return f"{what}: {why}."
    before, after = interval_of(first), interval_of(last)
    if before is None or after is None:
        return ""
    (was, was_low, was_high), (now, now_low, now_high) = before, after
    apart = now_low > was_high or now_high < was_low
    change = "rose" if now > was else "fell" if now < was else "stayed"
    surely = "the 95 % intervals do not touch" if apart else "the 95 % intervals overlap, so this may be chance"
    return f"{what} {change} from {was:.3g}{since} to {now:.3g} in version {version}: {surely}."


def _config(tree: Mapping[str, Any]) -> str:
    """A run file as JSON, without the shape of a policy from scratch if it starts from another one."""
    policy = tree.get("policy")
    if isinstance(policy, dict) and policy.get("path"):
        tree = {**tree, "policy": {key: value for key, value in policy.items() if key != "tiny"}}
    whole = json.dumps(tree, indent=1, ensure_ascii=False)
    return whole if len(whole) <= MOST_CONFIG_CHARS else whole[:MOST_CONFIG_CHARS] + "\n… (the log has all of it)"


def _changes(trees: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each value by which a run file differs from the one before."""
    found = list[str]()
    before = _values(trees[0])
    for tree in trees[1:]:
        now = _values(tree)
        for key in [key for key in now if now[key] != before.get(key)]:
            found.append(f"{key}: {before.get(key, 'none')} → {now[key]}"[:MOST_LINE_CHARS])
        before |= now
    return found


def _values(tree: Any, key: str = "") -> dict[str, str]:
    """The values of a run file by their dotted names."""
    if not isinstance(tree, Mapping):
        return {key: json.dumps(tree, ensure_ascii=False)}
    return {
        name: value
        for part, below in tree.items()
        for name, value in _values(below, f"{key}.{part}" if key else str(part)).items()
    }


def _said(section: object) -> str:
    """A section of the run file in a line, its name first: what is neither 0 nor empty."""
    if not isinstance(section, dict):
        return ""
    said = [str(section["name"])] if isinstance(section.get("name"), str) else []
    for key, value in section.items():
        if isinstance(value, dict):
            said += [f"{key} ({_said(value)})"] if value else []
        elif isinstance(value, str | int | float) and value and key != "name":
            said.append(f"{key} {value}")
    return ", ".join(said)[:MOST_LINE_CHARS]


def policy_of(run: RunReader, section: object) -> str:
    """The policy that was used: its architecture and size as its published files say, then where it began."""
    settings = section if isinstance(section, dict) else {}
    used = [key for key in ("dtype", "path", "implementation") if settings.get(key)]
    adapter = settings.get("adapter")
    if isinstance(adapter, dict) and adapter.get("rank"):
        used.append("adapter")
    spec = _spec(run)
    if spec is None and not settings.get("path"):
        used.append("tiny")
    said = [_said({key: settings[key] for key in used})]
    if spec is not None:
        about = "" if spec.tensor_shapes() else "about "
        count = f"{about}{spec.num_parameters():,} parameters"
        said.insert(0, f"{spec.family}, {count}, {_shape(spec)}, MLP {spec.mlp_width}")
    return "; ".join(filter(None, said))[:MOST_LINE_CHARS]


def _shape(spec: ModelConfig) -> str:
    heads = f"{spec.heads} heads ({spec.kv_heads} for keys and values)"
    return f"{spec.layers} layers of width {spec.width}, {heads}, vocabulary {spec.vocab_size:,}"


def _spec(run: RunReader) -> ModelConfig | None:
    """The shape of the newest version, from the files that its manifest names; None if they cannot be had."""
    version = run.state.main.version
    with contextlib.suppress(ShoalError, OSError), tempfile.TemporaryDirectory(prefix="shoal-report-") as home:
        if version < 0:
            return None
        manifest = run.manifest(version)
        for entry in manifest.files:
            if entry.path in ("config.json", "generation_config.json") and entry.size <= MAX_CONFIG_BYTES:
                chunks = entry.chunks[: 1 + MAX_CONFIG_BYTES // manifest.chunk_bytes]
                file = b"".join(run.blob(chunk) for chunk in chunks)
                if digest(file) == entry.digest:  # as its publisher signed it
                    (Path(home) / entry.path).write_bytes(file)
        return spec_of(Path(home))
    return None


def _use(run: RunReader) -> tuple[float, list[tuple[str, float, float | None]]]:
    """Time and CPU by role, as the launcher wrote them; nothing if it did not, or of a URL."""
    if run.folder:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            found = json.loads((run.folder.root / USAGE).read_bytes())
            peaks = found.get("peak_rss_mb", {})
            use = [(str(role), float(cpu_s), peaks.get(role)) for role, cpu_s in found["cpu_s"].items()]
            return float(found["wall_s"]), sorted(use, key=lambda one: -one[1])
    return 0.0, []


# --- The file ---


def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=StrictUndefined,
        finalize=_shown, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters |= {
        "when": moment, "duration": duration, "share": percent, "figure": partial(figure, digits=3), "result": result,
    }  # fmt: skip
    return made


def _shown(value: object) -> object:
    """What an expression of the template becomes before it is escaped."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value, keep="\n\t")  # guard: report-shows-controls
    return value


def result(value: float | None) -> str:
    """The mean of an evaluation, with as many digits in each row of a table."""
    return f"{value:.3f}" if value is not None and abs(value) < 10 else figure(value, 3)
