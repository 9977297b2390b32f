"""What the screen shows when a run has ended: before and after, credits, why cheaters were refused, sample games.

Pure, as `views/terminal/live_view` is.
"""

import io
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shoal.config import EnvConfig
from shoal.envs.settings_wrapper import LOWEST
from shoal.evaluation_files import Evaluation, Transcript, format_of, why_no_mean, why_not_comparable
from shoal.humanize import duration
from shoal.ledger.members import ASKED_BY_HOST
from shoal.runs.rollout_samples import SPEAKERS
from shoal.runs.run_status import RunStatus
from shoal.terminal import command, printable
from shoal.views.terminal.panels import BLANK, last_reason, reasons

_COLOURS = {"policy": "bold cyan", "user": "white", "system": "dim"}
_FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
_MARKS = {"=": "green", "+": "dark_goldenrod", "-": "grey35"}


@dataclass(frozen=True)
class RunEnd:
    """What the last table shows."""

    summary: dict[str, Any]
    run_dir: Path
    snapshot: RunStatus
    envs: tuple[EnvConfig, ...]
    games: tuple[tuple[str, Transcript], ...]
    """Sample episodes of the final policy, each with the label of its environment."""
    called: Mapping[str, str]
    """What summary.json calls each worker, by key."""
    advice: tuple[str, ...] = ()
    """If the run ended without a gain: what it saw, and what to change."""
    recipe: str = "RECIPE"
    """The run file and its options as they are typed, if they are known."""
    fault: str = ""
    """The error that most groups share on which an environment failed, with its line; empty if none is known."""
    hosted: bool = False
    """Whether it was hosted for others, without workers of its own."""


def render_end(end: RunEnd) -> RenderableType:
    """The last picture, for a terminal."""
    parts: list[RenderableType] = [_before_after(end), _credits(end)]
    if refusals := _refusals(end):
        parts.append(Text("\n".join(refusals), style="red"))
    if unbegun := _unbegun(end):
        parts.append(Text("\n".join((*unbegun, "")), style="yellow"))
    for i, (label, game) in enumerate(end.games):
        of = f" of {printable(label)}" if len(end.envs) > 1 else ""
        parts.append(_game(game, f"sample {i + 1} · {outcome(game)} · final policy, a held-out task{of}"))
    # Commands are for copying: the terminal may break a long line, we must not. It is printed with `crop=False`.
    for line in ("", *_next_steps(end)):
        parts.append(Text(line, style="bold", no_wrap=line.startswith("  "), overflow="ignore"))
    if end.advice:  # last, where it is in sight
        parts.append(Text("\n".join(("", *end.advice)), style="yellow"))
    return Group(*parts)


def plain_end(end: RunEnd) -> str:
    """The same as lines of text, for a file."""
    summary = end.summary
    lines = [
        f"run {printable(end.snapshot.name)} has ended after {summary['steps']} steps in {duration(summary['wall_s'])}"
    ]
    if faults := _faults(end):
        lines.append(faults.removeprefix("; "))
    for when in ("before", "after"):
        lines.append(f"held-out {when}: {_interval(summary['heldout'][when])}")
        found = summary["heldout"][when] or {}
        for label, one in {"": found, **found.get("envs", {})}.items():
            where = f"held-out {when}{f', {printable(label)}' if label else ''}"
            lines += [f"{where}: {_interval(one)}"] if label else []
            lines += [f"{where}, {printable(name)}: {mean:.3f}" for name, mean in _named(one)]
    for name, entry in summary["credits"].items():
        share = summary["influence"][name]
        role = f" ({entry['role']})" if entry["role"] else ""
        lines.append(f"credits {printable(name)}{role}: {entry['credits']:,}, influence {share:.1%}")
    lines += [*_refusals(end), *_unbegun(end)]
    for i, (label, game) in enumerate(end.games):
        of = f"{printable(label)}, " if len(end.envs) > 1 else ""
        lines.append(f"sample {i + 1} ({of}{outcome(game)}):")
        lines += [f"  {SPEAKERS.get(who, who)}: {text.strip()}" for who, text in turns(game)]
    return "\n".join([*lines, *_next_steps(end), *(["", *end.advice] if end.advice else [])])


def outcome(game: Transcript) -> str:
    """Won or lost, if the environment says so, and the score."""
    word = "" if game.success is None else ("won, " if game.success else "lost, ")
    if game.score is None:
        return f"no score: the environment failed: {printable(game.fault)}"
    return f"{word}score {game.score:.2f}"


