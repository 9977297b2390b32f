"""What commands share: the number of cores, and the log.

Called by `cli` and the other files of this folder. It does not depend on any command.
"""

import logging
import os
from importlib.util import find_spec
from typing import Literal

from shoal.errors import NO_TORCH, ShoalError
from shoal.terminal import JsonFormatter, PrintableFormatter


def cores() -> int:
    return os.cpu_count() or 1


def demand_torch() -> None:
    """Raises `ShoalError` on a machine without torch, before anything is sent or written."""
    if find_spec("torch") is None:
        raise ShoalError(NO_TORCH)


def log_to_stderr(role: str = "", form: Literal["text", "json"] = "text") -> None:
    """Log to standard error: of a `role` of a run into its file, which is kept, else for a person who looks on. A log that
    cannot be written stops nothing."""
    logging.raiseExceptions = False
    handler = logging.StreamHandler()
    if form == "json":
        handler.setFormatter(JsonFormatter(role))
    elif role:
        dated = "%(asctime)s %(levelname)-7s %(name)-11s %(message)s"
        handler.setFormatter(PrintableFormatter(dated, datefmt="%Y-%m-%d %H:%M:%S"))
    else:
        handler.setFormatter(PrintableFormatter("%(asctime)s %(name)-11s %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)
