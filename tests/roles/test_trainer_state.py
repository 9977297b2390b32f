"""A trainer that saves its state every few steps repeats the steps since the last one, with the same bits."""

import asyncio
import gzip
import shutil
import time
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest

from shoal.config import load_run
from shoal.errors import PeerError, StateError
from shoal.ledger.commands import Admin
from shoal.protocol.messages import AdminRequest
from shoal.roles.trainer.batch_reader import BatchReader
from shoal.roles.trainer.state import JournalStep, StepJournal, journal_step
from shoal.run_folder import RunFolder
from shoal.step_metrics import read_metrics
from shoal.train.checkpoint import kept_versions
from tests.roles.testbed import RunTestbed, tiny_run, weights_of_one_file

FEW = {"state_every": 3}


class Gone(Exception):
    """Stands for SIGKILL: the trainer says no last word."""


class Killed:
    """A trainer that is killed when it wants the batch of a step, then others, and one that goes on to the end.

    Its versions are published by then and its states on the disk: a thread of this process would outlive it.
    """

    def __init__(self, testbed, *steps):
        self.testbed, self.steps = testbed, steps

    async def run(self):
        for step in self.steps:
            trainer = self.testbed.trainer()
            trainer._batch = self._dying(trainer, step)
            with pytest.raises(Gone):
                await trainer.run()
        await self.testbed.trainer().run()

    @staticmethod
    def _dying(trainer, last):
        batch = trainer._batch

        async def until(step):
            if step < last:
                return await batch(step)
            await trainer._published()
            await trainer.saving.written()
            raise Gone

        return until


def test_a_trainer_killed_between_saved_states_ends_with_the_bytes_of_one_file(tmp_path, caplog):
    caplog.set_level("INFO")
    config = tiny_run(steps=7, storage=FEW)
    testbed = RunTestbed(tmp_path / "run", config)
    asyncio.run(testbed.live(Killed(testbed, 2, 5), testbed.validator(), testbed.worker("worker-0")))
    assert testbed.weights() == weights_of_one_file(config, tmp_path / "one")
    assert testbed.audit().findings == []
    repeated = [record.args[0] for record in caplog.records if record.msg.startswith("repeated the step")]
    assert repeated == [1, 2, 4, 5]
    assert kept_versions(testbed.folder.trainer) == [7, 6]
    assert [path.name for path in (testbed.folder.trainer / "journal").iterdir()] == ["v000007.step"]


def test_steps_are_repeated_without_the_coordinators_bodies(tmp_path, monkeypatch):
    """Of a run with groups of two versions, whose denominators are the trainer's."""
    policy, train = {"dtype": "bfloat16"}, {"dtype": "bfloat16", "moments": "8bit", "updates_per_batch": 2}
    config = tiny_run(steps=4, policy=policy, rollouts={"max_staleness": 1}, train=train, storage={"state_every": 9})
    testbed = RunTestbed(tmp_path / "run", config)
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("worker-0")))
    before = testbed.weights()
    assert kept_versions(testbed.folder.trainer) == [4, 0]
    shutil.rmtree(testbed.folder.trainer / "v000004")
    shutil.rmtree(testbed.folder.trainer / "published", ignore_errors=True)
    shutil.rmtree(testbed.folder.checkpoints)
    trainer = testbed.trainer()
    monkeypatch.setattr(trainer.batches, "rows", None)
    monkeypatch.setattr(trainer, "_denominators", None)
    asyncio.run(testbed.live(trainer))
    assert testbed.weights() == before and kept_versions(testbed.folder.trainer) == [4, 0]


