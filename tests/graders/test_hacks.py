"""No known reward hack earns anything, and every honest answer in unusual form does."""

from collections.abc import Iterator

import pytest

from shoal.graders.programs import ProgramLimits, in_pool
from shoal.sandbox.pool import Pool
from tests.graders import hacks
from tests.graders.hacks import HACKS, HONEST, PROGRAM_HACKS, Case
from tests.sandbox.needs import needs_bubblewrap

pytest.importorskip("re2", reason="pip install '.[answers]'")
pytest.importorskip("jsonschema_rs", reason="pip install '.[answers]'")
pytest.importorskip("math_verify", reason="pip install '.[math]'")


@pytest.mark.parametrize("hack", HACKS, ids=lambda hack: hack.name)
def test_a_hack_earns_nothing(hack: Case) -> None:
    graded = hack.grade()
    assert graded.score == 0.0, (hack.idea, graded)
    assert "\n" not in graded.reason and len(graded.reason) <= 200


@pytest.mark.parametrize("case", HONEST, ids=lambda case: case.name)
def test_an_honest_answer_in_unusual_form_is_rewarded(case: Case) -> None:
    graded = case.grade()
    assert (graded.score, graded.decided) == (1.0, True), (case.idea, graded)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(1) as pool:
        yield pool


@needs_bubblewrap
@pytest.mark.parametrize("hack", PROGRAM_HACKS, ids=lambda hack: hack.name)
def test_a_program_earns_nothing_in_the_sandbox_either(hack: Case, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hacks, "run", in_pool(pool))
    graded = hack.grade()
    assert graded.score == 0.0, (hack.idea, graded)


@needs_bubblewrap
def test_an_honest_program_is_rewarded_in_the_sandbox(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hacks, "run", in_pool(pool))
    assert hacks.double("print(2 * int(input()))").score == 1.0
    graded = hacks.call("def total(n): return sum(n)")
    assert (graded.score, graded.decided) == (1.0, True), graded


@needs_bubblewrap
@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("print(input())", "ended"),
        ("while True: pass", "time"),
        ("x = [bytearray(1 << 20) for _ in range(1 << 20)]", "memory"),
        ("print('x' * 5000)", "output"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", "failed"),
    ],
)
def test_the_sandbox_says_how_a_program_went(program: str, outcome: str, pool: Pool) -> None:
    limits = ProgramLimits(time_s=0.5, memory_mb=64, output_bytes=4000)
    assert in_pool(pool)(program.encode(), b"given", limits).outcome == outcome
