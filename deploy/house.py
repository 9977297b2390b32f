"""The size of the source tree beside its goals: files, lines, statements, and names by room.

`tests/test_house.py` holds the budget of each room: a folder of `shoal/`, or its own files.
"""

import ast
import re
import subprocess
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
GENERATED = re.compile(r"<!-- (generated|figures): .*?<!-- end of \1 -->", re.DOTALL)
SMALL_LINES, MAX_PARAMETERS = 150, 7
GOALS = {
    "files in shoal/": 430,
    "lines in shoal/": 72_000,
    "statements in shoal/": 39_200,
    "class names defined in more than one file": None,
    "file names twice in a room": None,
    f"files of fewer than {SMALL_LINES} lines with one importer": None,
    f"functions with more than {MAX_PARAMETERS} parameters": 0,
    "attributes set from outside their class": None,
    "fmt: skip": None,
    "lines of tests": 62_000,
    "lines of benchmarks": 10_000,
    "words of docs that are written by hand": 60_000,
}


class File(NamedTuple):
    """A Python file; `path` is from the root."""

    path: str
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @property
    def statements(self) -> int:
        """By the syntax tree, without docstrings and other texts that stand alone."""
        nodes = [node for node in ast.walk(self.tree) if isinstance(node, ast.stmt)]
        return sum(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in nodes)

    @property
    def room(self) -> str:
        parts = self.path.split("/")
        return parts[1] if len(parts) > 2 else parts[0]

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def imports(self) -> set[str]:
        """Modules, and names in modules, that the file imports."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        return found


class Room(NamedTuple):
    """What a budget is for."""

    files: int
    lines: int
    statements: int


def tracked(*patterns: str) -> list[str]:
    """Paths of the files that git tracks, from the root."""
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in listed.stdout.splitlines() if (ROOT / path).is_file()]


def files_below(folder: str) -> list[File]:
    texts = {path: (ROOT / path).read_text() for path in tracked(f"{folder}/*.py")}
    return [File(path, text, ast.parse(text)) for path, text in texts.items()]


def rooms(files: list[File]) -> dict[str, Room]:
    found = defaultdict[str, list[File]](list)
    for file in files:
        found[file.room].append(file)
    return {
        name: Room(len(inside), sum(one.lines for one in inside), sum(one.statements for one in inside))
        for name, inside in sorted(found.items())
    }


def measure(files: list[File]) -> dict[str, int]:
    """The figures of GOALS; `files` are those of `shoal/`."""
    classes = Counter(
        name for file in files for name in {n.name for n in file.tree.body if isinstance(n, ast.ClassDef)}
    )
    names = Counter((file.room, Path(file.path).name) for file in files if not file.path.endswith("__init__.py"))
    importers = Counter(module for file in files for module in file.imports())
    nodes = [node for file in files for node in ast.walk(file.tree)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    docs = [GENERATED.sub("", (ROOT / path).read_text()) for path in tracked("*.md")]
    figures = (
        len(files),
        sum(file.lines for file in files),
        sum(file.statements for file in files),
        sum(count > 1 for count in classes.values()),
        sum(count > 1 for count in names.values()),
        sum(file.lines < SMALL_LINES and importers[file.module] == 1 for file in files),
        sum(_num_parameters(node) > MAX_PARAMETERS for node in functions),
        sum(_is_set_from_outside(node) for node in nodes),
        sum(file.text.count("fmt: skip") for file in files),
        sum(file.lines for file in files_below("tests")),
        sum(file.lines for file in files_below("benchmarks")),
        sum(len(text.split()) for text in docs),
    )
    return dict(zip(GOALS, figures, strict=True))


def _num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    args = node.args
    named = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    return len(named) - (bool(named) and named[0].arg in ("self", "cls"))


def _is_set_from_outside(node: ast.AST) -> bool:
    """Whether a node is an attribute that is set, of something else than `self` or a class."""
    if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
        return False
    return not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))


def main() -> None:
    files = files_below("shoal")
    print(f"{'':57} {'figure':>8} {'goal':>8}")
    for name, figure in measure(files).items():
        goal = GOALS[name]
        print(f"{name:57} {figure:8,} {'' if goal is None else f'{goal:8,}'}")
    print(f"\n{'room':20} {'files':>6} {'lines':>8} {'statements':>11}")
    for room, size in rooms(files).items():
        print(f"{room:20} {size.files:6,} {size.lines:8,} {size.statements:11,}")


if __name__ == "__main__":
    main()
