"""Rows as scalars of TensorBoard: event files, which `tensorboard --logdir` shows.

Figures are one record of a file, so a kill or a full disk leaves them whole or not at all; given twice, they are the same
point twice. Each start begins a new file. It uses the package `tensorboard` alone, without TensorFlow or torch, but not its
writer: that one has a thread, which a full disk ends, and then waits for it without end.
"""

from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from shoal.roles.trackers.rows import Row

NAME = "events.out.tfevents.{:010d}"

VERSION = "brain.Event:2"
"""Of the format, as a file's first record names it."""


class TensorBoard:
    """The event files of one run in a folder of its own."""

    is_durable = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._records: RecordWriter | None = None

    def write(self, row: Row) -> None:
        if self._records is None:
            self._records = self._new_file(row.time_s)
        if row.values:
            self._add(row.step, row.time_s, row.values)
        if (one := row.evaluation) is not None:
            self._add(one.version, one.time_s, one.values)
        self._records.flush()

    def close(self) -> None:
        if self._records is not None:
            self._records.close()

    def _add(self, step: int, time_s: float, values: dict[str, float]) -> None:
        assert self._records is not None
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._records.write(Event(wall_time=time_s, step=step, summary=summary).SerializeToString())

    def _new_file(self, time_s: float) -> RecordWriter:
        self._folder.mkdir(parents=True, exist_ok=True)
        number = len(list(self._folder.glob(NAME.format(0)[:-10] + "*")))
        records = RecordWriter((self._folder / NAME.format(number)).open("xb"))
        records.write(Event(wall_time=time_s, file_version=VERSION).SerializeToString())
        return records
