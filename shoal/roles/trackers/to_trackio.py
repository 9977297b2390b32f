"""Rows in trackio's local database, which `trackio show` shows.

A row is committed before the next is taken, and has a name, of which trackio keeps the first: a step that was made again
has another time, and is a later point. It starts no thread and reaches no network: `trackio sync` shares a project.
"""

from datetime import UTC, datetime

from trackio.sqlite_storage import SQLiteStorage

from shoal.roles.trackers.rows import Row


class Trackio:
    """One run of a project of trackio."""

    is_durable = True

    def __init__(self, project: str, run: str, run_id: str, config: dict[str, object]) -> None:
        SQLiteStorage.validate_project_name(project)
        self._project, self._run, self._id, self._config = project, run, run_id, config

    def write(self, row: Row) -> None:
        if row.values:
            self._log(f"step {row.step} {row.time_s}", row.step, row.time_s, row.values)
        if (one := row.evaluation) is not None:
            self._log(f"heldout {one.name}", one.version, one.time_s, one.values)

    def _log(self, name: str, step: int, time_s: float, values: dict[str, float]) -> None:
        SQLiteStorage.bulk_log(
            self._project, self._run, [dict(values)], steps=[step],
            timestamps=[datetime.fromtimestamp(time_s, UTC).isoformat()], config=self._config,
            log_ids=[f"{self._id} {name}"], run_id=self._id,
        )  # fmt: skip

    def close(self) -> None:
        """Nothing: each row is committed."""
