"""What a check says: one line with the evidence, the fault, or what is missing.

It knows no environment.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from shoal.envs.interface import describe_fault, source_of


class CheckResult(NamedTuple):
    """The result of one check."""

    check: str
    outcome: Literal["passed", "failed", "skipped"]
    detail: str
    """One line: the evidence, the fault, or what is missing."""


class CheckFailed(Exception):
    """The environment breaks a promise; the message says which."""


class Differs(CheckFailed):
    """The same actions were answered in two ways. An environment may declare that this happens."""


class NotImplementedByEnv(Exception):
    """A check cannot run; the message says why."""


OR_DECLARE = "or declare reproducible = false: it then stays with the host"
NOT_THE_SAME = "not reproducible, as it declares, so it stays with the host"


def reproducible(env: object) -> bool:
    """Whether an environment promises the same replies and scores for the same actions."""
    return bool(getattr(env, "reproducible", True))


def find(name: str, check: Callable[[], str], env: Any) -> CheckResult:
    """Run one check. Whatever it raises is its finding."""
    try:
        return CheckResult(name, "passed", check())
    except NotImplementedByEnv as reason:
        return CheckResult(name, "skipped", str(reason))
    except Differs as problem:
        return differs(name, str(problem), reproducible(env))
    except CheckFailed as problem:
        return CheckResult(name, "failed", str(problem))
    except Exception as error:  # noqa: BLE001  foreign code may raise anything: that is a finding too
        return CheckResult(name, "failed", f"raised {describe_fault(error, source_of(env))}")


def differs(name: str, problem: str, promised: bool) -> CheckResult:
    """The finding about an environment that is not reproducible: a fault only if it promised to be."""
    if promised:
        return CheckResult(name, "failed", f"{problem}, {OR_DECLARE}")
    return CheckResult(name, "skipped", f"{NOT_THE_SAME}: {problem}")
