"""What one piece of foreign code may take, and how its run can end.

It starts no process.
"""

from dataclasses import dataclass

from shoal.ipc import Reason

NO_LIMIT = 1 << 30
"""CPU seconds of a resident that only `wall_s` limits."""


@dataclass(frozen=True)
class Limits:
    """For one snippet, or for one resident program."""

    wall_s: float = 5.0
    """For a snippet, or for one answer of a resident. Most honest snippets of a policy end within 0.1 s; a loop that
    never ends holds a place in the pool for this long."""
    cpu_s: int = 5
    """CPU seconds of each process of a snippet, and of all processes of a resident together, for its whole life. This limit
    stops a program that computes; `wall_s` stops one that sleeps."""
    memory_mb: int = 256
    """Memory of all processes together beyond what the interpreter took before. Tables of a few million Python objects
    fit."""
    address_mb: int = 0
    """Address space of each process beyond what the interpreter took before; 0 is `memory_mb`. Libraries may take much more
    address space than memory."""
    processes: int = 16
    """Processes and threads: enough for a few helpers, but not for a fork bomb."""
    file_mb: int = 16
    """Size of a file: half of the scratch disk, so that one file cannot fill it."""
    open_files: int = 64
    """Descriptors of each process. The buffers of that many pipes and sockets in every process stay below
    `memory_mb`."""
    output_bytes: int = 64 << 10
    """Bytes kept of standard output, and of standard error. More than a policy's context can hold; the rest is
    dropped."""
    scratch_mb: int = 32
    """Size of /tmp and of /dev/shm each. They are in memory, so this comes on top of `memory_mb`."""


@dataclass(frozen=True)
class Ended:
    """The program ended within its limits, so the result is its own."""

    exit_code: int
    """Negative if the program died of a signal that was its own doing, as in `subprocess`."""
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    cpu_s: float = 0.0
    """CPU seconds of the processes that something waited for."""


@dataclass(frozen=True)
class Stopped:
    """Something stopped the program. On a faster or larger machine it might have ended, so this is evidence against
    nobody: it has no exit code, and what depends on it is void."""

    reason: Reason
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    cpu_s: float = 0.0


Outcome = Ended | Stopped
