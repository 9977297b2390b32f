"""Does the policy's program do what it should? Hidden tests, run in a sandbox (Python).

`prints` runs the program once for each test, with the test's standard input, and compares what
it prints. `returns` calls one function of the program with each test's arguments, and compares what it returns.

The program cannot forge a pass, because its process holds nothing that decides. It has one test's input and nothing
else: no expected value, no other test, no file of tests, no word that means "passed". It sends back a value, which is
compared here, as plain data, by our own rules. A program that ends early, prints "OK", changes `__eq__`, replaces
modules of the harness or writes the harness's answer itself has still only named a value, which must be the right one.

A program that reaches a limit of time or memory is *undecided* with score 0, because a right program may reach it on a
slow machine. A program that writes too much is wrong.

Failure modes. It rewards a program that is right on the tests only: a table of answers to guessable inputs passes, so
draw large inputs at random. With `share=True` a program that always says "no" earns the tests whose answer is no. It
refuses a right program that prints a prompt, or another valid output than the expected one.

Graders that run a program take an argument `run`. `in_pool` runs programs in a sandbox: use it for programs that a policy
wrote. `in_child` limits time, memory and output, but isolates nothing: the program can read files and use the network. It
is for our own programs on hostile data, such as that of `math_answers`.
"""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO, Any, Literal, NamedTuple, Protocol, TypeAlias

from shoal.errors import ConfigError
from shoal.graders.grade import Answer, Extraction, Grade, partly, right, taken, undecided, wrong
from shoal.ipc import Reason, end
from shoal.sandbox.limits import Limits, Stopped
from shoal.sandbox.pool import Pool

MAX_PROGRAM_CHARS = 50_000
"""Limit on the length of a program."""

MAX_DEPTH = 32
"""Limit on the depth of a value that a function returns."""

Outcome: TypeAlias = Literal["ended", "time", "memory", "output", "failed"]
"""How a program ended. `ended`: it exited, with any exit code. `time`, `memory`, `output`: it reached that limit.
`failed`: it could not be run, or something else killed it. All but the first depend on the machine."""


class ProgramLimits(NamedTuple):
    """What a program may take."""

    time_s: float = 5.0
    """CPU-seconds. Wall time may be four times as long, because the machine may be busy."""
    memory_mb: int = 1024
    """Address space."""
    output_bytes: int = 1 << 20
    """Bytes of standard output, and of standard error."""


class ProgramResult(NamedTuple):
    """The result of a program."""

    stdout: bytes
    stderr: bytes
    exit: int | None
    """The exit code; None unless the outcome is `ended`."""
    outcome: Outcome


class ProgramRunner(Protocol):
    """Runs a Python program once, in a fresh process, and ends every process that the program started."""

    def __call__(self, program: bytes, stdin: bytes, limits: ProgramLimits) -> ProgramResult: ...


LIMITS = ProgramLimits(time_s=2.0, memory_mb=512, output_bytes=1 << 20)


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
    answer: Answer, tests: Sequence[Prints], run: ProgramRunner, *, share: bool = False, limits: ProgramLimits = LIMITS
) -> Grade:
    """1 if the program prints what each test expects and ends with exit code 0. With `share`, the share of such
    tests."""
    found = _program(answer)
    if found.text is None:
        return wrong(found.why)
    program = found.text.encode()

    def passes(test: Prints) -> bool | ProgramResult:
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
    answer: Answer,
    function: str,
    tests: Sequence[Returns],
    run: ProgramRunner,
    *,
    share: bool = False,
    limits: ProgramLimits = LIMITS,
) -> Grade:
    """1 if the function returns what each test expects. With `share`, the share of such tests."""
    if not function.isidentifier():
        raise ConfigError(f"{function!r} is not the name of a function")
    found = _program(answer)
    if found.text is None:
        return wrong(found.why)
    source = found.text

    def passes(test: Returns) -> bool | ProgramResult:
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


def _program(answer: Answer) -> Extraction:
    found = taken(answer, MAX_PROGRAM_CHARS)
    if found.text is not None and "\0" in found.text:
        return Extraction(None, "the program contains a zero byte")
    return found


def _value(stdout: bytes) -> Any:
    """The one JSON document of an output; `_NOTHING` if there is none, or more than one."""
    try:
        return json.loads(stdout.decode(), parse_constant=float)
    except (ValueError, RecursionError):
        return _NOTHING


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _until_failure(passes: Any, tests: Sequence[Any]) -> list[bool | ProgramResult]:
    """Results up to the first test that does not pass. The rest would change nothing."""
    results: list[bool | ProgramResult] = []
    for test in tests:
        results.append(passes(test))
        if results[-1] is not True:
            break
    return results


