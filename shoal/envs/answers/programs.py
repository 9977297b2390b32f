"""Does the policy's program do what it should? Hidden tests, run in a sandbox (Python).

Called by environments. `prints` runs the program once for each test, with the test's standard input, and compares what
it prints. `returns` calls one function of the program with each test's arguments, and compares what it returns.

The program cannot forge a pass, because its process holds nothing that decides. It has one test's input and nothing
else: no expected value, no other test, no file of tests, no word that means "passed". It sends back a value, which is
compared here, as plain data, by our own rules. A program that ends early, prints "OK", changes `__eq__`, replaces
modules of the harness or writes the harness's answer itself has still only named a value, which must be the right one.

`run` must be a sandbox: `in_child` limits what a stranger's program takes, but lets it read files. A program that
reaches a limit of time or memory is *undecided* with score 0, because a right program may reach it on a slow machine. A
program that writes too much is wrong.

Failure modes. It rewards a program that is right on the tests only: a table of answers to guessable inputs passes, so
draw large inputs at random. With `share=True` a program that always says "no" earns the tests whose answer is no. It
refuses a right program that prints a prompt, or another valid output than the expected one.
"""

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from shoal.envs.answers.graded import Answer, Found, Graded, partly, right, taken, undecided, wrong
from shoal.envs.answers.run import Limits, Ran, Run
from shoal.errors import ConfigError

MAX_PROGRAM_CHARS = 50_000
"""Limit on the length of a program."""

MAX_DEPTH = 32
"""Limit on the depth of a value that a function returns."""

LIMITS = Limits(time_s=2.0, memory_mb=512, output_bytes=1 << 20)


class Prints(NamedTuple):
    """A hidden test of a program."""

    stdin: str
    expected: str
    """Compared line by line, without white space at the ends of lines and around the whole."""


class Returns(NamedTuple):
    """A hidden test of a function."""

    arguments: tuple[Any, ...]
    """Plain data: None, booleans, numbers (of up to 4,300 digits), strings, lists, and dictionaries with strings as
    keys."""
    expected: Any
    """Plain data. A list equals a tuple; True does not equal 1; two numbers, one of them a float, are equal within a
    relative 1e-9."""


def prints(
    answer: Answer, tests: Sequence[Prints], run: Run, *, share: bool = False, limits: Limits = LIMITS
) -> Graded:
    """1 if the program prints what each test expects and ends with exit code 0. With `share`, the share of such
    tests."""
    found = _program(answer)
    if found.text is None:
        return wrong(found.why)
    program = found.text.encode()

    def passes(test: Prints) -> bool | Ran:
        ran = run(program, test.stdin.encode(), limits)
        if ran.outcome not in ("ended", "output"):
            return ran
        return (
            ran.outcome == "ended"
            and ran.exit == 0
            and _lines(ran.stdout.decode("utf-8", "replace")) == _lines(test.expected)
        )

    return _graded([passes(test) for test in tests] if share else _until_failure(passes, tests), len(tests), share)


def returns(
    answer: Answer, function: str, tests: Sequence[Returns], run: Run, *, share: bool = False, limits: Limits = LIMITS
) -> Graded:
    """1 if the function returns what each test expects. With `share`, the share of such tests."""
    if not function.isidentifier():
        raise ConfigError(f"{function!r} is not the name of a function")
    found = _program(answer)
    if found.text is None:
        return wrong(found.why)
    source = found.text

    def passes(test: Returns) -> bool | Ran:
        asked = {"source": source, "function": function, "arguments": test.arguments}
        ran = run(_HARNESS, json.dumps(asked).encode(), limits)
        if ran.outcome not in ("ended", "output"):
            return ran
        value = _value(ran.stdout)
        return value is not _NOTHING and equal_data(value, test.expected)

    return _graded([passes(test) for test in tests] if share else _until_failure(passes, tests), len(tests), share)


def equal_data(given: Any, expected: Any, depth: int = 0) -> bool:
    """Whether two plain values are equal. Types matter: True is not 1, "1" is not 1, and nan equals nothing."""
    if depth > MAX_DEPTH:
        return False
    if isinstance(expected, bool) or isinstance(given, bool) or expected is None or given is None:
        return given is expected
    if isinstance(expected, int | float) and isinstance(given, int | float):
        if isinstance(expected, int) and isinstance(given, int):
            return given == expected
        try:
            return math.isclose(given, expected, rel_tol=1e-9, abs_tol=1e-12)
        except OverflowError:  # a whole number beyond every float
            return False
    if isinstance(expected, str) and isinstance(given, str):
        return given == expected
    if isinstance(expected, list | tuple) and isinstance(given, list | tuple):
        return len(given) == len(expected) and all(
            equal_data(g, e, depth + 1) for g, e in zip(given, expected, strict=True)
        )
    if isinstance(expected, dict) and isinstance(given, dict):
        return given.keys() == expected.keys() and all(
            equal_data(given[key], expected[key], depth + 1) for key in expected
        )
    return False


# What the program prints is dropped. Only the value goes to standard output: a second answer makes it unreadable.
_HARNESS = b"""
import json, os, sys
asked = json.loads(sys.stdin.buffer.read())
answers = os.dup(1)
nowhere = os.open(os.devnull, os.O_RDWR)
os.dup2(nowhere, 0)
os.dup2(nowhere, 1)
names = {"__name__": "solution"}
exec(compile(asked["source"], "solution", "exec"), names)
value = names[asked["function"]](*asked["arguments"])
os.write(answers, json.dumps(value).encode())
"""

_NOTHING = object()


def _program(answer: Answer) -> Found:
    found = taken(answer, MAX_PROGRAM_CHARS)
    if found.text is not None and "\0" in found.text:
        return Found(None, "the program contains a zero byte")
    return found


def _value(stdout: bytes) -> Any:
    """The one JSON document of an output; `_NOTHING` if there is none, or more than one."""
    try:
        return json.loads(stdout.decode(), parse_constant=float)
    except (ValueError, RecursionError):
        return _NOTHING


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _until_failure(passes: Any, tests: Sequence[Any]) -> list[bool | Ran]:
    """Results up to the first test that does not pass. The rest would change nothing."""
    results: list[bool | Ran] = []
    for test in tests:
        results.append(passes(test))
        if results[-1] is not True:
            break
    return results


def _graded(results: Sequence[bool | Ran], num_tests: int, share: bool) -> Graded:
    if num_tests == 0:  # guard: no-tests-no-reward
        raise ConfigError("there are no tests: every program would pass")
    for at, result in enumerate(results):
        if isinstance(result, Ran):
            return undecided(f"test {at + 1} of {num_tests}: limit of {result.outcome}")
    passed = sum(result is True for result in results)
    if passed == num_tests:
        return right(f"all {num_tests} tests pass")
    if share:
        return partly(passed / num_tests, f"{passed} of {num_tests} tests pass")
    return wrong(f"test {len(results)} of {num_tests} fails")