def turns(game: Transcript) -> Iterable[tuple[str, str]]:
    """Who said what."""
    return ((printable(who), printable(text, keep="\n")) for who, text in game.turns)


def _before_after(end: RunEnd) -> RenderableType:
    summary = end.summary
    what = printable(end.envs[0].label) if len(end.envs) == 1 else f"{len(end.envs)} environments, by weight,"
    named = "" if what == printable(end.snapshot.name) else f"{printable(end.snapshot.name)}: "
    table = Table(title=Text(f"{named}{what} on held-out tasks", style="bold"), box=box.ROUNDED, min_width=60)
    for heading in ("", "mean", "95 % interval", "episodes"):
        table.add_column(heading, justify="left" if not heading else "right")
    for when, label in (("before", "before training"), ("after", "after training")):
        found = summary["heldout"][when]
        if found is None:
            table.add_row(label, "-", "-", "-")
            continue
        for name, one in {label: found, **{f"  {env}": one for env, one in found.get("envs", {}).items()}}.items():
            middle, spread = "none", ""
            if one["mean"] is not None:
                form = format_of(msgspec.convert(one, Evaluation))
                middle, spread = f"{one['mean']:{form}}", f"{one['low95']:{form}} to {one['high95']:{form}}"
            style = "bold green" if when == "after" else ""
            faults = f" ({one['faults']:,} without a score)" if one.get("faults") else ""
            table.add_row(Text(printable(name)), Text(middle, style=style), spread, f"{one['episodes']:,}{faults}")
            for part, mean in _named(one):
                table.add_row(Text(f"    {printable(part)}", style="dim"), f"{mean:.3f}", "", "")
    stale = ", ".join(f"{age}: {count:,}" for age, count in summary["staleness"].items()) or "-"
    caption = (
        f"{summary['steps']} steps, {summary['tokens']:,} tokens, {duration(summary['wall_s'])}; "
        f"{summary['accepted']:,} groups accepted, {sum(summary['refused'].values()):,} refused; "
        f"rollouts by age {stale}{_faults(end)}"
    )
    return Group(table, Text(f"{caption}\n", style="dim"))


def _faults(end: RunEnd) -> str:
    """On how many rollouts of the training tasks the environment failed, if on any."""
    count = end.summary.get("env_faults", 0)
    names = [printable(env.label) for env in end.envs]
    which = f"environment {names[0]}" if len(names) == 1 else f"one of the environments {', '.join(names[:8])}"
    most = f". The most frequent error: {printable(end.fault)}" if end.fault else ""
    rules = {env.on_fault for env in end.envs}
    counted = (
        "" if len(rules) > 1 else ", which have its lowest reward" if LOWEST in rules else ", which counted in nothing"
    )
    return f"; {which} failed on {count:,} rollouts{counted}{most}" if count else ""


def _unbegun(end: RunEnd) -> list[str]:
    """How many groups had a task that could never begin, if any had."""
    count, why = end.summary.get("unbegun", 0), printable(end.summary.get("unbegun_cause", ""))
    return [f"groups not played, because their tasks cannot begin: {count:,}; the last: {why}"] if count else []


def _named(found: dict[str, Any]) -> list[tuple[str, float]]:
    """Parts of the reward, and metrics, with their means."""
    return [item for key in ("parts", "metrics") for item in found.get(key, {}).items()]


def _credits(end: RunEnd) -> RenderableType:
    table = Table(title="credits: policy tokens accepted", box=box.ROUNDED, min_width=60, title_style="bold")
    table.add_column("worker")
    known = ["role"] if any(entry["role"] for entry in end.summary["credits"].values()) else []
    for heading in known:
        table.add_column(heading)
    for heading in ("accepted", "refused", "credits", "influence"):
        table.add_column(heading, justify="right")
    roles = end.summary["credits"]
    for node in end.snapshot.nodes:
        if (name := end.called.get(node.key, "")) in roles:
            cheats = roles[name]["role"] == "cheating"
            row = (
                Text(printable(name)),  # guard: name-is-no-markup
                *(roles[name][heading] for heading in known),
                f"{node.accepted:,}",
                f"{node.refused:,}",
                f"{node.credits:,}",
                f"{end.summary['influence'][name]:.1%}",
            )
            table.add_row(*row, style="red" if cheats else "")
    return Group(
        table, Text("influence: share of what the trainer learned from, by advantage and length\n", style="dim")
    )


