"""Weights that a process of its own fetches from a hub: where they come to, and how a fetch is ended."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shoal.config import TinyPolicy
from shoal.errors import StateError
from shoal.models import hub_subprocess
from shoal.models.hub_download import Hub
from shoal.models.hub_subprocess import fetch_apart
from shoal.models.random_model import make_tiny
from tests.models.hub_server import COMMIT, FakeHub, fake_hub

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed: pip install '.[hub]'")

TINY = TinyPolicy(width=32, layers=2, heads=2, kv_heads=1, mlp_width=48, max_positions=64)
SOURCE = f"hf:ann/small@{COMMIT}"
WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    make_tiny(TINY, tmp_path / "model", 3, "float32")
    with fake_hub() as served:
        served.models["ann/small"] = tmp_path / "model"
        yield served


def fetched(hub: FakeHub, tmp_path: Path, stopped: threading.Event | None = None) -> Path:
    sizes = {WEIGHTS: (tmp_path / "model" / WEIGHTS).stat().st_size}
    found = fetch_apart(
        Hub(hub.url, tmp_path / "cache"), SOURCE, sizes, tmp_path / "into", stopped or threading.Event()
    )
    return found[WEIGHTS]


def parts_in(folder: Path) -> list[Path]:
    return [*folder.rglob("*.incomplete")]


def test_weights_are_fetched_into_the_folder_and_not_into_the_cache(hub, tmp_path):
    path = fetched(hub, tmp_path)
    assert path.is_relative_to(tmp_path / "into") and not (tmp_path / "cache").exists()
    assert path.read_bytes() == (tmp_path / "model" / WEIGHTS).read_bytes()
    sent = hub.sent_bytes
    assert fetched(hub, tmp_path) == path
    assert hub.sent_bytes - sent < 10_000, "only the list of files"


def test_weights_in_the_users_cache_are_taken_without_asking_the_hub(hub, tmp_path):
    Hub(hub.url, tmp_path / "cache").bring(SOURCE, tmp_path / "here")
    asked = len(hub.asked)
    assert fetched(hub, tmp_path).is_relative_to(tmp_path / "cache")
    assert len(hub.asked) == asked and not [*(tmp_path / "into").iterdir()]


def test_what_the_hub_refuses_is_told_in_its_words(hub, tmp_path):
    hub.gated.add("ann/small")
    with pytest.raises(StateError, match="is gated: accept its terms on the hub"):
        fetched(hub, tmp_path)


def test_a_fetch_ends_at_once_when_it_is_told_to(hub, tmp_path):
    hub.stalls.set()
    stopped, ended = threading.Event(), []

    def tell() -> None:
        assert hub.stalled.wait(60)
        ended.append(time.monotonic())
        stopped.set()

    teller = threading.Thread(target=tell)
    teller.start()
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(StateError, match="stopped while its weights were fetched"):
        fetched(hub, tmp_path, stopped)
    teller.join()
    assert time.monotonic() - ended[0] < 5
    assert {child.pid for child in psutil.Process().children()} <= before
    assert not parts_in(tmp_path / "into")


def test_a_hub_that_sends_more_than_it_names_is_ended(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_subprocess, "SLACK_BYTES", 10_000)
    hub.pad_bytes = 1 << 20
    with pytest.raises(StateError, match=r"sent more than the \d+ bytes that the run's manifest names"):
        fetched(hub, tmp_path)
    assert not (tmp_path / "into").exists()


def test_what_came_too_much_is_deleted_when_nobody_writes_there_any_more(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_subprocess, "SLACK_BYTES", 10_000)
    hub.pad_bytes = 1 << 20
    before, alive, really = {child.pid for child in psutil.Process().children()}, [], hub_subprocess.shutil.rmtree

    def remove(folder: Path, **how: bool) -> None:
        alive.append({child.pid for child in psutil.Process().children()} - before)
        really(folder, **how)

    monkeypatch.setattr(hub_subprocess.shutil, "rmtree", remove)
    with pytest.raises(StateError, match="sent more than"):
        fetched(hub, tmp_path)
    assert alive == [set()]


def test_files_of_a_former_fetch_do_not_count_as_sent_by_this_one(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_subprocess, "SLACK_BYTES", 20_000)
    path = fetched(hub, tmp_path)
    store = path.parent.parent
    for number in range(10):
        (store / "blobs" / f"{number:064x}").write_bytes(bytes(100_000))
        (store / "snapshots" / COMMIT / f"model-{number:05d}-of-00010.safetensors").symlink_to(
            store / "blobs" / f"{number:064x}"
        )
    sent = hub.sent_bytes
    assert fetched(hub, tmp_path) == path and hub.sent_bytes - sent < 10_000
    assert [*(store / "blobs").iterdir()] == [path]


BROKEN = """
import os
os.write(1, b"a line that a library prints")
raise {error}
"""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("MemoryError", r"failed \(MemoryError\): try again"),
        ("RuntimeError('one\\ntwo')", r"failed \(RuntimeError: one\): try again"),
    ],
)
def test_an_error_that_nobody_expects_is_told(hub, tmp_path, monkeypatch, error, said):
    (tmp_path / "broken" / "huggingface_hub").mkdir(parents=True)
    (tmp_path / "broken" / "huggingface_hub" / "__init__.py").write_text(BROKEN.format(error=error))
    monkeypatch.syspath_prepend(tmp_path / "broken")
    with pytest.raises(StateError, match=said):
        fetched(hub, tmp_path)


def test_a_process_that_cannot_be_started_is_no_full_disk(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_subprocess.sys, "executable", str(tmp_path / "no-python"))
    with pytest.raises(StateError, match="no process can be started to fetch it: No such file"):
        fetched(hub, tmp_path)


def test_an_answer_of_the_wrong_form_is_told(hub, tmp_path, monkeypatch):
    wrong = "import sys; from shoal.ipc import write_message; write_message(1, b'{'); sys.stdin.read()"
    monkeypatch.setattr(hub_subprocess, "_PROGRAM", f"import sys; sys.path[:] = sys.argv[2:]; {wrong}")
    with pytest.raises(StateError, match=r"gave a wrong answer \(.*\): try again"):
        fetched(hub, tmp_path)


def test_what_a_killed_fetch_left_is_deleted(hub, tmp_path):
    left = tmp_path / "into" / "models--ann--small" / "blobs" / "ab.12345678.incomplete"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half a file")
    fetched(hub, tmp_path)
    assert not left.exists()
