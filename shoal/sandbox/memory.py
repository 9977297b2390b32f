"""How much memory a tree of processes takes, seen from outside.

Called by `sandbox/cell` every few milliseconds, so it first adds up what is cheap to read. That sum counts pages that a
fork shares twice. If it exceeds the limit, the kernel is asked for the share of each process.
"""

import contextlib
import resource
from pathlib import Path

_PAGE = resource.getpagesize()


def exceeds(root: int, most_bytes: int) -> bool:
    """Whether the process and its descendants take more than this."""
    tree = _tree(root)
    if sum(_resident(pid) for pid in tree) <= most_bytes:
        return False
    return sum(_share(pid) for pid in tree) > most_bytes


def taken_bytes(root: int) -> int:
    """Memory of the process and its descendants."""
    return sum(_share(pid) for pid in _tree(root))


def processes_of(root: int) -> list[int]:
    """The process and its descendants, as this machine numbers them."""
    return _tree(root)


def _tree(root: int) -> list[int]:
    """Each thread lists the children that it forked."""
    tree = [root]
    for pid in tree:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                tree += map(int, (thread / "children").read_text().split())
    return tree


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return 0


def _share(pid: int) -> int:
    """Its own pages, and its part of those that it shares. If the kernel does not tell, all pages that it uses."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return _resident(pid)