def _refusals(end: RunEnd) -> list[str]:
    """A line for each worker that had groups refused: by which checks, and the last refusal in full."""
    return [
        f"{printable(end.called[node.key])}: {node.refused:,} groups refused, by {reasons(node)}. "
        + (
            f"The last: {printable(node.last_reason)}"
            if node.last_reason != ASKED_BY_HOST
            else last_reason(node).capitalize()
        )
        for node in end.snapshot.nodes
        if node.role == "worker" and node.reasons
    ]


def _game(game: Transcript, title: str) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column()
    for who, said in turns(game):
        table.add_row(
            Text(SPEAKERS.get(who, who)),
            _tiles(said.strip()) or Text(said.strip() or BLANK, style=_COLOURS.get(who, "")),
        )
    return Constrain(Panel(table, title=Text(title), box=box.ROUNDED, title_align="left"), 80)


def _tiles(text: str) -> Text | None:
    """Coloured tiles, if the text is letters with a mark each, as in the answers of `envs/builtin/wordle`."""
    if not re.fullmatch(r"([a-z][=+-])+", text):
        return None
    tiles = Text()
    for letter, mark in zip(text[::2], text[1::2], strict=True):
        tiles.append(f" {letter.upper()} ", style=f"bold white on {_MARKS[mark]}").append(" ")
    return tiles


def _interval(found: dict[str, Any] | None) -> str:
    if found is None:
        return "not evaluated"
    faults = f", {found['faults']} of them without a score" if found.get("faults") else ""
    if found["mean"] is None:
        return f"no mean: {why_no_mean(msgspec.convert(found, Evaluation))}"
    form = format_of(msgspec.convert(found, Evaluation))
    spread = f"95 %: {found['low95']:{form}} to {found['high95']:{form}}"
    return f"{found['mean']:{form}} ({spread}, {found['episodes']} episodes{faults})"


def _gain(heldout: dict[str, Any]) -> list[str]:
    """What training changed, in one line, if it was evaluated before and after."""
    before, after = msgspec.convert((heldout["before"], heldout["after"]), tuple[Evaluation | None, Evaluation | None])
    if before is None or after is None:
        return []
    if why := why_not_comparable(before, after):
        return [f"Held-out tasks: {why}. `shoal env check` with the run file says why."]
    if before.mean is None or after.mean is None:
        return []
    what = "Held-out tasks: " if (form := format_of(before)) == ".1%" else "Held-out tasks, mean reward: "
    failed = [f"{one.faults:,} of {one.episodes:,} {when}" for one, when in ((before, "before"), (after, "after"))]
    without = (
        f" Episodes without a score have no part in it: {', '.join(failed)}." if before.faults + after.faults else ""
    )
    return [f"{what}{before.mean:{form}} before training, {after.mean:{form}} after.{without}"]


def _next_steps(end: RunEnd) -> tuple[str, ...]:
    final = end.run_dir / "checkpoints" / "final"
    return (
        *_gain(end.summary["heldout"]),
        f"The policy is in {final} (Hugging Face format).",
        f"The figures are in {end.run_dir / 'summary.json'}.",
        "",
        "Its curves in a picture, in a report to send, and on a page:",
        *(f"  {command(name, str(end.run_dir))}" for name in ("plot", "report", "dashboard")),
        "Play it again:",
        f"  {command('eval', str(end.run_dir), '--samples', '3')}",
        "Replay the log and check every credit:",
        f"  {command('ledger', 'verify', str(end.run_dir))}",
        *(() if end.hosted or end.advice else _how_to_host(end)),  # not with settings that the advice changes
    )


def _how_to_host(end: RunEnd) -> tuple[str, str]:
    return (
        "Host a run of its own that others join from their machines:",
        f"  {command('host')} {end.recipe} {shlex.join(['--out', f'{end.run_dir}-hosted'])}",
    )


def save_picture(picture: RenderableType, path: Path, width: int = 116) -> None:
    """Write what a terminal would show as an SVG, for documents, wide enough for its longest line. Raises OSError.

    It has the reader's own font: rich names one on another server, which a browser would fetch.
    """
    # In a Jupyter kernel, rich would show what goes into the file.
    console = Console(
        record=True, width=width, file=io.StringIO(), force_terminal=True, force_jupyter=False, color_system="truecolor"
    )
    console.print(picture, crop=False)
    console.width = max(width, *map(cell_len, console.export_text(clear=False).splitlines()))
    path.write_text(_FONT_FACE.sub("", console.export_svg(title="shoal")), encoding="utf-8")
