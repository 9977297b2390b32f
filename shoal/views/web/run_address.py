"""How a page names the place where a run is read: to its host the folder, to others a URL that they can use.

The path of a folder tells about the host's machine, and nobody else can use it.
"""

import contextlib
import re
from pathlib import Path, PurePath

from shoal.config import is_loopback
from shoal.errors import ShoalError
from shoal.net.server_process import local_url
from shoal.run_folder import RunFolder, is_url

ANY_PLACE = "RUN_FOLDER_OR_URL"
"""In a command, for viewers to whom no address of the run is known."""

_PLAIN_URL = re.compile(r"https?://[A-Za-z0-9.:\[\]_-]+(/[A-Za-z0-9._~/-]*)?")
_PATH = re.compile(r"(?<![\w.:/-])(?:/[^\s/:;,'\"()]+)+/?")


def is_folder(where: str) -> bool:
    """Whether it is a folder of this machine, and no URL."""
    return not is_url(where)


def address_for_others(where: str) -> str:
    """The URL that others know of a run; "" if there is none. Of a folder its run file says it, or where its coordinator
    listens, unless that is this machine's own or every address."""
    if not is_folder(where):
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
