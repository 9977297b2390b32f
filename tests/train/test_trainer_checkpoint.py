"""The trainer's own state: a resumed run is bit-identical, and a save may be killed at any point."""

import errno
import os
import pathlib
import shutil
import zlib

import msgspec
import pytest
import torch

from shoal.config import SamplingConfig, TrainConfig
from shoal.errors import StateError
from shoal.protocol.algorithm_config import Grpo
from shoal.train.checkpoint import load_state, save_state
from shoal.train.learner import Learner, LearnerState
from tests.low_memory import full_disk

CONFIG = TrainConfig(lr=1e-2, schedule="cosine", warmup_steps=2, weight_decay=0.1, algorithm=Grpo(entropy_bonus=0.01))


class Killed(BaseException):
    """Stands for SIGKILL: no handler of ours may run."""


def small_state(version):
    tensors = {"weights/a": torch.arange(6.0).reshape(2, 3) + version, "adam.m/a": torch.full((3,), float(version))}
    return LearnerState(version, version, tensors)


def same(left, right):
    return (
        (left.version, left.updates, left.layout) == (right.version, right.updates, right.layout)
        and left.tensors.keys() == right.tensors.keys()
        and all(torch.equal(tensor, right.tensors[name]) for name, tensor in left.tensors.items())
    )


@pytest.mark.parametrize(
    ("updates", "dtype", "moments"), [(1, "", "float32"), (3, "", "float32"), (1, "bfloat16", "float32"),
                                      (1, "", "8bit"), (2, "bfloat16", "8bit")],
)  # fmt: skip
def test_a_resumed_run_is_bit_identical_to_an_unbroken_one(make_model, make_rows, tmp_path, updates, dtype, moments):
    def learner():
        config = msgspec.structs.replace(CONFIG, updates_per_batch=updates, dtype=dtype, moments=moments)
        model = make_model().to(torch.bfloat16 if dtype else torch.float32)
        return Learner(model, config, SamplingConfig(), steps=6)

    def train(learner, versions):
        for version in versions:
            learner.step(make_rows(seed=version), version)

    unbroken = learner()
    train(unbroken, range(6))
    first = learner()
    train(first, range(3))
    save_state(tmp_path, first.state(3))
    _killed_before_its_last_update(first, lambda: train(first, range(3, 4)))
    second = learner()
    state = load_state(tmp_path)
    second.restore(state)
    assert state.version == 3 and second.updates == 3 * updates
    train(second, range(3, 6))
    assert same(unbroken.state(6), second.state(6))


def _killed_before_its_last_update(learner, step):
    """Ends a step as SIGKILL would, after its gradients and all but the last of its updates."""
    update, left = learner._update, [learner.config.updates_per_batch - 1]

    def last_one_never_comes(lr, version):
        if not left[0]:
            raise Killed
        left[0] -= 1
        return update(lr, version)

    learner._update = last_one_never_comes
    with pytest.raises(Killed):
        step()
    assert left == [0]


def test_a_state_comes_back_as_it_was_saved(tmp_path):
    save_state(tmp_path, small_state(7))
    assert same(load_state(tmp_path), small_state(7))


def test_a_state_names_its_layout_unless_it_is_float32(tmp_path):
    plain = save_state(tmp_path, small_state(1)) / "state.json"
    assert plain.read_bytes() == b'{"version":1,"updates":1}'
    coded = {"adam.m8/a": torch.arange(5, dtype=torch.uint8), "weights/a": torch.ones(3)}
    save_state(tmp_path, LearnerState(2, 2, coded, "bfloat16 8bit"))
    assert same(load_state(tmp_path), LearnerState(2, 2, coded, "bfloat16 8bit"))


def test_a_state_of_numbers_that_nobody_knows_is_not_read(tmp_path, caplog):
    save_state(tmp_path, small_state(1))
    folder = save_state(tmp_path, small_state(2))
    numbers, sums = b'{"version":2,"updates":2,"momentum":1}', (folder / "CRC32SUMS").read_text().splitlines()
    (folder / "state.json").write_bytes(numbers)
    (folder / "CRC32SUMS").write_text(f"{sums[0]}\n{zlib.crc32(numbers):08x}  state.json\n")
    assert load_state(tmp_path).version == 1 and "unknown field `momentum`" in caplog.text


def test_without_a_saved_state_none_is_loaded(tmp_path):
    assert load_state(tmp_path / "trainer") is None


def test_the_last_two_states_are_kept(tmp_path):
    for version in range(4):
        save_state(tmp_path, small_state(version))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000002", "v000003"]


