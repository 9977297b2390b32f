"""`docs/reference/figures.md`: every figure of every benchmark with its date, commit and command.

Called by `benchmarks/figures.py`, which writes it, and by `tests/test_figures.py`, which compares it.
"""

from pathlib import Path

from benchmarks.pages.markdown import table
from benchmarks.pages.quotes import BLOCK, pages
from benchmarks.pages.records import Found, Record, Records, Value, unit

PAGE = "docs/reference/figures.md"

HEAD = """# Figures

What the benchmarks measured. README, the other pages and `LOG.md` quote from here, and `tests/test_figures.py` fails where
a quoted figure is not here. This page is written from `benchmarks/records/` by

```console
$ python benchmarks/figures.py write
```

`python benchmarks/figures.py run decode` runs `benchmarks/decode.py` in full and adds what it measured.
`benchmarks/README.md` says what each benchmark compares, and how a page quotes a figure.

A share is between 0 and 1; pages quote it in per cent. *Earlier* are values of former runs, with the number of the run."""


def figures_page(records: Records, root: Path) -> str:
    """The whole page."""
    parts = [HEAD]
    where = _where_tables_are(root)
    for benchmark, runs in records.by_benchmark.items():
        parts.append(f"## {benchmark}")
        parts.append(table(("Run", "Date", "Commit", "Command", "Machine"), [_run(*each) for each in _numbered(runs)]))
        notes = [f"Run {number}: {run.note}" for number, run in _numbered(runs) if run.note]
        parts += ["\n".join(f"- {note}" for note in notes)] if notes else []
        names = list(dict.fromkeys(name for run in runs for name in run.figures))
        rows = [_figure(f"{benchmark}.{name}", runs, records) for name in names]
        parts += [table(("Figure", "Value", "Unit", "Run", "Earlier"), rows)] if rows else []
        tables = [(f"{benchmark}.{name}", number) for number, run in _numbered(runs) for name in run.tables]
        parts += ["Tables: " + "; ".join(_table(*each, where) for each in tables) + "."] if tables else []
    return "\n\n".join(parts) + "\n"


def _numbered(runs: list[Record]) -> list[tuple[int, Record]]:
    """Runs, newest first, with numbers that stay as new ones come."""
    return [(len(runs) - place, run) for place, run in enumerate(runs)]


def _run(number: int, run: Record) -> tuple[str, ...]:
    return str(number), run.date, f"`{run.commit}`", f"`{run.command}`", run.machine


def _figure(name: str, runs: list[Record], records: Records) -> tuple[str, ...]:
    numbers = {id(run): number for number, run in _numbered(runs)}

    def cited(found: Found) -> str:
        return f"{_number(found.value)} ({numbers[id(found.record)]})"

    newest, *earlier = records.find(name)
    run = str(numbers[id(newest.record)])
    return f"`{name}`", _number(newest.value), unit(name), run, "; ".join(map(cited, earlier))


def _number(value: Value) -> str:
    return " ".join(f"{one:,}" for one in (value if isinstance(value, list) else [value]))


def _table(name: str, number: int, where: dict[str, str]) -> str:
    place = f" in [{where[name].rpartition('/')[2]}]({where[name]})" if name in where else ""
    return f"`{name}`{place} (run {number})"


def _where_tables_are(root: Path) -> dict[str, str]:
    """Pages by the table that they quote, as links from this one."""
    return {
        block["name"]: "../" * (1 if page.is_relative_to(root / "docs") else 2)
        + page.relative_to(root / "docs" if page.is_relative_to(root / "docs") else root).as_posix()
        for page in pages(root)
        if page != root / PAGE
        for block in BLOCK.finditer(page.read_text())
    }
