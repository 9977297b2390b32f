"""Tests at start what this machine's sandbox really stops, and so what a node may run.

Called by roles before they run foreign code, and by `shoal doctor`. Each probe runs in the real sandbox. If one fails,
the node runs no foreign code.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from shoal.errors import StateError
from shoal.sandbox import bubblewrap, gvisor
from shoal.sandbox.cell import Kind
from shoal.sandbox.limits import Ended, Limits, Outcome, Reason, Stopped
from shoal.sandbox.memory import processes_of
from shoal.sandbox.pool import Pool

LIMITS = Limits(wall_s=2.0, cpu_s=2, memory_mb=64, processes=8, scratch_mb=4, file_mb=4, output_bytes=4096)
"""Small, so that the self-test takes about a second and little memory."""


class Report(NamedTuple):
    """The result of the self-test for one kind of sandbox."""

    works: bool
    """Foreign code may run here."""
    found: str
    """In one line: what was tried, or what failed."""
    remedy: str = ""
    """In one line: what would let foreign code run here. Empty if it may."""


def examine(kind: Kind = Kind.BUBBLEWRAP) -> Report:
    """Test the sandbox. This takes about a second, and leaves nothing behind."""
    try:
        with Pool(1, LIMITS, kind=kind) as pool:
            failed = [name for name, probe in _PROBES.items() if not probe(pool)]
    except (StateError, OSError) as error:
        return Report(False, " ".join(str(error).split())[:300], remedy(str(error)))
    if failed:
        return Report(False, f"{kind.value} starts, but does not keep its promises: {', '.join(failed)}", _OLD_KERNEL)
    return Report(True, f"{_version(kind)}: {', '.join(_PROBES)}")


@cache
def examined() -> Report:
    """The same, once for this process."""
    return examine()


# --- the probes: each is true if the sandbox stops what it should stop ---


def _prints(pool: Pool, source: str, wanted: str) -> bool:
    outcome = pool.run(source)
    return isinstance(outcome, Ended) and outcome.stdout.decode("utf-8", "replace").strip() == wanted


def _network(pool: Pool) -> bool:
    return _prints(pool, _REFUSED.format("import socket; socket.socket(socket.AF_INET)"), "refused")


def _root(pool: Pool) -> bool:
    places = ("/", "/usr/lib", str(Path(sys.base_prefix) / "lib"), "/dev", "/etc")
    return all(_prints(pool, _REFUSED.format(f"open('{place}/probe', 'w')"), "refused") for place in places)


def _processes(pool: Pool) -> bool:
    """A snippet sees itself and its keeper; in gVisor also the zygote, but no process of the host."""
    source = "import os; print(len([p for p in os.listdir('/proc') if p.isdigit()]) <= {})"
    return _prints(pool, source.format(2 if pool.kind is Kind.BUBBLEWRAP else 5), "True")


def _rights(pool: Pool) -> bool:
    """A snippet has no capability and cannot get one. If root started the sandbox, its user is not root."""
    names = ("CapEff", "CapPrm", "CapBnd", "NoNewPrivs", "Seccomp")
    source = (
        f"for line in open('/proc/self/status'):\n    if line.split(':')[0] in {names}: print(int(line.split()[1], 16))"
    )
    outcome = pool.run(source)
    told = outcome.stdout.split() if isinstance(outcome, Ended) else []
    if pool.kind is Kind.GVISOR:  # it shows less, and starts as root to give up its rights itself
        return len(told) > 0 and told[1] == b"0"
    owners = {os.stat(f"/proc/{pid}").st_uid for pid in processes_of(pool.peek())}
    return told == [b"0", b"0", b"0", b"1", b"2"] and not (bubblewrap.is_root() and 0 in owners)


def _memory(pool: Pool) -> bool:
    """One process that takes too much is stopped, and so are several that do so together."""
    alone = pool.run(f"bytearray({2 * LIMITS.memory_mb} * 10**6)")
    share = LIMITS.memory_mb * 10**6 // 3
    source = f"import os, time\nfor _ in range(6): os.fork() or (bytearray({share}), time.sleep(9))\ntime.sleep(9)"
    return _is(alone, Reason.MEMORY) and _is(pool.run(source), Reason.MEMORY)


def _forks(pool: Pool) -> bool:
    source = "import os, time\nfor _ in range({}):\n    if os.fork() == 0: time.sleep(9); os._exit(0)\nprint('done')"
    return _prints(pool, source.format(2), "done") and not _prints(pool, source.format(4 * LIMITS.processes), "done")


def _time(pool: Pool) -> bool:
    """A process that leaves its session and ignores signals ends with the others."""
    source = "import os, signal\nsignal.signal(15, signal.SIG_IGN)\nif os.fork() == 0: os.setsid()\nwhile True: pass"
    before = processes_of(pool.peek())
    ended = pool.run(source, limits=replace(LIMITS, wall_s=0.5))
    left = [pid for pid in before if Path(f"/proc/{pid}").exists() and pid not in processes_of(pool.peek())]
    return _is(ended, Reason.TIMEOUT) and not left and (pool.kind is Kind.GVISOR or len(processes_of(pool.peek())) == 1)


def _is(outcome: Outcome, reason: Reason) -> bool:
    return isinstance(outcome, Stopped) and outcome.reason is reason


_REFUSED = "try:\n    {}\n    print('done')\nexcept OSError:\n    print('refused')"

_PROBES: dict[str, Callable[[Pool], bool]] = {
    "no network": _network,
    "nothing writable": _root,
    "other processes invisible": _processes,
    "no rights": _rights,
    "processes limited": _forks,
    "memory limited": _memory,
    "time limited": _time,
}

# --- what is missing ---

_OLD_KERNEL = "install Linux 5.14 or newer (this is {})".format(os.uname().release if hasattr(os, "uname") else "none")

_SYSCTLS = (
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
    ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
    ("user/max_user_namespaces", "0", "user.max_user_namespaces=15000"),
)
"""Files under /proc/sys, the value with which only root may make user namespaces, and the setting that lets others."""

DOCKER = "--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined"


def remedy(error: str) -> str:
    """What to change on this machine, in one line, given the sandbox's error."""
    if sys.platform != "linux":
        return "run the node on Linux: in a virtual machine, or on another computer"
    for program, install in ((bubblewrap.PROGRAM, bubblewrap.INSTALL), (gvisor.PROGRAM, gvisor.INSTALL)):
        if install in error and shutil.which(program) is None:
            return install
    for name, value, change in _SYSCTLS:
        file = Path("/proc/sys") / name
        if file.exists() and file.read_text().strip() == value:
            return f"sudo sysctl {change}"
    if _in_container():
        return f"start the container with {DOCKER}"
    return "allow user namespaces for this user; docs/explanation/sandbox.md lists what else may forbid them"


def _in_container() -> bool:
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return True
    return any(line.startswith("Seccomp:\t2") for line in Path("/proc/self/status").read_text().splitlines())


def _version(kind: Kind) -> str:
    program = bubblewrap.PROGRAM if kind is Kind.BUBBLEWRAP else gvisor.PROGRAM
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=10).stdout
    return " ".join(said.split()[:3])
