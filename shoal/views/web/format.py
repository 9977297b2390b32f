"""How values look on a page: numbers, times, keys, and strangers' text, which stays text.

Jinja escapes all that they print; nothing here returns markup. Characters that do not print, or that change the direction
of a line, are shown as escapes, and `<bdi>` in the templates keeps the rest apart.
"""

import hashlib
import math
import shlex
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.environment import TemplateModule
from starlette.datastructures import QueryParams

from shoal.ledger.hints import split_remedy
from shoal.runs.event_text import KEY_CHARS
from shoal.terminal import as_called, brief, printable

HERE = Path(__file__).parent
TEMPLATES, STATIC = HERE / "templates", HERE / "static"

NONE = "–"


def templates() -> Environment:
    """The templates with what they may call."""
    env = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    env.autoescape = True  # guard: page-escapes-all
    env.filters |= {
        "number": number, "whole": whole, "percent": percent, "when": when, "iso": iso, "span": span,
        "cut": cut, "shown": shown, "said": said, "query": query, "after": after, "day": day, "clock": clock,
        "kind_class": kind_class, "quoted": shlex.quote, "split_remedy": split_remedy,
        "at_commands": at_commands,
    }  # fmt: skip
    env.globals |= {"dash": NONE, "asset": _assets().__getitem__}
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


def number(value: Any, digits: int = 4) -> str:
    """A figure with so many significant digits; what a host says instead of one, as text."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return NONE
    if not isinstance(value, int | float) or isinstance(value, bool):
        return shown(value)
    if isinstance(value, int) or (value == int(value) and abs(value) < 1e6):
        return whole(value)
    return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:,.0f}"


def whole(value: Any) -> str:
    """A whole number with its thousands apart."""
    return NONE if value is None else f"{int(value):,}"


def percent(value: Any) -> str:
    """A share of 1; what a host says instead of one, as text."""
    if value is not None and not isinstance(value, int | float):
        return shown(value)
    return NONE if value is None or not math.isfinite(value) else f"{100 * value:.3g} %"


def when(time_s: float | None) -> str:
    """A time in UTC."""
    found = _moment(time_s)
    return f"{found:%Y-%m-%d %H:%M:%S}" if found else NONE


def day(time_s: float | None) -> str:
    """The date of a time in UTC."""
    found = _moment(time_s)
    return f"{found:%A, %Y-%m-%d}" if found else NONE


def clock(time_s: float | None) -> str:
    """The time of the day in UTC."""
    found = _moment(time_s)
    return f"{found:%H:%M:%S}" if found else NONE


def iso(time_s: float | None) -> str:
    """The same for machines."""
    found = _moment(time_s)
    return found.isoformat(timespec="seconds") if found else ""


def _moment(time_s: float | None) -> datetime | None:
    try:
        return datetime.fromtimestamp(time_s, UTC) if time_s is not None else None
    except (OverflowError, ValueError, OSError):
        return None


def span(seconds: float | None) -> str:
    """A length of time with two units at most."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    if 0 < seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, hours, days = round(seconds / 60), round(seconds / 3600), seconds / 86400
    if minutes < 120:
        return f"{minutes} min"
    return f"{hours} h" if hours < 72 else f"{days:.1f} days"


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
