"""The folder map is the import map, and what else holds for every file of the package.

Read from the source, so that an import inside a function counts too; what must stay light is imported in a process of
its own.
"""

import ast
import functools
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from shoal import env
from shoal.env_packages import scaffold

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "shoal"
FILES = sorted(PACKAGE.rglob("*.py"))

FLOORS = (
    ("env",),
    ("algos", "protocol"),
    ("models", "sandbox", "net", "ledger"),
    ("chat",),
    ("engine", "env_packages", "graders", "monitors"),
    ("envs", "train", "verification", "weights", "plan"),
    ("runs",),
    ("roles",),
    ("jobs",),
    ("views",),
    ("launch",),
    ("api",),
    ("__init__",),
    ("cli",),
    ("__main__",),
)
"""Lowest first. A room imports from the floors below its own; rooms on one floor never import each other."""

COMMON = (
    "alarms",
    "config",
    "errors",
    "evaluation_files",
    "humanize",
    "ipc",
    "run_folder",
    "step_metrics",
    "terminal",
    "typed_toml",
)
"""Files that serve every room but `algos`. They import each other and `protocol`."""

BROAD_EXCEPTS = {
    "engine/noise.py": "Triton, its compilers and CUDA raise many things where a kernel cannot run; then torch makes noise",
    "engine/vllm/engine.py": "Triton and CUDA raise many things where vLLM's sampler cannot run; then ours is used",
    "runs/rollout_samples.py": "an environment may raise anything; then no conversation is shown",
    "launch/background_run.py": "what ended a run's thread is raised again in its caller's",
    "envs/interface.py": "an environment is foreign code and may raise anything; that ends its rollout, not our process",
    "envs/lint/worker.py": "the same, also if it ends the process: the parent reads what was raised",
    "envs/lint/finding.py": "the same, and the fault is the finding",
    "envs/lint/checks.py": "the same, and the finding names the action",
    "envs/rollout_rules.py": "the same, and the rollout ends by `error`",
    "envs/replay.py": "the same, when an environment compares the rollouts of a group",
    "envs/evaluate.py": "the same, when a held-out judge scores an evaluation",
    "envs/own_env.py": "the same, and its author, who trains in this process, gets one line",
    "envs/env_from_file.py": "the same, when a user's file is executed",
    "envs/concurrent_episodes.py": "the same, on its way to the episode, which decides what it means",
    "envs/isolated/pool.py": "the same, on its way from the thread of a process to who waits for the call",
    "envs/isolated/server.py": "the same, inside the sandbox: what a package raises is told to the other end",
    "envs/adapters/verifiers_v1_rollout.py": "a tool is foreign code and may raise anything; the policy reads it",
    "ledger/log/writer.py": "a bug in the rules must not keep the other waiting commands from their answers",
    "net/server.py": "a fault of ours while answering is logged and becomes a 500, not a broken connection",
    "verification/check_context.py": "an environment may raise anything; then nobody can play the slot, and it is void",
    "models/hf_model.py": "transformers may raise anything for a model that it cannot run; the model is refused by name",
    "models/hub_subprocess.py": "a library may raise anything in the process that fetches; the parent reads what it raised",
    "models/hub_download.py": "huggingface_hub may raise anything of its HTTP client; the model is refused by name",
    "chat/isolated.py": "a stranger's tokenizer may raise anything; the text is refused",
    "roles/trackers/main.py": "a logger may raise anything; it is opened again later, and the run goes on",
    "roles/node/package_consent.py": "what a thread aside raises is raised again where it is awaited",
    "sandbox/init.py": "a snippet may raise anything, and ends as a script would; a fault of ours must not look like its",
    "roles/env_server/env_child.py": "a traceback is printed and the exception goes on",
    "roles/env_server/reply_store.py": "what cannot be booked must not keep others that wait from their answers",
    "roles/node/device_queue.py": "what ends the thread ends the processes that wait for the device",
    "runs/rollouts.py": "an environment may raise anything for an answer; its user gets one line",
    "views/web/served_runs.py": "a page is stale if its index thread ends: the fault is logged, shown and tried again",
    "models/tokenizer_loader.py": "the tokenizers library raises bare Exception for a damaged file",
}
"""Named boundaries where anything may be caught, and why. Elsewhere it would hide a bug."""

