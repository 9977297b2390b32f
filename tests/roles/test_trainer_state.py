"""A trainer that saves its state every few steps repeats the steps since the last one, with the same bits."""

import asyncio
import shutil
import time
import zlib

import msgspec
import numpy as np
import pytest

from shoal.errors import StateError
from shoal.ledger.commands import Admin
from shoal.metrics import read_metrics
from shoal.roles.trainer.state import JournalStep, StepJournal, journal_step
from shoal.train.checkpoint import kept_versions
from tests.roles.in_memory_run import Town, tiny_run, weights_of_one_file

FEW = {"state_every": 3}


class Gone(Exception):
    """Stands for SIGKILL: the trainer says no last word."""


class Killed:
    """A trainer that is killed when it wants the batch of a step, then others, and one that goes on to the end.

    Its versions are published by then and its states on the disk: a thread of this process would outlive it.
    """

    def __init__(self, town, *steps):
        self.town, self.steps = town, steps

    async def run(self):
        for step in self.steps:
            trainer = self.town.trainer()
            trainer._batch = self._dying(trainer, step)
            with pytest.raises(Gone):
                await trainer.run()
        await self.town.trainer().run()

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
    town = Town(tmp_path / "run", config)
    asyncio.run(town.live(Killed(town, 2, 5), town.validator(), town.worker("worker-0")))
    assert town.weights() == weights_of_one_file(config, tmp_path / "one")
    assert town.audit().findings == []
    repeated = [record.args[0] for record in caplog.records if record.msg.startswith("repeated the step")]
    assert repeated == [1, 2, 4, 5]
    assert kept_versions(town.folder.trainer) == [7, 6]
    assert [path.name for path in (town.folder.trainer / "journal").iterdir()] == ["v000007.step"]


@pytest.mark.parametrize("train", [{"dtype": "bfloat16", "moments": "8bit"}, {"updates_per_batch": 2}], ids=str)
def test_steps_are_repeated_without_the_coordinators_bodies(tmp_path, monkeypatch, train):
    """Of a run with groups of two versions, whose denominators are the trainer's."""
    policy = {"dtype": "bfloat16"}
    config = tiny_run(steps=4, policy=policy, rollouts={"max_staleness": 1}, train=train, storage={"state_every": 9})
    town = Town(tmp_path / "run", config)
    asyncio.run(town.live(town.trainer(), town.validator(), town.worker("worker-0")))
    before = town.weights()
    assert kept_versions(town.folder.trainer) == [4, 0]
    shutil.rmtree(town.folder.trainer / "v000004")
    shutil.rmtree(town.folder.trainer / "published", ignore_errors=True)
    shutil.rmtree(town.folder.checkpoints)
    trainer = town.trainer()
    monkeypatch.setattr(trainer.batches, "rows", None)
    monkeypatch.setattr(trainer, "_denominators", None)
    asyncio.run(town.live(trainer))
    assert town.weights() == before and kept_versions(town.folder.trainer) == [4, 0]


def after_a_kill(town):
    """The states and the journal of a trainer that was killed before version 3 was on the disk."""
    fresh = town.folder.trainer / "v000003"
    assert kept_versions(town.folder.trainer) == [3, 0]
    shutil.rmtree(fresh)
    return StepJournal(town.folder.trainer / "journal")


@pytest.fixture
def three_steps(tmp_path):
    town = Town(tmp_path / "run", tiny_run(storage={"state_every": 9}))
    asyncio.run(town.live(town.trainer(), town.validator(), town.worker("worker-0")))
    return town


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


def test_steps_are_repeated_by_the_schedule_that_they_had_though_the_run_was_extended(tmp_path):
    """A longer schedule has other learning rates for the same steps."""
    town = Town(tmp_path / "run", tiny_run(train={"schedule": "cosine", "warmup_steps": 0}, storage={"state_every": 9}))
    asyncio.run(town.live(town.trainer(), town.validator(), town.worker("worker-0")))
    before = town.weights()
    after_a_kill(town)
    shutil.rmtree(town.folder.checkpoints)
    town.config = msgspec.structs.replace(town.config, steps=30)
    trainer = town.trainer()
    asyncio.run(trainer_opens(trainer))
    assert trainer.publisher.root_of(trainer.learner.model) == before and trainer.learner.steps == 30


def test_a_lower_rate_is_the_trainers_and_gives_the_bytes_of_a_run_file_with_that_rate(tmp_path):
    """Half of a learning rate is the same number, whichever of the two factors is halved."""
    town = Town(tmp_path / "run", tiny_run(steps=2))
    town.desk.book.write(Admin("rate", "", time.time(), lr_factor=0.5), time.time())
    asyncio.run(town.live(town.trainer(), town.validator(), town.worker("worker-0")))
    assert town.weights() == weights_of_one_file(tiny_run(steps=2, train={"lr": 5e-4}), tmp_path / "one")
    assert [line["lr"] for line in read_metrics(town.folder.metrics)] == [1e-4, 2e-4]  # two of five steps of warm-up
    assert town.audit().findings == []


def test_steps_are_repeated_by_the_rate_that_their_batches_had(tmp_path):
    town = Town(tmp_path / "run", tiny_run(storage={"state_every": 9}))
    town.desk.book.write(Admin("rate", "", time.time(), lr_factor=0.3), time.time())
    asyncio.run(town.live(town.trainer(), town.validator(), town.worker("worker-0")))
    before = town.weights()
    after_a_kill(town)
    shutil.rmtree(town.folder.checkpoints)
    trainer = town.trainer()
    asyncio.run(trainer_opens(trainer))
    assert trainer.publisher.root_of(trainer.learner.model) == before


