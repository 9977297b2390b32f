"""What crosses the wire decodes into exactly what was asked for, or is refused in one look."""

from typing import Any

import pytest

from shoal.protocol.types import Join
from shoal.protocol.wire import WireError, from_json, to_json


@pytest.mark.parametrize("name", ["[" * 500, "]" * 500 + "[" * 500, '\\"[{' * 100, "\\" * 33 + '"' + "{" * 99])
def test_brackets_inside_strings_are_no_nesting(name):
    join = Join("worker", name, 0.0, "x", "float32", "cpu")
    assert from_json(to_json({"body": join, "of": [[[name]]]}), dict[str, Any])["of"] == [[[name]]]


def test_a_string_that_never_ends_is_refused_in_one_look():
    for data in (b'["' * 200_000, b'"' + b'\\"' * 200_000 + b"[" * 40, b'{"a":"' + b"{" * 200_000):
        with pytest.raises(WireError):
            from_json(data, dict[str, Any])


@pytest.mark.parametrize("depth", [33, 5_000])
def test_deep_nesting_is_refused_and_shallow_is_not(depth):
    assert from_json(b"[" * 32 + b"]" * 32, list[Any])
    with pytest.raises(WireError, match="MAX_JSON_DEPTH"):
        from_json(b"[" * depth + b"]" * depth, list[Any])