HTTP_CLIENTS = {"http.client", "urllib.error", "urllib.request", "requests", "aiohttp"}
"""Proxies, redirects, limits and errors are decided once, for httpx."""

DURABLE = "run_folder.py"
"""The only file that makes writing durable. Elsewhere a step could be forgotten."""

LIGHT = ("torch", "transformers")
"""Packages that the machine of a coordinator or of a newcomer need not have."""


def name_of(file: Path) -> str:
    """Such as envs/builtin/wordle.py."""
    return file.relative_to(PACKAGE).as_posix()


def room_of(file: Path) -> str:
    """Folder or top-level file that a source file belongs to."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_of(file: Path) -> str:
    """Such as shoal.envs.builtin.wordle."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def tree_of(file: Path) -> ast.Module:
    """The syntax tree of a file. It is not changed."""
    return ast.parse(file.read_text())


@functools.cache
def nodes_of(file: Path) -> list[ast.AST]:
    """All nodes of the syntax tree of a file."""
    return list(ast.walk(tree_of(file)))


def imports_of(file: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of each thing of ours that a file imports, wherever in the file. Of `shoal/env.py` without what
    mypy alone reads: see `test_env_offers_what_lies_higher_by_name`."""
    if file == PACKAGE / "env.py":
        yield from imports_in(
            node for part in tree_of(file).body if not isinstance(part, ast.If) for node in ast.walk(part)
        )
    else:
        yield from imports_in(nodes_of(file))


def imports_in(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """The same of nodes of a syntax tree."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "shoal":
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if a.name.split(".")[0] == "shoal")


def allowed(room: str) -> set[str]:
    """Rooms that a room may import from, its own included."""
    if room in ("env", "algos", "protocol"):
        return {room}
    if room in COMMON:
        return {*COMMON, "protocol"}
    floor = next(i for i, rooms in enumerate(FLOORS) if room in rooms)
    return {room, *COMMON, *(below for rooms in FLOORS[:floor] for below in rooms)}


def test_git_ignores_no_file_of_the_package_or_its_tests() -> None:
    places = [*FILES, *(ROOT / "tests").rglob("*.py")]
    names = "\n".join(place.relative_to(ROOT).as_posix() for place in places)
    asked = ["git", "check-ignore", "--no-index", "--stdin"]
    assert subprocess.run(asked, cwd=ROOT, input=names, capture_output=True, text=True).stdout == ""


def test_every_folder_and_file_is_in_the_map() -> None:
    known = {*COMMON, *(room for floor in FLOORS for room in floor)}
    assert {room_of(file) for file in FILES} - known == set(), "add the room to FLOORS, and to the map in AGENTS.md"


def test_imports_follow_the_map() -> None:
    wrong = [
        f"{name_of(file)} line {line}: {imported}, may import from {', '.join(sorted(allowed(room_of(file))))}"
        for file in FILES
        for line, imported in imports_of(file)
        if imported != "shoal.__version__" and imported.split(".")[1] not in allowed(room_of(file))
    ]
    assert wrong == []


