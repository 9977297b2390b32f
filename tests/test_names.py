"""Every name in back-ticks exists in the tree: a path, module, class, function or field.

The test reads all pages, and the docstrings and comments of all Python files. A name may be

    `shoal/ledger/state.py`, `ledger/state`, `state.py`     a file: from the root, `shoal/` or a folder above it
    `apply_x`, `tests/ROOM`               a pattern: `x` or a word in capitals stands for any name
    `ledger.event_types.apply`, `State.law`, `train.lr`     what a module or a class defines; a key of a run file
    `must_audit`                                            any word of the code: a name, a key, a word of a string

Paths of Python files are checked without back-ticks and in code blocks, too. `FOREIGN` lists names of other programs.
"""

import ast
import functools
import importlib.util
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from shoal import config
from shoal.config.stages import StagesConfig
from shoal.roles.coordinator.prometheus import PREFIX, WATCHED, step_metrics
from shoal.typed_toml import all_keys

ROOT = Path(__file__).parent.parent
FOLDERS = ("shoal", "recipes", "examples", "benchmarks", "tests")
CODE = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
PAGES = sorted(
    page
    for page in [ROOT / "README.md", ROOT / "AGENTS.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks/README.md",
                 *(ROOT / "docs").rglob("*.md")]
    if page.name not in ("experiments.md", "figures.md", "coming-from.md") and not page.name.startswith("results-")
)  # fmt: skip
"""Without the table of experiments, whose commands have the names of their commits, the page of figures, which the records
make, and the page with others' names, whose keys of ours `tests/test_docs_site.py` looks up."""

_EVIDENCE = re.compile(r"^## Evidence\n.*?(?=^## )", re.MULTILINE | re.DOTALL)
_STEP = re.compile(r"`([\w/]+\.py):(\w+)`")

FOREIGN = {
    "environment.toml": "what describes a package",
    "install.toml": "a file that users write",
    "lock.txt": "a lock of pip",
    "Env.run": "a method of verifiers",
    "limit_conn": "a setting of nginx",
    "use_transformers_continuous_batching": "a setting of TRL",
    "WANDB_ENTITY": "an environment variable of wandb",
    "WANDB_BASE_URL": "another",
    "loss.by_token": "a key of `train.algorithm`",
    "loss.eps_low": "another",
    "loss.eps_high": "another",
    "loss.delta": "another",
    "reading.replayed(place)": "a call of a run that is read",
    "reading.replayed(reading.place_of(3, 17))": "another",
    "prometheus.yml": "a file of Prometheus",
    "launcher.log": "a log of a run",
    "v000012/": "an example of a kept version's folder",
}
"""Names that are not in the tree, and what they are."""

_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_PATH = re.compile(r"[\w.-]+(?:/[\w.*-]+)+/?|[\w-]+\.(?:py|md|toml)|\w+/")
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
_NAME = re.compile(r"[A-Za-z_]\w+")
_PATTERN = re.compile(r"x|[A-Z]+|\*\.\w+")
_HASH = re.compile(r"[0-9a-f]{7,}")
_FILE = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w/]+\.(?:py|toml)\b")
_ENDINGS = (
    "json", "jsonl", "sqlite", "safetensors", "jinja", "key", "seed", "token", "url", "lock", "md", "html", "com", "org",
)  # fmt: skip
"""Of files that a run or a model has, and of hosts."""


class Said(NamedTuple):
    """A span in back-ticks, and the file that says it."""

    file: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}: `{self.text}`"


# --- what is said ---


def text_of(file: Path) -> str:
    """A page or a Python file; of a design decision without its evidence, which has the names of other commits."""
    text = file.read_text()
    return _EVIDENCE.sub(lambda part: "\n" * part[0].count("\n"), text) if file.parent.name == "decisions" else text


def spans(file: Path, text: str) -> Iterator[Said]:
    """Spans in back-ticks of a page or of a Python file."""
    prose = _without_fences(text) if file.suffix == ".md" else _docstrings_and_comments(text)
    for number, line in prose:
        for span in _SPAN.findall(line):
            yield Said(file, number, span)


def _without_fences(text: str) -> Iterator[tuple[int, str]]:
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        inside ^= line.startswith("```")
        if not inside:
            yield number, line


