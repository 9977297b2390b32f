"""Our first program inside a sandbox: it starts foreign code, and isolates each snippet.

`sandbox/sandbox` starts it as a file, so it imports nothing of ours. A frame is a length in 4 bytes, big-endian, then that
many bytes. The first frame is a task in JSON: become a *resident*, which runs another program under limits, or a
*zygote*, which does the task's imports and then forks for each snippet.

A snippet takes three forks. The *opener* makes namespaces of users, processes and mounts, and exits. The *keeper* is
the first process in them: it mounts empty scratch directories and a /proc that shows these processes only, waits for
the snippet, and reports how it ended. Then the kernel kills every process that the snippet left behind.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import linecache
import os
import resource
import select
import signal
import sys
import time
import traceback
from typing import Any, NoReturn

CLONE_NEWNS = 0x00020000
NESTED = 0x10000000 | 0x20000000 | CLONE_NEWNS
"""CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS."""

MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x2, 0x4, 0x8
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 24, 38, 47
CAPABILITY_VERSION = 0x20080522
LAST_CAPABILITY = 63

OUT_OF_MEMORY = signal.SIGRTMAX
"""A snippet dies of this signal when Python raised `MemoryError` and nothing caught it."""

INODES = 4096
"""Files in the scratch directory."""
MAX_FILES = 256
"""Descriptors of the zygote."""
OWN_PROCESSES = 8
"""Zygote, opener, keeper, and some for threads that a package starts when it is imported."""
SNIPPET = "snippet.py"

libc = ctypes.CDLL(None, use_errno=True)


class SockFprog(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def main() -> None:
    """Read the task, and work on it until the node closes the pipe."""
    task = json.loads(receive(0))
    if task["kind"] == "resident":
        become_resident(task)
    requests, answers = os.dup(0), os.dup(1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_FILES, MAX_FILES))
    most = task["limits"]["processes"] + OWN_PROCESSES
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))  # imported modules are foreign code, too
    silence(0)
    silence(1)
    silence(2)
    sys.path[:] = task["paths"]
    try:
        for name in task["imports"]:
            importlib.import_module(name)
    except BaseException as error:  # noqa: BLE001  foreign code may raise anything while it is imported
        send(answers, json.dumps({"failed": traceback.format_exception_only(error)[-1][:1000]}).encode())
        return
    gc.collect()
    gc.freeze()  # else garbage collection in a snippet copies the pages of imported modules
    send(answers, b"{}")
    while True:
        request = json.loads(receive(requests))
        source, stdin = receive(requests), receive(requests)
        report, stdout, stderr = run_snippet(task, request, source, stdin)
        send(answers, json.dumps(report).encode())
        send(answers, stdout)
        send(answers, stderr)


# --- frames ---


def receive(pipe: int) -> bytes:
    """The next frame. Ends this process if the other end is closed: the node is gone or done with us."""
    return read_all(pipe, int.from_bytes(read_all(pipe, 4), "big"))


def read_all(pipe: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = os.read(pipe, min(size - len(data), 1 << 20))
        if not piece:
            os._exit(0)
        data += piece
    return bytes(data)


def send(pipe: int, data: bytes) -> None:
    rest = memoryview(len(data).to_bytes(4, "big") + data)
    while rest:
        rest = rest[os.write(pipe, rest) :]


def silence(descriptor: int) -> None:
    """Drop what is written there, and give nothing to read."""
    with open("/dev/null", "r+b", buffering=0) as empty:
        os.dup2(empty.fileno(), descriptor)


# --- a resident ---


def become_resident(task: dict[str, Any]) -> NoReturn:
    """Set the limits and run the program in this process. Its standard input and output are the pipes to the node."""
    silence(2)
    os.closerange(3, 1 << 16)
    take_limits(task["limits"])
    os.execve(task["program"][0], task["program"], task["environment"])


# --- a snippet ---


def run_snippet(
    task: dict[str, Any], request: dict[str, Any], source: bytes, stdin: bytes
) -> tuple[dict[str, Any], bytes, bytes]:
    """Run it until it ends or its time is up. Returns how it ended, standard output and standard error."""
    limits = request["limits"]
    until = time.monotonic() + limits["wall_s"]
    pipes = {name: os.pipe() for name in ("stdin", "stdout", "stderr", "opened", "told")}
    sys.stdout.flush()
    sys.stderr.flush()
    opener = os.fork()
    if opener == 0:
        open_world(task, limits, source, pipes)
    for name, (out, into) in pipes.items():
        os.close(out if name == "stdin" else into)
    os.waitpid(opener, 0)
    opened, told = pipes["opened"][0], pipes["told"][0]
    keeper = int.from_bytes(os.read(opened, 4), "big")
    reason = os.read(opened, 1000) if keeper == 0 else b""
    os.close(opened)
    if keeper == 0:
        for descriptor in (pipes["stdin"][1], pipes["stdout"][0], pipes["stderr"][0], told):
            os.close(descriptor)
        return {"failed": reason.decode("utf-8", "replace")}, b"", b""
    output = Output((pipes["stdout"][0], pipes["stderr"][0]), limits["output_bytes"])
    in_time = converse(keeper, told, pipes["stdin"][1], stdin, output, until)
    word = os.read(told, 1000)
    usage = os.wait4(keeper, 0)[2]
    os.close(told)
    (out, stdout), (err, stderr) = output.texts.items()
    report = {
        "status": int.from_bytes(word[:4], "big", signed=True) if word else None, "in_time": in_time,
        "failed": word[4:].decode("utf-8", "replace"),
        "stdout_truncated": out in output.full, "stderr_truncated": err in output.full,
        "cpu_s": usage.ru_utime + usage.ru_stime,
    }  # fmt: skip
    return report, bytes(stdout), bytes(stderr)


class Output:
    """What a snippet prints, by descriptor. Beyond `most` bytes it is dropped, so that a program that prints much ends like
    any other."""

    def __init__(self, descriptors: tuple[int, int], most: int) -> None:
        self.texts = {descriptor: bytearray() for descriptor in descriptors}
        self.full: set[int] = set()
        self._most = most

    def add(self, descriptor: int, piece: bytes) -> None:
        room = self._most - len(self.texts[descriptor])
        self.texts[descriptor] += piece[:room]
        if len(piece) > room:  # guard: output-is-capped
            self.full.add(descriptor)


def converse(keeper: int, told: int, to: int, stdin: bytes, output: Output, until: float) -> bool:
    """Pass input and output until no process can write any more. False if time ran out first and we killed all of them."""
    poll = select.poll()
    for descriptor in output.texts:
        poll.register(descriptor, select.POLLIN)
    os.set_blocking(to, False)
    rest = memoryview(stdin)
    if rest:
        poll.register(to, select.POLLOUT)
    else:
        os.close(to)
    reading, in_time = set(output.texts), True
    poll.register(told, select.POLLIN)
    while reading:
        left_s = until - time.monotonic()
        if in_time and left_s <= 0:
            os.kill(keeper, signal.SIGKILL)  # guard: the-whole-tree-is-killed
            in_time = False
        for descriptor, _ in poll.poll(1000 * left_s if in_time else None):
            if descriptor == told:
                poll.unregister(told)  # the keeper ends now, and with it every process that holds the other pipes
            elif descriptor == to:
                with contextlib.suppress(BlockingIOError):
                    try:
                        rest = rest[os.write(to, rest[: 1 << 16]) :]
                    except BrokenPipeError:
                        rest = rest[:0]
                if not rest:
                    poll.unregister(to)
                    os.close(to)
                    to = -1
            elif piece := os.read(descriptor, 1 << 16):
                output.add(descriptor, piece)
            else:
                poll.unregister(descriptor)
                os.close(descriptor)
                reading.remove(descriptor)
    if rest:
        os.close(to)
    return in_time


def open_world(
    task: dict[str, Any], limits: dict[str, Any], source: bytes, pipes: dict[str, tuple[int, int]]
) -> NoReturn:
    """The opener: make the namespaces, fork the keeper into them, report its process id (0 on failure), and exit."""
    keeper, reason = 0, b""
    try:
        user, group = os.getuid(), os.getgid()
        check(libc.unshare(NESTED), "unshare")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with contextlib.suppress(PermissionError), open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        keeper = os.fork()
    except OSError as error:
        reason = str(error).encode()[:900]
    if keeper == 0 and not reason:
        keep(task, limits, source, pipes)
    os.write(pipes["opened"][1], keeper.to_bytes(4, "big") + reason)
    os._exit(0)


def keep(task: dict[str, Any], limits: dict[str, Any], source: bytes, pipes: dict[str, tuple[int, int]]) -> NoReturn:
    """The keeper: mount the file systems, start the snippet, reap its orphans, and report how it ended."""
    told = pipes["told"][1]
    try:
        furnish(limits["scratch_mb"])
        check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")  # the snippet has our user id, and must not trace us
        os.setsid()  # `kill(0, ...)` in the snippet must not reach the zygote
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        snippet = os.fork()
    except OSError as error:
        os.write(told, (-1).to_bytes(4, "big", signed=True) + str(error).encode()[:900])
        os._exit(0)
    if snippet == 0:
        for descriptor, (name, end) in enumerate((("stdin", 0), ("stdout", 1), ("stderr", 1))):
            os.dup2(pipes[name][end], descriptor)
        os.closerange(3, MAX_FILES)  # guard: no-way-to-the-zygote
        obey(task, limits, source)
    for descriptor in (*pipes["stdin"], *pipes["stdout"], *pipes["stderr"]):
        os.close(descriptor)
    while True:
        with contextlib.suppress(InterruptedError):
            ended, status = os.wait()
            if ended == snippet:
                os.write(told, status.to_bytes(4, "big", signed=True))
                os._exit(0)  # the kernel kills the rest, and we are reaped only when all of them are dead


def furnish(scratch_mb: int) -> None:
    """Mount new, empty file systems where other snippets could have written, and hide other processes."""
    size = f"size={scratch_mb}m,nr_inodes={INODES},mode=755".encode()
    own = MS_NOSUID | MS_NODEV
    check(libc.mount(b"tmpfs", b"/tmp", b"tmpfs", own, size), "/tmp")  # guard: scratch-is-new
    check(libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", own, size), "/dev/shm")  # guard: shared-memory-is-new
    check(
        libc.mount(b"proc", b"/proc", b"proc", own | MS_NOEXEC, b"subset=pid"), "/proc"
    )  # guard: snippet-sees-no-other


def obey(task: dict[str, Any], limits: dict[str, Any], source: bytes) -> NoReturn:
    """The snippet's process: give up all rights, then run the source as a script."""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "dumpable")
        drop_rights()
        os.chdir("/tmp")
        take_limits(limits)
        load_filter(bytes.fromhex(task["filter"]))
    except Exception as error:  # noqa: BLE001  a fault of ours, which must not look like the snippet's
        os.write(2, str(error).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    code = 1
    try:
        code = run_as_script(source)
    finally:
        os._exit(code)


def run_as_script(source: bytes) -> int:
    """Run the source. Returns the exit code that Python would give."""
    module = type(sys)("__main__")
    module.__file__ = SNIPPET
    sys.modules["__main__"] = module
    sys.argv = [SNIPPET]
    try:
        text = source.decode()
        linecache.cache[SNIPPET] = (len(text), None, text.splitlines(keepends=True), SNIPPET)
        try:
            exec(compile(text, SNIPPET, "exec"), module.__dict__)
        finally:
            finish_threads()
        return 0
    except SystemExit as asked:
        return exit_code(asked.code)
    except MemoryError:
        os.kill(os.getpid(), OUT_OF_MEMORY)
        return 1
    except BaseException as error:  # noqa: BLE001  as the interpreter does for a script
        trace = error.__traceback__
        shown = trace.tb_next if trace is not None else None
        with contextlib.suppress(Exception):
            traceback.print_exception(type(error), error, shown)
        return 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()


def finish_threads() -> None:
    """What the interpreter does at its end: wait for threads, and run what was registered."""
    for module, act in (("threading", "_shutdown"), ("atexit", "_run_exitfuncs")):
        if module in sys.modules:
            getattr(sys.modules[module], act)()


def exit_code(asked: object) -> int:
    if asked is None or isinstance(asked, int):
        return (asked or 0) & 0xFF
    with contextlib.suppress(Exception):
        print(asked, file=sys.stderr)
    return 1


# --- rights and limits ---


def take_limits(limits: dict[str, Any]) -> None:
    """Limit what this process and its children may take."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    data = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (data, data))  # guard: memory-is-not-the-nodes
    for which, most in (
        (
            resource.RLIMIT_AS,
            used + (limits["address_mb"] or limits["memory_mb"]) * 1_000_000,
        ),  # guard: memory-of-a-process
        (resource.RLIMIT_NPROC, limits["processes"] + 1),  # guard: number-of-processes
        (resource.RLIMIT_FSIZE, limits["file_mb"] << 20),  # guard: size-of-a-file
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 256),
    ):
        resource.setrlimit(which, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))  # guard: time-of-a-processor


def drop_rights() -> None:
    """Drop every capability that came with the new namespace. None can come back."""
    for number in range(LAST_CAPABILITY):
        libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)  # fails above the last one that the kernel knows
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    check(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")  # guard: no-capabilities


def load_filter(program: bytes) -> None:
    """From here on, this process and its children can make only the calls that the filter allows."""
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    loaded = SockFprog(len(program) // 8, program)
    check(libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(loaded), 0, 0), "seccomp")  # guard: snippets-are-filtered


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