async def trainer_opens(trainer):
    async with trainer.client:
        assert await trainer._open() == 3


def test_a_step_of_before_schedules_were_kept_has_that_of_the_run_file(three_steps):
    journal, before = after_a_kill(three_steps), three_steps.weights()
    for step in list(journal.after(0)):
        journal.write(msgspec.structs.replace(step, steps=0))
    asyncio.run(three_steps.live(three_steps.trainer()))
    assert three_steps.weights() == before


def test_a_step_that_cannot_be_read_is_learned_again_from_the_log(three_steps, caplog):
    journal, before = after_a_kill(three_steps), three_steps.weights()
    path = journal.folder / "v000003.step"
    path.write_bytes(path.read_bytes()[:-1])
    shutil.rmtree(three_steps.folder.checkpoints)
    asyncio.run(three_steps.live(three_steps.trainer()))
    assert "the journal ends before this step" in caplog.text and three_steps.weights() == before


def test_a_step_that_cannot_be_read_and_whose_bodies_are_gone_stops_the_run_with_a_remedy(tmp_path):
    storage = {"state_every": 9, "retain": "window", "window_steps": 1}
    town = Town(tmp_path / "run", tiny_run(steps=4, storage=storage))
    asyncio.run(town.live(town.trainer(), town.validator(), town.worker("worker-0")))
    shutil.rmtree(town.folder.trainer / "v000004")
    path = town.folder.trainer / "journal" / "v000001.step"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(town.live(town.trainer()))
    error = raised.value.exceptions[0].exceptions[0]
    assert isinstance(error, StateError) and "\n" not in str(error)
    assert f"version 1 is published, the step that made it is missing or damaged ({path})" in str(error)
    assert f"start a new run whose policy.path is the newest folder in {town.folder.checkpoints}" in str(error)


def test_a_damaged_newest_state_is_replaced_by_the_one_before_and_the_journal(tmp_path, monkeypatch):
    town = Town(tmp_path / "run", tiny_run(steps=4, storage=FEW))
    asyncio.run(town.live(town.trainer(), town.validator(), town.worker("worker-0")))
    before = town.weights()
    assert kept_versions(town.folder.trainer) == [4, 3]
    shutil.rmtree(town.folder.checkpoints)
    (town.folder.trainer / "v000004" / "state.json").unlink()
    trainer = town.trainer()
    monkeypatch.setattr(trainer.batches, "rows", None)
    asyncio.run(town.live(trainer))
    assert town.weights() == before


def test_a_run_goes_on_when_its_states_become_rarer_or_more_frequent(tmp_path):
    config = tiny_run(steps=4, storage=FEW)
    town = Town(tmp_path / "run", config)

    killed = Killed(town, 2)
    make = town.trainer

    def made():
        trainer = make()
        trainer.saving._every = 1 if town.desk.state.main.version >= 2 else 3
        return trainer

    town.trainer = made
    asyncio.run(town.live(killed, town.validator(), town.worker("worker-0")))
    assert town.weights() == weights_of_one_file(config, tmp_path / "one")
    assert kept_versions(town.folder.trainer) == [4, 3]
    assert [path.name for path in (town.folder.trainer / "journal").iterdir()] == []


def test_a_run_that_saves_every_state_has_no_journal(tmp_path):
    town = Town(tmp_path / "run", tiny_run(steps=1))
    asyncio.run(town.live(town.trainer(), town.validator(), town.worker("worker-0")))
    assert not (town.folder.trainer / "journal").exists()


def test_a_full_disk_stops_the_run_before_the_version_is_announced(tmp_path, monkeypatch):
    town = Town(tmp_path / "run", tiny_run(storage=FEW))
    monkeypatch.setattr("shoal.roles.trainer.state.write_atomically", _full)
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(town.live(town.trainer(), town.validator(), town.worker("worker-0")))
    assert "cannot write the step of version 1" in str(raised.value.exceptions[0].exceptions[0])
    assert town.desk.state.main.version == 0


def _full(path, data):
    raise OSError(28, "No space left on device")


def test_rows_come_back_from_the_journal_as_they_were(tmp_path, make_row):
    rows = [make_row(i) for i in range(3)]
    journal = StepJournal(tmp_path)
    journal.write(journal_step(7, "ab", [2048, 512], rows, steps=9))
    (found,) = journal.after(6)
    assert (found.version, found.root, found.budgets, found.steps) == (7, "ab", (2048, 512), 9)
    for before, after in zip(rows, found.learned(), strict=True):
        for name in ("tokens_T", "positions_P", "behaviour_logp_P", "advantage_P", "weight_P"):
            left, right = getattr(before, name), getattr(after, name)
            assert left.dtype == right.dtype and np.array_equal(left, right)
        assert (before.reward, before.version, before.env, before.id) == (
            after.reward,
            after.version,
            after.env,
            after.id,
        )
    assert list(journal.after(7)) == []


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


def test_what_cannot_be_deleted_from_the_journal_stays_and_stops_nothing(tmp_path, make_row):
    journal = StepJournal(tmp_path)
    (tmp_path / "v000001.step").mkdir()
    journal.write(journal_step(2, "ab", [1], [make_row(2)], steps=3))
    journal.forget(2)
    assert [item.name for item in tmp_path.iterdir()] == ["v000001.step"]


def test_what_a_kill_left_of_a_step_that_was_being_written_is_deleted(three_steps):
    journal = after_a_kill(three_steps)
    (journal.folder / ".v000004.step.a1b2c3").write_bytes(b"half of it")
    asyncio.run(three_steps.live(three_steps.trainer()))
    assert all(not path.name.startswith(".") for path in journal.folder.iterdir())
