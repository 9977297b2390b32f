"""A value that follows from a state, computed once for each event."""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from shoal.ledger.state import State

P = ParamSpec("P")
T = TypeVar("T")


def once_per_event(count: Callable[Concatenate[State, P], T]) -> Callable[Concatenate[State, P], T]:
    """A function of a state, and perhaps of one of its streams, that is computed once for each event.

    The value is kept beside the fields of the state, so it changes no hash. Callers must not change the value.
    """
    name = f"{count.__module__}.{count.__qualname__}"

    @functools.wraps(count)
    def remembered(state: State, *of: P.args, **none: P.kwargs) -> T:
        key = " ".join([name, *(stream.name for stream in of)])  # type: ignore[attr-defined]
        seq, value = state.__dict__.get(key, (None, None))
        if seq != state.seq:  # guard: counted-once, counted-afresh
            value = count(state, *of, **none)
            state.__dict__[key] = (state.seq, value)
        return value

    return remembered