@pytest.mark.parametrize("name", ["state.safetensors", "state.json", "CRC32SUMS"])
@pytest.mark.parametrize("harm", ["flip", "truncate", "remove"])
def test_a_corrupt_newest_state_falls_back_to_the_one_before(tmp_path, caplog, name, harm):
    save_state(tmp_path, small_state(1))
    file = save_state(tmp_path, small_state(2)) / name
    body = bytearray(file.read_bytes())
    if harm == "remove":
        file.unlink()
    else:
        body[len(body) // 2] ^= 1
        file.write_bytes(bytes(body) if harm == "flip" else bytes(body)[: len(body) // 2])
    assert same(load_state(tmp_path), small_state(1))
    assert "taking the previous one" in caplog.text and "v000002" in caplog.text


def test_a_repeated_step_takes_the_place_of_the_corrupt_state(tmp_path):
    save_state(tmp_path, small_state(1))
    (save_state(tmp_path, small_state(2)) / "state.json").unlink()
    assert load_state(tmp_path).version == 1
    save_state(tmp_path, small_state(2))
    assert same(load_state(tmp_path), small_state(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000001", "v000002"]


def test_a_save_leaves_alone_what_is_being_published_beside_it(tmp_path):
    publishing = tmp_path / ".publishing.new" / "config.json"
    publishing.parent.mkdir()
    publishing.write_text("{}")
    save_state(tmp_path, small_state(1))
    assert publishing.exists() and load_state(tmp_path).version == 1


def test_a_version_that_is_saved_already_is_not_written_again(tmp_path):
    file = save_state(tmp_path, small_state(1)) / "state.safetensors"
    before = file.stat().st_ino
    save_state(tmp_path, small_state(1))
    assert file.stat().st_ino == before


def test_no_readable_state_is_an_error_that_names_each(tmp_path):
    for version in (1, 2):
        (save_state(tmp_path, small_state(version)) / "state.safetensors").write_bytes(b"")
    for _ in range(2):
        with pytest.raises(StateError, match=r"v000002: state.safetensors hashes to .*v000001: .*Check the disk"):
            load_state(tmp_path)


def interrupt(monkeypatch, at, fault):
    """Make the n-th file operation of a save fail, before it happens; gives the list of operations so far."""
    done = []

    def guarded(name, operation):
        def run(*args, **kwargs):
            done.append(name)
            if len(done) == at:
                raise fault
            return operation(*args, **kwargs)

        return run

    for owner, name in (
        (os, "open"),
        (os, "write"),
        (os, "fsync"),
        (os, "rename"),
        (shutil, "rmtree"),
        (pathlib.Path, "mkdir"),
        (pathlib.Path, "open"),
    ):
        monkeypatch.setattr(owner, name, guarded(name, getattr(owner, name)))
    return done


def num_operations(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        for version in (1, 2):
            save_state(tmp_path / "counted", small_state(version))
        done = interrupt(patch, -1, Killed())
        save_state(tmp_path / "counted", small_state(3))
    return len(done)


def test_a_save_killed_before_any_file_operation_leaves_a_loadable_state(tmp_path, monkeypatch):
    count = num_operations(tmp_path, monkeypatch)
    assert count >= 12
    found = []
    for at in range(1, count + 1):
        folder = tmp_path / str(at)
        for version in (1, 2):
            save_state(folder, small_state(version))
        with monkeypatch.context() as patch:
            interrupt(patch, at, Killed())
            with pytest.raises(Killed):
                save_state(folder, small_state(3))
        state = load_state(folder)
        assert same(state, small_state(state.version)) and state.version in (2, 3)
        found.append(state.version)
        save_state(folder, small_state(4))
        assert same(load_state(folder), small_state(4))
        assert len(list(folder.iterdir())) == 2
    assert found == sorted(found) and set(found) == {2, 3}


def test_a_full_disk_says_what_to_do_and_loses_nothing(tmp_path, monkeypatch):
    count = num_operations(tmp_path, monkeypatch)
    for at in range(1, count + 1):
        folder = tmp_path / str(at)
        for version in (1, 2):
            save_state(folder, small_state(version))
        with monkeypatch.context() as patch:
            interrupt(patch, at, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            with pytest.raises(StateError, match=r"version 3 .*the disk is full .*Free at least .*the previous state"):
                save_state(folder, small_state(3))
        assert load_state(folder).version in (2, 3)


def test_a_limit_of_the_size_of_files_is_reported_as_one(tmp_path):
    with full_disk(100), pytest.raises(StateError, match=r"ulimit -f") as raised:
        save_state(tmp_path / "trainer", small_state(1))
    assert "writable" not in str(raised.value) and "previous state" not in str(raised.value)


def test_a_folder_that_cannot_be_written_is_reported_in_one_line(tmp_path):
    (tmp_path / "trainer").write_text("a file")
    with pytest.raises(StateError, match="cannot save the trainer's state of version 1") as raised:
        save_state(tmp_path / "trainer", small_state(1))
    assert "\n" not in str(raised.value)