def test_env_offers_what_lies_higher_by_name() -> None:
    """Each name of its table is there for mypy and at run time, and is imported only when it is asked for."""
    tree = ast.parse((PACKAGE / "env.py").read_text())
    read_by_mypy = [
        node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    told = {
        full.split(".")[-1]: full.rpartition(".")[0] for node in read_by_mypy for _, full in imports_in(ast.walk(node))
    }
    assert told == env.LATER
    assert all(getattr(env, name) is getattr(importlib.import_module(told[name]), name) for name in told)
    with pytest.raises(AttributeError, match="elsewhere"):
        env.elsewhere  # noqa: B018
    others = tuple(module_of(file) for file in FILES if file.name != "__init__.py" and file != PACKAGE / "env.py")
    assert loaded_by(["shoal.env"], (*others, *LIGHT, "numpy", "msgspec", "httpx")) == ""


def written_by_authors() -> Iterator[tuple[str, str]]:
    """Sources that authors write or copy, and where each is: examples, environments of recipes and tests, what `shoal env
    init` writes, and Python in pages and notebooks."""
    for file in [
        *(ROOT / "examples" / "environments").rglob("*.py"),
        *(ROOT / "tests" / "envs" / "sabotaged").rglob("*.py"),
    ]:
        yield file.relative_to(ROOT).as_posix(), file.read_text()
    for file in [*(ROOT / "recipes").glob("*.py"), *(ROOT / "tests" / "envs").glob("[!t]*.py")]:
        if re.search(r"^(environment =|def environment)", file.read_text(), re.MULTILINE):
            yield file.relative_to(ROOT).as_posix(), file.read_text()
    yield "env_packages/scaffold", scaffold._CODE
    for page in (ROOT / "docs").rglob("*.md"):
        for block in re.findall(r"^```python.*?^```", page.read_text(), re.MULTILINE | re.DOTALL):
            yield page.name, block
    for notebook in (ROOT / "docs").rglob("*.ipynb"):
        yield notebook.name, "\n".join("".join(cell["source"]) for cell in json.loads(notebook.read_text())["cells"])


def test_authors_import_only_the_facade() -> None:
    """All else may move without a word to them. Programs around a run may also `import shoal`, and read `shoal.alarms`."""
    allowed = re.compile(r"shoal(\.env|\.graders(\.\w+)?|\.alarms)?")
    told = [
        (where, module)
        for where, text in written_by_authors()
        for module in re.findall(r"^\s*(?:from|import) (shoal\b[\w.]*)", text, re.MULTILINE)
    ]
    assert len({where for where, _ in told}) > 15
    assert not {(where, module) for where, module in told if not allowed.fullmatch(module)}


def test_roles_import_no_other_role_but_what_nodes_share() -> None:
    wrong = [
        f"{name_of(file)} line {line}: {imported}"
        for file in FILES
        if room_of(file) == "roles" and file.parent.name + file.stem != "roles__init__"
        for line, imported in imports_of(file)
        if imported.startswith("shoal.roles.") and imported.split(".")[2] not in (module_of(file).split(".")[2], "node")
    ]
    assert wrong == []


def test_files_never_import_in_circles() -> None:
    modules = {module_of(file): file for file in FILES}
    graph = {
        module: {name for _, full in imports_of(file) for name in (full, full.rpartition(".")[0]) if name in modules}
        - {module, "shoal"}
        for module, file in modules.items()
    }
    while leaves := [module for module, needed in graph.items() if not needed & graph.keys()]:
        for module in leaves:
            del graph[module]
    assert sorted(graph) == [], "these import each other in a circle"


def test_imports_are_absolute() -> None:
    wrong = [
        f"{name_of(file)} line {node.lineno}"
        for file in FILES
        for node in nodes_of(file)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert wrong == []


def test_only_config_reads_the_process_environment() -> None:
    wrong = [
        f"{name_of(file)} line {node.lineno}"
        for file in FILES
        if name_of(file) != "config/process_environment.py"
        for node in nodes_of(file)
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv"))
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {a.name for a in node.names} & {"environ", "getenv"}
        )
    ]
    assert wrong == []


def test_httpx_is_the_only_http_client() -> None:
    wrong = [
        f"{name_of(file)} line {node.lineno}"
        for file in FILES
        for node in nodes_of(file)
        if (isinstance(node, ast.Import) and {a.name for a in node.names} & HTTP_CLIENTS)
        or (isinstance(node, ast.ImportFrom) and node.module in HTTP_CLIENTS)
    ]
    assert wrong == []


def test_files_are_made_durable_in_one_place() -> None:
    found = {
        name_of(file)
        for file in FILES
        for node in nodes_of(file)
        if isinstance(node, ast.Attribute) and node.attr in ("fsync", "mkstemp", "NamedTemporaryFile")
    }
    assert found == {DURABLE}


def test_only_the_engine_room_knows_engine_classes() -> None:
    """The others describe an engine and get one by `engine/open`, so that a new kind is added in one place."""
    wrong = [
        f"{path.name} line {line}: {imported}"
        for path in [*FILES, *(ROOT / "recipes").glob("*.py"), *(ROOT / "examples" / "environments").glob("*.py")]
        for line, imported in imports_of(path)
        if imported.startswith("shoal.engine.native") and PACKAGE / "engine" not in path.parents
    ]
    assert wrong == []


def test_no_role_names_a_source_of_weights() -> None:
    """Where weights come from is the run's to say: `sources_of` in `weights/fetch/sources`."""
    wrong = [
        f"{name_of(file)} line {line}: {imported}"
        for file in FILES
        if room_of(file) != "weights"
        for line, imported in imports_of(file)
        if imported.startswith("shoal.weights.fetch.sources.") and imported.endswith("Source")
    ]
    assert wrong == []


def test_no_protocol_is_asked_for_by_isinstance() -> None:
    """What passes an environment or an engine on with `__getattr__` has the same members, and from Python 3.12 on it is no
    instance of their protocol. Ask for the members: `is_decided`."""
    assert [name_of(file) for file in FILES if "runtime_checkable" in file.read_text()] == []
    protocols = {
        node.name
        for file in FILES
        for node in nodes_of(file)
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Protocol" for base in node.bases)
    }
    wrong = [
        f"{name_of(file)} line {node.lineno}: {ast.unparse(node)}"
        for file in FILES
        for node in nodes_of(file)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("isinstance", "issubclass")
        and {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)} & protocols
    ]
    assert wrong == []


