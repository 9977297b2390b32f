"""How much disk the versions of somebody else's run may take.

Beside the versions that are kept there is one that is being made, from a copy of the weights before and from patches, which
may take as much as a version. A manifest may repeat one chunk many times, so what is downloaded does not bound what is
written. It does not deal with runs.
"""

from pathlib import Path

from shoal.run_folder import free_below, held_below


def room_for_version(limit_bytes: int, keep: int) -> int:
    """Bytes that one version may have, so that `keep` versions and one that is being made with its patches stay within the
    limit."""
    return max(0, limit_bytes) // (keep + 2)


def disk_limit(folder: Path, max_disk_mb: int = 0) -> int:
    """Bytes that a node may take: `max_disk_mb`; if it is 0, half of what is free or taken by the versions in `folder`."""
    if max_disk_mb:
        return max_disk_mb * 1_000_000
    return (free_below(folder) + held_below(folder)) // 2
