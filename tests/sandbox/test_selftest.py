"""The self-test decides what a node may run, and names what is missing."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.sandbox import bubblewrap, selftest
from shoal.sandbox.bubblewrap import INSTALL
from shoal.sandbox.cell import Kind
from tests.sandbox.needs import needs_bubblewrap, needs_gvisor

PROGRAM = "from shoal.sandbox.selftest import examine; print(*examine(), sep=chr(10))"


@needs_bubblewrap
def test_the_sandbox_of_this_machine_keeps_its_promises() -> None:
    report = selftest.examine()
    assert report.works and report.remedy == "", report
    assert "no network" in report.found


def test_without_bubblewrap_the_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert selftest.examine() == (False, f"bubblewrap is not installed: {INSTALL}", INSTALL)


@needs_bubblewrap
def test_where_user_namespaces_are_forbidden_the_setting_is_named() -> None:
    program = f"open('/proc/sys/user/max_user_namespaces', 'w').write('0')\n{PROGRAM}"
    told = subprocess.run(["unshare", "-Ur", sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    works, found, remedy = told.stdout.splitlines()
    assert works == "False" and "namespace" in found
    assert remedy == "sudo sysctl user.max_user_namespaces=15000"


@needs_bubblewrap
def test_in_a_container_without_permission_the_option_is_named() -> None:
    """A default container forbids the calls that our own filter forbids."""
    program = (
        "import ctypes, shoal.sandbox.inside as inside; from shoal.sandbox.filter import snippet_filter;"
        f"inside.load_filter(snippet_filter()); {PROGRAM}"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    works, _, remedy = told.stdout.splitlines()
    assert works == "False"
    assert remedy == f"start the container with {selftest.DOCKER}"


@needs_bubblewrap
def test_a_sandbox_without_its_filter_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_all = b"\x06\x00\x00\x00\x00\x00\xff\x7f"
    monkeypatch.setattr("shoal.sandbox.cell.snippet_filter", lambda: allow_all)
    monkeypatch.setattr("shoal.sandbox.cell.zygote_filter", lambda: allow_all)
    report = selftest.examine()
    assert not report.works and report.found.endswith("promises: no network")


@needs_bubblewrap
def test_a_sandbox_with_a_writable_root_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    command = bubblewrap.command

    def writable(*given: Any) -> list[str]:
        words = command(*given)
        at = max(index for index, word in enumerate(words) if word == "--remount-ro")
        return words[:at] + words[at + 2 :]

    monkeypatch.setattr(bubblewrap, "command", writable)
    report = selftest.examine()
    assert not report.works and report.found.endswith("promises: nothing writable")


@pytest.mark.slow
@needs_gvisor
def test_gvisor_keeps_the_same_promises() -> None:
    report = selftest.examine(Kind.GVISOR)
    assert report.works, report
