"""Rows in trackio's local database, which `trackio show` shows.

Called by `role`. A row is committed before the next is taken. It starts no thread and reaches no network: `trackio sync`
shares a project.
"""

from datetime import UTC, datetime

from trackio.sqlite_storage import SQLiteStorage

from shoal.roles.logger.rows import Row


class Trackio:
    """One run of a project of trackio."""

    def __init__(self, project: str, run: str, run_id: str, config: dict[str, object]) -> None:
        SQLiteStorage.validate_project_name(project)
        self._project, self._run, self._id, self._config = project, run, run_id, config

    def held(self) -> int:
        return SQLiteStorage.get_log_count(self._project, self._run, run_id=self._id)

    def write(self, row: Row) -> None:
        SQLiteStorage.bulk_log(
            self._project, self._run, [dict(row.values)], steps=[row.number],
            timestamps=[datetime.fromtimestamp(row.time_s, UTC).isoformat()], config=self._config,
            log_ids=[f"{self._id} {row.name}"], run_id=self._id,
        )  # fmt: skip

    def close(self) -> None:
        """Nothing: each row is committed."""
