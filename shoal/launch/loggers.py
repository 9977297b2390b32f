"""Which processes look on while a run goes on: loggers, if this machine has their packages, and the page.

Called by `launch/local` before any role starts. The packages are imported by the logger's process alone.
"""

from importlib.util import find_spec

from shoal.config import LOGGERS, RunConfig
from shoal.errors import StateError, how_to_install

STOP_S = 30.0
"""The logger may take this long to end: it writes what is left."""


def wanted_loggers(config: RunConfig) -> list[str]:
    """Loggers that need a process: all but the file that the trainer writes."""
    return [name for name in LOGGERS if name in config.logging.to]


def onlookers(config: RunConfig, hosts: bool) -> list[str]:
    """Processes that look on, and without which a run goes on: the logger, and the page of a hosted run."""
    return ["logger"] * bool(wanted_loggers(config)) + ["dashboard"] * (hosts and config.host.dashboard)


def demand_loggers(config: RunConfig) -> None:
    """Raise `StateError` if a logger's package is not installed. Otherwise it would be missed after days."""
    missing = [name for name in wanted_loggers(config) if find_spec(LOGGERS[name]) is None]
    if missing:
        raise StateError(
            f"logging.to names {', '.join(missing)}, which is not installed: {how_to_install(*missing)}, or "
            f"take it out of logging.to"
        )
