"""Is the answer JSON of the required form? Also the strict reader of JSON that other verifiers use.

Called by environments. An answer must be one JSON document and nothing else, without `NaN` and without repeated keys,
and limited in size and depth. A `json` fence around the whole answer is removed. jsonschema-rs, which is in the
extra `answers`, checks the schema: its patterns take linear time, and it fetches nothing. (jsonschema and
fastjsonschema pass `pattern` to Python's engine, which a hostile answer can make hang; the latter also generates code
from the schema.)

Failure modes. A schema checks the form, never whether the content is true: an empty object passes unless the schema
requires members, and unknown members pass unless it forbids them. `1.0` is an integer, as the standard says.
"""

import functools
import json
import math
import re
from typing import Any

from shoal.envs.answers.graded import Answer, Graded, right, taken, wrong
from shoal.errors import ConfigError, how_to_install

MAX_JSON_CHARS = 100_000
"""Limit on the length of a document."""

MAX_DEPTH = 32
"""Limit on the depth to which lists and objects are nested."""


def conforms(answer: Answer, schema: dict[str, Any]) -> Graded:
    """1 if the answer is one JSON document that the schema allows. A `$ref` may point into the schema only."""
    validator = _validator(json.dumps(schema, sort_keys=True))
    document, fault = read_json(answer)
    if fault:
        return wrong(fault)
    # is_valid remembers what it has compared. The other methods collect every error: many, if a schema is recursive.
    return right("the document conforms") if validator.is_valid(document) else wrong("the document does not conform")


def read_json(answer: Answer) -> tuple[Any, str]:
    """The document of an answer, and "". If there is none: None, and why."""
    found = taken(answer, MAX_JSON_CHARS)
    if found.text is None:
        return None, found.why
    text = _unfenced(found.text)
    if _depth(text) > MAX_DEPTH:  # guard: depth-of-an-answer
        return None, f"the document is deeper than {MAX_DEPTH}"
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_refused, parse_float=_finite), ""
    except (ValueError, RecursionError) as error:
        return None, f"the answer is not one JSON document: {error}"


@functools.lru_cache(64)
def _validator(schema: str) -> Any:
    try:
        import jsonschema_rs
    except ModuleNotFoundError:
        raise ConfigError(f"jsonschema-rs is not installed: {how_to_install('answers')}") from None
    offline = True  # guard: schema-fetches-nothing
    linear = jsonschema_rs.RegexOptions()
    try:
        return jsonschema_rs.validator_for(
            json.loads(schema), pattern_options=linear, validate_formats=True, offline=offline
        )
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        raise ConfigError(f"the schema is refused: {' '.join(str(error).split())[:300]}") from None


def _unfenced(text: str) -> str:
    fence = re.fullmatch(r"```(?:json)?[ \t]*\n(.*)\n```", text, re.DOTALL)
    return fence[1] if fence else text


def _depth(text: str) -> int:
    """An upper bound on the depth of a document: brackets in a string that is not closed count, too."""
    depth = most = 0
    for mark in re.finditer(r'"(?:[^"\\]|\\.|\\\Z)*+(?:"|\Z)|[\[{]|[\]}]', text, re.DOTALL):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(mark[0], 0)
        most = max(most, depth)
    return most


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):  # guard: json-key-twice
        raise ValueError("a key occurs twice")
    return members


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not a finite number")
    return value
