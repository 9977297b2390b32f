"""The reference of `import shoal`, as Markdown, from its signatures and docstrings.

Called by `tests/test_docs.py`, which keeps docs/reference/python.md equal to it. It reads the source instead of asking the
classes, because the strings below fields are nowhere else.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import shoal

FITS = 96
"""Longest signature, characters, that is not broken into lines."""


def python_reference() -> str:
    """Every name that `import shoal` gives: first the functions, then the types that they return."""
    things = {name: getattr(shoal, name) for name in shoal.__all__}
    functions = [function for name, thing in things.items() for function in of_function(name, thing)]
    classes = [line for name, thing in things.items() for line in of_class(name, thing)]
    return "\n\n".join([*functions, *classes])


def of_function(name: str, thing: Any) -> Iterator[str]:
    if not isinstance(thing, type):
        node = parsed(thing)
        assert isinstance(node, ast.FunctionDef), name
        yield from (f"## shoal.{name}", signature(node, f"shoal.{name}"), explained(node))


def of_class(name: str, thing: Any) -> Iterator[str]:
    """A class with its public fields, properties and methods, in the order of the source."""
    if not isinstance(thing, type):
        return
    node = parsed(thing)
    assert isinstance(node, ast.ClassDef), name
    yield from (f"## shoal.{name}", explained(node))
    fields = "\n".join(fields_of(node))
    if fields:
        yield fields
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_") and not is_property(method):
            yield from (f"### {name}.{method.name}", signature(method, method.name), explained(method))


def fields_of(node: ast.ClassDef) -> Iterator[str]:
    """A line for each field and property of a class, with what the string below it says."""
    for at, line in enumerate(node.body):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            name, kind = line.target.id, annotation(line.annotation)
            below = node.body[at + 1] if at + 1 < len(node.body) else None
            said = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
        elif isinstance(line, ast.FunctionDef) and is_property(line) and line.returns is not None:
            name, kind, said = line.name, annotation(line.returns), ast.get_docstring(line) or ""
        else:
            continue
        if not name.startswith("_"):
            yield f"- `{name}: {kind}`  \n  {' '.join(str(said).split())}".rstrip(" \n")


def parsed(thing: Any) -> ast.stmt:
    return ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]


def is_property(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator) == "property" for decorator in node.decorator_list)


def explained(node: ast.FunctionDef | ast.ClassDef) -> str:
    """A docstring, with each paragraph on one line."""
    said = ast.get_docstring(node)
    assert said, f"{node.name} has no docstring"
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in said.split("\n\n"))


def signature(node: ast.FunctionDef, name: str) -> str:
    """A function's signature as a block of Python, on one line if it fits."""
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg) and argument.annotation is not None:
            argument.annotation = ast.Name(annotation(argument.annotation))
    node.args.args = [argument for argument in node.args.args if argument.arg != "self"]
    whole = ast.unparse(node.args)
    ending = f") -> {annotation(node.returns)}" if node.returns is not None else ")"
    if len(name) + len(whole) + len(ending) < FITS:
        return f"```python\n{name}({whole}{ending}\n```"
    lines = "".join(f"    {argument},\n" for argument in top_level(whole))
    return f"```python\n{name}(\n{lines}{ending}\n```"


def top_level(arguments: str) -> list[str]:
    """The arguments between commas that are in no brackets."""
    found, depth = [""], 0
    for character in arguments:
        depth += (character in "[(") - (character in "])")
        if character == "," and not depth:
            found.append("")
        else:
            found[-1] += character
    return [argument.strip() for argument in found]


def annotation(node: ast.expr) -> str:
    """A type as its source has it, without the quotes of names that are imported late."""
    return str(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, str) else ast.unparse(node)
