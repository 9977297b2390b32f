"""Convert nested tables, as read from TOML, into typed configs and back, with errors that name the key.

Called by `config`, by environments for their arguments, and by code that compares or writes a config. It treats all
keys alike.
"""

import difflib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec

from shoal.errors import ConfigError, cause_of

T = TypeVar("T")


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the run file's sections: immutable, and unknown keys are refused."""


def read_toml(path: Path, what: str = "a run file") -> dict[str, Any]:
    """Read a TOML file as nested tables. Raises `ConfigError`; `what` says what the file should be."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {cause_of(error)}. Give the path of {what} (.toml)") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        hint = "" if path.suffix == ".toml" else f". Give the path of {what} (.toml)"
        raise ConfigError(f"{path} is not valid TOML: {error}{hint}") from None


def merge(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Put one tree over another. Tables are merged key by key; anything else, including lists, is replaced."""
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def set_key(tree: dict[str, Any], override: str) -> None:
    """Apply `workers.count=3`. The value is TOML, or a bare string. A number in the path selects an item of a list."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {override}: write it as key=value, for example --set workers.count=3")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, last = key.strip().split(".")
    node: Any = tree
    for part in parents:
        if isinstance(node, list):
            if not (part.isdigit() and int(part) < len(node)):
                raise ConfigError(f"--set {override}: {part} is not an item of the list (it has {len(node)})")
            node = node[int(part)]
        elif isinstance(node, dict):
            node = node.setdefault(part, {})
    if not isinstance(node, dict):
        raise ConfigError(f"--set {override}: {'.'.join(parents)} is not a section")
    node[last] = value


def from_tree(tree: dict[str, Any], kind: type[T], source: str) -> T:
    """Convert nested tables to a config. Raises a `ConfigError` that names the key and the nearest known one."""
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {_explain(str(error), kind)}") from None


def to_tree(config: msgspec.Struct) -> dict[str, Any]:
    """A config as nested plain tables, with lists for tuples, as in the resolved run file and the log."""
    tree: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(config))
    return tree


def all_keys(kind: Any, prefix: str = "") -> dict[str, Any]:
    """Every dotted key of a config type, sections and leaves, with its field; the tag of a table with its known values."""
    tag_field, tag = kind.__struct_config__.tag_field, kind.__struct_config__.tag
    keys: dict[str, Any] = {prefix + tag_field: (tag,)} if tag_field else {}
    for field in msgspec.structs.fields(kind):
        keys[prefix + field.name] = field
        for inner in structs_of(field.type):
            for key, held in all_keys(inner, f"{prefix}{field.name}.").items():
                keys[key] = tuple(dict.fromkeys((*keys.get(key, ()), *held))) if isinstance(held, tuple) else held
    return keys


def structs_of(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """The struct that a type is, or those that it is a union or a collection of."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    for inner in getattr(kind, "__args__", ()):
        yield from structs_of(inner)


def _explain(message: str, kind: Any) -> str:
    """Rewrite what msgspec says: an unknown key with its section and the nearest known key, an unknown tag or word with the
    known ones, and a value that should be a table. Other errors keep their text, after the key."""
    reason, _, place = message.partition(" - at `$")
    section = place.rstrip("`").replace("[...]", "").strip(".")
    key = re.sub(r"\[\d+\]", "", section)
    if reason.startswith("Expected `object`") and section and "[" not in place:
        return f"{section}: {reason}; write it as a table, [{section}]"
    if reason.startswith("Invalid value"):
        return f"{section}: {reason}; known: {', '.join(all_keys(kind)[key])}"
    if reason.startswith("Invalid enum value") and key in (keys := all_keys(kind)):
        return f"{section}: {reason}; known: {', '.join(map(repr, get_args(keys[key].type)))}"
    if not reason.startswith("Object contains unknown field"):
        return f"{section or 'run file'}: {reason}"
    name = reason.split("`")[1]
    full = f"{section}.{name}" if section else name
    known = all_keys(kind)
    same_name = [key for key in known if key.rsplit(".", 1)[-1] == name]
    near = same_name or difflib.get_close_matches(full, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(k for k in known if '.' not in k)}"
    return f"unknown key {full}{hint}"


def changed_keys(before: dict[str, Any], after: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys whose values differ between two trees."""
    changed = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            changed += changed_keys(old, new, f"{prefix}{name}.")
        elif old != new:
            changed.append(prefix + name)
    return changed
