"""The filter of system calls: a small assembler for the kernel's BPF, and the two lists of allowed calls.

Called by `sandbox/cell`. The filter is an allow-list, so it refuses calls that later kernels add. Bubblewrap loads its
bytes for the first process, and `sandbox/inside` for each snippet.
"""

import errno
import platform
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shoal.errors import StateError
from shoal.sandbox.syscalls import ARCHITECTURES, ARGUED, FREE, HIGHEST, X32_BIT

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
"""BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_JMP|JSET|K, BPF_RET|K."""

_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
"""SECCOMP_RET_ALLOW, SECCOMP_RET_KILL_PROCESS, and SECCOMP_RET_ERRNO, to which the error is added."""

_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Where the parts of a call are in `struct seccomp_data`."""

_UNIX = 1
"""AF_UNIX: sockets within one machine. The host's cannot be reached, because mounts and network namespace are new."""

_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""

_CLONE_TRACED = 0x2000
"""CLONE_PTRACE."""

_NESTED = 0x10000000 | 0x20000000 | 0x00020000
"""CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS: what `sandbox/inside` gives each snippet."""

_MOUNTS = (0x2 | 0x4, 0x2 | 0x4 | 0x8)
"""MS_NOSUID | MS_NODEV, and the same with MS_NOEXEC: they mount a new file system, and cannot bind or move a mount."""

_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX and FIOCLEX. TIOCSTI is left out: it types into a terminal."""

_PRCTLS = (1, 2, 3, 4, 15, 16, 21, 23, 30, 36, 37, 38, 39, 40, 41, 0x53564D41)
"""PDEATHSIG, DUMPABLE, NAME, GET_SECCOMP, CAPBSET_READ, GET_TIMERSLACK, CHILD_SUBREAPER, NO_NEW_PRIVS, GET_TID_ADDRESS,
SET_THP_DISABLE and SET_VMA."""

_PRCTLS_OF_ZYGOTE = (22, 24, 47)
"""SET_SECCOMP, CAPBSET_DROP and CAP_AMBIENT: they only take rights away."""

_FCNTLS = (*range(10), 11, 36, 37, 38, *range(1030, 1035))
"""F_DUPFD to F_GETOWN, F_GETSIG, locks, pipe sizes and seals. F_SETLEASE is left out: a lease on a file makes
the node wait for up to 45 s when it opens that file to write."""

_SOL_SOCKET, _SOCKET_OPTIONS = 1, (2, 7, 8, 9, 13, 16, 20, 21)
"""REUSEADDR, SNDBUF, RCVBUF, KEEPALIVE, LINGER, PASSCRED, RCVTIMEO and SNDTIMEO. Those that attach BPF are left out."""

_QUERY = 0xFFFFFFFF
"""The argument of personality that changes nothing."""


class Instruction(NamedTuple):
    """One BPF instruction: `struct sock_filter`."""

    code: int
    if_true: int
    if_false: int
    k: int


def snippet_filter(machine: str = "") -> bytes:
    """What a foreign program may call. Raises `StateError` on an architecture that we have no table for."""
    return _filter(machine or platform.machine(), zygote=False)


def zygote_filter(machine: str = "") -> bytes:
    """The same, plus the calls that isolate a snippet: new namespaces with one set of flags, and new file systems."""
    return _filter(machine or platform.machine(), zygote=True)


def _filter(machine: str, zygote: bool) -> bytes:
    if machine not in ARCHITECTURES:
        raise StateError(f"no sandbox on {machine}: system calls are known only for {', '.join(ARCHITECTURES)}")
    architecture, column = ARCHITECTURES[machine]
    numbers = {name: row[column] for name, row in (FREE | ARGUED).items() if row[column] >= 0}
    program = [
        Instruction(_LOAD, 0, 0, _ARCHITECTURE),
        Instruction(_EQUAL, 1, 0, architecture),
        _end(_KILL),  # guard: foreign-architectures-are-killed
        Instruction(_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        program += [Instruction(_AT_LEAST, 0, 1, X32_BIT), _end(_KILL)]
    program += [Instruction(_AT_LEAST, 0, 1, HIGHEST + 1), _error(errno.ENOSYS)]
    for name in FREE:
        if name in numbers:
            program += _case(numbers[name], [_end(_ALLOW)])
    for name, body in _argued(zygote).items():
        program += _case(numbers[name], body)
    program.append(_error(errno.EPERM))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _argued(zygote: bool) -> dict[str, list[Instruction]]:
    """The instructions that decide each call of `ARGUED`."""
    refused = [_error(errno.EPERM)]
    return {
        "socket": _one_of(0, [_UNIX], errno.EAFNOSUPPORT),  # guard: no-sockets-but-unix
        "socketpair": _one_of(0, (_UNIX,), errno.EAFNOSUPPORT),
        "setsockopt": _is(1, _SOL_SOCKET) + _one_of(2, _SOCKET_OPTIONS),
        "ioctl": _one_of(1, _IOCTLS, errno.ENOTTY),
        "clone": _none_of(0, _NEW_NAMESPACES | _CLONE_TRACED),  # guard: no-namespaces-by-clone
        "clone3": [
            _error(errno.ENOSYS)
        ],  # its flags are in memory, which a filter cannot read; libraries then use clone
        "fcntl": _one_of(1, _FCNTLS),  # guard: no-leases
        "prctl": _one_of(0, _PRCTLS + (_PRCTLS_OF_ZYGOTE if zygote else ())),
        "prlimit64": _one_of(0, [0]),  # itself
        "personality": _one_of(0, [0, _QUERY]),
        "unshare": _one_of(0, [_NESTED]) if zygote else refused,  # guard: no-namespaces-by-unshare
        "mount": _one_of(3, _MOUNTS) if zygote else refused,
        "capset": [_end(_ALLOW)] if zygote else refused,
    }


# --- the assembler: each body ends in a return, whatever the arguments are ---


def _case(number: int, body: Sequence[Instruction]) -> list[Instruction]:
    """The body, if this is the call's number."""
    return [Instruction(_EQUAL, 0, len(body), number), *body]


def _one_of(argument: int, values: Iterable[int], otherwise: int = errno.EPERM) -> list[Instruction]:
    body = [_load(argument)]
    for value in values:
        body += [Instruction(_EQUAL, 0, 1, value), _end(_ALLOW)]
    return [*body, _error(otherwise)]


def _is(argument: int, value: int) -> list[Instruction]:
    """Go on to the next instruction if the argument has this value, else refuse the call."""
    return [_load(argument), Instruction(_EQUAL, 1, 0, value), _error(errno.EPERM)]


def _none_of(argument: int, bits: int) -> list[Instruction]:
    return [_load(argument), Instruction(_ANY_BIT, 0, 1, bits), _error(errno.EPERM), _end(_ALLOW)]


def _load(argument: int) -> Instruction:
    """Load the low half of an argument. The kernel, too, uses only that half of the arguments compared here."""
    return Instruction(_LOAD, 0, 0, _ARGUMENTS + 8 * argument)


def _error(number: int) -> Instruction:
    return _end(_FAIL | number)


def _end(what: int) -> Instruction:
    return Instruction(_RETURN, 0, 0, what)
