"""A run as a program reads it: each of its tables as a property, and single rollouts.

It gives what `run_reader` and `csv_tables` know to a notebook as plain values, and adds nothing.
"""

import os
from pathlib import Path
from types import TracebackType

from shoal.errors import ConfigError
from shoal.roles.auditor.rejudge_groups import read_id
from shoal.run_folder import is_url
from shoal.runs.csv_tables import TABLES, rows_of
from shoal.runs.run_reader import RunReader, open_run
from shoal.views.notebook.data_frame import Frame
from shoal.views.notebook.rollout import Rollout


class Opened:
    """A run in a folder or at a URL. Each property reads what is new first; use it in one thread at a time.

    Close it, or use it in a `with` statement, to end its connections. Properties raise `ShoalError`.
    """

    def __init__(self, where: str | os.PathLike[str], private: bool = False, own_files: bool = False) -> None:
        """As `shoal.open`."""
        place = os.fspath(where)
        self._reading = open_run(place if is_url(place) else Path(place), private=private, own_files=own_files)

    @property
    def reading(self) -> RunReader:
        """The same run as `shoal.views.notebook` reads it: state, events, manifests, groups."""
        return self._reading

    @property
    def log(self) -> Frame:
        """Events."""
        return self._frame("events")

    @property
    def metrics(self) -> Frame:
        """The trainer's metrics, one step a row."""
        return self._frame("metrics")

    @property
    def nodes(self) -> Frame:
        return self._frame("nodes")

    @property
    def versions(self) -> Frame:
        return self._frame("versions")

    @property
    def groups(self) -> Frame:
        return self._frame("groups")

    @property
    def rollouts(self) -> Frame:
        """Rollouts whose bodies can be read now, with their text."""
        return self._frame("rollouts")

    @property
    def evaluations(self) -> Frame:
        return self._frame("evaluations")

    @property
    def verdicts(self) -> Frame:
        return self._frame("verdicts")

    @property
    def refusals(self) -> Frame:
        """Refused groups, with the check that failed."""
        return self._frame("refusals")

    def rollout(self, name: str) -> Rollout:
        """The rollout VERSION/SLOT/INDEX of the group that was accepted for the slot, such as "3/17/0".

        Raises `ConfigError` for another name, `NothingYet` if none was accepted or its body cannot be read.
        """
        version, slot, index = read_id(name)
        self._reading.catch_up()
        place = self._reading.place_of(version, slot)
        group = self._reading.group(place, with_pieces=True)
        if index is None or index >= len(group.rollouts):
            raise ConfigError(f"{name} names no rollout: write VERSION/SLOT/INDEX, INDEX below {len(group.rollouts)}")
        return Rollout(self._reading, place, group, index)

    def close(self) -> None:
        """End connections, and delete temporary files."""
        self._reading.close()

    def __enter__(self) -> "Opened":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<the run of {self._reading.name}: {', '.join(('log', *[name for name in TABLES if name != 'events']))}>"
        )

    def _frame(self, name: str) -> Frame:
        self._reading.catch_up()
        table = TABLES[name]
        return Frame(name, table.sentence, table.columns, rows_of(self._reading, name))
