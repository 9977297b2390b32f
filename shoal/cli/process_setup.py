"""The process of a command: its CPU cores, its logging, and whether torch is installed."""

import logging
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from shoal.errors import ShoalError, no_torch
from shoal.launch.log_rotation import formatter, named_log


def cores() -> int:
    return os.cpu_count() or 1


def demand_torch() -> None:
    """Raises `ShoalError` on a machine without torch, before anything is sent or written."""
    if find_spec("torch") is None:
        raise ShoalError(no_torch())


def log_to_stderr(role: str = "", form: Literal["text", "json"] = "text", into: Path | None = None) -> None:
    """Log to standard error: of a `role` of a run into its file, which is kept, else for a person who looks on. A log that
    cannot be written stops nothing. `into`: also into this file, with `role` as who writes. Raises `ConfigError`."""
    logging.raiseExceptions = False
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(role if into is None else "", form))
    handlers = [handler] if into is None else [handler, named_log(into, role)]
    logging.basicConfig(level=logging.INFO, handlers=handlers)
    logging.getLogger("httpx").setLevel(logging.WARNING)
