"""What all messages have in common: they are frozen, have known fields only, and hold texts that are safe to show.

The other files of this folder build on it, and so does `pay_lines` beside it. It defines no message.
"""

import re
from typing import Annotated

import msgspec

from shoal.protocol.constants import MAX_FACT_CHARS, MAX_SAID_CHARS, MAX_URL_CHARS

_UNPRINTABLE = r"\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069"
"""Characters that control a terminal, or that hide or reverse the characters beside them."""

# guard: name-length, name-prints
Fact = Annotated[str, msgspec.Meta(max_length=MAX_FACT_CHARS, pattern=rf"\A[^{_UNPRINTABLE}]*\Z")]
"""What a node says about itself: short, and safe to show."""

Said = Annotated[
    str, msgspec.Meta(max_length=MAX_SAID_CHARS, pattern=rf"\A[^{_UNPRINTABLE}]*\Z")
]  # guard: said-is-short
"""What a worker says of its environment: a stranger's words, safe to show."""

Url = Annotated[str, msgspec.Meta(max_length=MAX_URL_CHARS, pattern=rf"\A[^{_UNPRINTABLE}]*\Z")]
"""Where a node says that it is: safe to show."""


def fact(text: str, most_chars: int = MAX_FACT_CHARS) -> str:
    """Any text as a `Fact`, or as a longer text that is safe to show."""
    return re.sub(f"[{_UNPRINTABLE}]", "?", text)[:most_chars]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of what nodes send each other and of what the log holds. It is immutable and refuses unknown fields, but
    `Answer` does not."""


class Response(Message, frozen=True, forbid_unknown_fields=False):
    """Base of a coordinator's answers that nobody hashes or signs. It may gain fields, which older nodes ignore.

    So a field that a node must understand to take part is never added to one.
    """
