"""Hidden tests: what counts as equal, what limits mean, and that the process holds nothing worth stealing."""

import json

import pytest

from shoal.errors import ConfigError
from shoal.graders.programs import (
    Outcome,
    Prints,
    ProgramLimits,
    ProgramResult,
    Returns,
    equal_data,
    in_child,
    prints,
    returns,
)

DOUBLE = "def double(n):\n    return 2 * n"


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        (1, 1, True), (1, 1.0, True), (0.1 + 0.2, 0.3, True), ([1, [2]], (1, (2,)), True), ({"a": [1]}, {"a": [1]}, True),
        (None, None, True), (float("inf"), float("inf"), True), ("", "", True), ([], [], True),
        (True, 1, False), (1, True, False), (0, False, False), (None, False, False), ("1", 1, False), (1, 2, False),
        (float("nan"), float("nan"), False), ([1], [1, 1], False), ({"a": 1}, {"b": 1}, False), ({}, [], False),
        (10**400, 1.0, False), (1.001, 1, False), ("a", ["a"], False), (None, 0, False),
    ],
)  # fmt: skip
def test_equality_is_by_plain_data(given: object, expected: object, same: bool) -> None:
    assert equal_data(given, expected) == same


def test_a_process_is_given_one_test_and_no_expected_value() -> None:
    seen: list[bytes] = []

    def watch(program: bytes, stdin: bytes, limits: ProgramLimits) -> ProgramResult:
        seen.append(program + stdin)
        return in_child(program, stdin, limits)

    tests = (Returns((11111,), 22222), Returns((33333,), 66666))
    assert returns(DOUBLE, "double", tests, watch).score == 1.0
    assert [b"11111" in given for given in seen] == [True, False]
    assert not any(b"22222" in given or b"66666" in given for given in seen)
    seen.clear()
    assert prints("print(2 * int(input()))", (Prints("11111", "22222"),), watch).score == 1.0
    assert b"22222" not in seen[0]


@pytest.mark.parametrize(
    ("outcome", "decided"), [("time", False), ("memory", False), ("failed", False), ("output", True)]
)
def test_a_limit_that_depends_on_the_machine_is_undecided(outcome: Outcome, decided: bool) -> None:
    graded = prints("x", (Prints("", "2"),), lambda p, s, limits: ProgramResult(b"2", b"", None, outcome))
    assert (graded.score, graded.decided) == (0.0, decided)


def test_partial_credit_is_the_share_of_tests() -> None:
    tests = tuple(Returns((n,), 2 * n) for n in range(4))
    source = "def double(n):\n    return 2 * n if n < 3 else 0"
    assert returns(source, "double", tests, in_child, share=True).score == 0.75
    assert returns(source, "double", tests, in_child).score == 0.0


def test_without_tests_nothing_is_rewarded() -> None:
    with pytest.raises(ConfigError, match="no tests"):
        returns(DOUBLE, "double", (), in_child)


@pytest.mark.parametrize("stdout", [b"", b"2 2", b"2\n3", b"{", b"[" * 100_000, b"9" * 5000, b"\xff", b"NaN"])
def test_an_output_that_is_not_the_one_value_is_wrong(stdout: bytes) -> None:
    ran = ProgramResult(stdout, b"", 0, "ended")
    assert returns(DOUBLE, "double", (Returns((1,), 2),), lambda p, s, limits: ran).score == 0.0


@pytest.mark.parametrize(
    "source", ["", "x" * 60_000, "a\0b", "def double(:", "def other(n): return 2 * n", "double = 5"]
)
def test_a_program_that_cannot_work_is_wrong(source: str) -> None:
    graded = returns(source, "double", (Returns((1,), 2),), in_child)
    assert (graded.score, graded.decided) == (0.0, True)


def test_a_function_is_named_by_an_identifier() -> None:
    with pytest.raises(ConfigError, match="name of a function"):
        returns(DOUBLE, "double or x", (Returns((1,), 2),), in_child)


def test_arguments_arrive_as_they_are() -> None:
    asked = [None, True, -1, 2.5, 'ü"\n', [1, [2]], {"k": []}]
    tests = (Returns((asked,), json.loads(json.dumps(asked))),)
    assert returns("def same(x): return x", "same", tests, in_child).score == 1.0
