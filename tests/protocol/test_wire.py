"""What crosses the wire decodes into exactly what was asked for, or is refused in one pass."""

from typing import Any

import pytest

from shoal.protocol.encoding import WireError, float_sum, from_json, to_json
from shoal.protocol.messages import EnvSpec, Join


@pytest.mark.parametrize("name", ["[" * 500, "]" * 500 + "[" * 500, '\\"[{' * 100, "\\" * 33 + '"' + "{" * 99])
def test_brackets_inside_strings_do_not_count_as_nesting(name):
    join = Join("worker", name, 0.0, "x", "float32", "cpu")
    assert from_json(to_json({"body": join, "of": [[[name]]]}), dict[str, Any])["of"] == [[[name]]]


def test_a_string_that_never_ends_is_refused_in_one_pass():
    for data in (b'["' * 200_000, b'"' + b'\\"' * 200_000 + b"[" * 40, b'{"a":"' + b"{" * 200_000):
        with pytest.raises(WireError):
            from_json(data, dict[str, Any])


@pytest.mark.parametrize("depth", [33, 5_000])
def test_deep_nesting_is_refused_and_shallow_is_not(depth):
    assert from_json(b"[" * 32 + b"]" * 32, list[Any])
    with pytest.raises(WireError, match="MAX_JSON_DEPTH"):
        from_json(b"[" * depth + b"]" * depth, list[Any])


def test_the_label_of_an_environment_is_sent_only_if_it_is_not_the_name():
    old = b'{"name":"wordle","digest":"d","num_tasks":1,"weight":1.0,"args":{}}'
    spec = from_json(old, EnvSpec)
    assert spec.label == "wordle" and to_json(spec) == old
    labelled = from_json(old[:-1] + b',"label":"hard"}', EnvSpec)
    assert labelled.label == "hard" and to_json(labelled) == old[:-1] + b',"label":"hard"}'
    for label in ("\\u001b[2J", "\\u202e", "x" * 65):
        with pytest.raises(WireError, match="label"):
            from_json(old[:-1] + f',"label":"{label}"}}'.encode(), EnvSpec)


def test_each_python_adds_floats_alike() -> None:
    """The light tests run on Pythons whose own `sum` says 1.0 and 2.0."""
    assert float_sum([0.1] * 10) == 0.9999999999999999 and float_sum([1e16, 1.0, 1.0, -1e16]) == 0.0
    assert float_sum([]) == 0.0 and float_sum([1e308, 1e308]) == float("inf")
