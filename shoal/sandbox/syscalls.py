"""Numbers of the system calls that the filter names, for each architecture that it knows.

Read by `sandbox/filter`. A call that is in neither table is refused. The numbers are the kernel's, and never change.
"""

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
