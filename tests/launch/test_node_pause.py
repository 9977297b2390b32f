"""`shoal node pause` and `resume`: they reach the worker of a folder, and nobody else."""

import os
import signal
from pathlib import Path

import pytest

from shoal.errors import StateError
from shoal.launch.run_lock import locked, name_worker, on_pause_signals, signal_worker


def test_a_worker_is_paused_and_resumed_by_its_folder(tmp_path: Path) -> None:
    done: list[str] = []
    before = signal.getsignal(signal.SIGUSR1)
    with on_pause_signals(lambda: done.append("pause"), lambda: done.append("resume")), locked(tmp_path) as lock_fd:
        name_worker(lock_fd)
        assert "finishes what it holds" in signal_worker(tmp_path, "pause") and done == ["pause"]
        assert "takes leases again" in signal_worker(tmp_path, "resume") and done == ["pause", "resume"]
    assert signal.getsignal(signal.SIGUSR1) == before


def test_only_a_worker_is_signalled(tmp_path: Path) -> None:
    told: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
    try:
        with locked(tmp_path), pytest.raises(StateError, match="cannot be paused, because it is not a worker"):
            signal_worker(tmp_path, "pause")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert told == []


def test_a_folder_without_a_running_node_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"no node has used .* --home"):
        signal_worker(tmp_path / "none", "pause")
    with locked(tmp_path) as lock_fd:
        name_worker(lock_fd)
    assert str(os.getpid()) in (tmp_path / ".lock").read_text(), "it is left there when the worker ends"
    with pytest.raises(StateError, match="no node works from"):
        signal_worker(tmp_path, "pause")
