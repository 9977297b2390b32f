"""Patterns and schemas: linear time, nothing fetched, strict JSON."""

import time

import pytest

from shoal.errors import ConfigError
from shoal.graders.text import conforms, matches, read_json

pytest.importorskip("re2", reason="pip install '.[answers]'")
pytest.importorskip("jsonschema_rs", reason="pip install '.[answers]'")


@pytest.mark.parametrize("pattern", [r"(a+)+", r"(a|aa)+", r"(.*)(.*)(.*)(.*)b", r"([a-z]+)*[a-z]+[0-9]"])
def test_no_pattern_hangs(pattern: str) -> None:
    began = time.process_time()
    assert matches("a" * 9_990 + "!", pattern).score == 0.0
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize("pattern", ["(?=a)", r"(a)\1", "(", "a{1000}{1000}", "x" * 3000])
def test_a_pattern_that_re2_cannot_keep_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match="the pattern"):
        matches("a", pattern)


@pytest.mark.parametrize(
    "schema", [{"$ref": "http://127.0.0.1:1/schema.json"}, {"$ref": "other.json"}, {"type": "number?"}]
)
def test_an_invalid_schema_or_a_reference_outside_it_is_refused(schema: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="refused"):
        conforms("1", schema)


def test_a_file_that_is_there_is_not_read(tmp_path) -> None:
    (tmp_path / "schema.json").write_text("{}")
    with pytest.raises(ConfigError, match="refused"):
        conforms("1", {"$ref": (tmp_path / "schema.json").as_uri()})


def test_a_reference_inside_the_schema_is_followed() -> None:
    schema = {"$ref": "#/$defs/count", "$defs": {"count": {"type": "integer"}}}
    assert conforms("3", schema).score == 1.0
    assert conforms('"3"', schema).score == 0.0


def test_a_recursive_schema_takes_little_time() -> None:
    child = {"properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    began = time.process_time()
    assert conforms('{"a":' * 30 + "1" + "}" * 30, {"type": "object", "anyOf": [child, child]}).score == 0.0
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    "text",
    ["", "nul", "{", "[1,]", "{'a': 1}", "1 2", "Infinity", "1e999", '{"a":1,"a":1}', "9" * 5000, "[" * 33 + "]" * 33],
)
def test_what_is_not_one_plain_document_is_refused(text: str) -> None:
    assert read_json(text)[1]


@pytest.mark.parametrize(
    "text", ["null", '"[[[["', '{"a": [1, 2.5, "x\\"]"]}', "[" * 32 + "]" * 32, '```json\n{"a": 1}\n```']
)
def test_a_plain_document_is_read(text: str) -> None:
    assert read_json(text)[1] == ""
