"""Mathematical equality: measured on pairs, within limits, and never "wrong" for a limit."""

import sys

import pytest

from shoal.errors import ConfigError
from shoal.graders.math_answers import LIMITS, mathematics, readable
from shoal.graders.programs import Outcome, ProgramLimits, ProgramResult, in_child
from tests.graders.pairs import PAIRS, here

needs_math = pytest.mark.skipif(
    pytest.importorskip("importlib.util").find_spec("math_verify") is None, reason="pip install '.[math]'"
)


@needs_math
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.gold} and {pair.answer}"[:40])
def test_pairs_are_judged_as_recorded(pair) -> None:
    graded = mathematics(pair.answer, pair.gold, run=here)
    assert (graded.score == 1.0) == (pair.equal != pair.missed), graded


@needs_math
@pytest.mark.parametrize(
    ("gold", "can"), [("x^2", True), (r"\text{even}", True), ("12:00", False), (r"\frac{1}{", False)]
)
def test_a_reference_can_be_checked_before_a_run(gold: str, can: bool) -> None:
    assert readable(gold) == can


@pytest.mark.parametrize("outcome", ["time", "memory", "failed", "output"])
def test_a_limit_is_undecided(outcome: Outcome) -> None:
    graded = mathematics("x", "y", run=lambda program, stdin, limits: ProgramResult(b"right", b"", None, outcome))
    assert (graded.score, graded.decided) == (0.0, False)


@pytest.mark.parametrize("stdout", [b"", b"right wrong", b"right\n", b"RIGHT"])
def test_an_output_of_another_form_is_undecided(stdout: bytes) -> None:
    assert not mathematics("x", "y", run=lambda program, stdin, limits: ProgramResult(stdout, b"", 0, "ended")).decided


def test_numbers_and_texts_start_no_process() -> None:
    def refuse(program: bytes, stdin: bytes, limits: ProgramLimits) -> ProgramResult:
        raise AssertionError("no process is needed")

    for answer, gold, score in (
        (" 5 ", "5", 1.0), ("5.0", "5", 1.0), ("6", "5", 0.0), ("$x$", "x", 1.0), (r"\text{odd}", r"\text{even}", 0.0),
    ):  # fmt: skip
        graded = mathematics(answer, gold, run=refuse)
        assert (graded.score, graded.decided) == (score, True)


def test_a_missing_package_is_the_authors_to_install() -> None:
    missing = ProgramResult(b"", b"ModuleNotFoundError: No module named 'math_verify'", 1, "ended")
    with pytest.raises(ConfigError, match="math-verify is not installed: pip install "):
        mathematics("x", "y", run=lambda program, stdin, limits: missing)


# --- the child process ---


def test_a_child_returns_what_the_program_writes() -> None:
    program = b"import sys; print(sys.stdin.read()[::-1]); print('x', file=sys.stderr); sys.exit(3)"
    assert in_child(program, b"abc", LIMITS) == ProgramResult(b"cba\n", b"x\n", 3, "ended")


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        (b"while True: pass", "time"),
        (b"import time; time.sleep(60)", "time"),
        (b"import sys\nwhile True: sys.stdout.write('x' * 4096)", "output"),
        (b"import sys; sys.exit(77)", "memory"),
        (b"import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "failed"),
    ],
)
def test_a_child_ends_at_its_limits(program: bytes, outcome: Outcome) -> None:
    ran = in_child(program, b"", ProgramLimits(time_s=0.5, memory_mb=256, output_bytes=10_000))
    assert ran.outcome == outcome and len(ran.stdout) <= 10_000


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not keep a process within its address space")
def test_a_child_gets_no_more_memory_than_its_limit() -> None:
    program = b"try: x = bytearray(400 << 20)\nexcept MemoryError: print('none')"
    assert in_child(program, b"", ProgramLimits(memory_mb=256)).stdout == b"none\n"
    assert in_child(program, b"", ProgramLimits(memory_mb=1024)).stdout == b""


def test_a_child_sees_none_of_our_environment_variables(monkeypatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    assert b"sesame" not in in_child(b"import os; print(os.environ)", b"", LIMITS).stdout
