"""An error's message is never empty and never `None`, whatever the system leaves out."""

import errno
import re
import shutil
from pathlib import Path

import httpx
import pytest

from shoal.errors import cause_of

PACKAGE = Path(__file__).parent.parent / "shoal"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "a/file"), "No space left on device"),
        (OSError("half a page written"), "half a page written"),
        (OSError(), "OSError"),
        (TimeoutError(), "TimeoutError"),
        (httpx.ReadTimeout(""), "ReadTimeout"),
        (
            shutil.Error([("a", "b", "[Errno 28] No space left on device: 'b'")]),
            "[Errno 28] No space left on device: 'b'",
        ),
    ],
    ids=repr,
)
def test_cause_of_an_error_is_never_empty(error: Exception, cause: str) -> None:
    assert cause_of(error) == cause


def test_no_message_is_made_from_a_strerror_that_may_be_none() -> None:
    bare = re.compile(r"\{\w+\.strerror\}")
    found = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if bare.search(path.read_text())]
    assert found == [], "use errors.cause_of"
