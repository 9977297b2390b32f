"""Tests at start what this machine's sandbox really stops, and so what a node may run.

Each probe runs in the real sandbox. If one fails, the node runs no foreign code.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from shoal.errors import StateError
from shoal.sandbox import bubblewrap
from shoal.sandbox.cgroups import processes_of
from shoal.sandbox.limits import Ended, Limits, Outcome, Reason, Stopped
from shoal.sandbox.pool import Pool
from shoal.terminal import docs_page

LIMITS = Limits(wall_s=60.0, cpu_s=20, memory_mb=64, processes=8, scratch_mb=4, file_mb=4, output_bytes=4096)
"""Little memory, but much time: a probe takes milliseconds, and many times as long on a busy machine. Only the probe that
must be stopped has a short limit."""


class SelftestReport(NamedTuple):
    """The result of the self-test for one kind of sandbox."""

    works: bool
    """Foreign code may run here."""
    found: str
    """In one line: what was tried, or what failed."""
    remedy: str = ""
    """In one line: what would let foreign code run here. Empty if it may."""


def examine() -> SelftestReport:
    """Test the sandbox. This takes about a second, and leaves nothing behind."""
    try:
        with Pool(1, LIMITS) as pool:
            found = {name: probe(pool) for name, probe in _PROBES.items()}
    except (StateError, OSError) as error:
        return SelftestReport(False, " ".join(str(error).split())[:300], remedy(str(error)))
    failed = {name: seen for name, seen in found.items() if seen}
    if failed:
        told = ", ".join(f"{name} ({seen})" for name, seen in failed.items())
        return SelftestReport(False, f"bubblewrap starts, but does not keep its promises: {told}", _remedy_of(failed))
    return SelftestReport(True, f"{_version()}: {', '.join(_PROBES)}")


@cache
def examined() -> SelftestReport:
    """The same, once for this process."""
    return examine()


# --- the probes: each gives what was seen if the sandbox did not stop what it should, else nothing ---


def _prints(pool: Pool, source: str, wanted: str) -> str:
    outcome = pool.run(source)
    right = isinstance(outcome, Ended) and outcome.stdout.decode("utf-8", "replace").strip() == wanted
    return "" if right else _seen(outcome)


def _network(pool: Pool) -> str:
    return _prints(pool, _REFUSED.format("import socket; socket.socket(socket.AF_INET)"), "refused")


def _root(pool: Pool) -> str:
    places = ("/", "/usr/lib", str(Path(sys.base_prefix) / "lib"), "/dev", "/etc")
    seen = ((place, _prints(pool, _REFUSED.format(f"open('{place}/probe', 'w')"), "refused")) for place in places)
    return next((f"{place}: {what}" for place, what in seen if what), "")


def _processes(pool: Pool) -> str:
    """A snippet sees itself and its keeper, and no process of the host."""
    source = "import os; print(len([p for p in os.listdir('/proc') if p.isdigit()]) <= 2)"
    return _prints(pool, source, "True")


def _rights(pool: Pool) -> str:
    """A snippet has no capability and cannot get one. If root started the sandbox, its user is not root."""
    names = ("CapEff", "CapPrm", "CapBnd", "NoNewPrivs", "Seccomp")
    source = (
        f"for line in open('/proc/self/status'):\n    if line.split(':')[0] in {names}: print(int(line.split()[1], 16))"
    )
    outcome = pool.run(source)
    told = outcome.stdout.split() if isinstance(outcome, Ended) else []
    if told != [b"0", b"0", b"0", b"1", b"2"]:
        return _seen(outcome)
    owners = {os.stat(f"/proc/{pid}").st_uid for pid in processes_of(pool.peek())}
    return "it runs as root" if bubblewrap.is_root() and 0 in owners else ""


def _memory(pool: Pool) -> str:
    """One process that takes too much is stopped, and so are several that do so together."""
    alone = pool.run(f"bytearray({2 * LIMITS.memory_mb} * 10**6)")
    share = LIMITS.memory_mb * 10**6 // 3
    source = f"import os, time\nfor _ in range(6): os.fork() or (bytearray({share}), time.sleep(30))\ntime.sleep(30)"
    return _not(alone, Reason.MEMORY) or _not(pool.run(source), Reason.MEMORY)


def _forks(pool: Pool) -> str:
    source = "import os, time\nfor _ in range({}):\n    if os.fork() == 0: time.sleep(30); os._exit(0)\nprint('done')"
    if few := _prints(pool, source.format(2), "done"):
        return few
    many = 4 * LIMITS.processes
    return "" if _prints(pool, source.format(many), "done") else f"{many} processes, limit {LIMITS.processes}"


def _time(pool: Pool) -> str:
    """A process that leaves its session and ignores signals ends with the others."""
    source = "import os, signal\nsignal.signal(15, signal.SIG_IGN)\nif os.fork() == 0: os.setsid()\nwhile True: pass"
    before = processes_of(pool.peek())
    ended = pool.run(source, limits=replace(LIMITS, wall_s=0.5))
    now = processes_of(pool.peek())
    left = [pid for pid in before if Path(f"/proc/{pid}").exists() and pid not in now]
    if left or len(now) != 1:
        return "processes are left"
    return _not(ended, Reason.TIMEOUT)


def _not(outcome: Outcome, reason: Reason) -> str:
    return "" if isinstance(outcome, Stopped) and outcome.reason is reason else _seen(outcome)


def _seen(outcome: Outcome) -> str:
    """How a probe ended, in a few words."""
    if isinstance(outcome, Stopped):
        return TOO_LATE if outcome.reason is Reason.TIMEOUT else f"stopped: {outcome.reason.value}"
    said = " ".join((outcome.stdout + outcome.stderr).decode("utf-8", "replace").split())[-100:]
    return f"exit code {outcome.exit_code}, {said!r}"


_FORKS = "processes limited"
_REFUSED = "try:\n    {}\n    print('done')\nexcept OSError:\n    print('refused')"

TOO_LATE = f"it did not end within {LIMITS.wall_s:g} s"

_PROBES: dict[str, Callable[[Pool], str]] = {
    "no network": _network,
    "nothing writable": _root,
    "other processes invisible": _processes,
    "no rights": _rights,
    _FORKS: _forks,
    "memory limited": _memory,
    "time limited": _time,
}

# --- what is missing ---

_OLD_KERNEL = "install Linux 5.14 or newer (this is {})".format(os.uname().release if hasattr(os, "uname") else "none")
"""Older kernels count the processes of a user, not those of a sandbox."""

_BUSY = "this machine is too busy or too slow to try the sandbox: start again when less is running"
_PAGE = docs_page("docs/explanation/sandbox.md")
_ELSEWHERE = f"run the node on another machine; {_PAGE} lists what the sandbox needs"

_SYSCTLS = (
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
    ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
    ("user/max_user_namespaces", "0", "user.max_user_namespaces=15000"),
)
"""Files under /proc/sys, the value with which only root may make user namespaces, and the setting that lets others."""

DOCKER = "--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined"


def _remedy_of(failed: Mapping[str, str]) -> str:
    """What to change, given what was seen of the probes that failed."""
    if any(TOO_LATE in seen for seen in failed.values()):
        return _BUSY
    return _OLD_KERNEL if _FORKS in failed else _ELSEWHERE


def remedy(error: str) -> str:
    """What to change on this machine, in one line, given the sandbox's error."""
    if sys.platform != "linux":
        return "run the node on Linux: in a virtual machine, or on another computer"
    if bubblewrap.INSTALL in error and shutil.which(bubblewrap.PROGRAM) is None:
        return bubblewrap.INSTALL
    for name, value, change in _SYSCTLS:
        file = Path("/proc/sys") / name
        if file.exists() and file.read_text().strip() == value:
            return f"sudo sysctl {change}"
    if _in_container():
        return f"start the container with {DOCKER}"
    return f"allow user namespaces for this user; {_PAGE} lists what else may forbid them"


def _in_container() -> bool:
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return True
    return any(line.startswith("Seccomp:\t2") for line in Path("/proc/self/status").read_text().splitlines())


def _version() -> str:
    said = subprocess.run(
        [bubblewrap.PROGRAM, "--version"], capture_output=True, text=True, check=False, timeout=10
    ).stdout
    return " ".join(said.split()[:3])
