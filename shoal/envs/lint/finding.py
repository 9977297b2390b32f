"""What a check says: one line with the evidence, the fault, or what is missing."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from shoal.env import Env
from shoal.envs.interface import describe, describe_fault, source_of


class CheckResult(NamedTuple):
    """The result of one check."""

    check: str
    outcome: Literal["passed", "failed", "skipped"]
    detail: str
    """One line: the evidence, the fault, or what is missing."""


def passes(check: str, detail: str) -> CheckResult:
    return CheckResult(check, "passed", detail)


def fails(check: str, detail: str) -> CheckResult:
    return CheckResult(check, "failed", detail)


def skips(check: str, detail: str) -> CheckResult:
    return CheckResult(check, "skipped", detail)


class CheckFailed(Exception):
    """The environment breaks a promise; the message says which."""


class Differs(CheckFailed):
    """The same actions were answered in two ways. An environment may declare that this happens."""


class NotImplementedByEnv(Exception):
    """A check cannot run; the message says why."""


OR_DECLARE = "or declare reproducible = false: it then stays with the host"
NOT_THE_SAME = "not reproducible, as it declares, so it stays with the host"


def find(name: str, check: Callable[[], str], env: Env) -> CheckResult:
    """Run one check. Whatever it raises is its finding."""
    try:
        return passes(name, check())
    except NotImplementedByEnv as reason:
        return skips(name, str(reason))
    except Differs as problem:
        return differs(name, str(problem), describe(env).reproducible)
    except CheckFailed as problem:
        return fails(name, str(problem))
    except Exception as error:  # noqa: BLE001  foreign code may raise anything: that is a finding too
        return fails(name, f"raised {describe_fault(error, source_of(env))}")


def differs(name: str, problem: str, promised: bool) -> CheckResult:
    """The finding about an environment that is not reproducible: a fault only if it promised to be."""
    if promised:
        return fails(name, f"{problem}, {OR_DECLARE}")
    return skips(name, f"{NOT_THE_SAME}: {problem}")
