"""Writes a report: facts and curves into one HTML file without scripts, which loads nothing.

Every text goes through `printable` and Jinja2's escaping; only the pictures, which are paths by matplotlib, are markup. The
policy in the file's head forbids scripts, requests and forms, in case anything was missed.
"""

import contextlib
from functools import partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from shoal import __version__
from shoal.errors import NothingYet
from shoal.humanize import duration, figure, moment, percent
from shoal.runs.replay import RunReader
from shoal.terminal import printable
from shoal.views.plots.render import draw_inline
from shoal.views.plots.series import picture_of, read_run, sentence_of
from shoal.views.report.content import facts_of

CSP = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'none'; base-uri 'none'"


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
