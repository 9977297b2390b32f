"""No known reward hack earns anything, and every honest answer in unusual form does."""

import pytest

from tests.envs.answers.hacks import HACKS, HONEST, Case

pytest.importorskip("re2", reason="pip install 'shoal[answers]'")
pytest.importorskip("jsonschema_rs", reason="pip install 'shoal[answers]'")
pytest.importorskip("math_verify", reason="pip install 'shoal[math]'")


def test_there_are_at_least_fifty_hacks() -> None:
    assert len(HACKS) >= 50


@pytest.mark.parametrize("hack", HACKS, ids=lambda hack: hack.name)
def test_a_hack_earns_nothing(hack: Case) -> None:
    graded = hack.grade()
    assert graded.score == 0.0, (hack.idea, graded)
    assert "\n" not in graded.reason and len(graded.reason) <= 200


@pytest.mark.parametrize("case", HONEST, ids=lambda case: case.name)
def test_an_honest_answer_in_unusual_form_is_rewarded(case: Case) -> None:
    graded = case.grade()
    assert (graded.score, graded.decided) == (1.0, True), (case.idea, graded)
