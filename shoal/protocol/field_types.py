"""Base classes of messages, and types of fields with their ranges.

A range is checked where bytes or a run file become a value. It refuses NaN, and infinity where it has an upper end.
"""

import re
import sys
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta

from shoal.protocol.constants import MAX_FACT_CHARS, MAX_SAID_CHARS, MAX_URL_CHARS

_UNPRINTABLE = r"\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069"
"""Characters that control a terminal, or that hide or reverse the characters beside them."""

# guard: name-length, name-prints
Fact = Annotated[str, Meta(max_length=MAX_FACT_CHARS, pattern=rf"\A[^{_UNPRINTABLE}]*\Z")]
"""What a node says about itself: short, and safe to show."""

Said = Annotated[str, Meta(max_length=MAX_SAID_CHARS, pattern=rf"\A[^{_UNPRINTABLE}]*\Z")]  # guard: said-is-short
"""What a worker says of its environment: a stranger's words, safe to show."""

Url = Annotated[str, Meta(max_length=MAX_URL_CHARS, pattern=rf"\A[^{_UNPRINTABLE}]*\Z")]
"""Where a node says that it is: safe to show."""

Whole = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]

Seed = Annotated[int, Meta(ge=-1, le=(1 << 63) - 1, description="-1 takes a random one")]

FINITE = sys.float_info.max
"""Upper end of numbers that must be finite."""

Finite = Annotated[float, Meta(ge=-FINITE, le=FINITE)]
NonNegative = Annotated[float, Meta(ge=0, le=FINITE)]
Positive = Annotated[float, Meta(gt=0, le=FINITE)]
Share = Annotated[float, Meta(ge=0, le=1)]
PositiveShare = Annotated[float, Meta(gt=0, le=1)]
OpenShare = Annotated[float, Meta(gt=0, lt=1)]
Fraction = Annotated[float, Meta(ge=0, lt=1)]


def limits_of(kind: Any) -> Meta | None:
    """The range of a type's values; None if it has none."""
    found = [meta for one in (kind, *get_args(kind)) for meta in getattr(one, "__metadata__", ())]
    return found[0] if found else None


def words_of(limits: Meta) -> str:
    """A range in words, such as "at least 0 and below 1"."""
    low = [f"{word} {end}" for word, end in (("at least", limits.ge), ("above", limits.gt)) if end is not None]
    high = [f"{word} {end}" for word, end in (("at most", limits.le), ("below", limits.lt)) if end is not None]
    if limits.le == FINITE:
        return f"{low[0]}, and finite" if limits.ge != -FINITE else "finite"
    if limits.ge is not None and limits.le is not None:
        return f"from {limits.ge} to {limits.le}"
    return " and ".join([*low, *high])


def demand_of(limits: Meta | None) -> str:
    """What a value must be, with the remark of its type; empty if a range of numbers or a remark does not say it."""
    words = words_of(limits) if limits else ""
    return "; ".join(part for part in (words and f"must be {words}", limits and limits.description) if part)


def fact(text: str, most_chars: int = MAX_FACT_CHARS) -> str:
    """Any text as a `Fact`, or as a longer text that is safe to show."""
    return re.sub(f"[{_UNPRINTABLE}]", "?", text)[:most_chars]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of what nodes send each other and of what the log holds. It is immutable and refuses unknown fields, but
    `Response` does not."""


class Response(Message, frozen=True, forbid_unknown_fields=False):
    """Base of a coordinator's answers that nobody hashes or signs. It may gain fields, which older nodes ignore.

    So a field that a node must understand to take part is never added to one.
    """