def _docstrings_and_comments(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for offset, line in enumerate(node.value.value.splitlines()):
                yield node.lineno + offset, line
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


# --- what there is ---


@functools.cache
def vocabulary() -> frozenset[str]:
    """Every word of the code: names, keys and words of strings, but not of docstrings and comments."""
    words = set[str]()
    for file in CODE:
        if file == Path(__file__):
            continue  # its examples of names that do not exist
        tree = ast.parse(file.read_text())
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            words.update(_words_of(node) if id(node) not in prose else ())
    words.update(PREFIX + name for name in (*WATCHED, *(told.name for told in step_metrics().values())))
    for file in [
        *ROOT.glob("recipes/*.toml"),
        ROOT / "pyproject.toml",
        ROOT / "Makefile",
        *ROOT.glob("benchmarks/*.toml"),
    ]:
        words.update(_NAME.findall(file.read_text()))
    return frozenset(words | {file.stem for file in CODE} | {folder.name for file in CODE for folder in file.parents})


def _words_of(node: ast.AST) -> Iterator[str]:
    for value in (getattr(node, field, None) for field in ("id", "attr", "arg", "name", "asname", "module", "value")):
        if isinstance(value, str):
            yield from _NAME.findall(value)


@functools.cache
def modules() -> dict[str, Path]:
    """Modules and packages of `shoal` by each end of their dotted names: `shoal.ledger.constants`, `ledger.constants`,
    `law`."""
    found: dict[str, Path] = {}
    for file in sorted((ROOT / "shoal").rglob("*.py"), key=lambda file: -len(file.parts)):
        path = file.parent if file.name == "__init__.py" else file
        parts = path.relative_to(ROOT).with_suffix("").parts
        for start in range(len(parts)):
            found[".".join(parts[start:])] = path
    return found


@functools.cache
def classes() -> dict[str, set[str]]:
    """What the classes of the code define, by name of the class."""
    found: dict[str, set[str]] = {}
    for file in CODE:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).update(_defined(node.body))
    return found


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
                stored = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
                yield from (attribute.attr for attribute in stored)  # self.x = ...
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Assign(targets=targets):
                yield from (n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name for alias in names)


KEYS = frozenset(key for kind in (config.RunConfig, config.SftConfig, StagesConfig) for key in all_keys(kind))


# --- what is wrong ---


def unknown(said: Said) -> bool:
    """Whether a span names something that is not in the tree."""
    if said.text in FOREIGN:
        return False
    for word in said.text.split():
        if _PATH.fullmatch(word) and not is_path(word, said.file):
            return True
    name = re.sub(r"\(.*\)$", "", said.text)
    if _PATH.fullmatch(name) or _HASH.fullmatch(name):
        return False
    if _DOTTED.fullmatch(name):
        return not is_dotted(name, said.file)
    return bool(_NAME.fullmatch(name)) and not is_word(name)


def is_path(name: str, file: Path) -> bool:
    """Whether a path exists from the root, from the package or from a folder above the file; or is none of ours."""
    *folders, last = name.strip("/").split("/")
    bases = [ROOT, *(base for base in file.parents if ROOT in base.parents), ROOT / "shoal"]
    for place in (base.joinpath(*folders) for base in bases):
        if place.is_dir() and (_PATTERN.fullmatch(last) or (place / last).exists() or (place / f"{last}.py").exists()):
            return True
    if not folders:  # `registry.py`, or `keys/` of a run's folder
        return any(found.name == last for found in _all_files()) or last in vocabulary() or last in shown_files()
    # Of `runs/`, folders of runs that pages make are told from the room by their names.
    return folders[0] not in _own_folders() or (folders[0] == "runs" and not last.endswith(".py"))


@functools.cache
def _all_files() -> tuple[Path, ...]:
    return (*CODE, *PAGES, *ROOT.glob("*"), *ROOT.glob("recipes/*"))


@functools.cache
def _own_folders() -> frozenset[str]:
    return frozenset({*FOLDERS, "docs"} | {folder.name for file in CODE for folder in file.relative_to(ROOT).parents})


@functools.cache
def shown_files() -> frozenset[str]:
    """Files whose text a page shows whole, by name."""
    return frozenset(
        name for page in PAGES for name in re.findall(r"^```\w+ (\S+\.\w+)$", page.read_text(), re.MULTILINE)
    )