def test_broad_excepts_are_only_at_named_boundaries() -> None:
    def is_broad(handler: ast.ExceptHandler) -> bool:
        caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        return any(c is None or ast.unparse(c) in ("Exception", "BaseException") for c in caught)

    found = {
        name_of(file)
        for file in FILES
        for node in nodes_of(file)
        if isinstance(node, ast.ExceptHandler) and is_broad(node)
    }
    assert found <= BROAD_EXCEPTS.keys()


def test_a_file_opens_by_saying_what_it_is_and_an_init_file_holds_names() -> None:
    inits = {file for file in FILES if file.name == "__init__.py" and file.parent != PACKAGE}
    nodes = ast.ImportFrom | ast.Assign | ast.Expr
    assert [name_of(f) for f in inits if not all(isinstance(node, nodes) for node in tree_of(f).body)] == []
    assert [name_of(file) for file in FILES if file not in inits and not ast.get_docstring(tree_of(file))] == []


def test_files_and_functions_stay_readable() -> None:
    """More lines than these are a design question."""
    assert [name_of(file) for file in FILES if file.read_text().count("\n") > 500] == []
    functions = [
        (name_of(file), node.name, (node.end_lineno or 0) - node.lineno)
        for file in FILES
        for node in nodes_of(file)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [function for function in functions if function[2] >= 80] == []


def light_modules() -> list[str]:
    """What must import without torch and transformers."""
    rooms = (
        "env", "protocol", "sandbox", "ledger", "net", "graders", "env_packages", "monitors", "weights", "envs", "runs",
        "launch", "views",
    )  # fmt: skip
    files = [file for file in FILES if room_of(file) in (*rooms, *COMMON, "api", "cli")]
    files += [
        f
        for f in FILES
        if name_of(f).startswith(
            ("roles/coordinator", "roles/origin", "roles/relay/", "roles/node/serve_chunks", "verification/")
        )
    ]
    files += [
        PACKAGE / name for name in ("chat/renderer.py", "models/config.py", "engine/interface.py", "engine/open.py")
    ]
    assert all(file.exists() for file in files), "name what was moved"
    return [module_of(file) for file in files]


def loaded_by(modules: list[str], suspects: tuple[str, ...]) -> str:
    """Which suspects a fresh process has loaded after importing the modules."""
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(' '.join(name for name in {suspects!r} if name in sys.modules))"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.strip()


def test_light_rooms_import_neither_torch_nor_transformers() -> None:
    assert loaded_by(light_modules(), LIGHT) == ""


def test_worker_needs_no_transformers() -> None:
    assert loaded_by(["shoal.roles.worker.worker", "shoal.engine.native"], ("transformers",)) == ""


def test_command_line_imports_nothing_heavy() -> None:
    heavy = (*LIGHT, "numpy", "rich", "starlette", "uvicorn", "sqlalchemy", "httpx", "tokenizers")
    assert loaded_by(["shoal.cli.main"], heavy) == ""


def test_importing_shoal_imports_only_what_is_needed_at_once() -> None:
    heavy = (*LIGHT, "numpy", "rich", "sqlalchemy", "httpx", "tokenizers", "msgspec", "asyncio", "shoal.api")
    assert loaded_by(["shoal"], heavy) == ""
