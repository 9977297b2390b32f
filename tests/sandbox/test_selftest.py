"""The self-test decides what a node may run, and names what is missing."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.sandbox import bubblewrap, selftest
from shoal.sandbox.bubblewrap import INSTALL
from tests.sandbox.needs import needs_bubblewrap

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
        "import ctypes, shoal.sandbox.init as inside; from shoal.sandbox.seccomp import snippet_filter;"
        f"inside.load_filter(snippet_filter()); {PROGRAM}"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    works, _, remedy = told.stdout.splitlines()
    assert works == "False"
    assert remedy == f"start the container with {selftest.DOCKER}"


@needs_bubblewrap
def test_a_sandbox_without_its_filter_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_all = b"\x06\x00\x00\x00\x00\x00\xff\x7f"
    monkeypatch.setattr("shoal.sandbox.sandbox.snippet_filter", lambda: allow_all)
    monkeypatch.setattr("shoal.sandbox.sandbox.zygote_filter", lambda: allow_all)
    monkeypatch.setattr(selftest, "_PROBES", {"no network": selftest._PROBES["no network"]})
    report = selftest.examine()
    assert not report.works and "promises: no network (exit code 0, 'done')" in report.found
    assert "another machine" in report.remedy


@needs_bubblewrap
def test_a_sandbox_with_a_writable_root_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    command = bubblewrap.command

    def writable(*given: Any) -> list[str]:
        words = command(*given)
        at = max(index for index, word in enumerate(words) if word == "--remount-ro")
        return words[:at] + words[at + 2 :]

    monkeypatch.setattr(bubblewrap, "command", writable)
    report = selftest.examine()
    assert not report.works and "promises: nothing writable (/" in report.found


@needs_bubblewrap
def test_a_probe_that_takes_seconds_on_a_busy_machine_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "_REFUSED", "import time; time.sleep(2.5)\n" + selftest._REFUSED)
    monkeypatch.setattr(selftest, "_PROBES", {"no network": selftest._PROBES["no network"]})
    assert selftest.examine().works


@needs_bubblewrap
def test_a_machine_on_which_a_probe_never_ends_is_called_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "LIMITS", replace(selftest.LIMITS, wall_s=0.3))
    monkeypatch.setattr(selftest, "_REFUSED", "import time; time.sleep(9)\n" + selftest._REFUSED)
    monkeypatch.setattr(selftest, "_PROBES", {"no network": selftest._PROBES["no network"]})
    report = selftest.examine()
    assert not report.works and "no network (it did not end" in report.found and "too busy" in report.remedy


@needs_bubblewrap
def test_only_a_missing_limit_of_processes_is_blamed_on_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "_PROBES", {"processes limited": lambda pool: "32 processes, limit 8"})
    report = selftest.examine()
    assert not report.works and "(32 processes, limit 8)" in report.found and "Linux 5.14" in report.remedy
