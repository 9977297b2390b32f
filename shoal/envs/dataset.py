"""Tasks from a data set on disk: rows of JSON Lines or Parquet files, pinned by their hash, with a held-out split.

An environment's digest covers only its source, so put the hash of the data into its arguments, which are in the log.
Then a node that repeats a rollout has the same rows, or learns that it has not.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from shoal.chat.messages import BadMessage, plain
from shoal.env import Env, Task, require_index
from shoal.errors import ConfigError, cause_of, how_to_install

MAX_BYTES = 1 << 31
"""Limit on the files of a data set together. Rows are kept in memory."""

SUFFIXES = (".jsonl", ".parquet", ".arrow")
"""JSON Lines, Parquet, and the files that `datasets` saves. The last two need pyarrow."""

Row: TypeAlias = dict[str, Any]


def read_rows(path: str | Path, sha256: str = "") -> list[Row]:
    """All rows of a file, or of a folder's files in the order of their names.

    `sha256` is the digest that the files must have, as `digest_of` gives it; empty allows any. Raises `ConfigError`.
    """
    files = _files(Path(path))
    found = _digest(files)
    if sha256 and found != sha256.lower():  # guard: data-are-pinned
        raise ConfigError(
            f"data set {path} has changed: its SHA-256 is {found}, not {sha256[:80]}. Restore the old files, "
            "or set the new hash"
        )
    rows = []
    for file in files:
        for number, row in enumerate(_rows(file)):
            try:
                rows.append(plain(row, f"row {number}"))
            except BadMessage as fault:
                raise ConfigError(f"{file}: {fault}") from None
    if not rows:
        raise ConfigError(f"data set {path} has no rows")
    return rows


def digest_of(path: str | Path) -> str:
    """SHA-256 of a data set, in hex: what sha256sum prints for a file; for a folder, the hash of what it prints for all
    files."""
    return _digest(_files(Path(path)))


def split(rows: list[Row], heldout: int) -> tuple[list[Row], list[Row]]:
    """Training rows and held-out rows, each in their order. Only a row's contents decide whether it is held out.

    Equal rows stay together, so slightly more than `heldout` may be held out. Raises `ConfigError`.
    """
    if not 0 <= heldout < len(rows):
        raise ConfigError(f"heldout = {heldout}: give at least 0 and less than the {len(rows)} rows of the data set")
    keys = [hashlib.sha256(b"shoal/heldout" + _canonical(row)).digest() for row in rows]
    last = sorted(keys)[heldout - 1] if heldout else b""
    training = [row for row, key in zip(rows, keys, strict=True) if key > last]
    if not training:
        raise ConfigError(f"heldout = {heldout} leaves no training rows, because equal rows stay together")
    return training, [row for row, key in zip(rows, keys, strict=True) if key <= last]


class DatasetEnv(Env):
    """An environment whose tasks are rows. A subclass writes `reset`, `step` and `score`."""

    def __init__(
        self,
        path: str | Path,
        sha256: str = "",
        heldout: int = 0,
        heldout_path: str | Path = "",
        heldout_sha256: str = "",
        to_task: Callable[[Row], Task] = lambda row: row,
    ) -> None:
        """Held-out tasks come from the data set at `heldout_path`; if none is given, they are split off the rows.

        `to_task` turns a row into a task. Raises `ConfigError` if the data cannot be used.
        """
        rows = read_rows(path, sha256)
        training, held = (rows, read_rows(heldout_path, heldout_sha256)) if heldout_path else split(rows, heldout)
        self._tasks = tuple(_tasks(side, to_task) for side in (training, held))
        self.num_tasks, self.num_heldout = map(len, self._tasks)

    def task(self, index: int, heldout: bool = False) -> Task:
        """The task of a row."""
        tasks = self._tasks[heldout]
        require_index(index, len(tasks))
        return tasks[index]


def _tasks(rows: list[Row], to_task: Callable[[Row], Task]) -> list[Task]:
    tasks = []
    for number, row in enumerate(rows):
        try:
            tasks.append(to_task(row))
        except (LookupError, TypeError, ValueError, AttributeError) as fault:
            raise ConfigError(f"to_task fails on row {number}, {str(row)[:80]}: {fault!r:.200}") from None
    return tasks


def _files(path: Path) -> list[Path]:
    try:
        found = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES) if path.is_dir() else [path]
        size = sum(file.stat().st_size for file in found)
    except OSError as error:
        raise ConfigError(f"cannot read the data set {path}: {cause_of(error)}. Give a file or a folder") from None
    if not found or any(file.suffix not in SUFFIXES for file in found):
        raise ConfigError(f"{path} is not a data set: give a file or a folder of {', '.join(SUFFIXES)}")
    if size > MAX_BYTES:
        raise ConfigError(f"data set {path} has {size} bytes, limit {MAX_BYTES}: take a part of it")
    return found


def _digest(files: list[Path]) -> str:
    sums = {}
    for file in files:
        with file.open("rb") as data:
            sums[file.name] = hashlib.file_digest(data, "sha256").hexdigest()
    if len(files) == 1:
        return sums[files[0].name]
    return hashlib.sha256("".join(f"{value}  {name}\n" for name, value in sums.items()).encode()).hexdigest()


def _rows(file: Path) -> Iterator[Mapping[str, Any]]:
    if file.suffix == ".jsonl":
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    row = json.loads(line) if line.strip() else None
                except (ValueError, RecursionError) as fault:
                    raise ConfigError(f"{file} line {number} is not JSON: {fault}") from None
                if row is not None:
                    if not isinstance(row, dict):
                        raise ConfigError(f"{file} line {number} is {type(row).__name__}: each line must be an object")
                    yield row
        return
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise ConfigError(f"{file.name} needs pyarrow: {how_to_install('data')}, or give JSON Lines") from None
    try:
        table = (
            pyarrow.parquet.read_table(file) if file.suffix == ".parquet" else pyarrow.ipc.open_stream(file).read_all()
        )
    except (OSError, pyarrow.ArrowException) as fault:
        raise ConfigError(f"{file} is damaged: {' '.join(str(fault).split())[:200]}. Get it again") from None
    yield from table.to_pylist()


def _canonical(row: Row) -> bytes:
    return json.dumps(row, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
