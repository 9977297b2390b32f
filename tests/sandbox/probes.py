# ruff: noqa: E501  a snippet is one string
"""Sixty and more attempts to leave a sandbox or to exhaust the machine, in twelve classes of at least five.

Each is a snippet that prints ESCAPED if it got what it wants. `tests/sandbox/test_probes.py` runs them in a real sandbox and looks
at the machine afterwards, because a snippet may succeed without knowing. Those marked `bare` are also run without a sandbox, where
they must succeed: else they would prove nothing.
"""

from typing import NamedTuple

from shoal.sandbox.limits import Limits

SMALL = Limits(wall_s=4.0, cpu_s=4, memory_mb=64, processes=8, file_mb=4, scratch_mb=8, output_bytes=20_000)
SHORT_S = 0.6
"""Wall time of probes that wait until they are stopped."""


class Probe(NamedTuple):
    """One attempt. The test replaces words such as <secret> with things of the host."""

    kind: str
    name: str
    source: str
    then: str = ""
    """A snippet that runs after it, in the same place of the pool, and prints ESCAPED if it finds something."""
    ends: str = ""
    """How it must end: ended, timeout, memory, or any of them if empty."""
    bare: bool = False
    short: bool = False
    """Whether it runs until it is stopped."""


LIBC = """
import ctypes, os, platform, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"
def call(x86, arm, *args):
    return libc.syscall(ctypes.c_long(x86 if X86 else arm), *args)
def escaped(what=""): print("ESCAPED", what, flush=True)
def tried(attempt):
    try:
        if attempt() is not False: escaped()
    except (OSError, KeyError, ValueError) as error: print("refused", error)
"""
"""What all of them begin with."""


def _files() -> list[Probe]:
    return [
        Probe("files", "read a file of the host", "tried(lambda: open('<secret>').read())", bare=True),
        Probe("files", "read the users", "tried(lambda: open('/etc/passwd').read())", bare=True),
        Probe(
            "files", "leave by a link",
            "os.symlink('<secret>', '/tmp/link-<number>')\ntried(lambda: open('/tmp/link-<number>').read())", bare=True,
        ),
        Probe("files", "leave by the root of another process",
              "for pid in (1, os.getppid(), <victim>): tried(lambda: open(f'/proc/{pid}/root<secret>').read())", bare=True),
        Probe("files", "leave by an inherited descriptor", """
for number in range(3, 256):
    try: os.fstat(number)
    except OSError: continue
    escaped(number)
"""),
        Probe("files", "change the interpreter", """
import json
for place in (json.__file__, os.path.dirname(json.__file__) + "/new", "/new", "/usr/lib/new", "/etc/new", "/dev/new"):
    tried(lambda: os.close(os.open(place, os.O_WRONLY | os.O_CREAT)))
"""),
        Probe("files", "hold up who writes to a file", """
import fcntl
held = os.open('/tmp/leased-<number>', os.O_RDWR | os.O_CREAT)
for command in (1024, 1026): tried(lambda: fcntl.fcntl(held, command, 1) == 0)
"""),
        Probe("files", "leave by chroot", """
os.mkdir('/tmp/cage')
held = os.open('/', os.O_RDONLY)
if libc.chroot(b'/tmp/cage') == 0:
    os.fchdir(held)
    for _ in range(9): os.chdir('..')
    libc.chroot(b'.')
    tried(lambda: open('<secret>').read())
"""),
    ]  # fmt: skip