def is_dotted(name: str, file: Path) -> bool:
    """Whether a dotted name is a key, or a module, class or folder has what it names; or it is none of ours."""
    parts = name.split(".")
    if name in KEYS or any(key.startswith(f"{name}.") for key in KEYS) or parts[-1] in _ENDINGS:
        return True
    for length in range(len(parts), 0, -1):
        path, left = modules().get(".".join(parts[:length])), parts[length:]
        if path is not None and not (length == 1 and parts[0] in _arguments_in(file)):
            return not left or left[0] in _names_in(path)
    if parts[0] in classes():
        return parts[1] in classes()[parts[0]]
    return (is_word(parts[0]) and is_word(parts[-1])) or importlib.util.find_spec(parts[0]) is not None


@functools.cache
def _arguments_in(file: Path) -> frozenset[str]:
    """Names of arguments: a dotted name that begins with one is not a module's."""
    if file.suffix != ".py":
        return frozenset()
    return frozenset(node.arg for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.arg))


@functools.cache
def _names_in(path: Path) -> frozenset[str]:
    if path.is_dir():
        package = (
            ast.parse((path / "__init__.py").read_text()) if (path / "__init__.py").exists() else ast.Module([], [])
        )
        given = [
            node.value for node in ast.walk(package) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        return frozenset([*(file.stem for file in path.iterdir()), *_defined(package.body), *given])  # also `__all__`
    return frozenset(_defined(ast.parse(path.read_text()).body))


def is_word(name: str) -> bool:
    """Whether a word is in the code, or a pattern like `apply_x` fits one. Words in capitals stand for any."""
    if name.endswith("_x"):
        return any(word.startswith(name[:-1]) for word in vocabulary())
    return name in vocabulary() or bool(_PATTERN.fullmatch(name))


@pytest.mark.parametrize("file", [*PAGES, *CODE], ids=lambda file: file.relative_to(ROOT).as_posix())
def test_every_name_in_back_ticks_is_in_the_tree(file: Path) -> None:
    assert [str(said) for said in spans(file, text_of(file)) if unknown(said)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_file_that_a_page_names_is_in_the_tree(page: Path) -> None:
    assert [name for name in _FILE.findall(text_of(page)) if not (ROOT / name).exists()] == []


def test_each_step_of_the_paths_through_the_code_is_a_function_of_its_file() -> None:
    paths = (ROOT / "docs" / "design" / "in-code.md").read_text().split("\n## ")[1:]
    assert [len(re.findall(r"^\d+\. `", path, re.MULTILINE)) for path in paths] == [10, 10, 10, 10]
    for file, name in _STEP.findall("".join(paths)):
        found = ast.walk(ast.parse((ROOT / "shoal" / file).read_text()))
        assert name in [node.name for node in found if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)], file


@pytest.mark.parametrize("text", [
    "shoal/ledger/gone.py", "ledger/gone", "gone.py", "ledger.table.gone", "State.gone", "gone_and_forgotten",
    "python benchmarks/gone.py --quick", "apply_gone_x", "train.gone",
])  # fmt: skip
def test_a_name_that_is_not_in_the_tree_is_found(text: str) -> None:
    assert unknown(Said(ROOT / "README.md", 1, text))


@pytest.mark.parametrize("text", [
    "shoal/ledger/state.py", "ledger/state", "state.py", "ledger.event_types.apply", "State.law", "must_audit",
    "train.lr", "apply_x", "tests/ROOM", "must_audit(draw, rate)", "torch.multinomial", "shoal audit RUN",
])  # fmt: skip
def test_a_name_that_is_in_the_tree_passes(text: str) -> None:
    assert not unknown(Said(ROOT / "README.md", 1, text))


def test_no_file_refers_to_the_design_document() -> None:
    """It is not in the project, so nobody can look a section up."""
    word = "DESI" + "GN"
    assert [file for file in [*PAGES, *CODE] if re.search(rf"\b{word}\b", file.read_text())] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_page_uses_a_synonym(page: Path) -> None:
    """The glossary has one word for each idea: a verdict is not called a vote, nor a decision a settlement."""
    assert re.findall(r"\b(?:votes?|voted|voices?|settlements?)\b", page.read_text()) == []
