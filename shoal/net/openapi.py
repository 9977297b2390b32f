"""Make an OpenAPI 3.1 document from a table of calls, so that the server and its description cannot differ.

It defines no calls itself.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from shoal.protocol.messages import Refusal


class Call(NamedTuple):
    """One HTTP call: who may make it, and the types of its JSON bodies (None for bytes or no body)."""

    method: str
    path: str
    who: str
    summary: str
    request: Any
    response: Any


def document(title: str, version: str, calls: Sequence[Call]) -> dict[str, Any]:
    """The OpenAPI document of a table of calls."""
    kinds = [kind for call in calls for kind in (call.request, call.response) if kind is not None]
    schemas, components = msgspec.json.schema_components([*kinds, Refusal], ref_template="#/components/schemas/{name}")
    by_kind = dict(zip(map(str, kinds), schemas, strict=False))
    paths: dict[str, dict[str, Any]] = {}
    for call in calls:
        paths.setdefault(call.path.replace(":path}", "}"), {})[call.method.lower()] = _operation(call, by_kind)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(call: Call, by_kind: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": f"{call.summary} For {call.who}.",
        "responses": {
            "200": {"description": "done"},
            "4XX": _json({"$ref": "#/components/schemas/Refusal"}, "refused"),
        },
    }
    if call.response is not None:
        operation["responses"]["200"] = _json(by_kind[str(call.response)], "done")
    if call.request is not None:
        operation["requestBody"] = _json(by_kind[str(call.request)])
    names = re.findall(r"\{(\w+)(?::path)?\}", call.path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return operation


def _json(schema: Any, description: str = "") -> dict[str, Any]:
    body: dict[str, Any] = {"content": {"application/json": {"schema": schema}}}
    return body | {"description": description} if description else body
