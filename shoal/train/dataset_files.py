"""Files of training data: chosen rows to imitate, and pairs of answers. Light: it knows neither the run nor a tokenizer."""

import codecs
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shoal.chat.messages import normal
from shoal.chat.renderer import FILES
from shoal.env import Message
from shoal.errors import StateError
from shoal.models.safetensors_header import open_regular
from shoal.protocol.constants import MODEL_STOPS
from shoal.protocol.encoding import digest, to_json
from shoal.run_folder import write_atomically
from shoal.terminal import printable

# --- Rows to be imitated: what rejection sampling hands to supervised fine-tuning ---


class Examples(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows that teach, and what their token ids mean."""

    tokenizer: str
    """Of the policy that wrote them; see `tokenizer_digest`."""
    rows: tuple[tuple[bytes, bytes], ...]
    """Token ids, int32, and authors, uint8, of each row."""

    def read(self) -> list[tuple[list[int], list[int]]]:
        """Token ids and authors of each row."""
        return [
            (np.frombuffer(tokens, dtype="<i4").tolist(), np.frombuffer(author, dtype="u1").tolist())
            for tokens, author in self.rows
        ]


def tokenizer_digest(policy: Path) -> str:
    """SHA-256, hex, over the files of a policy's directory that decide its tokens. Its config also has sizes, which may
    differ."""
    names = [name for name in FILES[MODEL_STOPS] if not name.endswith("config.json") and (policy / name).is_file()]
    return digest(to_json([[name, digest((policy / name).read_bytes())] for name in names]))


def write_examples(examples: Examples, path: Path) -> None:
    """Whole or not at all. Raises OSError."""
    write_atomically(path, msgspec.msgpack.encode(examples))


def read_examples(path: Path) -> Examples:
    """Raises `StateError` if the file is not what `write_examples` wrote."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=Examples)
    except (OSError, msgspec.DecodeError) as error:
        raise StateError(
            f"the chosen rollouts {path} cannot be read: {error}. Delete the stage's folder to redo it"
        ) from None


# --- Pairs of answers of which one is preferred: the form of each line, whatever the policy ---


MAX_LINE_BYTES = 1 << 20
"""Limit on a line of a file of pairs."""

BYTE_ORDER_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class PreferencePair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a file of pairs, in the form that TRL reads, too."""

    prompt: str | list[dict[str, Any]]
    chosen: str | list[dict[str, Any]]
    rejected: str | list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    """What the chat template shows of tools."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Other arguments of the chat template."""

    def messages(self) -> list[Message]:
        """The prompt. Raises ValueError if an answer cannot follow it."""
        messages = _messages(self.prompt, "user")
        if messages and messages[-1].get("role") == "assistant":
            raise ValueError(
                "the prompt ends with a message of the assistant, after which the answer would be another: put its "
                "text at the beginning of both answers"
            )
        return messages

    def answers(self) -> tuple[Message, Message]:
        """The chosen one and the rejected one. Raises ValueError if one of them is none."""
        return _answer(self.chosen), _answer(self.rejected)


def preference_pairs(path: Path) -> Iterator[tuple[int, PreferencePair]]:
    """Each line that is not empty, with its number. Raises `StateError` that names the line."""
    with open_regular(path) as file:
        start = file.read(4)
        if start.startswith(BYTE_ORDER_MARKS) or b"\0" in start:
            what = "begins with a byte order mark" if start.startswith(codecs.BOM_UTF8) else "is not UTF-8"
            raise StateError(f"{path} {what}: save it as UTF-8 without a byte order mark")
        file.seek(0)
        for number, data in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
            try:
                if len(data) > MAX_LINE_BYTES:
                    raise ValueError(f"longer than {MAX_LINE_BYTES} bytes")
                if not data.strip():
                    continue
                line = msgspec.json.decode(data.decode(), type=PreferencePair)
                json.loads(data, object_pairs_hook=_demand_distinct)
                normal([*line.messages(), *line.answers()])
            except UnicodeDecodeError:
                raise StateError(f"{path}, line {number} is not UTF-8: save the file as UTF-8") from None
            except (ValueError, RecursionError) as error:  # msgspec.DecodeError and ShoalError are
                raise pair_error(path, number, error) from None
            yield number, line


def _demand_distinct(members: list[tuple[str, Any]]) -> None:
    """Raise ValueError if an object has a key twice, of which a decoder takes the last one."""
    keys = Counter(key for key, _ in members)
    twice = [key for key, count in keys.items() if count > 1]
    if twice:  # guard: keys-of-pairs-are-distinct
        raise ValueError(f"the key {printable(twice[0])[:40]!r} occurs twice")


def pair_error(path: Path, number: int, error: Exception) -> StateError:
    """What is wrong with a line."""
    is_unknown = isinstance(error, msgspec.ValidationError) and "unknown field" in str(error)
    known = f"; known are {', '.join(PreferencePair.__struct_fields__)}" if is_unknown else ""
    return StateError(f"{path}, line {number}: {error}{known}. Correct it, or take it out")


def demand_preference_pairs(path: Path) -> None:
    """Raise `StateError` if the file has no line, or one that is no pair."""
    if not sum(1 for _ in preference_pairs(path)):
        raise StateError(f"{path}: there are no pairs to learn from: give some")


def _messages(said: str | list[dict[str, Any]], role: str) -> list[Message]:
    return [{"role": role, "content": said}] if isinstance(said, str) else list(said)


def _answer(said: str | list[dict[str, Any]]) -> Message:
    messages = _messages(said, "assistant")
    if len(messages) != 1 or messages[0].get("role") != "assistant":
        raise ValueError("an answer is a text, or one message of the assistant: what comes before it is the prompt")
    return messages[0]
