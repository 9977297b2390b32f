"""Guards and their mutants: where each guard is in `shoal/`, which test needs it, and how it is taken out mechanically.

A guard is marked in the source by `# guard: its-name`, behind its line or on the line before; one comment may name several
guards, separated by commas. A line of `tests/guards.txt` gives the guard's name, a test that fails without it, and the
operator that makes its mutant, if that is another than the usual one. The operators:

    drop      a condition loses its effect: False for `if`, `while` and operands of `or`; else True. Usual if there is one
    pass      the statement does nothing. Usual for calls, and for other statements without a condition
    uncaught  the handler around the statement catches nothing. Usual there, if neither of these is
    true      a condition is True
    false     a condition is False
    part      one part takes the place of the whole: an argument of its call, a side of `+` or of `x if c else y`
    less      a call, a tuple, a list or a set has one element less
    swap      `<` and `<=`, `min` and `max`, `all` and `any`, True and False, the other way round
    nan       `not a <= b` is `a > b` and the reverse, which differs for a NaN
    unlocked  the context manager of a `with` does nothing
    empty     a string, a list or a set has nothing in it, another value is ()
    none, zero, one, huge    a value is None, 0, 1 or 1 << 40

Where an operator fits several places, `drop:2` means the second, in the order of the source. Those places count that begin
on the marked line; any of the statement, if the marked line is its first, or if none begins there. For the few guards that
no operator takes out, `hand` refers to `tests/guard_mutants.py`.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.guard_mutants import BY_HAND

ROOT = Path(__file__).resolve().parent.parent
MARKER = re.compile(r"# guard: ([a-z0-9-]+(?:, [a-z0-9-]+)*)$")
SWAPPED = {"min": "max", "all": "any", "nsmallest": "nlargest", "sorted": "list", "fullmatch": "search"}
SWAPPED |= {new: old for old, new in SWAPPED.items()}
COMPARISONS: dict[type, tuple[str, ...]] = {
    ast.Lt: ("<=",), ast.LtE: ("<",), ast.Gt: (">=",), ast.GtE: (">",), ast.Eq: ("<=", ">="), ast.NotEq: ("<", ">"),
}  # fmt: skip
NEGATIONS: dict[type, str] = {ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<"}
VALUES = {"none": "None", "zero": "0", "one": "1", "huge": "1 << 40"}
EMPTY: dict[type, str] = {
    ast.JoinedStr: "''",
    ast.Set: "set()",
    ast.SetComp: "set()",
    ast.List: "[]",
    ast.ListComp: "[]",
}
OPERATORS = ("drop", "pass", "uncaught", "true", "false", "part", "less", "swap", "nan", "unlocked", "empty", *VALUES)


class Guard(NamedTuple):
    """A line of the table."""

    name: str
    test: str
    """Of pytest: the smallest test that fails without the guard."""
    operator: str = ""
    """And the number of its place, such as drop:2. Empty: the usual operator, at its first place."""


class Place(NamedTuple):
    """Where a guard is."""

    file: Path
    """Relative to the root."""
    line: int

    @property
    def room(self) -> str:
        return self.file.parts[1] if len(self.file.parts) > 2 else "shoal"


class Edit(NamedTuple):
    """What an operator puts in the place of a node."""

    operator: str
    node: ast.stmt | ast.expr
    text: str


def guards(table: Path = ROOT / "tests/guards.txt") -> list[Guard]:
    return [Guard(*line.split()) for line in table.read_text().splitlines()]


def marked(root: Path) -> Iterator[tuple[str, Place]]:
    """Each name in a marker, with the place of the marked code."""
    for file in sorted((root / "shoal").rglob("*.py")):
        lines = file.read_text().splitlines()
        for index, line in enumerate(lines):
            marker = MARKER.search(line)
            if marker is None:
                continue
            while lines[index].lstrip().startswith("#"):
                index += 1
            yield from ((name, Place(file.relative_to(root), index + 1)) for name in marker[1].split(", "))


def mutant(guard: Guard, source: str, line: int) -> str:
    """A file's source less a guard on this line. Raises `ValueError` if the guard's operator fits nothing there."""
    statement, handler = _statement(source, line)
    if guard.operator == "hand":
        return _by_hand(guard, source, statement)
    edits = _edits(statement, handler, line)
    operator, _, number = (guard.operator or _usual(statement, edits)).partition(":")
    fitting = [edit for edit in edits if edit.operator == operator]
    if not 1 <= int(number or 1) <= len(fitting):
        raise ValueError(
            f"guard {guard.name}: {guard.operator} fits {len(fitting)} places of the statement on line {line}"
        )
    return spliced(source, fitting[int(number or 1) - 1])


def _usual(statement: ast.stmt, edits: list[Edit]) -> str:
    """The operator of a guard whose line names none."""
    if isinstance(statement, ast.Expr):
        return "pass"
    fit = {edit.operator for edit in edits}
    return next(operator for operator in ("drop", "uncaught", "pass") if operator in fit)


def _by_hand(guard: Guard, source: str, statement: ast.stmt) -> str:
    old, new = BY_HAND[guard.name]
    wanted = ast.dump(ast.parse(old, mode="eval").body)
    found = [node for node, _ in _expressions(statement) if ast.dump(node) == wanted]
    if len(found) != 1:
        raise ValueError(f"guard {guard.name}: `{old}` is {len(found)} times in its statement, not once")
    return spliced(source, Edit("hand", found[0], new))


@functools.lru_cache(maxsize=4)
def _statements(source: str) -> list[ast.stmt | ast.ExceptHandler]:
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt | ast.ExceptHandler)]


def _statement(source: str, line: int) -> tuple[ast.stmt, ast.ExceptHandler | None]:
    """The innermost statement on a line, and the innermost handler around it."""
    nodes = _statements(source)
    inside = [node for node in nodes if isinstance(node, ast.stmt) and _is_on(node, line)]
    if not inside:
        raise ValueError(f"no statement is on line {line}")
    statement = max(inside, key=lambda node: node.lineno)
    handlers = [node for node in nodes if isinstance(node, ast.ExceptHandler)]
    around = [node for node in handlers if node.lineno < statement.lineno <= (node.end_lineno or 0)]
    return statement, max(around, key=lambda node: node.lineno, default=None)


def _is_on(statement: ast.stmt, line: int) -> bool:
    """Whether a line is one of a statement's own, not of its body."""
    body = getattr(statement, "body", None)
    last = body[0].lineno - 1 if body else statement.end_lineno
    return statement.lineno <= line <= last


