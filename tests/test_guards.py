"""Each guard removed in turn breaks a test: no defence is in the source that nothing would miss (tests/mutants.py)."""

import ast
from collections import Counter

import pytest

from tests import mutate
from tests.guard_mutants import BY_HAND
from tests.mutants import MARKER, ROOT, Guard, guards, marked, mutant

PLACES = dict(marked(ROOT))


def test_each_marker_in_the_source_is_in_the_table_once_and_the_reverse() -> None:
    in_source, in_table = Counter(name for name, _ in marked(ROOT)), Counter(guard.name for guard in guards())
    assert in_source == in_table, f"{in_source - in_table} in the source only, {in_table - in_source} in the table only"
    assert set(in_table.values()) == {1}, in_table.most_common(1)


def test_the_table_is_sorted_and_refers_to_each_mutant_that_is_made_by_hand() -> None:
    table = guards()
    assert table == sorted(table)
    assert {guard.name for guard in table if guard.operator == "hand"} == BY_HAND.keys()


def test_every_comment_about_a_guard_is_a_marker() -> None:
    lines = [(file, line) for file in (ROOT / "shoal").rglob("*.py") for line in file.read_text().splitlines()]
    unread = [f"{file}: {line}" for file, line in lines if "# guard" in line and not MARKER.search(line)]
    assert unread == [], "a marker is `# guard: one-name, another`, with nothing behind it"


def test_every_guard_has_a_mutant_and_its_test_exists() -> None:
    for guard in sorted(guards(), key=lambda guard: PLACES[guard.name]):
        file, line = PLACES[guard.name]
        source = (ROOT / file).read_text()
        without = mutant(guard, source, line)
        ast.parse(without)
        assert without != source, guard.name
        path, _, test = guard.test.partition("::")
        assert f"def {test}(" in (ROOT / path).read_text(), f"{guard.name}: {path} has no {test}"


LINES = """
async def pay(node, rate, limit, names):
    try:
        if not rate > 0 and node.asks:
            return min(rate, limit)
        async with node.lock:
            node.pay(1, names[:4], late=False)
    except (ValueError, OSError):
        node.lost = ["a", {n for n in names if n in node.known}]
        raise
"""


@pytest.mark.parametrize(("line", "operator", "becomes"), [
    (4, "", "if False:"), (4, "drop:2", "if True and node.asks:"), (4, "drop:3", "if not True and node.asks:"),
    (4, "drop:4", "if not rate > 0 and True:"), (4, "true", "if True:"), (4, "nan", "if rate <= 0 and node.asks:"),
    (4, "swap", "if not rate >= 0 and node.asks:"), (4, "part:2", "if node.asks:"),
    (5, "", "pass"), (5, "part", "return rate"), (5, "less:2", "return min(rate)"), (5, "swap", "return max(rate, limit)"),
    (5, "huge:3", "return min(rate, 1 << 40)"), (5, "none", "return None"),
    (6, "unlocked", "async with __import__('contextlib').nullcontext():"), (7, "", "pass"),
    (7, "less:3", "node.pay(1, names[:4])"),
    (7, "part:3", "node.pay(1, names, late=False)"), (7, "zero:2", "node.pay(0, names[:4], late=False)"),
    (9, "", "node.lost = ['a', {n for n in names if True}]"),
    (9, "empty:2", "node.lost = ['', {n for n in names if n in node.known}]"),
    (9, "uncaught", "except ():"), (10, "", "except ():"),
])  # fmt: skip
def test_operators_take_out_one_place_of_the_marked_statement(line: int, operator: str, becomes: str) -> None:
    without = ast.unparse(ast.parse(mutant(Guard("a-guard", "", operator), LINES, line))).splitlines()
    whole = ast.unparse(ast.parse(LINES)).splitlines()
    assert [new.strip() for old, new in zip(whole, without, strict=True) if old != new] == [becomes]


def test_an_operator_that_fits_no_place_is_refused_by_the_name_of_the_guard() -> None:
    with pytest.raises(ValueError, match=r"a-guard.*drop:5.*line 4"):
        mutant(Guard("a-guard", "", "drop:5"), LINES, 4)


@pytest.mark.parametrize(("code", "output", "problem"), [
    (1, "E   assert 1 == 2", ""), (0, "1 passed", "survives"), (None, "", "runs for more"),
    (4, "no such test", "cannot be tested"), (1, "E   NameError: name 'x' is not defined", "NameError"),
])  # fmt: skip
def test_only_a_test_that_fails_without_its_guard_needs_it(code: int | None, output: str, problem: str) -> None:
    found = mutate.problem_of(code, output)
    assert problem in found and bool(problem) == bool(found)
