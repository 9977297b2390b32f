"""What anyone may fetch: chunks and manifests of published versions, in a folder of its own that the origin serves.

The folder holds a hard link to each blob, so nothing is stored twice, and another process or web server can serve it
without asking who may read what.
"""

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from shoal.config import HostConfig
from shoal.errors import cause_of
from shoal.net.blobs import FolderBlobs, path_of
from shoal.net.server_process import port_of_living

log = logging.getLogger("coordinator")


class PublicBlobs:
    """The names of blobs that anyone may read, each with a link in `folder` if it is here."""

    def __init__(self, folder: Path, blobs: FolderBlobs) -> None:
        self.folder, self._blobs = folder, blobs
        self._names = set[str]()
        self._is_told = False

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def show(self, names: Iterable[str]) -> None:
        """Let anyone read these blobs."""
        for name in set(names) - self._names:
            self._names.add(name)
            self._link(name)

    def again(self, name: str) -> None:
        """A blob was stored again: anyone reads it as it is now. A link would still lead to the bytes before."""
        if name in self._names:
            self._link(name)

    def hide(self, name: str) -> None:
        """Take a blob back before it is deleted."""
        if name in self._names:
            self._names.discard(name)
            path_of(self.folder, name).unlink(missing_ok=True)

    def hide_others(self) -> None:
        """Delete links to what is not public any more: a kill left them."""
        for path in self.folder.glob("[0-9a-f][0-9a-f]/*"):
            if path.name not in self._names:
                path.unlink()  # guard: left-links

    def _link(self, name: str) -> None:
        link, stored = path_of(self.folder, name), self._blobs.path_of(name)
        try:
            if link.exists() and os.path.samefile(link, stored):
                return
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)  # of a blob that was stored again
            os.link(stored, link)
        except FileNotFoundError:
            return  # the blob is not here: the coordinator answers so, too
        except OSError as error:
            if not self._is_told:
                log.warning("the origin lacks blobs, and the coordinator serves them itself: %s", cause_of(error))
            self._is_told = True


def origin_of(host: HostConfig, address: Path) -> str:
    """Where clients fetch chunks: a URL, or ":PORT/PATH" of the host that they call. Empty: from the coordinator.

    `address` is the file in which the origin says where it is. Behind a proxy only the run file can say it.
    """
    if host.origin_url or host.public_url:
        return host.origin_url
    port = port_of_living(address)
    return f":{port}/v1/blobs" if port else ""