def after_a_kill(testbed):
    """The states and the journal of a trainer that was killed before version 3 was on the disk."""
    fresh = testbed.folder.trainer / "v000003"
    assert kept_versions(testbed.folder.trainer) == [3, 0]
    shutil.rmtree(fresh)
    return StepJournal(testbed.folder.trainer / "journal")


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The folder of a run of three steps on a cosine schedule, whose rate the host lowered."""
    train = {"schedule": "cosine", "warmup_steps": 0}
    testbed = RunTestbed(tmp_path_factory.mktemp("ended") / "run", tiny_run(train=train, storage={"state_every": 9}))
    testbed.coordinator.log_writer.write(Admin("rate", AdminRequest(lr_factor=0.3), time.time()), time.time())
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("worker-0")))
    return testbed.folder.root


@pytest.fixture
def three_steps(ended, tmp_path):
    """The run, in a folder of its own."""
    shutil.copytree(ended, tmp_path / "run")
    return RunTestbed(tmp_path / "run", RunFolder(ended).config())


def test_a_repeated_step_with_another_result_stops_the_run_with_a_remedy(three_steps):
    journal = after_a_kill(three_steps)
    second = list(journal.after(0))[1]
    journal.write(msgspec.structs.replace(second, root="f" * 64))
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(three_steps.live(three_steps.trainer()))
    error = raised.value.exceptions[0].exceptions[0]
    assert isinstance(error, StateError)
    assert "made version 2 and came to weights" in str(error) and f"instead of {'f' * 12}" in str(error)
    assert "Resume there, or start a new run" in str(error)


def test_steps_are_repeated_by_the_schedule_and_rate_that_they_had_though_the_run_was_extended(three_steps):
    """A longer schedule has other learning rates for the same steps."""
    before = three_steps.weights()
    after_a_kill(three_steps)
    shutil.rmtree(three_steps.folder.checkpoints)
    three_steps.config = msgspec.structs.replace(three_steps.config, steps=30)
    trainer = three_steps.trainer()
    asyncio.run(trainer_opens(trainer))
    assert trainer.publisher.root_of(trainer.learner.model) == before and trainer.learner.steps == 30


def test_a_lower_rate_is_the_trainers_and_gives_the_bytes_of_a_run_file_with_that_rate(tmp_path):
    """Half of a learning rate is the same number, whichever of the two factors is halved."""
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=2))
    testbed.coordinator.log_writer.write(Admin("rate", AdminRequest(lr_factor=0.5), time.time()), time.time())
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("worker-0")))
    assert testbed.weights() == weights_of_one_file(tiny_run(steps=2, train={"lr": 5e-4}), tmp_path / "one")
    assert [line["lr"] for line in read_metrics(testbed.folder.metrics)] == [1e-4, 2e-4]  # two of five steps of warm-up
    assert testbed.audit().findings == []


async def trainer_opens(trainer):
    async with trainer.client:
        assert await trainer._open() == 3


def test_a_step_that_cannot_be_read_is_learned_again_from_the_log(three_steps, caplog):
    journal, before = after_a_kill(three_steps), three_steps.weights()
    path = journal.folder / "v000003.step"
    path.write_bytes(path.read_bytes()[:-1])
    shutil.rmtree(three_steps.folder.checkpoints)
    asyncio.run(three_steps.live(three_steps.trainer()))
    assert "the journal ends before this step" in caplog.text and three_steps.weights() == before


def test_a_step_that_cannot_be_read_and_whose_bodies_are_gone_stops_the_run_with_a_remedy(tmp_path):
    storage = {"state_every": 9, "retain": "window", "window_steps": 1}
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=4, storage=storage))
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("worker-0")))
    shutil.rmtree(testbed.folder.trainer / "v000004")
    path = testbed.folder.trainer / "journal" / "v000001.step"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(testbed.live(testbed.trainer()))
    error = raised.value.exceptions[0].exceptions[0]
    assert isinstance(error, StateError) and "\n" not in str(error)
    assert f"version 1 is published, the step that made it is missing or damaged ({path})" in str(error)
    assert f"start a new run whose policy.path is the newest folder in {testbed.folder.checkpoints}" in str(error)


def test_a_damaged_newest_state_is_replaced_by_the_one_before_and_the_journal(tmp_path, monkeypatch):
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=4, storage=FEW))
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("worker-0")))
    before = testbed.weights()
    assert kept_versions(testbed.folder.trainer) == [4, 3]
    shutil.rmtree(testbed.folder.checkpoints)
    (testbed.folder.trainer / "v000004" / "state.json").unlink()
    trainer = testbed.trainer()
    monkeypatch.setattr(trainer.batches, "rows", None)
    asyncio.run(testbed.live(trainer))
    assert testbed.weights() == before


def test_a_full_disk_stops_the_run_before_the_version_is_announced(tmp_path, monkeypatch):
    testbed = RunTestbed(tmp_path / "run", tiny_run(storage=FEW))
    monkeypatch.setattr("shoal.roles.trainer.state.write_atomically", _full)
    monkeypatch.setattr("shoal.roles.coordinator.routes.LONG_POLL_S", 0.2)
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("worker-0")))
    assert "cannot write the step of version 1" in str(raised.value.exceptions[0].exceptions[0])
    assert testbed.coordinator.state.main.version == 0


def _full(path, data):
    raise OSError(28, "No space left on device")


@pytest.fixture
def make_row():
    from shoal.train.rows import TrainingRow

    def make(i):
        rng = np.random.default_rng(i)
        logp, A, w = (rng.normal(size=4).astype(np.float32) for _ in range(3))
        return TrainingRow(
            rng.integers(0, 1 << 18, 9), np.arange(3, 7), logp, A, w, 0.1 * i, 5, "env", (5, i, 2) if i else None,
        )  # fmt: skip

    return make


def test_a_step_of_the_journal_that_is_damaged_or_foreign_ends_it(tmp_path, make_row, caplog):
    journal = StepJournal(tmp_path)
    for version in (1, 2, 3):
        journal.write(journal_step(version, "ab", [1], [make_row(version)], steps=3))
    path = tmp_path / "v000002.step"
    good = path.read_bytes()
    foreign = msgspec.msgpack.encode(msgspec.to_builtins(msgspec.msgpack.decode(good[4:])) | {"more": 1})
    for data in (b"", good[:-1], bytes([good[0] ^ 1]) + good[1:], zlib.crc32(foreign).to_bytes(4, "little") + foreign):
        path.write_bytes(data)
        assert [step.version for step in journal.after(0)] == [1] and "cannot be read" in caplog.text
    path.write_bytes(good)
    assert [step.version for step in journal.after(0)] == [1, 2, 3] and isinstance(next(journal.after(2)), JournalStep)
    journal.forget(2)
    assert [item.name for item in tmp_path.iterdir()] == ["v000003.step"]


def test_what_a_kill_left_of_a_step_that_was_being_written_is_deleted(three_steps):
    journal = after_a_kill(three_steps)
    (journal.folder / ".v000004.step.a1b2c3").write_bytes(b"half of it")
    asyncio.run(three_steps.live(three_steps.trainer()))
    assert all(not path.name.startswith(".") for path in journal.folder.iterdir())


def test_groups_of_pages_before_one_that_failed_are_counted_when_they_are_read_again(monkeypatch):
    with gzip.open(Path(__file__).parents[1] / "golden" / "logs" / "demo.jsonl.gz") as file:
        lines = file.read().splitlines()
    monkeypatch.setattr("shoal.roles.trainer.batch_reader.MAX_EVENTS", 4)

    class Pages:
        """Serves four events a page, and fails at one page once."""

        def __init__(self, fails_at):
            self.left = fails_at

        async def get(self, path, cap):
            self.left -= 1
            if not self.left:
                raise PeerError("the coordinator is away")
            first = int(path.rpartition("=")[2]) + 1
            return b"\n".join(lines[first : first + 4])

    def figures(fails_at):
        reader = BatchReader(
            load_run(Path(__file__).parents[2] / "recipes" / "wordle.toml"), Pages(fails_at), 64, Path()
        )
        if fails_at:
            with pytest.raises(PeerError):
                asyncio.run(reader.accepted_for(0))
        return asyncio.run(reader.accepted_for(0))

    assert figures(12) == figures(0) != {}  # 44 events, with six groups
