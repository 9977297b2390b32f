"""Rows of rollouts that were chosen to be imitated, as a file: what rejection sampling hands to supervised fine-tuning.

Written by a reject stage (`launch/pipeline/training_examples`), read by `jobs/sft`. Light: it knows neither the run nor the
rule that chose.
"""

from pathlib import Path

import msgspec
import numpy as np

from shoal.chat.renderer import FILES
from shoal.errors import StateError
from shoal.protocol.constants import MODEL_STOPS
from shoal.protocol.encoding import digest, to_json
from shoal.run_folder import write_atomically


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
