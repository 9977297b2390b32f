"""A trainer's key has leaked, as its host meets it: by processes and commands, while a stranger works for the run."""

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from shoal.errors import ConfigError, StateError
from shoal.launch.admin import make_publisher, take_root
from shoal.net.key_files import load_key, load_or_make_key
from shoal.run_folder import RunFolder
from tests.launch.test_join import SHOAL, begin, said
from tests.launch.test_supervisor import RUN_FILE


def shoal(folder: Path, *args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*SHOAL, *args], cwd=folder, capture_output=True, text=True)


def steps(run: Path) -> list[int]:
    file = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.slow
def test_the_root_of_a_hosted_run_replaces_a_leaked_key_and_no_step_is_lost(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(RUN_FILE)
    run = tmp_path / "runs" / "small"
    values = ("steps=4000", "eval.episodes=0", "workers.cheating=0")
    sets = [word for value in values for word in ("--set", value)]
    host = begin(tmp_path, "host", "host", "small.toml", "--root", "root.key", *sets)
    try:
        url = said(tmp_path, "host", r"shoal join (http://127\.0\.0\.1:\d+)\n")
        said(tmp_path, "host", r"Made the root key root.key. Move it to a disk")
        (tmp_path / "stick").mkdir()
        shutil.move(tmp_path / "root.key", tmp_path / "stick" / "root.key")
        worker = begin(tmp_path, "worker", "join", url, "--threads", "1", "--name", "stranger")
        said(tmp_path, "worker", r"accepted groups=\d+ credits=\+\d+")

        refused = shoal(tmp_path, "admin", "rotate-publisher", "runs/small")
        assert refused.returncode == 2 and "give its file, --root FILE" in refused.stderr
        shutil.copy(run / "keys" / "run.key", tmp_path / "stick" / "other.key")
        refused = shoal(tmp_path, "admin", "rotate-publisher", "runs/small", "--root", "stick/other.key")
        assert refused.returncode == 2 and "give the root's file" in refused.stderr
        done = shoal(tmp_path, "admin", "rotate-publisher", "runs/small", "--root", "stick/root.key")
        assert done.returncode == 0 and "rotation 1: " in done.stdout, done.stderr
        far = make_publisher(RunFolder(run))  # the same from another machine, which has the root and the run's URL
        done = shoal(tmp_path, "admin", "rotate-publisher", url, "--root", "stick/root.key", "--new-key", far)
        assert done.returncode == 0 and f"rotation 2: {far}" in done.stdout, done.stderr

        before = len(steps(run))
        deadline = time.monotonic() + 90
        while len(steps(run)) < before + 3:
            assert time.monotonic() < deadline and host.poll() is None and worker.poll() is None
            time.sleep(0.1)
        worker.send_signal(signal.SIGINT)
        assert worker.wait(timeout=60) == 0
        host.send_signal(signal.SIGINT)
        assert host.wait(timeout=60) == 130
    finally:
        host.kill()
    assert steps(run) == list(range(len(steps(run)))), "a step was lost or repeated"
    log = "\n".join(file.read_text() for file in (run / "logs").glob("trainer*"))
    assert "publishes with key=" in log and log.count("opened version=") == 1, log
    pins = json.loads(next((tmp_path / "worker-home").glob("evidence/*/publishers.json")).read_text())
    assert [rotation["serial"] for rotation in pins["publishers"]["rotations"]][-1] == 2
    verified = shoal(tmp_path, "ledger", "verify", "runs/small")
    assert verified.returncode == 0, verified.stdout


def test_a_run_keeps_the_root_that_it_began_with(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert "Move it to a disk" in take_root(folder, str(tmp_path / "root.key"))
    public = load_key(tmp_path / "root.key").public
    assert take_root(folder, public) == "" and folder.root_key() == public
    folder.log.touch()
    assert take_root(folder, str(tmp_path / "root.key")) == ""
    other = load_or_make_key(tmp_path / "other.key").public
    with pytest.raises(StateError, match="It keeps that"):
        take_root(folder, other)
    assert folder.root_key() == public


@pytest.mark.parametrize("begun", ["root.pub", "log"])
def test_a_run_that_has_begun_makes_no_second_root(tmp_path: Path, begun: str) -> None:
    """Its root key was moved to another disk, and the host types the same command again."""
    folder, file = RunFolder(tmp_path / "run"), tmp_path / "root.key"
    folder.root.mkdir()
    if begun == "log":
        folder.log.touch()
    else:
        take_root(folder, str(file))
        file.unlink()
    with pytest.raises(StateError, match="leave out --root"):
        take_root(folder, str(file))
    assert not file.exists()


@pytest.mark.parametrize("given", ["ab" * 31 + "a", "AB" * 32, "ab" * 33])
def test_a_mistyped_public_key_makes_no_file_of_its_name(tmp_path: Path, given: str, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="64 lower-case hex digits"):
        take_root(RunFolder(tmp_path / "run"), given)
    assert list(tmp_path.iterdir()) == []