def _secrets() -> list[Probe]:
    return [
        Probe("secrets", "own environment", "tried(lambda: os.environ['SHOAL_SECRET'])", bare=True),
        Probe("secrets", "environment of others", """
for pid in [p for p in os.listdir('/proc') if p.isdigit()]:
    try:
        if b'SHOAL_SECRET' in open(f'/proc/{pid}/environ', 'rb').read(): escaped(pid)
    except OSError: pass
""", bare=True),
        Probe("secrets", "command lines of the host", """
for pid in [p for p in os.listdir('/proc') if p.isdigit()]:
    try:
        if b'pytest' in open(f'/proc/{pid}/cmdline', 'rb').read(): escaped(pid)
    except OSError: pass
""", bare=True),
        Probe("secrets", "keys of users", """
for place in ('/root/.ssh', '/root/.shoal', '/home', '/var', '/run', '/etc/ssh', '/etc/shadow', '/root/.bash_history'):
    if os.path.exists(place): escaped(place)
""", bare=True),
        Probe("secrets", "kernel and hardware", """
for place in ('/sys', '/proc/cmdline', '/proc/keys', '/proc/kallsyms', '/proc/config.gz', '/proc/kcore', '/proc/sys'):
    if os.path.exists(place): escaped(place)
""", bare=True),
        Probe("secrets", "keyrings of the kernel",
              "tried(lambda: call(250, 219, 0, ctypes.c_long(-3), 1) >= 0)\ntried(lambda: call(248, 217, b'user', b'a', b'b', 1, -3) >= 0)"),
    ]  # fmt: skip


def _network() -> list[Probe]:
    return [
        Probe("network", "tcp", "tried(lambda: socket.create_connection(('127.0.0.1', <tcp>), 2))", bare=True),
        Probe("network", "udp", "tried(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', <udp>)))",
              bare=True),
        Probe("network", "tcp over IPv6", "tried(lambda: socket.socket(socket.AF_INET6))", bare=True),
        Probe("network", "a socket file of the host", "tried(lambda: socket.socket(socket.AF_UNIX).connect('<unix>'))", bare=True),
        Probe("network", "an abstract socket of the host",
              "tried(lambda: socket.socket(socket.AF_UNIX).connect('\\0<abstract>'))", bare=True),
        Probe("network", "names", "tried(lambda: socket.getaddrinfo('localhost', 80) and socket.socket(socket.AF_INET))", bare=True),
        Probe("network", "raw, packet and netlink", """
for family, kind in ((socket.AF_INET, socket.SOCK_RAW), (socket.AF_PACKET, socket.SOCK_RAW), (socket.AF_NETLINK, socket.SOCK_RAW),
                     (socket.AF_ALG, socket.SOCK_SEQPACKET), (40, socket.SOCK_STREAM)):
    tried(lambda: socket.socket(family, kind))
"""),
    ]  # fmt: skip


def _processes() -> list[Probe]:
    return [
        Probe("processes", "see others", "if len([p for p in os.listdir('/proc') if p.isdigit()]) > 2: escaped()", bare=True),
        Probe("processes", "kill one of the host", "tried(lambda: os.kill(<victim>, 9))"),
        Probe("processes", "kill all", "for number in range(1, 65): tried(lambda: bool(os.kill(1, number)))\ntried(lambda: os.kill(-1, 9))", ends="ended"),
        Probe("processes", "kill the own group", "os.kill(0, 9)"),
        Probe("processes", "trace", "for pid in (1, <victim>): tried(lambda: call(101, 117, 16, pid, 0, 0) == 0)"),
        Probe("processes", "read and write memory", """
for pid in (1, <victim>):
    for how in ('rb', 'r+b'): tried(lambda: open(f'/proc/{pid}/mem', how))
    tried(lambda: open(f'/proc/{pid}/maps').read())
class Piece(ctypes.Structure): _fields_ = [('base', ctypes.c_void_p), ('size', ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(8)
piece = Piece(ctypes.addressof(buffer), 8)
for pid in (1, os.getpid()): tried(lambda: call(310, 270, pid, ctypes.byref(piece), 1, ctypes.byref(piece), 1, 0) >= 0)
"""),
        Probe("processes", "take descriptors", """
tried(lambda: call(434, 434, 1, 0) >= 0)
tried(lambda: call(438, 438, 3, 0, 0) >= 0)
tried(lambda: os.listdir('/proc/1/fd'))
"""),
        Probe("processes", "limit the keeper", "import resource\ntried(lambda: resource.prlimit(1, resource.RLIMIT_CPU, (0, 0)))"),
    ]  # fmt: skip


