"""Manifests expire, so that nodes notice a source that is out of date. A run goes on even after a longer pause."""

import asyncio
import time

import pytest

from shoal.ledger.commands import Admin
from shoal.ledger.log.writer import LogWriter
from shoal.ledger.versions import CheckpointPublished
from shoal.protocol.messages import AdminRequest
from tests.roles.testbed import RunTestbed, tiny_run


class Calendar:
    """A clock that a test moves forward."""

    def __init__(self):
        self.days_on = 0.0

    def __call__(self):
        return time.time() + self.days_on * 24 * 3600


@pytest.fixture
def calendar():
    return Calendar()


@pytest.fixture
def testbed(tmp_path, calendar, monkeypatch):
    monkeypatch.setattr("shoal.roles.coordinator.routes.LONG_POLL_S", 0.1)
    return RunTestbed(tmp_path / "run", tiny_run(steps=1), clock=calendar)


async def until(holds):
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.05)


async def renewed(testbed, before):
    await until(lambda: testbed.coordinator.state.main.versions[0].manifest != before)


def test_a_run_paused_for_longer_than_a_manifest_lives_goes_on(testbed, calendar):
    async def scenario():
        async with asyncio.timeout(60):
            trainer = asyncio.create_task(testbed.trainer().run())
            await until(lambda: testbed.coordinator.state.main.version == 0)
            await testbed.coordinator.log_writer.submit(Admin("pause", AdminRequest(), calendar()))
            for _ in range(3):
                before = testbed.coordinator.state.main.versions[0].manifest
                calendar.days_on += 4
                await renewed(testbed, before)
            await testbed.coordinator.log_writer.submit(Admin("resume", AdminRequest(), calendar()))
            await testbed.live(testbed.validator(), testbed.worker("honest"))
            await trainer

    asyncio.run(scenario())
    assert testbed.coordinator.state.main.version == 1 and testbed.audit().findings == []
    published = [e.body.manifest for e in testbed.audit().entries if isinstance(e.body, CheckpointPublished)]
    for log_writer in (testbed.coordinator.log_writer, LogWriter(testbed.coordinator.log_writer.store)):
        assert len(published) > 3 and all(map(log_writer.knows_manifest, published))
        assert not log_writer.knows_manifest("ab" * 32)


def test_a_run_whose_host_was_away_for_longer_than_a_manifest_lives_goes_on(testbed, calendar):
    async def begin():
        trainer = asyncio.create_task(testbed.trainer().run())
        await until(lambda: testbed.coordinator.state.main.version == 0)
        trainer.cancel()
        await asyncio.wait([trainer])

    async def resume():
        before, trainer = testbed.coordinator.state.main.versions[0].manifest, testbed.trainer()
        async with trainer.client:
            await trainer._open()
        assert testbed.coordinator.state.main.versions[0].manifest != before
        await testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("honest"), limit_s=60.0)

    asyncio.run(begin())
    calendar.days_on = 8
    asyncio.run(resume())
    assert testbed.coordinator.state.main.version == 1 and testbed.audit().findings == []
