"""Whose tokenizers are opened in the sandbox, and what the self-test before that costs a node."""

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.chat import isolated_tokenizer
from shoal.chat.isolated import ContainedRenderer, RendererLimits, start_here
from shoal.chat.renderer import FILES
from shoal.config import TinyPolicy
from shoal.errors import Overreach, StateError
from shoal.ipc import ChildExited, Reason
from shoal.models.random_model import make_tiny
from shoal.protocol.constants import MODEL_STOPS
from shoal.sandbox.cgroups import Cgroup
from shoal.weights import engine_loader
from tests.sandbox.needs import needs_bubblewrap


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    directory = tmp_path / "policy"
    make_tiny(TinyPolicy(width=16, layers=1, heads=2, kv_heads=1, mlp_width=16), directory, seed=0, dtype="float32")
    return directory


def settled(works: bool) -> "Future[bool]":
    future: Future[bool] = Future()
    future.set_result(works)
    return future


@pytest.mark.parametrize(("works", "shows", "start"), [
    (True, True, isolated_tokenizer.start), (False, True, None), (True, False, None),
])  # fmt: skip
def test_strangers_get_the_sandbox_where_it_works(
    works: bool, shows: bool, start: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated_tokenizer, "tried", lambda: settled(works))
    monkeypatch.setattr(isolated_tokenizer, "can_show", lambda files: shows)
    monkeypatch.setattr(engine_loader, "ContainedRenderer", lambda directory, limits, start, stops: start)
    assert engine_loader.contained(RendererLimits())(Path("policy")) is start  # type: ignore[comparison-overlap]


def test_a_sandbox_that_does_not_start_does_not_mean_that_a_text_is_refused(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain `StateError` would end the rollout, and other nodes would then compute another one."""

    def broken(*_: object) -> None:
        raise StateError("no memory")

    renderer = ContainedRenderer(tiny)
    renderer._child, renderer._start = None, isolated_tokenizer.start
    monkeypatch.setattr(isolated_tokenizer, "Resident", broken)
    with pytest.raises(Overreach, match="cannot be opened: no memory"):
        renderer.start([{"role": "user", "content": "hello"}])


@needs_bubblewrap
def test_linked_files_open_in_the_sandbox_and_weights_are_not_there(tiny: Path, tmp_path: Path) -> None:
    """The cache of a model hub holds links to files in another directory."""
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in tiny.iterdir():
        (linked / file.name).symlink_to(file)
    renderer = ContainedRenderer(linked, start=isolated_tokenizer.start)
    assert renderer.encode("hello") == ContainedRenderer(tiny, start=start_here).encode("hello")
    assert renderer._child is not None
    there = {file.name for file in Path(f"/proc/{renderer._child.pid}/root{isolated_tokenizer.PLACE}").iterdir()}
    assert there == {name for name in FILES[MODEL_STOPS] if (tiny / name).exists()}


@needs_bubblewrap
def test_a_damaged_file_is_named_where_its_user_finds_it(tiny: Path) -> None:
    (tiny / "tokenizer.json").write_text("{")
    with pytest.raises(StateError, match=f"^{tiny}/tokenizer.json is damaged"):
        ContainedRenderer(tiny, start=isolated_tokenizer.start)


def test_files_that_only_root_may_read_are_opened_without_the_sandbox(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shoal.sandbox.bubblewrap.is_root", lambda: True)
    files = [tiny / name for name in FILES[MODEL_STOPS]]
    monkeypatch.setattr(isolated_tokenizer, "_code", list)
    for file in tiny.iterdir():
        file.chmod(0o644)
    assert isolated_tokenizer.can_show(files)
    (tiny / "tokenizer.json").chmod(0o600)
    assert not isolated_tokenizer.can_show(files)
    assert f"chmod -R a+rX {tiny / 'tokenizer.json'}" in caplog.text


@needs_bubblewrap
def test_the_memory_of_all_processes_of_a_tokenizer_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that has taken over its process may fork, and the limit that the process sets itself is of each."""
    monkeypatch.setattr(Cgroup, "make", staticmethod(lambda: Cgroup([])))
    monkeypatch.setattr(isolated_tokenizer, "LIMITS", replace(isolated_tokenizer.LIMITS, memory_mb=100))
    forks = "import os, time; [os.fork() or (bytearray(50_000_000), time.sleep(30)) for _ in range(4)]; time.sleep(30)"
    child, _ = isolated_tokenizer.start(forks, (), [])
    with pytest.raises(ChildExited) as gone:
        child.receive(20.0, 1)
    assert gone.value.reason is Reason.MEMORY