def _privilege() -> list[Probe]:
    return [
        Probe("privilege", "become root", "tried(lambda: os.setuid(0))\ntried(lambda: os.setresuid(0, 0, 0))\ntried(lambda: os.setgroups([0]))"),
        Probe("privilege", "a new user namespace", """
for flags in (0x10000000, 0x10000000 | 0x20000000 | 0x20000, 0x40000000, 0x20000):
    tried(lambda: libc.unshare(flags) == 0)
    tried(lambda: call(56, 220, flags | 17, 0, 0, 0, 0) >= 0)
"""),
        Probe("privilege", "a namespace by clone3", """
arguments = (ctypes.c_uint64 * 11)(0x10000000, 0, 0, 0, 17)
pid = call(435, 435, ctypes.byref(arguments), 88)
if pid == 0: os._exit(0)
if pid > 0: escaped()
"""),
        Probe("privilege", "enter a namespace", """
for name in ('user', 'mnt', 'net', 'pid'):
    tried(lambda: libc.setns(os.open(f'/proc/self/ns/{name}', os.O_RDONLY), 0) == 0)
"""),
        Probe("privilege", "mount", """
tried(lambda: libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 6, b'') == 0)
tried(lambda: libc.mount(b'/', b'/tmp', None, 0x1000, None) == 0)
tried(lambda: libc.umount2(b'/proc', 2) == 0)
tried(lambda: libc.pivot_root(b'/tmp', b'/tmp') == 0 if hasattr(libc, 'pivot_root') else False)
tried(lambda: call(428, 428, -100, b'/', 1) >= 0)
tried(lambda: call(430, 430, b'tmpfs', 0) >= 0)
"""),
        Probe("privilege", "capabilities", """
header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6)
tried(lambda: libc.capset(header, data) == 0)
for line in open('/proc/self/status'):
    if line.startswith(('CapEff', 'CapPrm', 'CapBnd', 'CapAmb')) and int(line.split()[1], 16): escaped(line)
"""),
        Probe("privilege", "a set-user-id file, and devices", """
import stat
open('/tmp/own', 'w').close()
os.chmod('/tmp/own', 0o4755)
if not os.statvfs('/tmp').f_flag & os.ST_NOSUID: escaped()
tried(lambda: os.mknod('/tmp/disk', stat.S_IFBLK | 0o666, os.makedev(8, 0)))
tried(lambda: os.open('/dev/mem', os.O_RDONLY))
"""),
    ]  # fmt: skip


def _kernel() -> list[Probe]:
    machine_code = """
import mmap
def machine_code(code):
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    return ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
"""
    return [
        Probe("kernel", "bpf, counters, io_uring, userfaultfd", """
memory = ctypes.create_string_buffer(256)
for x86, arm in ((321, 280), (298, 241), (425, 425), (323, 282)): tried(lambda: call(x86, arm, memory, memory, -1, -1, 0) >= 0)
"""),
        Probe("kernel", "modules, reboot, clocks, swap, hosts", """
for x86, arm in ((175, 105), (313, 273), (246, 104), (169, 142), (227, 112), (167, 224), (170, 161), (163, 89), (172, -1), (103, 116)):
    if X86 or arm >= 0: tried(lambda: call(x86, arm, 1, 0, 0, 0) >= 0)
"""),
        Probe("kernel", "type into a terminal", """
import fcntl
for command in (0x5412, 0x541C, 0x5423, 0x540E):
    for number in (0, 1, 2): tried(lambda: fcntl.ioctl(number, command, b'x'))
"""),
        Probe("kernel", "calls of another architecture",
              machine_code + "if X86 and machine_code(bytes.fromhex('b814000000cd80c3')) > 0: escaped()"),
        Probe("kernel", "calls of the x32 ABI", "if X86 and call(0x40000000 + 39, 0) > 0: escaped()"),
        Probe("kernel", "files by handle, and other ways around paths", """
memory = ctypes.create_string_buffer(256)
for x86, arm in ((303, 264), (304, 265), (437, 437), (300, 262), (442, 442)): tried(lambda: call(x86, arm, -100, memory, memory, 0) >= 0)
"""),
        Probe("kernel", "memory that nothing counts", """
memory = ctypes.create_string_buffer(64)
for x86, arm in ((319, 279), (447, 447), (29, 194), (68, 186), (240, 180)):
    tried(lambda: call(x86, arm, memory, 4096, 0o1600, 0) >= 0)
""", bare=True),
        Probe("kernel", "another filter", "tried(lambda: call(317, 277, 1, 0, 0) == 0)\ntried(lambda: libc.prctl(22, 1, 0, 0, 0) == 0)"),
    ]  # fmt: skip


