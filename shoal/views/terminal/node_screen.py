"""What `shoal join` and `shoal validate` show: the run that is helped, and the node's own figures.

Pure, as `views/terminal/live_view` is: a value becomes a picture, or a line where the output is piped.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich import box
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from shoal.humanize import duration
from shoal.ledger.constants import LAW
from shoal.protocol import messages as t
from shoal.roles.node.activity import JudgingStats
from shoal.runs.run_status import RunStatus, left_label, seconds_left, trend_of
from shoal.terminal import brief
from shoal.views.terminal import panels
from shoal.views.terminal.panels import last_reason


@dataclass(frozen=True)
class NodeNow:
    """A node of this machine and its run at one moment."""

    role: str
    snapshot: RunStatus
    """The run, as anyone may see it."""
    words: str = "starting"
    words_s: float = 0.0
    """For how long that has been so."""
    key: str = ""
    name: str = ""
    info: t.RunInfo | None = None
    node: t.NodeState | None = None
    tokens_per_s: float = 0.0
    memory_mb: int = 0
    gpu_mb: int = 0
    up_s: float = 0.0
    accepted_before: int = 0
    """Groups that were accepted when this process joined."""
    limits: str = ""
    """What the user allows, in words."""
    paused: bool = False
    judged: JudgingStats = field(default_factory=JudgingStats)
    unheard_s: float = 0.0
    """For how long the host has answered nothing; 0 if it does."""
    seen_s: float = 0.0
    """How old what is shown of the run is; 0 if it is as of now. The node's own figures may be newer."""


def picture(now: NodeNow, width: int, height: int, log: Sequence[str] = ()) -> RenderableType:
    """The whole picture, in `height` lines."""
    inside = max(8, width - 4)
    since = f"  {duration(now.words_s)}"
    words = brief(at(now).removeprefix("waiting: "), max(8, inside - 2 - len(since)))  # how long is never cut off
    state = Text(f"● {words}", style=_style(now), no_wrap=True, overflow="ellipsis")
    state.append(since, style="dim")
    own = validator_lines(now) if now.role == "validator" else worker_lines(now)
    said, style = (unheard(now), "yellow") if now.unheard_s else (helps(now), "bold")
    if now.seen_s:
        said, style = f"{unheard(now) or 'the host does not tell its status'}; {_age(now)}:", "yellow"
    parts: list[RenderableType] = [state, Text(said, style=style, no_wrap=True, overflow="ellipsis")]
    room = height - 2 - 2
    seen = now.snapshot.steps > 0  # the host has answered
    if seen:
        figures = panels.figures_in_a_row(now.snapshot, inside, 2 if room > 12 else 1)
        parts += [panels.progress(now.snapshot, inside), figures]
        room -= figures.plain.count("\n") + 2
    said = trend_of(now.snapshot.series("reward_all_mean"))
    texts = [Text(line, no_wrap=True, overflow="ellipsis") for line in [said, *own, machine(now)] if line]
    parts += texts[: max(1, room)]
    room -= len(texts)
    if seen and room > 0:
        waits = Text("\n").join(panels.watchdog(now.snapshot, inside, min(room, 3)).split("\n")[:room])
        waits.no_wrap, waits.overflow = True, "ellipsis"
        parts.append(waits)
        room -= waits.plain.count("\n") + 1
    if room > 1:
        rows = [row for line in log[-room:] for row in textwrap.wrap(brief(line, 400), inside, subsequent_indent="  ")]
        parts += [Text(), *(Text(row, style="dim", no_wrap=True, overflow="ellipsis") for row in rows[-(room - 1) :])]
    title = Text.assemble(("shoal", "bold"), f" · {'judging for' if now.role == 'validator' else 'working for'} ")
    # By its key the user finds it on the page, and in the log it scrolls away: so the run's name is cut short before it.
    mine = f" · {brief(now.name, 20)} {now.key[:12]}" if now.key else ""
    title.append(brief(now.snapshot.name or "a run", min(40, max(8, inside - 2 - title.cell_len - cell_len(mine)))))
    title.append(mine, style="dim")
    return Panel(Group(*parts), title=title, subtitle=Text(hint(now), style="dim"), box=box.ROUNDED, height=height)


OF_THE_HOST = "waiting", "sending", "fetching a submission"
"""How what a node is at begins, if it goes on only when the host answers."""


def plain(now: NodeNow) -> str:
    """The same as one line."""
    snapshot = now.snapshot
    phase = unheard(now) or brief(snapshot.status.phase, 12)
    if now.seen_s:
        phase += f"; {_age(now)}:"
    parts = [f"run={brief(snapshot.name)} {phase} step={snapshot.step}/{snapshot.steps}"]
    if (reward := snapshot.latest("reward_all_mean")) is not None:
        parts.append(f"reward={reward:.3f}")
    if not now.seen_s and (left_s := seconds_left(snapshot)) is not None:
        parts.append(f"{left_label(snapshot)}={duration(left_s)}")
    own = validator_lines(now) if now.role == "validator" else worker_lines(now)
    last = ["last known:"] if now.unheard_s and own else []
    return "  ".join([*parts, "·", *last, *own, machine(now), f"· {brief(at(now), 200)}"])


