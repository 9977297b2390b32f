"""Convert nested tables, as read from TOML, into typed configs and back, with errors that name the key.

It treats all keys alike.
"""

import contextlib
import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from shoal.errors import ConfigError, cause_of
from shoal.protocol.field_types import demand_of, limits_of
from shoal.terminal import printable

T = TypeVar("T")

NEAR = {True: 0.66, False: 0.8}
"""How alike two names must be for one to be suggested for the other, in the same section and elsewhere, and two values as
elsewhere: 1 is the same, and `gpa` for `gap` is 0.67. A hint that is far off is worse than none."""


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the run file's sections: immutable, and unknown keys are refused."""


def read_toml(path: Path, what: str = "a run file") -> dict[str, Any]:
    """Read a TOML file as nested tables. Raises `ConfigError`; `what` says what the file should be."""
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        hint = "" if path.suffix == ".toml" else f". Give the path of {what} (.toml)"
        raise ConfigError(f"{path} is not valid TOML: {error}{hint}") from None
    except (OSError, ValueError) as error:  # of a path with a NUL
        named = printable(str(path))
        raise ConfigError(f"cannot read {named}: {cause_of(error)}. Give the path of {what} (.toml)") from None


def merge(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Put one tree over another. Tables are merged key by key; anything else, including lists, is replaced."""
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def from_tree(
    tree: dict[str, Any], kind: type[T], source: str, foreign: Mapping[str, tuple[str, str]] = MappingProxyType({})
) -> T:
    """Convert nested tables to a config. Raises a `ConfigError` that names the key and the nearest known one, or its range.

    `foreign` has names that other programs give to keys: for each, the key here, or "", and what else to say. The same of
    values, of keys here and of such names: `KEY = "VALUE"`, and of the types of values here: `KEY = float`.
    """
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        said = _explain(str(error), kind, tree, foreign)
        raise ConfigError(f"{source}: {said}" if source else said) from None


def to_tree(config: msgspec.Struct) -> dict[str, Any]:
    """A config as nested plain tables, with lists for tuples, as in the resolved run file and the log."""
    tree: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(config))
    return tree


def all_keys(kind: Any, prefix: str = "", tree: Any = None) -> dict[str, Any]:
    """Every dotted key of a config type, sections and leaves, with its field; the tag of a table with its known values.
    With `tree`, a table that names its tag has the keys of that tag alone."""
    tag_field, tag = kind.__struct_config__.tag_field, kind.__struct_config__.tag
    keys: dict[str, Any] = {prefix + tag_field: (tag,)} if tag_field else {}
    for field in msgspec.structs.fields(kind):
        keys[prefix + field.name] = field
        inside = tree.get(field.name) if isinstance(tree, dict) else None
        kinds = list(structs_of(field.type))
        for inner in [one for one in kinds if _is_named(one, inside)] or kinds:
            for key, held in all_keys(inner, f"{prefix}{field.name}.", inside).items():
                keys[key] = tuple(dict.fromkeys((*keys.get(key, ()), *held))) if isinstance(held, tuple) else held
    return keys


def _is_named(kind: type[msgspec.Struct], table: Any) -> bool:
    tag_field, tag = kind.__struct_config__.tag_field, kind.__struct_config__.tag
    return tag_field is not None and isinstance(table, dict) and table.get(tag_field) == tag


def structs_of(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """The struct that a type is, or those that it is a union or a collection of."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    for inner in getattr(kind, "__args__", ()):
        yield from structs_of(inner)


def _explain(message: str, kind: Any, tree: Any, foreign: Mapping[str, tuple[str, str]]) -> str:
    """Rewrite what msgspec says: an unknown key with its section and the nearest known key, an unknown tag or word with the
    known ones, a value that should be a table, and one out of range. Other errors keep their text, after the key."""
    reason, _, place = message.partition(" - at `$")
    steps = re.findall(r"\[[\d.]+\]|[^.\[\]]+", place.rstrip("`"))
    for name, held, value in _at(kind, tree, steps) if "got `" not in reason else ():
        if (demand := demand_of(limits_of(held))) and not _fits(value, held):
            return f"{name} = {value!r}: {demand}"
    section = place.rstrip("`").replace("[...]", "").strip(".")
    key = re.sub(r"\[\d+\]", "", section)
    if reason.startswith("Expected `object`") and section and "[" not in place:
        return f"{section}: {reason}; write it as a table, [{section}]"
    value = reason.partition("'")[2].removesuffix("'")
    named = f'"{value}"' if value else reason.partition("got `")[2].rstrip("`")
    called = "".join(f"; {clause}" for _, clause in [foreign.get(f"{key} = {named}", ("", ""))] if clause)
    if reason.startswith("Invalid value"):
        words = all_keys(kind)[key]
        return f"{section}: {reason}{called or _nearest(value, words)}; known: {', '.join(words)}"
    if reason.startswith("Invalid enum value") and key in (keys := all_keys(kind)):
        words = get_args(keys[key].type)
        words = get_args(words[0]) or words  # a list's are those of its items
        return f"{section}: {reason}{called or _nearest(value, words)}; known: {', '.join(map(repr, words))}"
    if not reason.startswith("Object contains unknown field"):
        return f"{section or 'run file'}: {reason}{called}"
    name = reason.split("`")[1]
    full, place = (f"{at}.{name}" if at else name for at in (section, key))
    return f"unknown key {full}{_hint(place, kind, tree, foreign)}"


def _at(kind: Any, tree: Any, steps: Sequence[str], name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The values at a place of msgspec's, each with its key and type. The place does not say which key of a table it is."""
    if not steps:
        yield name, kind, tree
        return
    step, rest = steps[0], steps[1:]
    items = next((get_args(one) for one in (kind, *get_args(kind)) if get_origin(one) in (dict, tuple, list)), (Any,))
    if step == "[...]" and isinstance(tree, dict):
        for key, value in tree.items():
            yield from _at(items[-1], value, rest, f'{name}."{key}"')
    elif step.startswith("[") and isinstance(tree, list | tuple):
        yield from _at(items[0], tree[int(step[1:-1])], rest, name + step)
    elif isinstance(tree, dict) and step in tree:
        kinds = list(structs_of(kind))
        for one in [one for one in kinds if _is_named(one, tree)] or kinds[:1]:
            held = get_type_hints(one, include_extras=True).get(step, Any)
            yield from _at(held, tree[step], rest, f"{name}.{step}" if name else step)


def _fits(value: Any, kind: Any) -> bool:
    with contextlib.suppress(msgspec.ValidationError):
        msgspec.convert(value, kind)
        return True
    return False


def _nearest(value: str, words: Iterable[object]) -> str:
    near = difflib.get_close_matches(value, map(str, words), 1, NEAR[False])
    return f' (did you mean "{near[0]}"?)' if near else ""


def _hint(refused: str, kind: Any, tree: Any, foreign: Mapping[str, tuple[str, str]]) -> str:
    """Which key may have been meant by one that is refused: one of its name elsewhere, what it is called here if another
    program calls it so, itself under another tag, or one spelt much like it. Else the keys of its section."""
    section, _, name = refused.rpartition(".")
    known = [key for key in all_keys(kind, tree=tree) if key != refused]
    given = tree
    for part in refused.split("."):
        given = given.get(part) if isinstance(given, dict) else None
    value = f'{name} = "{given}"' if isinstance(given, str) else name
    meant, clause = foreign.get(value) or foreign.get(name, ("", ""))
    also = clause and f" ({clause})"
    if same_name := [key for key in known if key.rsplit(".", 1)[-1] == name]:
        return f"; did you mean {same_name[0]}?{also if meant == same_name[0] else ''}"
    if clause and not meant:
        return f"; there is no key for it: {clause}"
    if meant in known:
        return f"; did you mean {meant}?{also}"
    if meant != refused and (under := _other_tag(meant, kind, tree)):
        return f"; did you mean {meant}? It needs {under}{also}"
    if under := _other_tag(refused, kind, tree):
        return f"; it needs {under}{also if meant == refused else ''}"
    near = {key: difflib.SequenceMatcher(None, name, key.rsplit(".", 1)[-1]).ratio() for key in known}
    near = {key: alike for key, alike in near.items() if alike >= NEAR[key.rpartition(".")[0] == section]}
    if near:
        return f"; did you mean {max(near, key=lambda key: (near[key], key.rpartition('.')[0] == section))}?"
    within = [key.rsplit(".", 1)[-1] for key in known if key.rpartition(".")[0] == section]
    return f"; known{f' in {section}' if section else ''}: {', '.join(within)}"


def _other_tag(key: str, kind: Any, tree: Any) -> str:
    """The setting under which a config would have a key that it has not; empty if there is none."""
    parts, keys = key.split("."), all_keys(kind)
    for depth in range(len(parts) - 1, 0, -1):
        table = ".".join(parts[:depth])
        tags = keys.get(f"{table}.name")
        for tag in tags if isinstance(tags, tuple) else ():
            other: dict[str, Any] = {"name": tag}
            for part in reversed(parts[:depth]):
                other = {part: other}
            if key in all_keys(kind, tree=merge(tree, other)):
                return f'{table}.name = "{tag}"'
    return ""
