"""The ledger is ordered by subject, and `event_types` alone lists them."""

import ast
from pathlib import Path

import pytest

import shoal
from shoal.ledger import event_types

LEDGER = Path(shoal.__file__).parent / "ledger"
DECIDING = [
    *(Path(subject.__file__) for subject in event_types.SUBJECTS),
    *(LEDGER / f"{name}.py" for name in ("verdict_majority", "replay_context", "validator_turns", "group_advantages")),
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
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "Store(" in text else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Store":
                opened[path.relative_to(LEDGER.parent).as_posix()] = [word.arg for word in node.keywords]
    assert {path for path, words in opened.items() if "read_only" not in words} == {"roles/coordinator/main.py"}


def test_no_function_of_the_ledger_is_named_underscore():
    for path in LEDGER.rglob("*.py"):
        names = [node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        assert "_" not in names, path
