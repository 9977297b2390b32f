"""Which chat templates a checkpoint has, and which one shows tools: what `transformers` would read and pick.

A file goes before `tokenizer_config.json`. Where there are several templates, transformers picks `tool_use` if a
conversation has tools, and else `default`. It renders nothing.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shoal.errors import StateError
from shoal.models.safetensors_header import bad_value, read_capped

MAX_TEMPLATE_BYTES = 1 << 18
"""Limit on the text of a template: those of common models have below 64 KiB."""

FILE, FOLDER = "chat_template.jinja", "additional_chat_templates"

DEFAULT, TOOL_USE = "default", "tool_use"

IN_FOLDER = {f"{FOLDER}/{name}.jinja": name for name in (DEFAULT, TOOL_USE)}
"""Files of a folder of templates that are read; transformers takes others only by name."""


class TemplateSource(NamedTuple):
    """Where a template is: a file, and if it is a part of that, the key."""

    file: str = ""
    """Empty if it is not from a file."""
    key: str = ""

    def text(self, whole: bool = True) -> str:
        """For people; with `whole`, the file has its folder, which other machines lack."""
        file = self.file if whole else self.file.rpartition("/")[2]
        return f"{self.key} of {file}" if self.key else file or "its text"


class ChatTemplates(NamedTuple):
    """The text of a checkpoint's template, and that of the one which shows tools, where it is another."""

    plain: str | None
    """None if conversations without tools have no template."""
    tools: str | None = None
    where: TemplateSource = TemplateSource()


def chat_templates(directory: Path, config: Mapping[str, Any]) -> ChatTemplates:
    """The templates of a checkpoint. `config` is the content of its `tokenizer_config.json`. Raises `StateError`."""
    path, where = directory / FILE, TemplateSource(str(directory / "tokenizer_config.json"), "chat_template")
    for name in IN_FOLDER:
        if (directory / name).exists():  # guard: template-for-tools-not-lost
            raise StateError(
                f"{directory} has the chat template {name}, and only files in the directory itself are published: put all "
                f'templates into tokenizer_config.json, as "chat_template": [{{"name": "{DEFAULT}", "template": ...}}, '
                f'{{"name": "{TOOL_USE}", "template": ...}}], and delete {FOLDER} and {FILE}'
            )
    found = config.get("chat_template")
    if path.exists():
        found, where = _text_of(path), TemplateSource(str(path))
    else:
        _demand_texts(directory / "tokenizer_config.json", found)
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
    if isinstance(found, dict):
        texts = {name: text for name, text in found.items() if isinstance(name, str) and isinstance(text, str)}
        if not texts.keys() & {DEFAULT, TOOL_USE}:
            raise StateError(
                f"{directory} has chat templates of other names ({', '.join(sorted(texts))[:80]}): name the right one "
                f"{DEFAULT}"
            )
        return ChatTemplates(texts.get(DEFAULT), texts.get(TOOL_USE), where)
    if not isinstance(found, str):
        raise StateError(f"{directory} has no chat template: use the -Instruct variant, or add {FILE}")
    return ChatTemplates(found, where=where)


def _text_of(path: Path) -> str:
    """The text of a template's file. Raises `StateError`, as transformers raises `UnicodeDecodeError`."""
    try:
        return read_capped(path, MAX_TEMPLATE_BYTES).decode()
    except UnicodeDecodeError as error:
        raise StateError(
            f"{path} is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}. Write it in UTF-8, or "
            "download the model again"
        ) from None


def _demand_texts(path: Path, found: object) -> None:
    """Refuse a `chat_template` that holds anything but texts. Raises `StateError`."""
    entries = [found] if isinstance(found, str) else [*found.values()] if isinstance(found, dict) else found
    if isinstance(found, list):
        entries = [one.get("template") for one in found if isinstance(one, dict) and isinstance(one.get("name"), str)]
        entries = entries if len(entries) == len(found) else None
    right = isinstance(entries, list) and entries and all(isinstance(one, str) for one in entries)
    if found is not None and not right:
        raise bad_value(path, "chat_template", found, ["str", 'a list of tables with "name" and "template"'])
    size = max(map(len, entries), default=0) if isinstance(entries, list) else 0
    if size > MAX_TEMPLATE_BYTES:  # guard: templates-are-short
        raise StateError(
            f"{path}: chat_template has {size} characters, limit {MAX_TEMPLATE_BYTES}: take the model's own template"
        )


def with_folder(config: Mapping[str, Any], files: Mapping[str, Path]) -> bytes:
    """A `tokenizer_config.json` that has the templates of `files`, which are `FILE` and those of a folder, by name: they go
    before its own. Raises `StateError`."""
    names = {FILE: DEFAULT, **IN_FOLDER}
    texts = {names[name]: _text_of(files[name]) for name in names if name in files}
    templates = [{"name": name, "template": text} for name, text in texts.items()]
    return msgspec.json.format(msgspec.json.encode({**config, "chat_template": templates}), indent=2)