def _forks() -> list[Probe]:
    return [
        Probe("fork bombs", "fork", "while True:\n    try: os.fork()\n    except OSError: pass", ends="timeout", short=True),
        Probe("fork bombs", "fork and leave", """
while True:
    try:
        if os.fork() == 0:
            os.setsid()
            if os.fork(): os._exit(0)
    except OSError: pass
""", ends="timeout", short=True),
        Probe("fork bombs", "threads", """
import threading, time
for number in range(1000):
    try: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
    except RuntimeError: break
if number > 10: escaped(number)
""", ends="ended"),
        Probe("fork bombs", "programs", """
import subprocess
running = []
try:
    while len(running) < 100: running.append(subprocess.Popen([sys.executable, '-c', 'while True: pass']))
except OSError: pass
if len(running) > 10: escaped(len(running))
""", ends="ended"),
        Probe("fork bombs", "as many as allowed, each busy", """
for _ in range(7):
    if os.fork() == 0: break
while True: pass
""", ends="timeout", short=True),
        Probe("fork bombs", "vfork", "for _ in range(100):\n    if call(56, 220, 17, 0, 0, 0, 0) < 0: break\nelse: escaped()\nos._exit(0)"),
    ]  # fmt: skip


def _memory() -> list[Probe]:
    return [
        Probe("memory", "one large object", "x = bytearray(10**9)\nescaped()", ends="memory"),
        Probe("memory", "many small objects", "x = []\nwhile len(x) < 10**8: x.append(object())\nescaped()", ends="memory"),
        Probe("memory", "many processes together", """
import time
for _ in range(6):
    if os.fork() == 0: break
x = bytearray(30 * 10**6)
time.sleep(9)
""", ends="memory"),
        Probe("memory", "shared pages", """
import mmap, time
for _ in range(6):
    if os.fork() == 0: break
x = mmap.mmap(-1, 30 * 10**6)
for at in range(0, len(x), 4096): x[at] = 1
time.sleep(9)
""", ends="memory"),
        Probe("memory", "recursion", "sys.setrecursionlimit(10**9)\ndef f(): return f()\nf()"),
        Probe("memory", "pipes and sockets", """
held, size = [], 0
try:
    while True:
        a, b = socket.socketpair()
        a.setblocking(False)
        held.append((a, b))
        while True: size += a.send(bytes(60000))
        # full: the next
except BlockingIOError: pass
except OSError: pass
if size > 64 << 20: escaped(size)
"""),
        Probe("memory", "files in memory", """
size = 0
for place in ('/tmp', '/dev/shm'):
    for number in range(1000):
        try:
            with open(f'{place}/{number}', 'wb') as file: size += file.write(bytes(1 << 20))
        except OSError: break
if size > 17 << 20: escaped(size)
""", ends="ended"),
    ]  # fmt: skip


def _disk() -> list[Probe]:
    fill = "\nif size > 8 << 20: escaped(size)"
    return [
        Probe("disk", "one large file", """
size = 0
try:
    with open('/tmp/large', 'wb', buffering=0) as file:
        while True: size += file.write(bytes(1 << 20))
except OSError as error: print(error)
if size > 4 << 20: escaped(size)
""", ends="ended", bare=False),
        Probe("disk", "a sparse file", "tried(lambda: os.truncate(os.open('/tmp/sparse', os.O_RDWR | os.O_CREAT), 10**12))", bare=True),
        Probe("disk", "a reserved file", "tried(lambda: os.posix_fallocate(os.open('/tmp/f', os.O_RDWR | os.O_CREAT), 0, 5 << 20))"),
        Probe("disk", "many files", """
number = 0
try:
    while number < 10**5:
        os.close(os.open(f'/tmp/{number}', os.O_CREAT))
        number += 1
except OSError as error: print(error)
if number > 5000: escaped(number)
"""),
        Probe("disk", "files that have no name any more", """
size = 0
try:
    for number in range(60):
        file = os.open('/tmp/gone', os.O_RDWR | os.O_CREAT)
        os.unlink('/tmp/gone')
        size += os.write(file, bytes(1 << 20))
except OSError as error: print(error)
""" + fill),
        Probe("disk", "attributes of files", """
try:
    for number in range(1000): os.setxattr('/tmp', f'user.{number}', bytes(60000))
    escaped()
except OSError as error: print(error)
"""),
    ]  # fmt: skip


