"""How much of its quota the blobs of a run take, as the coordinator's `GET /metrics` has it.

A folder is measured; a URL does not tell.
"""

from shoal.run_folder import held_below
from shoal.watch.reading.replay import RunReader
from shoal.watch.reading.source import FolderSource

EVERY_S = 60.0
"""How often a folder with blobs is measured: there may be 100,000 files."""


class Quota:
    """The figures as they were measured last."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}
        self._at = -EVERY_S

    def of(self, reading: RunReader, now: float) -> dict[str, int]:
        """`blob_bytes` and, if the log names the quota, `quota_bytes`; nothing of a URL."""
        source = reading.source
        if isinstance(source, FolderSource) and (not self._told.get("blob_bytes") or abs(now - self._at) >= EVERY_S):
            self._at = now
            storage = reading.state.config.get("storage", {})
            quota_mb = storage.get("quota_mb", 0) if isinstance(storage, dict) else 0
            quota = {"quota_bytes": quota_mb * 1_000_000} if isinstance(quota_mb, int) and quota_mb > 0 else {}
            self._told = {"blob_bytes": held_below(source.folder.blobs), **quota}
        return self._told
