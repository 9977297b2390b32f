"""What the screen shows when a run has ended: before and after, credits, why cheaters were refused, sample games.

Called by `launch/local` with the figures that `launch/summary` gathered. Pure, as `launch/view` is.
"""

import io
import json
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shoal.config import EnvConfig
from shoal.launch.nodes_table import reasons
from shoal.launch.panels import BLANK, duration
from shoal.launch.samples import SPEAKERS
from shoal.launch.summary import RunEnd
from shoal.terminal import printable

_COLOURS = {"assistant": "bold cyan", "user": "white", "system": "dim"}
_FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
_MARKS = {"=": "green", "+": "dark_goldenrod", "-": "grey35"}


def render_end(end: RunEnd) -> RenderableType:
    """The last picture, for a terminal."""
    parts: list[RenderableType] = [_before_after(end), _credits(end)]
    if refusals := _refusals(end):
        parts.append(Text("\n".join(refusals), style="red"))
    for i, (label, game) in enumerate(end.games):
        of = f" of {printable(label)}" if len(end.envs) > 1 else ""
        parts.append(_game(game, f"sample {i + 1} of the final policy on a held-out task{of} · {outcome(game)}"))
    # Commands are for copying: the terminal may break a long line, we must not.
    parts.append(Text("\n".join(("", *_next_steps(end))), style="bold", no_wrap=True, overflow="ignore"))
    return Group(*parts)


def plain_end(end: RunEnd) -> str:
    """The same as lines of text, for a file."""
    summary = end.summary
    lines = [
        f"run {printable(end.snapshot.name)} has ended after {summary['steps']} steps in {duration(summary['wall_s'])}"
    ]
    for when in ("before", "after"):
        lines.append(f"held-out {when}: {_interval(summary['heldout'][when])}")
        found = summary["heldout"][when] or {}
        for label, one in {"": found, **found.get("envs", {})}.items():
            where = f"held-out {when}{f', {printable(label)}' if label else ''}"
            lines += [f"{where}: {_interval(one)}"] if label else []
            lines += [f"{where}, {printable(name)}: {mean:.3f}" for name, mean in _named(one)]
    for name, entry in summary["credits"].items():
        share = summary["influence"][name]
        lines.append(f"credits {printable(name)} ({entry['role']}): {entry['credits']:,}, influence {share:.1%}")
    lines += _refusals(end)
    for i, (label, game) in enumerate(end.games):
        of = f"{printable(label)}, " if len(end.envs) > 1 else ""
        lines.append(f"sample {i + 1} ({of}{outcome(game)}):")
        lines += [f"  {SPEAKERS.get(who, who)}: {text.strip()}" for who, text in turns(game)]
    return "\n".join(lines + list(_next_steps(end)))


def outcome(game: dict[str, Any]) -> str:
    """Won or lost, if the environment says so, and the score."""
    success = game.get("success")
    word = "" if success is None else ("won, " if success else "lost, ")
    return f"{word}score {float(game.get('score', 0.0)):.2f}"


def turns(game: dict[str, Any]) -> Iterable[tuple[str, str]]:
    """Who said what."""
    return ((printable(str(who)), printable(str(text), keep="\n")) for who, text in game.get("turns", ()))


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
            spread = f"{one['low95']:.1%} to {one['high95']:.1%}"
            style = "bold green" if when == "after" else ""
            table.add_row(
                Text(printable(name)), Text(f"{one['mean']:.1%}", style=style), spread, f"{one['episodes']:,}"
            )
            for part, mean in _named(one):
                table.add_row(Text(f"    {printable(part)}", style="dim"), f"{mean:.3f}", "", "")
    stale = ", ".join(f"{age}: {count:,}" for age, count in summary["staleness"].items()) or "-"
    caption = (
        f"{summary['steps']} steps, {summary['tokens']:,} tokens, {duration(summary['wall_s'])}; "
        f"{summary['accepted']:,} groups accepted, {sum(summary['refused'].values()):,} refused; "
        f"rollouts by age {stale}"
    )
    return Group(table, Text(f"{caption}\n", style="dim"))


def _named(found: dict[str, Any]) -> list[tuple[str, float]]:
    """Parts of the reward, and metrics, with their means."""
    return [item for key in ("parts", "metrics") for item in found.get(key, {}).items()]