def _expressions(node: ast.AST) -> Iterator[tuple[ast.expr, ast.AST]]:
    """Those of a statement itself, not of the statements in its body, each with its parent."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            if isinstance(child, ast.expr):
                yield child, node
            yield from _expressions(child)


def _edits(statement: ast.stmt, handler: ast.ExceptHandler | None, line: int) -> list[Edit]:
    """All that the operators can do on a line, for each in the order of the source."""
    found = sorted(_expressions(statement), key=lambda pair: _span(pair[0]))
    if line != statement.lineno:
        found = [pair for pair in found if pair[0].lineno == line] or found
    edits = [Edit("pass", statement, "pass")]
    if handler is not None and handler.type is not None:
        edits.append(Edit("uncaught", handler.type, "()"))
    conditions = {node: without for node, parent in found if (without := _neutral(node, parent)) is not None}
    edits += [Edit("drop", node, without) for node, without in conditions.items()]
    values = [node for node, parent in found if _is_value(node, parent)]
    for node in [*conditions, *(node for node in values if node not in conditions)]:
        edits += [Edit("true", node, "True"), Edit("false", node, "False")]
    for node, parent in found:
        edits += [Edit("part", node, ast.unparse(part)) for part in _parts(node)]
        edits += [Edit("less", node, text) for text in _less(node)]
        edits += [Edit(operator, node, text) for operator, text in _swapped(node)]
        if isinstance(parent, ast.withitem):
            edits.append(Edit("unlocked", node, "__import__('contextlib').nullcontext()"))
    edits += [Edit("empty", node, _emptied(node)) for node in values]
    edits += [Edit(operator, node, text) for node in values for operator, text in VALUES.items()]
    return edits


def _span(node: ast.expr) -> tuple[int, int, int, int]:
    """Sorts the outer before the inner."""
    assert node.end_lineno is not None and node.end_col_offset is not None
    return node.lineno, node.col_offset, -node.end_lineno, -node.end_col_offset


def _is_value(node: ast.expr, parent: ast.AST) -> bool:
    """Whether an expression may be replaced by another value; parts of names and of texts may not."""
    is_read = isinstance(getattr(node, "ctx", None), ast.Load | None)
    is_called = isinstance(parent, ast.Call) and parent.func is node
    return is_read and not is_called and not isinstance(parent, ast.Attribute | ast.Subscript | ast.FormattedValue)


def _neutral(node: ast.expr, parent: ast.AST) -> str | None:
    """What a condition is when it has no effect; nothing for what is no condition."""
    match parent:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if test is node:
            return "False"
        case ast.BoolOp(op=ast.Or()) | ast.BinOp(op=ast.BitOr()):
            return "False"
        case ast.BoolOp() | ast.BinOp(op=ast.BitAnd()):
            return "True"
        case ast.comprehension(ifs=ifs) if node in ifs:
            return "True"
    return "True" if isinstance(node, ast.Compare) else None


def _parts(node: ast.expr) -> list[ast.expr]:
    match node:
        case ast.Call(func=func, args=args):
            called_on = [func.value] if isinstance(func, ast.Attribute) and not isinstance(func.value, ast.Name) else []
            return [*called_on, *(arg for arg in args if not isinstance(arg, ast.Starred))]
        case ast.IfExp(body=one, orelse=other) | ast.BinOp(left=one, right=other):
            return [one, other]
        case ast.BoolOp(values=values):
            return values
        case ast.Compare(left=left, ops=ops, comparators=comparators) if ops[1:]:
            sides = [left, *comparators]
            return [ast.Compare(sides[i], [op], [sides[i + 1]]) for i, op in enumerate(ops)]
        case ast.Subscript(value=value, slice=ast.Slice()):
            return [value]
    return []


def _emptied(node: ast.expr) -> str:
    """Of the kind of value, as far as the source shows it."""
    match node:
        case ast.Constant(value=str() | bytes() as value):
            return repr(value[:0])
    return EMPTY.get(type(node), "()")


def _less(node: ast.expr) -> Iterator[str]:
    parts = {ast.Call: ("args", "keywords"), ast.Tuple: ("elts",), ast.List: ("elts",), ast.Set: ("elts",)}
    for name in parts.get(type(node), ()):
        full = getattr(node, name)
        for index in range(len(full)):
            setattr(node, name, full[:index] + full[index + 1 :])
            yield ast.unparse(node) if full[1:] or name != "elts" else "()"
        setattr(node, name, full)


def _swapped(node: ast.expr) -> Iterator[tuple[str, str]]:
    """Operators that change a comparison or a word of the language to its neighbour."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            one, other = ast.unparse(left), ast.unparse(right)
            yield from (("swap", f"{one} {sign} {other}") for sign in COMPARISONS.get(type(op), ()))
            if type(op) in NEGATIONS:
                yield "nan", f"not {one} {NEGATIONS[type(op)]} {other}"
        case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=ast.Compare(left=left, ops=[op], comparators=[right])):
            if type(op) in NEGATIONS:
                yield "nan", f"{ast.unparse(left)} {NEGATIONS[type(op)]} {ast.unparse(right)}"
        case ast.Constant(value=bool(value)):
            yield "swap", str(not value)
        case ast.SetComp(elt=elt, generators=generators):
            yield "swap", ast.unparse(ast.ListComp(elt, generators))
        case ast.Name(id=name) if name in SWAPPED:
            yield "swap", SWAPPED[name]
        case ast.Attribute(value=value, attr=name) if name in SWAPPED:
            yield "swap", f"{ast.unparse(value)}.{SWAPPED[name]}"


def spliced(source: str, edit: Edit) -> str:
    """The source with other text in the place of a node."""
    node, text = edit.node, edit.text
    assert node.end_lineno is not None
    if isinstance(node, ast.expr) and not text.startswith("*"):
        text = f"({text})"
    lines = source.encode().split(b"\n")  # columns are in bytes
    before, after = lines[node.lineno - 1][: node.col_offset], lines[node.end_lineno - 1][node.end_col_offset :]
    return b"\n".join([*lines[: node.lineno - 1], before + text.encode() + after, *lines[node.end_lineno :]]).decode()
