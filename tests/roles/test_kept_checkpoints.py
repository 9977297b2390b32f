"""A trainer killed between announcing a version and keeping its checkpoint keeps it when it is started again."""

import asyncio

import pytest

from shoal.launch.summary import UsageBook, write_summary
from shoal.ledger.commands import Admin
from shoal.models.checkpoint import tensors_of
from shoal.roles.trainer import publish
from shoal.runs.run_status import RunStatus
from tests.roles.in_memory_run import Town, tiny_run

RUN = tiny_run(steps=2, storage={"checkpoint_every": 1})


class Killed(BaseException):
    """Stands for the end of a killed process."""


class DiesOnce:
    """A trainer that is killed just before it keeps a checkpoint, and then started again."""

    def __init__(self, town, before, monkeypatch):
        self.town, self.before, self.monkeypatch = town, before, monkeypatch

    async def run(self):
        with self.monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(publish, "copy_checkpoint", self._keep_or_die)
            await self.town.trainer().run()
        assert not (self.town.folder.checkpoints / self.before).exists()
        await self.town.trainer().run()

    def _keep_or_die(self, source, target, keep=publish.copy_checkpoint):
        if target.name == self.before:
            raise Killed
        keep(source, target)


@pytest.fixture(autouse=True)
def short_polls(monkeypatch):
    monkeypatch.setattr("shoal.roles.coordinator.calls.LONG_POLL_S", 0.1)


@pytest.mark.parametrize("before", ["v000000", "v000001", "v000002", "final"])
def test_a_checkpoint_that_a_kill_left_out_is_kept_after_the_restart(tmp_path, monkeypatch, before):
    town = Town(tmp_path / "run", RUN)
    asyncio.run(town.live(DiesOnce(town, before, monkeypatch), town.validator(), town.worker("worker")))
    kept = town.folder.checkpoints
    assert sorted(path.name for path in kept.iterdir()) == ["final", "v000000", "v000001", "v000002"]
    assert town.weights() == town.desk.state.main.versions[2].root
    assert tensors_of(kept / "v000002") == tensors_of(kept / "final") != tensors_of(kept / "v000001")
    assert tensors_of(kept / "v000000") == tensors_of(town.folder.policy)
    end = write_summary(town.folder, town.config, RunStatus("town", "", 2), UsageBook(tmp_path / "usage.json"))
    assert end.summary["weights_hash"] == town.weights()
    assert town.audit().findings == []


def test_a_drained_run_keeps_its_final_checkpoint_after_a_kill(tmp_path, monkeypatch):
    town = Town(tmp_path / "run", RUN)

    async def drain_soon():
        while town.desk.state.main.version < 1:
            await asyncio.sleep(0.01)
        await town.desk.book.submit(Admin("drain", "", town.clock()))

    async def story():
        async with asyncio.TaskGroup() as group:
            group.create_task(drain_soon())
            await town.live(DiesOnce(town, "final", monkeypatch), town.validator(), town.worker("worker"))

    asyncio.run(story())
    version = town.desk.state.main.version
    assert tensors_of(town.folder.checkpoints / "final") == tensors_of(town.folder.checkpoints / f"v{version:06d}")


def test_a_checkpoint_that_is_there_is_left_alone(tmp_path):
    town = Town(tmp_path / "run", RUN)
    asyncio.run(town.live(town.trainer(), town.validator(), town.worker("worker")))
    final = town.folder.checkpoints / "final"
    before = final.stat().st_ino
    asyncio.run(town.trainer().run())
    assert final.stat().st_ino == before
    (final / "model.safetensors").write_bytes(b"damaged")
    asyncio.run(town.trainer().run())
    assert town.weights() == town.desk.state.main.versions[2].root
