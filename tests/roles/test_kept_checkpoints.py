"""A trainer killed between announcing a version and keeping its checkpoint keeps it when it is started again."""

import asyncio

import pytest

from shoal.launch.summary import UsageBook, write_summary
from shoal.ledger.commands import Admin
from shoal.models.checkpoint import tensors_of
from shoal.protocol.messages import AdminRequest
from shoal.roles.trainer import publish_version
from shoal.runs.run_status import RunStatus
from tests.roles.testbed import RunTestbed, tiny_run

RUN = tiny_run(steps=2, storage={"checkpoint_every": 1})


class Killed(BaseException):
    """Stands for the end of a killed process."""


class DiesOnce:
    """A trainer that is killed just before it keeps a checkpoint, and then started again."""

    def __init__(self, testbed, before, monkeypatch):
        self.testbed, self.before, self.monkeypatch = testbed, before, monkeypatch

    async def run(self):
        with self.monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(publish_version, "copy_checkpoint", self._keep_or_die)
            await self.testbed.trainer().run()
        assert not (self.testbed.folder.checkpoints / self.before).exists()
        await self.testbed.trainer().run()

    def _keep_or_die(self, source, target, keep=publish_version.copy_checkpoint):
        if target.name == self.before:
            raise Killed
        keep(source, target)


@pytest.fixture(autouse=True)
def short_polls(monkeypatch):
    monkeypatch.setattr("shoal.roles.coordinator.routes.LONG_POLL_S", 0.1)


@pytest.mark.parametrize("before", ["v000000", "v000002", "final"])
def test_a_checkpoint_that_a_kill_left_out_is_kept_after_the_restart(tmp_path, monkeypatch, before):
    testbed = RunTestbed(tmp_path / "run", RUN)
    asyncio.run(testbed.live(DiesOnce(testbed, before, monkeypatch), testbed.validator(), testbed.worker("worker")))
    kept = testbed.folder.checkpoints
    assert sorted(path.name for path in kept.iterdir()) == ["final", "v000000", "v000001", "v000002"]
    assert testbed.weights() == testbed.coordinator.state.main.versions[2].root
    assert tensors_of(kept / "v000002") == tensors_of(kept / "final") != tensors_of(kept / "v000001")
    assert tensors_of(kept / "v000000") == tensors_of(testbed.folder.policy)
    end = write_summary(testbed.folder, testbed.config, RunStatus("town", "", 2), UsageBook(tmp_path / "usage.json"))
    assert end.summary["weights_hash"] == testbed.weights()
    assert testbed.audit().findings == []


def test_a_drained_run_keeps_its_final_checkpoint_after_a_kill(tmp_path, monkeypatch):
    testbed = RunTestbed(tmp_path / "run", RUN)

    async def drain_soon():
        while testbed.coordinator.state.main.version < 1:
            await asyncio.sleep(0.01)
        await testbed.coordinator.log_writer.submit(Admin("drain", AdminRequest(), testbed.clock()))

    async def scenario():
        async with asyncio.TaskGroup() as group:
            group.create_task(drain_soon())
            await testbed.live(DiesOnce(testbed, "final", monkeypatch), testbed.validator(), testbed.worker("worker"))

    asyncio.run(scenario())
    version, final = testbed.coordinator.state.main.version, testbed.folder.checkpoints / "final"
    assert tensors_of(final) == tensors_of(testbed.folder.checkpoints / f"v{version:06d}")
    before = final.stat().st_ino
    asyncio.run(testbed.trainer().run())
    assert final.stat().st_ino == before, "it is there"
    (final / "model.safetensors").write_bytes(b"damaged")
    asyncio.run(testbed.trainer().run())
    assert testbed.weights() == testbed.coordinator.state.main.versions[version].root