def _graded(results: Sequence[bool | ProgramResult], num_tests: int, share: bool) -> Grade:
    if num_tests == 0:  # guard: no-tests-no-reward
        raise ConfigError("there are no tests: every program would pass")
    for at, result in enumerate(results):
        if isinstance(result, ProgramResult):
            return undecided(f"test {at + 1} of {num_tests}: limit of {result.outcome}")
    passed = sum(result is True for result in results)
    if passed == num_tests:
        return right(f"all {num_tests} tests pass")
    if share:
        return partly(passed / num_tests, f"{passed} of {num_tests} tests pass")
    return wrong(f"test {len(results)} of {num_tests} fails")


# --- where programs run ---


def in_pool(pool: Pool) -> ProgramRunner:
    """Runs programs in a pool of sandboxes. A program gets no more than the limits of the pool."""

    def run(program: bytes, stdin: bytes, limits: ProgramLimits) -> ProgramResult:
        """Raises `StateError` if the sandbox does not start here."""
        most = Limits(
            wall_s=4 * limits.time_s,
            cpu_s=math.ceil(limits.time_s),
            memory_mb=limits.memory_mb,
            output_bytes=limits.output_bytes,
        )
        ran = pool.run(program.decode(), stdin, most)
        if isinstance(ran, Stopped):
            return ProgramResult(ran.stdout, ran.stderr, None, _STOPPED.get(ran.reason, "failed"))
        if ran.stdout_truncated or ran.stderr_truncated:
            return ProgramResult(ran.stdout, ran.stderr, None, "output")
        if ran.exit_code < 0:
            return ProgramResult(ran.stdout, ran.stderr, None, "failed")
        return ProgramResult(ran.stdout, ran.stderr, ran.exit_code, "ended")

    return run


_STOPPED: dict[Reason, Outcome] = {Reason.TIMEOUT: "time", Reason.MEMORY: "memory"}


def in_child(program: bytes, stdin: bytes, limits: ProgramLimits) -> ProgramResult:
    """Run one of our own programs in a child process. It sees none of this process's environment variables."""
    with tempfile.TemporaryFile() as code, tempfile.TemporaryFile() as given, _file() as out, _file() as err:
        for file, data in ((code, program), (given, stdin)):
            file.write(data)
            file.seek(0)
        numbers = (code.fileno(), limits.time_s, limits.memory_mb, limits.output_bytes)
        process = subprocess.Popen(
            [sys.executable, "-s", "-P", "-c", _BOOTSTRAP, *map(str, numbers)],
            stdin=given, stdout=out, stderr=err, pass_fds=(code.fileno(),), start_new_session=True,
            env={"PATH": os.defpath, "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            code_of_exit: int | None = process.wait(4 * limits.time_s)
        except subprocess.TimeoutExpired:
            code_of_exit = None
        finally:
            end(process)
        outcome = _outcome(code_of_exit, out, err, limits)
        return ProgramResult(
            _read(out, limits), _read(err, limits), code_of_exit if outcome == "ended" else None, outcome
        )


NO_MEMORY = 77
"""Exit code with which our own programs report that memory ran out."""

# The limits hold from the program's first line. Output goes to a file, so the kernel limits its size.
_BOOTSTRAP = """
import math, os, resource, sys
code, time_s, memory_mb, output_bytes = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
with open(code, "rb") as file:
    program = file.read()
seconds = math.ceil(time_s)
for which, soft, hard in (
    (resource.RLIMIT_CPU, seconds, seconds + 1),
    (resource.RLIMIT_AS, memory_mb << 20, memory_mb << 20),
    (resource.RLIMIT_FSIZE, output_bytes + 1, output_bytes + 1),
    (resource.RLIMIT_CORE, 0, 0),
):
    try:
        resource.setrlimit(which, (soft, hard))
    except (ValueError, OSError):
        pass
sys.argv[1:] = []
exec(compile(program, "program", "exec"), {"__name__": "__main__"})
"""


def _file() -> IO[bytes]:
    return tempfile.TemporaryFile()


def _outcome(code: int | None, out: IO[bytes], err: IO[bytes], limits: ProgramLimits) -> Outcome:
    if any(os.fstat(file.fileno()).st_size > limits.output_bytes for file in (out, err)):
        return "output"
    if code is None or code == -signal.SIGXCPU:
        return "time"
    if code == NO_MEMORY:
        return "memory"
    return "ended" if code >= 0 else "failed"


def _read(file: IO[bytes], limits: ProgramLimits) -> bytes:
    file.seek(0)
    return file.read(limits.output_bytes)
