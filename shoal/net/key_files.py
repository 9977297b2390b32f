"""Private keys on disk, readable only by their owner.

A key file holds the 32 secret bytes in hex. It is written whole, with mode 0600 from the start, and never overwritten. A
file that others can read is refused.
"""

import os
import stat
from pathlib import Path

from shoal.errors import StateError, cause_of
from shoal.protocol.signing import Key
from shoal.run_folder import write_atomically


def load_or_make_key(path: Path) -> Key:
    """Load the key in a file, or make one if there is no file. Raises `StateError` as `load_key` and `save_key`."""
    if not path.exists():
        try:
            save_key(path, Key.generate())
        except FileExistsError:
            pass  # another process was first: use its key
    return load_key(path)


def find_key(folder: Path, prefix: str, public: str) -> Key | None:
    """The key with this public part in a folder, among the files whose names begin so. Raises as `load_key`."""
    keys = (load_key(path) for path in sorted(folder.glob(f"{prefix}*.key")))
    return next((key for key in keys if key.public == public), None)


def load_key(path: Path) -> Key:
    """Read a key file. Raises `StateError` if it is missing or damaged, or if others can read it."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise StateError(f"cannot read the key {path}: {cause_of(error)}. Give the path of a key file") from None
    if mode & 0o077:
        raise StateError(f"the key {path} can be read by others (mode {mode:04o}): run chmod 600 {path}")
    try:
        return Key(bytes.fromhex(text.decode("ascii").strip()))
    except ValueError:
        raise StateError(
            f"the key {path} is damaged: it must hold 64 hex digits. Restore it from a backup, or move it away to get "
            "a new identity (with no credits)"
        ) from None


def save_key(path: Path, key: Key) -> None:
    """Write a key to a new file. Raises FileExistsError if the file exists, `StateError` if writing fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StateError(f"cannot make the folder {path.parent}: {cause_of(error)}. Use another folder") from None
    try:
        write_atomically(path, key.secret().hex().encode() + b"\n", mode=0o600, replace=False)
    except FileExistsError:
        raise
    except OSError as error:
        raise StateError(f"cannot write the key {path}: {cause_of(error)}. Make {path.parent} writable") from None


_MAX_FILE_BYTES = 4096
