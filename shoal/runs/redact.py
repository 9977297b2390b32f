"""What others than its host learn of a run: alarms without nodes and figures, words without paths, a URL for the folder.

The path of a folder tells about the host's machine, and nobody else can use it.
"""

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any

from msgspec.structs import replace

from shoal.alarms import Alarm, AlarmLine
from shoal.config import is_loopback
from shoal.config.alarm_limits import said_of
from shoal.errors import ShoalError
from shoal.net.server_address import local_url
from shoal.protocol.messages import StandingAlarm
from shoal.run_folder import RunFolder, is_url

MAX_DEPTH = 20
"""Of a run file, which may be a stranger's."""

_PLAIN_URL = re.compile(r"https?://[A-Za-z0-9.:\[\]_-]+(/[A-Za-z0-9._~/-]*)?")
_PATH = re.compile(r"(?<![\w.:/-])(?:/[^\s/:;,'\"()]+)+/?")


def alarm_of(told: StandingAlarm) -> Alarm:
    """An alarm that a coordinator tells anyone, with the general sentence of its cause."""
    return Alarm(told.cause, told.severity, told.since, told.since, said_of(told.cause), "")


def public_alarms(lines: Iterable[AlarmLine]) -> list[AlarmLine]:
    """The same of the lines of an alarms file: one for each cause and step."""
    told = dict[tuple[str, str, int], AlarmLine]()
    for line in lines:
        alarm = replace(line.alarm, node="", summary=said_of(line.alarm.cause), remedy="", measured=())
        told.setdefault((line.change, alarm.cause, alarm.since), replace(line, alarm=alarm))
    return list(told.values())


def public_url(where: str) -> str:
    """The URL that others know of a run; "" if there is none. Of a folder its run file says it, or where its coordinator
    listens, unless that is this machine's own or every address."""
    if is_url(where):
        return where
    folder = RunFolder(Path(where))
    with contextlib.suppress(ShoalError, OSError, ValueError):
        host = folder.config().host
        reached = "" if host.bind in ("", "0.0.0.0", "::") or is_loopback(host.bind) else host.bind
        url = host.public_url or (local_url(folder.address, reached) if reached else "")
        return url if _PLAIN_URL.fullmatch(url) else ""
    return ""


def without_paths(words: str, where: str = "") -> str:
    """An error's words with the last part only of each path on this machine, and nothing of where a run's folder is."""
    if where:
        folder = Path(where)
        for path in sorted({where, str(folder), str(folder.absolute()), str(folder.resolve())}, key=len, reverse=True):
            if "/" in path:
                words = words.replace(path, "RUN_FOLDER")
    return _PATH.sub(lambda found: f"…/{PurePath(found[0]).name}", words)


def without_folders(tree: Any, depth: int = 0) -> Any:
    """A run file whose absolute paths have their last part only."""
    if depth > MAX_DEPTH:
        return "…"
    if isinstance(tree, dict):
        return {key: without_folders(value, depth + 1) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [without_folders(value, depth + 1) for value in tree]
    return f"…/{PurePath(tree).name}" if isinstance(tree, str) and tree.startswith("/") else tree  # guard: report-paths
