"""How values look on a page: numbers, times, keys, and strangers' text, which stays text.

Jinja escapes all that they print; nothing here returns markup. Characters that do not print, or that change the direction
of a line, are shown as escapes, and `<bdi>` in the templates keeps the rest apart.
"""

import hashlib
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.environment import TemplateModule
from starlette.datastructures import QueryParams

from shoal import humanize
from shoal.runs.event_text import KEY_CHARS
from shoal.terminal import as_called, brief, printable

HERE = Path(__file__).parent
TEMPLATES, STATIC = HERE / "templates", HERE / "static"


def templates() -> Environment:
    """The templates with what they may call."""
    env = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    env.autoescape = True  # guard: page-escapes-all
    env.filters |= {
        "number": number, "whole": whole, "percent": percent, "when": humanize.moment, "iso": iso,
        "span": humanize.duration,
        "cut": cut, "shown": shown, "said": said, "query": query, "after": after,
        "day": partial(humanize.moment, form="%A, %Y-%m-%d"), "clock": partial(humanize.moment, form="%H:%M:%S"),
        "kind_class": kind_class, "quoted": shlex.quote, "at_commands": at_commands,
    }  # fmt: skip
    env.globals |= {"dash": humanize.UNKNOWN, "asset": _assets().__getitem__}
    return env


def parts(env: Environment, name_of: Callable[[str], str], being_read: str) -> TemplateModule:
    """What pages show alike, with the names of this run's nodes by key, and that its log is still being read."""
    return env.get_template("parts.html").make_module({"name_of": name_of, "being_read": being_read})


def _assets() -> dict[str, str]:
    """Addresses of the static files, which change with their bytes, so that browsers may keep them."""
    return {
        file.name: f"/static/{hashlib.sha256(file.read_bytes()).hexdigest()[:12]}/{file.name}"
        for file in STATIC.iterdir()
    }


def shown(text: object, most: int = 60) -> str:
    """A stranger's text in one line."""
    return brief(str(text), most)


def said(text: object, most: int = 20_000) -> str:
    """A stranger's text in several lines."""
    whole_text = str(text)
    rest = len(whole_text) - most
    return printable(whole_text[:most], keep="\n\t") + (f"\n[{rest} more characters]" if rest > 0 else "")


def at_commands(text: str, run: str) -> list[str]:
    """A text for the host of the run in a folder, cut at its commands: every second part is one, with that folder."""
    return as_called(text, Path(run)).split("`")


def number(value: object, digits: int = 4) -> str:
    """A figure with so many significant digits; a text, such as what a trainer waited for, as it is."""
    return humanize.figure(value, digits) if isinstance(value, int | float | None) else shown(value)


def percent(value: object) -> str:
    """A share of 1; a text as it is."""
    return humanize.percent(value) if isinstance(value, int | float | None) else shown(value)


def whole(value: float | None) -> str:
    """A whole number with its thousands apart."""
    return humanize.UNKNOWN if value is None else f"{int(value):,}"


def iso(time_s: float | None) -> str:
    """A time for machines; empty if it is unknown."""
    return humanize.moment(time_s, "%Y-%m-%dT%H:%M:%S+00:00").replace(humanize.UNKNOWN, "")


def cut(key: object, most: int = KEY_CHARS) -> str:
    """The beginning of a key or a digest."""
    return shown(str(key)[:most])


def kind_class(kind: str) -> str:
    """How a kind of event is marked in a timeline."""
    return next((mark for mark, kinds in _MARKS.items() if kind in kinds), "other")


_MARKS = {
    "run": ("run_created", "run_ended", "rules_changed", "checkpoint_published", "batch_formed"),
    "trouble": ("slash", "forfeited", "node_quarantined", "validator_fault", "lease_lapsed", "slot_void"),
}


def after(given: QueryParams, place: int) -> str:
    """The query of the next page of a list, with what filters it."""
    kept = [(name, value) for name, value in given.multi_items() if name not in ("after", "live") and value]
    return "?" + urlencode([*kept, ("after", place)])


def query(values: dict[str, Any]) -> str:
    """The query of a link, without what is empty."""
    given = {name: value for name, value in values.items() if value not in (None, "", [])}
    return f"?{urlencode(given, doseq=True)}" if given else ""
