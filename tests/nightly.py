"""Cases of a claim that only `make test-slow` tries, where one case shows it."""

import pytest


def first_of(*cases: object, num: int = 1) -> list[object]:
    """The first `num` cases as they are, the others as slow ones. A case of several values is a tuple."""
    others = (case if type(case) is tuple else (case,) for case in cases[num:])
    return [*cases[:num], *(pytest.param(*case, marks=pytest.mark.slow) for case in others)]
