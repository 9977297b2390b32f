"""Rows as scalars of TensorBoard: event files, which `tensorboard --logdir` shows.

Called by `role`. A row is one record of a file, so a kill or a full disk leaves it whole or not at all. Each start begins a
new file. It uses the package `tensorboard` alone, without TensorFlow or torch, but not its writer: that one has a thread,
which a full disk ends, and then waits for it without end.
"""

from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from shoal.roles.logger.rows import Row

NAME = "events.out.tfevents.{:010d}"

VERSION = "brain.Event:2"
"""Of the format, as a file's first record names it."""


class TensorBoard:
    """The event files of one run in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._records: RecordWriter | None = None

    def held(self) -> int:
        """Records with figures in all files."""
        records = (
            Event.FromString(record) for file in self._files() for record in RawEventFileLoader(str(file)).Load()
        )
        return sum(bool(event.summary.value) for event in records)

    def write(self, row: Row) -> None:
        if self._records is None:
            self._records = self._new_file(row.time_s)
        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
        event = Event(wall_time=row.time_s, step=row.number, summary=Summary(value=values))
        self._records.write(event.SerializeToString())
        self._records.flush()

    def close(self) -> None:
        if self._records is not None:
            self._records.close()

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob(NAME.format(0)[:-10] + "*"))

    def _new_file(self, time_s: float) -> RecordWriter:
        self._folder.mkdir(parents=True, exist_ok=True)
        records = RecordWriter((self._folder / NAME.format(len(self._files()))).open("xb"))
        records.write(Event(wall_time=time_s, file_version=VERSION).SerializeToString())
        return records
