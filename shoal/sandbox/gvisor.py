"""The same sandbox on gVisor's kernel, which `runsc` starts from an OCI bundle.

Called by `sandbox/cell`. As with bubblewrap, the sandbox has separate process ids, no network and a read-only root.
gVisor, not this machine's kernel, handles every system call. It cannot mount in nested namespaces, so `sandbox/pool`
uses each such sandbox for one snippet only.
"""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from shoal.errors import StateError
from shoal.sandbox.groups import Group
from shoal.sandbox.layout import ENVIRONMENT, USER, Shown, links
from shoal.sandbox.limits import Limits
from shoal.sandbox.started import Started, launch

PROGRAM = "runsc"
INSTALL = "apt install runsc"
PLATFORM = "ptrace"
"""Works without /dev/kvm, and in most containers."""

_KINDS_OF_RIGHTS = ("bounding", "effective", "inheritable", "permitted", "ambient")


def start(shown: Sequence[Shown], limits: Limits, program: Sequence[str], group: Group) -> Started:
    """Raises `StateError` if `runsc` is not installed."""
    path = shutil.which(PROGRAM)
    if path is None:
        raise StateError(f"gVisor is not installed: {INSTALL}")
    folder = Path(tempfile.mkdtemp(prefix="shoal-gvisor-"))
    (folder / "bundle" / "rootfs").mkdir(parents=True)
    (folder / "bundle" / "config.json").write_text(json.dumps(bundle(shown, limits, program)))
    runsc = [path, "--root", str(folder / "state"), f"--platform={PLATFORM}", "--network=none", "--ignore-cgroups"]
    command = [*runsc, "run", "--bundle", str(folder / "bundle"), folder.name]
    process = launch({"groups": group.entries, "sources": [], "command": command, "user": None})
    return Started(process, process.pid, partial(_clean, runsc, folder))


def bundle(shown: Sequence[Shown], limits: Limits, program: Sequence[str]) -> dict[str, Any]:
    """The configuration of the container."""
    binds = [(str(source), str(place)) for source, place in shown]
    binds += [(f"/{target.lstrip('/')}", place) for target, place in links()]
    size = f"size={limits.scratch_mb}m"
    return {
        "ociVersion": "1.0.0",
        "process": {
            "user": {"uid": USER, "gid": USER},
            "args": list(program),
            "env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
            "cwd": "/tmp",
            "capabilities": {kind: [] for kind in _KINDS_OF_RIGHTS},
            "noNewPrivileges": True,
        },
        "root": {"path": "rootfs", "readonly": True},
        "hostname": "sandbox",
        "mounts": [
            *({"type": "bind", "source": s, "destination": d, "options": ["ro", "bind"]} for s, d in binds),
            {"type": "proc", "source": "proc", "destination": "/proc"},
            *({"type": "tmpfs", "source": "tmpfs", "destination": d, "options": [size]} for d in ("/tmp", "/dev/shm")),
        ],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
    }


def _clean(runsc: Sequence[str], folder: Path) -> None:
    """Remove what gVisor's two processes leave on disk. They end with the process that we started."""
    subprocess.run([*runsc, "delete", "-force", folder.name], capture_output=True, timeout=30, check=False)
    shutil.rmtree(folder, ignore_errors=True)