def _time() -> list[Probe]:
    return [
        Probe("time", "a loop", "while True: pass", ends="timeout", short=True),
        Probe("time", "a loop that ignores signals", """
import signal
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(number, signal.SIG_IGN)
while True: pass
""", ends="timeout", short=True),
        Probe("time", "a sleep", "import time\ntime.sleep(1000)", ends="timeout", short=True),
        Probe("time", "a call that no signal interrupts", "import re\nre.match('(a+)+$', 'a' * 60 + 'b')", ends="timeout", short=True),
        Probe("time", "a daemon that holds the output", """
import time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
print('done')
""", ends="ended"),
        Probe("time", "a stopped process", "import signal\nos.kill(os.getpid(), signal.SIGSTOP)", ends="timeout", short=True),
    ]  # fmt: skip


def _output() -> list[Probe]:
    return [
        Probe("output", "standard output", "for _ in range(20000): print('x' * 100)", ends="ended"),
        Probe("output", "standard error", "for _ in range(20000): print('x' * 100, file=sys.stderr)", ends="ended"),
        Probe("output", "without end", "while True: os.write(1, b'x' * 65536)", ends="timeout", short=True),
        Probe("output", "many writers", """
for _ in range(6):
    if os.fork() == 0: break
for _ in range(200): os.write(1, b'y' * 60000); os.write(2, b'z' * 60000)
""", ends="ended"),
        Probe("output", "frames that imitate the zygote's", """
import struct
for number in range(3, 64):
    try: os.write(number, struct.pack('>I', 20) + b'{"status": 0, "in_time"'); escaped(number)
    except OSError: pass
os.write(1, struct.pack('>I', 1 << 31))
""", ends="ended"),
    ]  # fmt: skip


def _persistence() -> list[Probe]:
    found = "if os.path.exists('{0}'): escaped()"
    return [
        Probe("persistence", "a file", "open('/tmp/left', 'w').close()", found.format("/tmp/left")),
        Probe("persistence", "a file in shared memory", "open('/dev/shm/left', 'w').close()", found.format("/dev/shm/left")),
        Probe("persistence", "a process", """
if os.fork() == 0:
    os.setsid()
    import time
    while True: time.sleep(1)
""", "if len([p for p in os.listdir('/proc') if p.isdigit()]) > 2: escaped()"),
        Probe("persistence", "a changed module", "import json, builtins\njson.left = builtins.left = 1\nsys.modules['left'] = json\nsys.path.insert(0, '/tmp')",
              "import json, builtins\nif hasattr(json, 'left') or hasattr(builtins, 'left') or 'left' in sys.modules or '/tmp' in sys.path: escaped()"),
        Probe("persistence", "an abstract socket", """
held = socket.socket(socket.AF_UNIX)
held.bind('\\0left'); held.listen()
if os.fork() == 0:
    import time
    time.sleep(9)
""", "tried(lambda: socket.socket(socket.AF_UNIX).connect('\\0left'))"),
        Probe("persistence", "shared memory of System V", "call(29, 194, 77, 4096, 0o1666)", "tried(lambda: call(29, 194, 77, 4096, 0) >= 0)"),
        Probe("persistence", "limits and environment", "os.environ['LEFT'] = '1'\nimport resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))\nos.umask(0o777)\nos.nice(19)",
              "import resource\nif 'LEFT' in os.environ or resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 20 or os.umask(0) == 0o777 or os.nice(0) == 19: escaped()"),
        Probe("persistence", "the zygote's signals and terminal", "import signal\nos.kill(0, 15)", "print('alive')", ends="ended"),
    ]  # fmt: skip


PROBES = [
    *_files(), *_secrets(), *_network(), *_processes(), *_privilege(), *_kernel(),
    *_forks(), *_memory(), *_disk(), *_time(), *_output(), *_persistence(),
]  # fmt: skip
