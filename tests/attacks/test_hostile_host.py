"""A volunteer with a hostile host: memory, disk, time and processes stay within what was allowed, and one line says why.

Each case serves one hostile thing to a real `shoal join` or `shoal validate`.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.config import TinyPolicy
from shoal.models.random_model import make_tiny
from shoal.sandbox.selftest import LIMITS as SELF_TEST
from tests.attacks.hostile_cases import CASES, QUICK
from tests.attacks.hostile_host import HostileHost, Stay, stay

MEMORY_MB, DISK_MB = 700, 60
PROCESSES = 2 * SELF_TEST.processes
"""The node, its child, and what the self-test of the sandbox tries to fork beside the processes of a sandbox."""
TINY = TinyPolicy(width=32, layers=2, heads=2, kv_heads=1, mlp_width=64, max_positions=1 << 18)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("policy") / "policy"
    make_tiny(TINY, directory, seed=0, dtype="float32")
    return directory


@pytest.fixture
def host(policy: Path, tmp_path: Path) -> HostileHost:
    (tmp_path / "policy").mkdir()
    for path in policy.iterdir():
        (tmp_path / "policy" / path.name).write_bytes(path.read_bytes())
    return HostileHost(tmp_path / "policy")


def visit(
    host: HostileHost,
    role: str,
    folder: Path,
    stop_after_s: float | None = None,
    ready: Callable[[], object] | None = None,
) -> Stay:
    (folder / "guest").mkdir()
    with host.served() as url:
        limits = ["--threads", "1", "--max-memory", str(MEMORY_MB), "--max-disk", str(DISK_MB)]
        command, ready = [role, url, *limits], ready or (lambda: host.met)
        return stay(command, folder / "guest", stop_after_s=stop_after_s, ready=ready)


def test_an_honest_host_gets_work_within_the_same_limits(host: HostileHost, tmp_path: Path) -> None:
    found = visit(host, "join", tmp_path, stop_after_s=0.5, ready=lambda: host.taken)
    assert found.code == 0 and "left credits=0" in found.last_line and host.taken and host.left
    assert found.memory_mb <= MEMORY_MB and found.disk_mb <= DISK_MB and not found.outlived


@pytest.mark.parametrize("name", [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES
])  # fmt: skip
def test_a_volunteer_takes_no_more_than_it_allows(name: str, host: HostileHost, tmp_path: Path) -> None:
    case = CASES[name]
    case.change(host)
    found = visit(host, case.role, tmp_path, case.stop_after_s)
    told = (
        f"{name}: {found.memory_mb} MB, {found.disk_mb} MB on disk, {found.processes} processes, {found.wall_s:.1f} s"
    )
    print(f"{told}: {found.last_line}")
    assert re.search(case.says, found.last_line), found.said[-3000:]
    assert "Traceback" not in found.said and len(found.said) < 10_000, found.said[-3000:]
    waits = case.stop_after_s is not None
    assert found.code == (0 if waits else 2) and found.last_line.startswith("error: ") == (not waits)
    assert found.memory_mb <= MEMORY_MB and found.disk_mb <= DISK_MB, told
    assert found.processes <= PROCESSES, told
    assert found.wall_s < 45 and not found.outlived and host.calls < 200, (told, host.calls)
