"""The ledger is ordered by subject, and `registry` alone lists them."""

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
DECIDING = [
    *(Path(subject.__file__) for subject in registry.SUBJECTS),
    *(LEDGER / f"{name}.py" for name in ("verdict_tally", "replay_context", "validator_turns", "group_signal")),
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


def names_called(function):
    return {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}


@pytest.mark.parametrize("path", DECIDING, ids=lambda path: path.stem)
def test_what_decides_changes_no_state(path):
    """Only `apply_x` does, with what it calls and nothing else calls; else a replay would not give the state."""
    functions = {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
    applying = {name for name in functions if name.startswith("apply_")}
    while more := {n for a in applying for n in names_called(functions[a]) & functions.keys()} - applying:
        applying |= more
    deciding = [function for name, function in functions.items() if name not in applying]
    shared = {name for function in deciding for name in names_called(function)} & applying
    checked = [*deciding, *(functions[name] for name in shared)]
    assert [(path.name, line) for function in checked for line in changes_to_what_was_given(function)] == []


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


GREETINGS = '''"""A greeting."""
from dataclasses import dataclass
from shoal.ledger.replay_context import Trigger
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
COMMANDS = {Greet: lambda command, state: [Greeted(command.who)]}
CAUSES = {Greeted: lambda body, here: Trigger(Greet(body.who, here.now))}
LINES = {Greeted: lambda body, told: iter([told.line(f"greeted by {body.who}")])}
'''
USE = """
from shoal.ledger.greetings import Greet
from shoal.ledger.replay_context import PayContext
from shoal.ledger.state import State
from shoal.ledger.registry import apply, cause_of, decide, lines_of, make_entry, read_entry

state = State()
(body,) = decide(Greet("a friend", 1.0), state)
entry, _ = read_entry(make_entry(0, 1.0, body, state.head).data)
apply(state, entry)
lines = [line.detail for line in lines_of(entry.body, PayContext(entry, state, "", {}))]
print(entry.kind, state.name, lines, state.seq)
"""


def test_a_new_subject_is_a_file_and_a_line_of_the_registry(tmp_path):
    shutil.copytree(LEDGER.parent, tmp_path / "shoal", ignore=shutil.ignore_patterns("__pycache__"))
    ledger = tmp_path / "shoal" / "ledger"
    (ledger / "greetings.py").write_text(GREETINGS)
    listed = (ledger / "registry.py").read_text()
    listed = listed.replace("    batches,\n", "    batches,\n    greetings,\n", 1)
    listed = listed.replace("\n    run_decisions,\n)  #", "\n    run_decisions, greetings,\n)  #", 1)
    (ledger / "registry.py").write_text(listed)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", USE], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert result.stdout == "greeted hello a friend ['greeted by a friend'] 0\n", result.stderr
