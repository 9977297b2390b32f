"""Rows as scalars of TensorBoard: event files, which `tensorboard --logdir` shows.

Called by `role`. A row is one record of a file, so that a kill leaves it whole or not at all. Each start begins a new file.
It uses the package `tensorboard` alone, without TensorFlow or torch.
"""

from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from shoal.roles.logger.rows import Row


class TensorBoard:
    """The event files of one run in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: EventFileWriter | None = None

    def held(self) -> int:
        """Records with figures in all files."""
        files = sorted(self._folder.glob("events.out.tfevents.*"))
        records = (Event.FromString(record) for file in files for record in RawEventFileLoader(str(file)).Load())
        return sum(bool(event.summary.value) for event in records)

    def write(self, row: Row) -> None:
        if self._writer is None:
            self._writer = EventFileWriter(str(self._folder))
        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
        self._writer.add_event(Event(wall_time=row.time_s, step=row.number, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
