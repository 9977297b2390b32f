"""Nothing that foreign code tries gets out of the sandbox, takes more than its limits, or stays for the next snippet."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.sandbox.cgroups import processes_of, taken_bytes
from shoal.sandbox.limits import Ended, Outcome, Stopped
from shoal.sandbox.pool import Pool
from tests.sandbox.needs import needs_bubblewrap
from tests.sandbox.probes import LIBC, PROBES, SHORT_S, SMALL, Probe

SECRET = "the host's secret"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    """Things of the host that probes reach for, with a process that they may try to kill."""
    folder = tmp_path_factory.mktemp("host")
    folder.chmod(0o755)
    (folder / "secret").write_text(SECRET)
    os.environ["SHOAL_SECRET"] = SECRET
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    tcp, udp = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    unix, abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    unix.bind(str(folder / "s"))
    abstract.bind(f"\0shoal-{os.getpid()}")
    unix.listen()
    abstract.listen()
    yield {
        "secret": folder / "secret", "tcp": tcp.getsockname()[1], "udp": udp.getsockname()[1], "unix": folder / "s",
        "abstract": f"shoal-{os.getpid()}", "victim": victim.pid, "number": os.getpid(),
    }  # fmt: skip
    assert victim.poll() is None, "a probe killed a process of the host"
    victim.kill()
    victim.wait()
    for sock in (tcp, udp, unix, abstract):
        sock.close()
    del os.environ["SHOAL_SECRET"]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(1, SMALL) as pool:
        yield pool


def source(host: dict[str, object], text: str) -> str:
    for name, value in host.items():
        text = text.replace(f"<{name}>", str(value))
    return LIBC + text


def name_of(probe: Probe) -> str:
    return f"{probe.kind}: {probe.name}"


def how(outcome: Outcome) -> str:
    return outcome.reason.value if isinstance(outcome, Stopped) else "ended"


@needs_bubblewrap
@pytest.mark.parametrize("probe", PROBES, ids=name_of)
def test_no_probe_succeeds_and_the_host_is_alive(probe: Probe, pool: Pool, host: dict[str, object]) -> None:
    zygote = pool.peek()
    began = time.monotonic()
    limits = replace(SMALL, wall_s=SHORT_S) if probe.short else SMALL
    with Watch(zygote) as seen:
        outcome = pool.run(source(host, probe.source), limits=limits)
    took_s = time.monotonic() - began
    assert b"ESCAPED" not in outcome.stdout, outcome
    assert probe.ends in ("", how(outcome)), outcome
    assert len(outcome.stdout) <= SMALL.output_bytes and len(outcome.stderr) <= SMALL.output_bytes
    assert took_s < limits.wall_s + 5, "the snippet was not stopped in time"
    assert seen.processes <= SMALL.processes + 4, "more processes than allowed, beside zygote, opener and keeper"
    assert seen.bytes < (SMALL.memory_mb * 3) * 10**6, "more memory than allowed, and what grows between two looks"
    assert Path(f"/proc/{host['victim']}").exists()
    left = processes_of(pool.peek())
    assert len(left) == 1, "something of the snippet still runs"
    after = pool.run(source(host, probe.then or "print('alive')"))
    assert isinstance(after, Ended) and after.exit_code == 0, after
    assert b"ESCAPED" not in after.stdout, after


def test_there_are_twelve_classes_of_five_probes_or_more() -> None:
    counts = Counter(probe.kind for probe in PROBES)
    assert len(counts) == 12 and min(counts.values()) >= 5, counts
    assert len({name_of(probe) for probe in PROBES}) == len(PROBES)


@pytest.mark.parametrize("probe", [probe for probe in PROBES if probe.bare], ids=name_of)
def test_without_a_sandbox_the_probe_succeeds(probe: Probe, host: dict[str, object], tmp_path: Path) -> None:
    """Else it would prove nothing."""
    text = source(host, probe.source.replace("/tmp/", f"{tmp_path}/"))
    bare = subprocess.run([sys.executable, "-c", text], capture_output=True, timeout=30)
    assert b"ESCAPED" in bare.stdout, bare


class Watch:
    """The most processes and memory that a sandbox had, looked at from outside."""

    def __init__(self, init: int) -> None:
        self._init, self._over = init, threading.Event()
        self.processes = self.bytes = 0
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.02):
            self.processes = max(self.processes, len(processes_of(self._init)))
            self.bytes = max(self.bytes, taken_bytes(self._init))
