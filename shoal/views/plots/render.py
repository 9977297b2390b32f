"""Draws a picture of runs as PNG or SVG, with matplotlib, which is an extra and is imported when something is drawn.

The same picture gives the same bytes. Colours are those of Okabe and Ito, which people with any colour vision tell apart;
lines differ in dashes, too, so that a print in grey can be read.
"""

import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from shoal.errors import ConfigError, how_to_install
from shoal.views.plots.series import ACROSS, Panel, Picture, PlotCurve, Point

OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")
DASHES = ("-", "--", ":", "-.")
INK = "#1a1b1c"
"""Of text and axes. A page that shows the picture inline lets it follow its own text colour."""

COLUMNS, PANEL_INCHES = 3, (4.2, 2.7)
DOTS_PER_INCH = 150
MOST_BUCKETS = 400
"""A long line keeps the first, lowest, highest and last point of this many stretches: no panel has more pixels."""

Format = Literal["png", "svg"]


def draw(picture: Picture, form: Format, title: str = "") -> bytes:
    """The picture as a file. Raises `ConfigError` without matplotlib."""
    with _matplotlib("|".join(panel.metric for panel in picture.panels)) as figure_class:
        columns = min(COLUMNS, len(picture.panels))
        rows = math.ceil(len(picture.panels) / columns)
        names = _names(picture.panels)
        foot = 0.3 * (len(picture.notes) > 0) + 0.24 * math.ceil(len(names) / columns) * (len(names) > 0)
        wide, high = PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows + foot + 0.3 * bool(title)
        figure = figure_class(figsize=(wide, high), layout="constrained")
        figure.get_layout_engine().set(rect=(0, foot / high, 1, 1 - foot / high - 0.3 * bool(title) / high))
        grid = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes, panel in zip(grid, picture.panels, strict=False):
            _panel(axes, panel, picture)
        for axes in grid[len(picture.panels) :]:
            axes.set_axis_off()
        if title:
            figure.text(0.5, 1 - 0.08 / high, title, ha="center", va="top", fontsize=11, color=INK)
        if names:
            figure.legend(
                names.values(), names, loc="lower center", ncols=columns, frameon=False, fontsize=8,
                bbox_to_anchor=(0.5, 0.3 * bool(picture.notes) / high),
            )  # fmt: skip
        if picture.notes:
            figure.text(0.5, 0.08 / high, " ".join(picture.notes), ha="center", va="bottom", fontsize=7.5, color=INK)
        return _saved(figure, form)


def draw_inline(panel: Panel, picture: Picture) -> str:
    """One panel as an SVG element for a page: no header, no background, its ink is the text colour of the page.

    The page may set the colour of the first curve by the property `--curve` of CSS.
    """
    with _matplotlib(panel.metric) as figure_class:
        figure = figure_class(figsize=PANEL_INCHES, layout="constrained")
        axes = figure.subplots()
        axes.set_facecolor("none")
        _panel(axes, panel, picture)
        drawn = _saved(figure, "svg", "none").decode()
    inner = drawn[drawn.index("<svg") :].replace(INK, "currentColor")
    inner = inner.replace(OKABE_ITO[0].lower(), f"var(--curve, {OKABE_ITO[0].lower()})")
    inner = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", inner, flags=re.DOTALL)
    inner = re.sub(r'<g id="[^"]*"', "<g", inner)  # the same in every picture of a page, and nothing refers to them
    return re.sub(r' (width|height)="[0-9.]+pt"', "", inner, count=2)


