"""Figures and tables that pages quote: where they are, whether they are right, and how they are brought up to date.

Called by `benchmarks/figures.py` and by `tests/test_figures.py`. A number is quoted by a comment behind it, which a
rendered page does not show; it names as many figures as there are numbers before it, in their order:

    TRL takes 1.34<!-- figure: whole_system.ratio_cpu --> times our CPU-seconds
    27.6, 30.1 and 30.2 %<!-- figure: demo.wins_before --> before          (this figure is a list of three)

A number is right if it is the figure, rounded to the digits that the page shows; where a % follows, the figure times
100. A comment never begins a line: Markdown would end the paragraph there. A whole table stands between
`<!-- figures: poisoning.worlds -->` and `<!-- end of figures -->`.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.pages.records import Records

MARK = re.compile(r"<!-- figure: (?P<names>[^>]*?) -->")
BLOCK = re.compile(r"<!-- figures: (?P<name>\S+) -->\n(?P<text>.*?)\n<!-- end of figures -->", re.DOTALL)
GENERATED = re.compile(r"<!-- generated: .*?<!-- end of generated -->", re.DOTALL)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"(?<![\w.,])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?![\w.]*\d)")
SOURCE = re.compile(r"\bbenchmarks/|LOG\.md|± ?\d|\b[Mm]easured (?:on|in|with|over|by)\b")
"""What in a paragraph says that its numbers come from a measurement."""

QUANTITY = re.compile(r"\d\.\d|\d ?%|\d (?:times|s|ms|MB|GB|(?:CPU-)?(?:seconds|minutes))\b")
"""A number that looks measured."""


class Quote(NamedTuple):
    """A number of a page, or a table of one, and what it should say."""

    line: int
    name: str
    start: int
    end: int
    text: str
    wanted: str
    """The newest figure as the page would show it."""
    right: bool
    """Whether the newest figure says so."""
    once: bool
    """Whether the figure of any run says so."""


def quotes(page: str, records: Records) -> Iterator[Quote]:
    """All quotes of a page. Raises `ValueError` for one that names nothing, or has no number before it."""
    page, after = FENCE.sub(lambda fence: re.sub(r"[^\n]", " ", fence[0]), page), 0
    for mark in MARK.finditer(page):
        line = page.count("\n", 0, mark.start()) + 1
        begin = max(after, page.rfind("\n\n", 0, mark.start()) + 1)
        numbers = list(NUMBER.finditer(page, begin, mark.start()))
        names = [name.strip() for name in mark["names"].split(",") if name.strip() != "none"]
        wanted = [one for name in names for one in _values(name, records, line)]
        if len(numbers) < len(wanted):
            raise ValueError(f"line {line}: {len(numbers)} numbers stand before {mark[0]}, it names {len(wanted)}")
        if page[: mark.start()].rpartition("\n")[2].strip() == "":
            raise ValueError(f"line {line}: a comment that begins a line ends its paragraph: {mark[0]}")
        last = numbers[len(numbers) - len(wanted) :]
        if not last:
            continue
        percent = "%" in page[last[-1].end() : mark.start()] or page[mark.end() :].lstrip().startswith("%")
        for number, (name, values) in zip(last, wanted, strict=True):
            scaled = [value * 100 if percent else value for value in values]
            yield Quote(line, name, number.start(), number.end(), number[0], shown(scaled[0], number[0]),
                        _says(number[0], scaled[0]), any(_says(number[0], value) for value in scaled))  # fmt: skip
        after = mark.end()
    for block in BLOCK.finditer(page):
        line, text = page.count("\n", 0, block.start()) + 1, records.table(block["name"])
        if text is None:
            raise ValueError(f"line {line}: no run has a table {block['name']!r}")
        same = text == block["text"]
        yield Quote(line, block["name"], block.start("text"), block.end("text"), block["text"], text, same, same)


def _values(name: str, records: Records, line: int) -> Iterator[tuple[str, list[float]]]:
    """For each number of a figure, its values, newest run first."""
    found = records.find(name)
    if not found:
        raise ValueError(f"line {line}: no run has a figure {name!r}; docs/reference/figures.md lists them")
    lists = [each.value if isinstance(each.value, list) else [each.value] for each in found]
    for place in range(len(lists[0])):
        yield name, [values[place] for values in lists if len(values) == len(lists[0])]


def _says(text: str, value: float) -> bool:
    """Whether a number is a value, rounded to as many digits."""
    return abs(float(text.replace(",", "")) - value) <= 0.5 * 10 ** -_digits(text) * (1 + 1e-9)


def _digits(text: str) -> int:
    """How many digits behind the point a number shows: -1 for 5e1, 6 for 1.3e-5."""
    mantissa, _, exponent = text.partition("e")
    return len(mantissa.partition(".")[2]) - int(exponent or 0)


def shown(value: float, like: str) -> str:
    """A value with the digits, sign and commas of another number."""
    sign = "+" if like.startswith("+") else ""
    mantissa, exponent, _ = like.partition("e")
    whole, _, digits = mantissa.partition(".")
    comma = "," if "," in like or len(whole.lstrip("+-")) < 4 else ""
    if exponent:
        return re.sub(r"e([-+])0*", lambda m: "e" + m[1].strip("+"), f"{value:{sign}.{len(digits)}e}")
    return f"{value:{sign}{comma}.{len(digits)}f}"


def updated(page: str, records: Records) -> str:
    """A page with every quote that is not right replaced by the newest figure."""
    for quote in sorted(quotes(page, records), key=lambda quote: -quote.start):
        if not quote.right:
            page = page[: quote.start] + quote.wanted + page[quote.end :]
    return page


def unmarked(page: str) -> list[str]:
    """Paragraphs that tell measured numbers and quote none, and tables of numbers outside any block.

    A paragraph, or an item of a list, tells measured numbers if it names a benchmark or the log, gives an interval or says
    *measured*, and has a fraction, a per cent, a time or a size. Where these are settings, `<!-- figure: none -->` says so.
    """
    for pattern in (FENCE, GENERATED, BLOCK):
        page = pattern.sub("", page)
    return [
        part.strip()
        for part in re.split(r"\n\s*\n|\n(?=\s*(?:-|\d+\.) )", page)
        if (_is_table_of_numbers(part) if part.lstrip().startswith("|") else _tells_numbers(part))
        and not MARK.search(part)
    ]


def _tells_numbers(paragraph: str) -> bool:
    plain = re.sub(r"`[^`]*`|\]\([^)]*\)|arXiv:\S+", "", paragraph)
    return SOURCE.search(paragraph) is not None and QUANTITY.search(plain) is not None


def _is_table_of_numbers(part: str) -> bool:
    """Whether most cells beside the first column begin with a number."""
    cells = [cell.strip(" *+") for line in part.strip().splitlines()[2:] for cell in line.strip("|").split("|")[1:]]
    return bool(cells) and sum(bool(re.match(r"[-+]?[\d,.]+(?: |$)", cell)) for cell in cells) > len(cells) / 2


def pages(root: Path) -> list[Path]:
    """Pages that describe the present, whose quotes are kept up to date. The log is history."""
    named = [root / "README.md", root / "AGENTS.md", root / "benchmarks/README.md"]
    return sorted([*(page for page in named if page.is_file()), *(root / "docs").rglob("*.md")])