def at(now: NodeNow) -> str:
    """What it is at. It learns only from the host what it waits for, and sends only to it."""
    return "waiting for the host" if now.unheard_s and now.words.startswith(OF_THE_HOST) else now.words


def unheard(now: NodeNow) -> str:
    """That the host is silent, and since when; empty if it is not."""
    return f"the host has not answered for {duration(now.unheard_s)}" if now.unheard_s else ""


def _age(now: NodeNow) -> str:
    """That the run's figures are old."""
    return f"the run {duration(now.seen_s)} ago"


def helps(now: NodeNow) -> str:
    """What the run trains."""
    info = now.info
    if info is None:
        return "asking the host for its run"
    envs = ", ".join(brief(env.label, 40) for env in info.envs[:4]) + (" …" if len(info.envs) > 4 else "")
    kind = getattr(type(info.rules.algorithm), "__struct_config__", None)
    named = f" by {kind.tag}" if kind is not None and kind.tag else ""
    return f"trains a policy on {envs}{named}, {info.rules.steps:,} steps · {brief(now.snapshot.url, 60)}"


def worker_lines(now: NodeNow) -> list[str]:
    """What was accepted and refused, what it is worth, and when the next of it is safe."""
    node = now.node
    if node is None:
        return []
    why = ", ".join(
        f"{brief(check, 30)} {count}x" for check, count in sorted(node.reasons.items(), key=lambda r: -r[1])
    )
    refused = f"{node.refused:,} refused" + (f" ({why})" if why else "")
    lines = [
        f"{brief(node.standing, 12)} · accepted {node.accepted:,} groups · {refused} · {node.lapsed:,} lapsed",
        f"credits {node.credits:,} ({node.vested:,} vested) · {_place(now)}",
    ]
    if said := last_reason(node):
        lines.append(said)
    if vesting := next_vesting(now):
        lines.append(vesting)
    return lines


def _place(now: NodeNow) -> str:
    """Rank and share among the workers, as the host's list has them."""
    workers = [node for node in now.snapshot.nodes if node.role == "worker" and node.key != now.key]
    if now.node is None or not now.snapshot.nodes:
        return "rank not known yet"
    rank = 1 + sum(node.credits > now.node.credits for node in workers)
    total = now.node.credits + sum(node.credits for node in workers)
    share = f"{now.node.credits / total:.1%} of all credits" if total else "nobody has credits yet"
    return f"rank {rank:,} of {len(workers) + 1:,} · {share}"


def next_vesting(now: NodeNow) -> str:
    """When a slash can no longer take the oldest pay, by the pace of this session."""
    node, info = now.node, now.info
    if node is None or info is None or node.credits <= node.vested:
        return ""
    window = LAW.vesting_blocks * info.rules.block_groups
    missing = window - node.accepted
    if node.vested or missing <= 0:
        return "each further accepted group makes the oldest unvested one safe"
    done = node.accepted - now.accepted_before
    when = f", in about {duration(missing * now.up_s / done)}" if done > 0 else ""
    return f"the first pay vests after {missing:,} more accepted groups{when}"


def validator_lines(now: NodeNow) -> list[str]:
    """What was judged, and by which checks it was refused."""
    judged = now.judged
    refused = ", ".join(f"{brief(check, 30)} {count}x" for check, count in judged.refused.most_common())
    groups = judged.accepted + judged.void + sum(judged.refused.values())
    share = f"{judged.audited / groups:.0%}" if groups else "none"
    each = f" · {judged.busy_s / judged.submissions:.1f} s each" if judged.submissions else ""
    lines = [
        f"judged {judged.submissions:,} submissions{each}: {judged.accepted:,} groups accepted, "
        f"{sum(judged.refused.values()):,} refused{f' ({refused})' if refused else ''}"
        + (f", {judged.void:,} void" if judged.void else ""),
        f"audited with the model: {share} of the groups · {now.snapshot.status.pending:,} submissions wait to be judged",
    ]
    if judged.last_reason:
        lines.append(f"last refusal: {brief(judged.last_reason, 240)}")
    return lines


def machine(now: NodeNow) -> str:
    """What it takes of this machine."""
    parts = [f"{now.tokens_per_s:,.0f} tokens/s"] if now.tokens_per_s else []
    parts += [f"memory {now.memory_mb:,} MB"] if now.memory_mb else []
    parts += [f"GPU {now.gpu_mb:,} MB"] if now.gpu_mb else []
    return " · ".join([*parts, f"up {duration(now.up_s)}", *([now.limits] if now.limits else [])])


def hint(now: NodeNow) -> str:
    """Keys, in words."""
    if now.role == "validator":
        return "Ctrl-C judges what is in hand and leaves"
    return f"p {'resumes' if now.paused else 'pauses'} · Ctrl-C finishes the work in hand and leaves"


def _style(now: NodeNow) -> str:
    if now.paused or "outside --hours" in now.words or "quarantined" in now.words:
        return "yellow"
    return "dim" if now.words.startswith("waiting") else "green"
