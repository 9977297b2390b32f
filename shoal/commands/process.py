"""What commands share: the number of cores, and the log.

Called by `cli` and the other files of this folder. It does not depend on any command.
"""

import logging
import os
from importlib.util import find_spec

from shoal.errors import NO_TORCH, ShoalError
from shoal.terminal import PrintableFormatter


def cores() -> int:
    return os.cpu_count() or 1


def demand_torch() -> None:
    """Raises `ShoalError` on a machine without torch, before anything is sent or written."""
    if find_spec("torch") is None:
        raise ShoalError(NO_TORCH)


def log_to_stderr() -> None:
    """Log to standard error. A log that cannot be written stops nothing."""
    logging.raiseExceptions = False
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("%(asctime)s %(name)-11s %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)
