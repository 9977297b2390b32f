"""Manifests expire, so that nodes notice a source that is out of date. A run goes on even after a longer pause."""

import asyncio
import time

import pytest

from shoal.ledger.commands import Admin
from shoal.ledger.log.writer import LogWriter
from shoal.ledger.versions import CheckpointPublished
from tests.roles.in_memory_run import Town, tiny_run


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
def town(tmp_path, calendar, monkeypatch):
    monkeypatch.setattr("shoal.roles.coordinator.calls.LONG_POLL_S", 0.1)
    return Town(tmp_path / "run", tiny_run(steps=1), clock=calendar)


async def until(holds):
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.05)


async def renewed(town, before):
    await until(lambda: town.desk.state.main.versions[0].manifest != before)


def test_a_run_paused_for_longer_than_a_manifest_lives_goes_on(town, calendar):
    async def story():
        async with asyncio.timeout(60):
            trainer = asyncio.create_task(town.trainer().run())
            await until(lambda: town.desk.state.main.version == 0)
            await town.desk.book.submit(Admin("pause", "", calendar()))
            for _ in range(3):
                before = town.desk.state.main.versions[0].manifest
                calendar.days_on += 4
                await renewed(town, before)
            await town.desk.book.submit(Admin("resume", "", calendar()))
            await town.live(town.validator(), town.worker("honest"))
            await trainer

    asyncio.run(story())
    assert town.desk.state.main.version == 1 and town.audit().findings == []
    published = [e.body.manifest for e in town.audit().entries if isinstance(e.body, CheckpointPublished)]
    for book in (town.desk.book, LogWriter(town.desk.book.store)):
        assert len(published) > 3 and all(map(book.knows_manifest, published))
        assert not book.knows_manifest("ab" * 32)


def test_a_run_whose_host_was_away_for_longer_than_a_manifest_lives_goes_on(town, calendar):
    async def begin():
        trainer = asyncio.create_task(town.trainer().run())
        await until(lambda: town.desk.state.main.version == 0)
        trainer.cancel()
        await asyncio.wait([trainer])

    async def resume():
        before, trainer = town.desk.state.main.versions[0].manifest, town.trainer()
        async with trainer.client:
            await trainer._open()
        assert town.desk.state.main.versions[0].manifest != before
        await town.live(town.trainer(), town.validator(), town.worker("honest"), limit_s=60.0)

    asyncio.run(begin())
    calendar.days_on = 8
    asyncio.run(resume())
    assert town.desk.state.main.version == 1 and town.audit().findings == []
