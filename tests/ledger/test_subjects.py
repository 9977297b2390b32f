"""The ledger is ordered by subject: two files each, listed in `table` alone, and rules import each other in one order."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from shoal.ledger import registry

LEDGER = Path(shoal.__file__).parent / "ledger"
ORDER = [facts.__name__.rsplit(".", 1)[-1] for facts, _ in registry.SUBJECTS]


def ledger_imports(path):
    """Modules of the ledger that a file imports, such as `facts.leases`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shoal.ledger."):
            found.add(node.module.removeprefix("shoal.ledger."))
    return found


@pytest.mark.parametrize("subject", ORDER)
def test_facts_import_the_ground_floor_alone(subject):
    assert ledger_imports(LEDGER / "facts" / f"{subject}.py") <= {
        "entry",
        "law",
        "state",
        "state_records",
        "turns",
        "drawn",
        "fault_rate",
        "pools",
        "seeds",
    }


@pytest.mark.parametrize("subject", ORDER)
def test_rules_import_the_rules_of_earlier_subjects_alone(subject):
    allowed = {f"rules.{earlier}" for earlier in ORDER[: ORDER.index(subject)]}
    imported = {name for name in ledger_imports(LEDGER / "rules" / f"{subject}.py") if name.startswith("rules.")}
    assert imported <= allowed


def test_each_subject_has_its_two_files_and_there_are_no_others():
    for half in ("facts", "rules"):
        assert sorted(path.stem for path in (LEDGER / half).glob("[a-z]*.py")) == sorted(ORDER)


DECIDING = [
    *(LEDGER / "rules").glob("*.py"),
    *(LEDGER / f"{name}.py" for name in ("weigh", "past", "seeds", "turns", "algorithm")),
]
MUTATING = {
    "append",
    "appendleft",
    "add",
    "clear",
    "discard",
    "extend",
    "insert",
    "pop",
    "popleft",
    "remove",
    "setdefault",
    "update",
}


def changes_to_what_was_given(function):
    """Lines of a function that assign to a part of one of its arguments, or call a method on one that changes it."""
    given = {arg.arg for arg in ast.walk(function.args) if isinstance(arg, ast.arg)}
    for node in ast.walk(function):
        parts = [node.func.value] if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else []
        parts = parts if parts and node.func.attr in MUTATING else []
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            parts = [node]
        for part in parts:
            while isinstance(part, ast.Attribute | ast.Subscript):
                part = part.value
            if isinstance(part, ast.Name) and part.id in given:
                yield node.lineno


@pytest.mark.parametrize("path", DECIDING, ids=lambda path: path.stem)
def test_what_decides_changes_no_state(path):
    """Only `apply_x` in facts/ does, with the methods of `State`; else a replay would not give the state."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    assert [(path.name, line) for function in functions for line in changes_to_what_was_given(function)] == []


def test_the_book_alone_appends_to_a_log():
    opened = {}
    for path in LEDGER.parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Store":
                opened[path.relative_to(LEDGER.parent).as_posix()] = [word.arg for word in node.keywords]
    assert {path for path, words in opened.items() if "read_only" not in words} == {"roles/coordinator/main.py"}


def test_no_function_of_the_ledger_is_named_underscore():
    for path in LEDGER.rglob("*.py"):
        names = [node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        assert "_" not in names, path


FACTS = '''"""A greeting."""
from dataclasses import dataclass
from shoal.protocol.messages import Message

class Greeted(Message, frozen=True):
    who: str

@dataclass(frozen=True)
class Greet:
    who: str
    now: float

def apply_greeted(body, state, entry):
    state.name = f"hello {body.who}"

EVENTS = {"greeted": (Greeted, apply_greeted)}
'''
RULES = '''"""Who may greet."""
from shoal.ledger.facts.greetings import Greet, Greeted
from shoal.ledger.replay_context import Cause

COMMANDS = {Greet: lambda command, state: [Greeted(command.who)]}
CAUSES = {Greeted: lambda body, here: Cause(Greet(body.who, here.now))}
LINES = {Greeted: lambda body, told: iter([told.line(f"greeted by {body.who}")])}
'''
USE = """
from shoal.ledger.facts.greetings import Greet
from shoal.ledger.replay_context import Told
from shoal.ledger.state import State
from shoal.ledger.registry import apply, cause_of, decide, lines_of, make_entry, read_entry

state = State()
(body,) = decide(Greet("a friend", 1.0), state)
entry, _ = read_entry(make_entry(0, 1.0, body, state.head).data)
apply(state, entry)
lines = [line.detail for line in lines_of(entry.body, Told(entry, state, "", {}))]
print(entry.kind, state.name, lines, state.seq)
"""


def test_a_new_subject_touches_two_new_files_and_the_table(tmp_path):
    shutil.copytree(LEDGER.parent, tmp_path / "shoal", ignore=shutil.ignore_patterns("__pycache__"))
    ledger = tmp_path / "shoal" / "ledger"
    (ledger / "facts" / "greetings.py").write_text(FACTS)
    (ledger / "rules" / "greetings.py").write_text(RULES)
    listed = (ledger / "table.py").read_text()
    listed = listed.replace("import batches,", "import batches, greetings,", 1)
    listed = listed.replace(
        "from shoal.ledger.rules import leases as",
        "from shoal.ledger.rules import greetings as greetings_rules\nfrom shoal.ledger.rules import leases as",
        1,
    )
    listed = listed.replace("    (run, run_rules),\n", "    (run, run_rules),\n    (greetings, greetings_rules),\n", 1)
    (ledger / "table.py").write_text(listed)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", USE], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert result.stdout == "greeted hello a friend ['greeted by a friend'] 0\n", result.stderr