@contextmanager
def _matplotlib(salt: str) -> Iterator[Any]:
    """The class of figures, with settings that give the same bytes everywhere. `salt` keeps ids of pictures apart."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise ConfigError(f"matplotlib is not installed: {how_to_install('plot')}") from None
    settings = {
        "svg.hashsalt": salt, "svg.fonttype": "path", "text.parse_math": False, "font.family": "DejaVu Sans",
        "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": INK, "text.color": INK,
        "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.formatter.use_mathtext": False,
        "text.usetex": False, "path.simplify": True, "savefig.dpi": DOTS_PER_INCH,
    }  # fmt: skip
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(settings)
        warnings.filterwarnings("ignore", message=".*[Gg]lyph.*")  # a name in letters that the font lacks shows boxes
        yield Figure


def _panel(axes: Any, panel: Panel, picture: Picture) -> None:
    for curve in panel.curves:
        style = _style(curve)
        if panel.dots:
            x, y = [point.x for point in curve.points], [point.y for point in curve.points]
            reach = [
                [max(0.0, p.y - p.low) for p in curve.points],
                [max(0.0, p.high - p.y) for p in curve.points],
            ]
            axes.errorbar(x, y, yerr=reach, **style, marker="o", markersize=4, capsize=3, linewidth=1.2)
            continue
        drawn = thinned(curve.points)
        x, y = [point.x for point in drawn], [point.y for point in drawn]
        axes.plot(x, y, **style, linewidth=1.5, marker="o" if len(drawn) == 1 else None)
        if curve.seeds > 1:
            axes.fill_between(
                x, [p.low for p in drawn], [p.high for p in drawn], color=style["color"], alpha=0.2, linewidth=0
            )
    axes.set_title(panel.metric if len(panel.metric) <= 40 else panel.metric[:39] + "…", fontsize=10, loc="left")
    axes.set_xlabel("policy version" if panel.dots and picture.across == "step" else ACROSS[picture.across], fontsize=8)
    axes.set_ylabel(panel.unit, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(color=INK, alpha=0.12, linewidth=0.6)
    values = {value for curve in panel.curves for point in curve.points for value in point[1:] if value == value}
    if len(values) == 1:  # the axis of a page's chart, with a margin in which the line is seen
        low, high = sorted((0.0, 2 * values.pop() or 1.0))
        axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    elif panel.unit in ("share", "success"):
        axes.set_ylim(bottom=0)
    if picture.across == "step":
        axes.xaxis.get_major_locator().set_params(integer=True)


def _style(curve: PlotCurve) -> dict[str, Any]:
    """Colour and dashes of a line, the same in all panels."""
    return {"color": OKABE_ITO[curve.colour % len(OKABE_ITO)], "linestyle": DASHES[curve.colour % len(DASHES)]}


def thinned(points: Sequence[Point]) -> list[Point]:
    """Points that draw the same line: of each stretch the first, the least, the most and the last."""
    if len(points) <= 4 * MOST_BUCKETS:
        return list(points)
    kept = list[Point]()
    for bucket in range(MOST_BUCKETS):
        start, end = (len(points) * edge // MOST_BUCKETS for edge in (bucket, bucket + 1))
        places = range(start, end)
        least, most = min(places, key=lambda i: points[i].low), max(places, key=lambda i: points[i].high)
        kept += [points[i] for i in sorted({start, least, most, end - 1})]
    return kept


def _names(panels: Sequence[Panel]) -> dict[str, Any]:
    """The legend: a line's name, and how it is drawn. None for a single run."""
    from matplotlib.lines import Line2D

    curves: dict[str, PlotCurve] = {}
    for panel in panels:
        for curve in panel.curves:
            curves.setdefault(curve.label, curve)
    if len(curves) == 1 and next(iter(curves.values())).seeds == 1:
        return {}
    found = {}
    for label, curve in curves.items():
        name = label if curve.seeds == 1 else f"{label}: mean of {curve.seeds} seeds, band from lowest to highest"
        style = _style(curve)
        found[name] = Line2D([], [], color=style["color"], linestyle=style["linestyle"], linewidth=1.5)
    return found


def _saved(figure: Any, form: Format, background: str = "white") -> bytes:
    out = io.BytesIO()
    metadata = {"Date": None, "Creator": None} if form == "svg" else {"Software": None}
    figure.savefig(out, format=form, metadata=metadata, facecolor=background)
    return out.getvalue()
