"""The seccomp filter: system calls that a program in the sandbox may make."""

import errno
import platform
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shoal.errors import StateError

# --- Numbers of the system calls that the filter names, for each architecture that it knows ---
#
# A call that is in neither table is refused. The numbers are the kernel's, and never change.


ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""For each machine (`uname -m`), what the kernel calls it (AUDIT_ARCH_x), and its column in the tables below."""

X32_BIT = 0x40000000
"""Marks calls of the x32 ABI, which has the same architecture as x86_64 but other numbers."""

HIGHEST = 462
"""The highest number when this table was written. Higher ones get "no such call", which libraries are prepared for."""

# fmt: off
FREE = {
    # files
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "preadv": (295, 69), "pwritev": (296, 70), "preadv2": (327, 286),
    "pwritev2": (328, 287), "open": (2, -1), "openat": (257, 56), "creat": (85, -1), "close": (3, 57),
    "close_range": (436, 436), "stat": (4, -1), "lstat": (6, -1), "fstat": (5, 80), "newfstatat": (262, 79),
    "statx": (332, 291), "access": (21, -1), "faccessat": (269, 48), "faccessat2": (439, 439), "lseek": (8, 62),
    "flock": (73, 32), "fsync": (74, 82), "fdatasync": (75, 83), "sync_file_range": (277, 84),
    "truncate": (76, 45), "ftruncate": (77, 46), "fallocate": (285, 47), "fadvise64": (221, 223),
    "readahead": (187, 213), "getdents": (78, -1), "getdents64": (217, 61), "getcwd": (79, 17),
    "chdir": (80, 49), "fchdir": (81, 50), "mkdir": (83, -1), "mkdirat": (258, 34), "rmdir": (84, -1),
    "rename": (82, -1), "renameat": (264, 38), "renameat2": (316, 276), "link": (86, -1), "linkat": (265, 37),
    "unlink": (87, -1), "unlinkat": (263, 35), "symlink": (88, -1), "symlinkat": (266, 36), "readlink": (89, -1),
    "readlinkat": (267, 78), "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53),
    "fchmodat2": (452, 452), "chown": (92, -1), "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54),
    "umask": (95, 166), "statfs": (137, 43), "fstatfs": (138, 44), "utime": (132, -1), "utimes": (235, -1),
    "futimesat": (261, -1), "utimensat": (280, 88), "sendfile": (40, 71), "copy_file_range": (326, 285),
    "getxattr": (191, 8), "lgetxattr": (192, 9), "fgetxattr": (193, 10), "listxattr": (194, 11),
    "llistxattr": (195, 12), "flistxattr": (196, 13),
    # descriptors
    "dup": (32, 23), "dup2": (33, -1), "dup3": (292, 24), "pipe": (22, -1), "pipe2": (293, 59), "poll": (7, -1),
    "ppoll": (271, 73), "select": (23, -1), "pselect6": (270, 72), "epoll_create": (213, -1),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, -1), "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441), "eventfd": (284, -1), "eventfd2": (290, 19), "signalfd": (282, -1),
    "signalfd4": (289, 74), "timerfd_create": (283, 85), "timerfd_settime": (286, 86),
    "timerfd_gettime": (287, 87),
    # memory
    "brk": (12, 214), "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216),
    "madvise": (28, 233), "msync": (26, 227), "mincore": (27, 232), "membarrier": (324, 283),
    # signals
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "rt_sigqueueinfo": (129, 138),
    "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "kill": (62, 129), "tkill": (200, 130),
    "tgkill": (234, 131), "pause": (34, -1), "alarm": (37, -1), "getitimer": (36, 102), "setitimer": (38, 103),
    "timer_create": (222, 107), "timer_settime": (223, 110), "timer_gettime": (224, 108),
    "timer_getoverrun": (225, 109), "timer_delete": (226, 111), "restart_syscall": (219, 128),
    # processes
    "fork": (57, -1), "vfork": (58, -1), "execve": (59, 221), "exit": (60, 93), "exit_group": (231, 94),
    "wait4": (61, 260), "waitid": (247, 95), "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178),
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "getresuid": (118, 148), "getresgid": (120, 150), "getgroups": (115, 158), "setpgid": (109, 154),
    "getpgid": (121, 155), "getpgrp": (111, -1), "setsid": (112, 157), "getsid": (124, 156),
    "set_tid_address": (218, 96), "set_robust_list": (273, 99), "get_robust_list": (274, 100),
    "futex": (202, 98), "futex_waitv": (449, 449), "rseq": (334, 293), "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123), "sched_setaffinity": (203, 122), "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120), "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126),
    "getpriority": (140, 141), "setpriority": (141, 140), "getrlimit": (97, 163), "setrlimit": (160, 164),
    "getrusage": (98, 165), "times": (100, 153), "arch_prctl": (158, -1), "uname": (63, 160),
    "sysinfo": (99, 179), "capget": (125, 90), "getcpu": (309, 168),
    # time
    "time": (201, -1), "gettimeofday": (96, 169), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "nanosleep": (35, 101),
    # sockets
    "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202), "accept4": (288, 242),
    "getsockname": (51, 204), "getpeername": (52, 205), "getsockopt": (55, 209), "sendto": (44, 206),
    "recvfrom": (45, 207), "sendmsg": (46, 211), "recvmsg": (47, 212), "sendmmsg": (307, 269),
    "recvmmsg": (299, 243), "shutdown": (48, 210),
    # randomness
    "getrandom": (318, 278),
}
"""Calls that a program may make with any arguments: (x86_64, aarch64), -1 where there is no such call.

They work on the process's own memory, time and descriptors, and on files that the mounts let it reach. These are left
out: calls that reach other processes (ptrace, process_vm_writev, pidfd_getfd), keys, BPF, performance counters,
io_uring, userfaultfd, mounts, namespaces, modules, clocks, raw devices, System V and POSIX queues and shared memory
(they would outlive a snippet), memfd_create (no limit counts its memory), splice and vmsplice (after a fault of the
kernel they could write into pages of others).
"""

ARGUED = {
    "socket": (41, 198), "socketpair": (53, 199), "setsockopt": (54, 208), "ioctl": (16, 29), "clone": (56, 220),
    "prctl": (157, 167), "prlimit64": (302, 261), "personality": (135, 92), "unshare": (272, 97), "capset": (126, 91),
    "mount": (165, 40), "clone3": (435, 435), "fcntl": (72, 25),
}
"""Calls that are allowed with some arguments only."""
# fmt: on


# --- The filter of system calls ---
#
# A small assembler for the kernel's BPF, and the two lists of allowed calls.
#
# The filter is an allow-list, so it refuses calls that later kernels add. Bubblewrap loads its bytes for the first
# process, and `sandbox/init` for each snippet.


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
"""CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS: what `sandbox/init` gives each snippet."""

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
