"""Where the rows of a run go: Weights & Biases, trackio, TensorBoard. Each package is imported when its logger is made."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shoal.roles.trackers.tracker_rows import HELDOUT, Row

EVENT_FILE = "events.out.tfevents.{:010d}"

EVENT_VERSION = "brain.Event:2"
"""Of the format, as a file's first record names it."""


class WandB:
    """One run of a project of Weights & Biases, which each start resumes: offline files, or the service if there is a key.

    wandb keeps rows in the memory of a process of its own, which ends without writing the newest ones when this one is
    killed. So rows since the last orderly end are given again; W&B takes only steps that rise.
    """

    is_durable = False

    def __init__(self, folder: Path, project: str, name: str, run_id: str, config: dict[str, object]) -> None:
        import wandb

        quiet = wandb.Settings(
            console="off", disable_git=True, silent=True, x_disable_meta=True, x_disable_stats=True,
            x_disable_machine_info=True,
        )  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=project, name=name, id=run_id, config=config, dir=str(folder), resume="allow", settings=quiet
        )
        self._next = self._run.step
        """The service has the steps below; offline it is 0."""
        self._run.define_metric(f"{HELDOUT}/*", step_metric=f"{HELDOUT}/version")

    def write(self, row: Row) -> None:
        if row.step >= self._next:  # wandb would ignore it, with a warning
            evaluated = {} if row.evaluation is None else row.evaluation.values
            self._run.log({**row.values, **evaluated, "_timestamp": row.time_s}, step=row.step, commit=True)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """One run of a project in trackio's local database, which `trackio show` shows.

    A row is committed before the next is taken, and has a name, of which trackio keeps the first: a step that was made
    again has another time, and is a later point. It starts no thread and reaches no network: `trackio sync` shares a
    project.
    """

    is_durable = True

    def __init__(self, project: str, run: str, run_id: str, config: dict[str, object]) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        SQLiteStorage.validate_project_name(project)
        self._storage = SQLiteStorage
        self._project, self._run, self._id, self._config = project, run, run_id, config

    def write(self, row: Row) -> None:
        if row.values:
            self._log(f"step {row.step} {row.time_s}", row.step, row.time_s, row.values)
        if (one := row.evaluation) is not None:
            self._log(f"heldout {one.name}", one.version, one.time_s, one.values)

    def _log(self, name: str, step: int, time_s: float, values: dict[str, float]) -> None:
        self._storage.bulk_log(
            self._project, self._run, [dict(values)], steps=[step],
            timestamps=[datetime.fromtimestamp(time_s, UTC).isoformat()], config=self._config,
            log_ids=[f"{self._id} {name}"], run_id=self._id,
        )  # fmt: skip

    def close(self) -> None:
        """Nothing: each row is committed."""


class TensorBoard:
    """Scalars of one run in event files in a folder of its own, which `tensorboard --logdir` shows.

    Figures are one record of a file, so a kill or a full disk leaves them whole or not at all; given twice, they are the
    same point twice. Each start begins a new file. It uses the package `tensorboard` alone, without TensorFlow or torch,
    but not its writer: that one has a thread, which a full disk ends, and then waits for it without end.
    """

    is_durable = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._records: Any = None

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
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._records.write(Event(wall_time=time_s, step=step, summary=summary).SerializeToString())

    def _new_file(self, time_s: float) -> Any:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        number = len(list(self._folder.glob(EVENT_FILE.format(0)[:-10] + "*")))
        records = RecordWriter((self._folder / EVENT_FILE.format(number)).open("xb"))
        records.write(Event(wall_time=time_s, file_version=EVENT_VERSION).SerializeToString())
        return records
