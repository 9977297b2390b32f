"""What a sandbox shows of this machine: the interpreter, its libraries, and what the caller names. All of it read-only.

Nothing of /home, /root, /etc, /run, /var or /sys is shown, except /etc/ld.so.cache, and the directories of the interpreter
and of packages if they are there.
"""

import os
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

INSIDE = "/shoal-inside.py"
"""Where the sandbox has `sandbox/init`."""

OUTSIDE = Path("/outside")
"""The folder of the sandbox that holds the paths its caller names."""

ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
}
"""All environment variables of foreign code. They are equal on every machine, because results may depend on them."""

INTERPRETER_FLAGS = ("-s", "-P", "-S", "-B")
"""No user's packages, no script's directory, no `site` (which runs .pth files), no bytecode written."""

USER = 1000
"""The user id that foreign code sees. Outside the sandbox it has another."""


class SandboxPath(NamedTuple):
    """A path of this machine, and its place in the sandbox."""

    source: Path
    place: Path


def interpreter() -> Path:
    """The real file of the running interpreter. In a virtual environment it is behind a link."""
    return Path(sys.executable).resolve()


def standard_paths() -> list[str]:
    """`sys.path` of an interpreter without packages."""
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix, "installed_base": sys.base_prefix}
    library = Path(sysconfig.get_path("stdlib", vars=base))
    compiled = Path(sysconfig.get_path("platstdlib", vars=base)) / "lib-dynload"
    return [str(library), str(compiled)]


def outside(path: Path) -> Path:
    """Where the sandbox shows a path that the caller names. It cannot keep its place, which may be in /tmp."""
    return OUTSIDE / path.absolute().relative_to("/")


def shown(extra: Iterable[Path | SandboxPath] = ()) -> list[SandboxPath]:
    """What a sandbox shows: the interpreter and libraries at their own places, and each `extra` path below `OUTSIDE`."""
    wanted = {interpreter()}
    wanted |= {Path(sys.base_prefix) / "lib", Path("/usr/lib"), Path("/usr/lib64"), Path("/usr/local/lib")}
    wanted |= {path for path in map(Path, ("/lib", "/lib64")) if path.is_dir() and not path.is_symlink()}
    wanted |= {Path("/etc/ld.so.cache")}
    if library := sysconfig.get_config_var("LIBDIR"):
        wanted.add(Path(library))
    there = sorted(path for path in wanted if path.exists())
    outer: list[Path] = []
    for path in there:
        if not any(path.is_relative_to(other) for other in outer):
            outer.append(path)
    ours = SandboxPath(Path(__file__).with_name("init.py"), Path(INSIDE))
    named = [item if isinstance(item, SandboxPath) else SandboxPath(item.absolute(), outside(item)) for item in extra]
    return [*(SandboxPath(path, path) for path in outer), *named, ours]


def links() -> list[tuple[str, str]]:
    """Links of the root directory, such as /lib to usr/lib."""
    return [(os.readlink(path), path) for path in ("/lib", "/lib64") if os.path.islink(path)]