def _credits(end: RunEnd) -> RenderableType:
    table = Table(title="credits: policy tokens accepted", box=box.ROUNDED, min_width=60, title_style="bold")
    table.add_column("worker")
    table.add_column("role")
    for heading in ("accepted", "refused", "credits", "influence"):
        table.add_column(heading, justify="right")
    roles = end.summary["credits"]
    for node in end.snapshot.nodes:
        if node.role == "worker" and node.name in roles:
            cheats = roles[node.name]["role"] == "cheating"
            row = (
                Text(printable(node.name)),  # guard: name-is-no-markup
                roles[node.name]["role"],
                f"{node.accepted:,}",
                f"{node.refused:,}",
                f"{node.credits:,}",
                f"{end.summary['influence'][node.name]:.1%}",
            )
            table.add_row(*row, style="red" if cheats else "")
    return Group(
        table, Text("influence: share of what the trainer learned from, by advantage and length\n", style="dim")
    )


def _refusals(end: RunEnd) -> list[str]:
    """A line for each worker that had groups refused: by which checks, and the last refusal in full."""
    return [
        f"{printable(node.name)}: {node.refused:,} groups refused, by {reasons(node)}. The last: "
        f"{printable(node.last_reason)}"
        for node in end.snapshot.nodes
        if node.role == "worker" and node.reasons
    ]


def _game(game: dict[str, Any], title: str) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column()
    for who, said in turns(game):
        table.add_row(
            Text(SPEAKERS.get(who, who)),
            _tiles(said.strip()) or Text(said.strip() or BLANK, style=_COLOURS.get(who, "")),
        )
    return Panel(table, title=Text(title), box=box.ROUNDED, width=80, title_align="left")


def _tiles(text: str) -> Text | None:
    """Coloured tiles, if the text is letters with a mark each, as in the answers of `envs/wordle`."""
    if not re.fullmatch(r"([a-z][=+-])+", text):
        return None
    tiles = Text()
    for letter, mark in zip(text[::2], text[1::2], strict=True):
        tiles.append(f" {letter.upper()} ", style=f"bold white on {_MARKS[mark]}").append(" ")
    return tiles


def _interval(found: dict[str, Any] | None) -> str:
    if found is None:
        return "not evaluated"
    return f"{found['mean']:.1%} (95 %: {found['low95']:.1%} to {found['high95']:.1%}, {found['episodes']} episodes)"


def _gain(heldout: dict[str, Any]) -> list[str]:
    """What training changed, in one line, if it was evaluated before and after."""
    before, after = heldout["before"], heldout["after"]
    return (
        [f"Held-out tasks: {before['mean']:.1%} before training, {after['mean']:.1%} after."]
        if before and after
        else []
    )


def _next_steps(end: RunEnd) -> tuple[str, ...]:
    final = end.run_dir / "checkpoints" / "final"
    return (
        *_gain(end.summary["heldout"]),
        f"The policy is in {final} (Hugging Face format).",
        f"The figures are in {end.run_dir / 'summary.json'}.",
        "",
        "Play it again:",
        *(f"  shoal eval {final} {_env_options(env)}--samples 3" for env in end.envs),
        "Replay the log and check every credit:",
        f"  shoal ledger verify {end.run_dir}",
        "Host a run of its own that others join from their machines:",
        f"  shoal host {end.recipe} --out {shlex.quote(f'{end.run_dir}-hosted')}",
    )


def _env_options(env: EnvConfig) -> str:
    args = f"--env-args {shlex.quote(json.dumps(env.args))} " if env.args else ""
    return f"--env {shlex.quote(env.name)} {args}"


def save_picture(picture: RenderableType, path: Path, width: int = 116) -> None:
    """Write what a terminal would show as an SVG, for documents. Raises OSError.

    It has the reader's own font: rich names one on another server, which a browser would fetch.
    """
    # In a Jupyter kernel, rich would show what goes into the file.
    console = Console(
        record=True, width=width, file=io.StringIO(), force_terminal=True, force_jupyter=False, color_system="truecolor"
    )
    console.print(picture)
    path.write_text(_FONT_FACE.sub("", console.export_svg(title="shoal")), encoding="utf-8")
