"""Sets Python's clock for the process that checks an environment: to a fixed moment, or to another one.

With a fixed clock, only the clock can be the reason if a process at another moment gives other replies. It does not reach
packages that ask `datetime`, nor what reads the time by other ways than Python's.
"""

import builtins
import datetime
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

HERE_S, ELSEWHERE_S = 1_700_000_000.0, 1_951_234_567.0
"""Two moments in different years, months, days of the week, hours, minutes and seconds."""

HERE_ZONE, ELSEWHERE_ZONE = "UTC", "ELSE-11:30"
"""Two time zones, in a form that needs no files."""

_MONOTONIC = ("monotonic", "perf_counter", "process_time", "thread_time")


def set_clock(now_s: float, own: Callable[[str], bool], runs: bool) -> None:
    """From now on it is `now_s`. `own` tells the environment's files by their names: for them, the clocks that measure how
    long something takes stand still, or, if time `runs`, gain an hour with each look."""
    looks = [0]
    _set_time(now_s)
    for name in _MONOTONIC:
        _set_monotonic(name, own, looks, 3600.0 if runs else 0.0)
    _set_datetime(now_s, own)


def _set_time(now_s: float) -> None:
    real = {name: getattr(time, name) for name in ("localtime", "gmtime", "ctime", "strftime", "asctime")}
    put: Any = time
    put.time = lambda: now_s
    put.time_ns = lambda: int(now_s * 1e9)
    put.localtime = lambda seconds=None: real["localtime"](now_s if seconds is None else seconds)
    put.gmtime = lambda seconds=None: real["gmtime"](now_s if seconds is None else seconds)
    put.ctime = lambda seconds=None: real["ctime"](now_s if seconds is None else seconds)
    put.strftime = lambda form, *given: real["strftime"](form, *(given or (real["localtime"](now_s),)))
    put.asctime = lambda *given: real["asctime"](*(given or (real["localtime"](now_s),)))


def _set_monotonic(name: str, own: Callable[[str], bool], looks: list[int], gains_s: float) -> None:
    real, real_ns = getattr(time, name), getattr(time, f"{name}_ns")

    def seconds() -> float:
        if not own(sys._getframe(1).f_code.co_filename):
            return float(real())
        looks[0] += 1
        return 1000.0 + looks[0] * gains_s

    def nanoseconds() -> int:
        if not own(sys._getframe(1).f_code.co_filename):
            return int(real_ns())
        looks[0] += 1
        return int((1000.0 + looks[0] * gains_s) * 1e9)

    setattr(time, name, seconds)
    setattr(time, f"{name}_ns", nanoseconds)


def _set_datetime(now_s: float, own: Callable[[str], bool]) -> None:
    """`datetime` is compiled and does not ask `time`. Compiled packages depend on its very classes, so only the
    environment's own files get other ones, when they import it."""
    fixed = ModuleType("datetime")
    vars(fixed).update({name: value for name, value in vars(datetime).items() if not name.startswith("__")})
    fixed.date, fixed.datetime = _fixed_classes(now_s)  # type: ignore[attr-defined]
    bring = builtins.__import__

    def imported(name: str, into: Any = None, *more: Any, **named: Any) -> Any:
        module = bring(name, into, *more, **named)
        return fixed if module is datetime and own(str((into or {}).get("__file__", ""))) else module

    put: Any = builtins
    put.__import__ = imported


def _fixed_classes(now_s: float) -> tuple[type, type]:
    """`date` and `datetime` for which it is `now_s`."""
    date: Any = datetime.date
    moment: Any = datetime.datetime

    class Kind(type):
        """Values of the classes that others use count as instances, too."""

        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, moment if issubclass(cls, moment) else date)

    class FixedDate(date, metaclass=Kind):
        @classmethod
        def today(cls) -> Any:
            return cls.fromtimestamp(now_s)

    class FixedDatetime(moment, metaclass=Kind):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return cls.fromtimestamp(now_s, tz)

        @classmethod
        def today(cls) -> Any:
            return cls.fromtimestamp(now_s)

        @classmethod
        def utcnow(cls) -> Any:
            return cls.fromtimestamp(now_s, datetime.UTC).replace(tzinfo=None)

    return FixedDate, FixedDatetime
