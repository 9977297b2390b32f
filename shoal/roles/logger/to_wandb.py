"""Rows in a run of Weights & Biases: offline files, or the service if there is a key for it.

Called by `role`. wandb keeps rows in the memory of a process of its own, which ends without writing them when this one is
killed. So `held` counts what is in its files, and the rest is logged again.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

import wandb
from wandb.proto.wandb_internal_pb2 import Record

from shoal.roles.logger.rows import HELDOUT, Row

MAGIC_BYTES, BLOCK_BYTES, HEAD_BYTES = 7, 32768, 7
"""Of a file of wandb: what it begins with; its blocks; and what precedes each part of a record, as in LevelDB's logs."""

WHOLE, LAST = 1, 4
"""Kinds of parts that end a record."""


class WandB:
    """One run of a project of W&B, which each start resumes."""

    def __init__(self, folder: Path, project: str, name: str, run_id: str, config: dict[str, object]) -> None:
        quiet = wandb.Settings(
            console="off", disable_git=True, silent=True, x_disable_meta=True, x_disable_stats=True,
            x_disable_machine_info=True,
        )  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        self._in_files = rows_in(folder, run_id)
        self._run = wandb.init(
            project=project, name=name, id=run_id, config=config, dir=str(folder), resume="allow", settings=quiet
        )
        self._next = max(self._in_files, self._run.step)  # the service may have rows that the files have lost
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric(f"{HELDOUT}/*", step_metric=f"{HELDOUT}/version")

    def held(self) -> int:
        return self._next

    def write(self, row: Row) -> None:
        self._run.log({**row.values, "_timestamp": row.time_s}, step=self._next, commit=True)
        self._next += 1

    def close(self) -> None:
        self._run.finish()


def rows_in(folder: Path, run_id: str) -> int:
    """Rows of a run in the files that its starts have left below a folder: one more than the largest number of a row."""
    return max((row for file in files_of(folder, run_id) for row in numbers_in(file)), default=-1) + 1


def files_of(folder: Path, run_id: str) -> list[Path]:
    """The files that the starts of a run have left, oldest first, without the link to the latest of their folders."""
    return sorted(folder.glob(f"wandb/*run-*/run-{run_id}.wandb"))


def numbers_in(file: Path) -> Iterator[int]:
    """Numbers of the rows in one file, which may end in the middle of a record."""
    for data in records_of(file.read_bytes()):
        record = Record.FromString(data)
        if record.HasField("history"):
            yield record.history.step.num


def records_of(data: bytes) -> Iterator[bytes]:
    """Whole records of a file's bytes."""
    at, whole = MAGIC_BYTES, b""
    while at + HEAD_BYTES <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < HEAD_BYTES:  # the rest of a block is padding
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        at += HEAD_BYTES
        if at + size > len(data):
            return
        whole += data[at : at + size]
        at += size
        if kind in (WHOLE, LAST):
            yield whole
            whole = b""
