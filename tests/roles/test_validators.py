"""Whole runs with three validators, one of them bad: nobody honest is slashed, nothing is lost, all is decided once."""

import asyncio
from functools import partial

import pytest

from shoal.engine.local import LocalEngine
from shoal.ledger import audits
from shoal.ledger import events as ev
from shoal.roles.validator import Validator
from tests.attacks.validators import Hangman, Idler
from tests.roles.town import Town, tiny_run


@pytest.fixture
def hurried(monkeypatch):
    """Turns and rechecks as in a long run, within a short one."""
    monkeypatch.setattr(audits, "TURN_S", 0.5)
    monkeypatch.setattr(audits, "RECHECK_RATE", 1.0)


def town_of_three(path):
    return Town(path / "run", tiny_run(validators={"count": 3}))


def validator(town, number, kind=Validator):
    home = town.folder.nodes / f"validator-{number}"
    return kind(
        town.client(town.folder.keys / f"validator-{number}.key"), home, partial(LocalEngine, 1), own_files=True
    )


def key_of(town, number):
    return town.client(town.folder.keys / f"validator-{number}.key")._key.public


def slashed(audit):
    return {entry.body.node for entry in audit.entries if isinstance(entry.body, ev.Slash)}


def faults(audit):
    return {entry.body.validator for entry in audit.entries if isinstance(entry.body, ev.ValidatorFault)}


def test_a_validator_that_refuses_everything_slashes_nobody_and_changes_no_byte(tmp_path, hurried):
    alone = Town(tmp_path / "alone", tiny_run())
    asyncio.run(alone.live(alone.trainer(), alone.validator(), alone.worker("honest")))
    town = town_of_three(tmp_path)
    honest = town.worker("honest")
    judges = [validator(town, 0, Hangman), validator(town, 1), validator(town, 2)]
    asyncio.run(town.live(town.trainer(), honest, *judges))
    audit = town.audit()
    assert audit.findings == [] and slashed(audit) == set() and town.weights() == alone.weights()
    node = audit.state.nodes[honest.key]
    assert node.credits > 0 and node.refused == node.failures == 0
    assert faults(audit) <= {key_of(town, 0)} and all(audit.decided[name] == 1 for name in audit.received)


def test_a_forger_is_slashed_by_two_honest_validators_and_the_idle_one_is_named(tmp_path, hurried):
    town = town_of_three(tmp_path)
    honest, forger = town.worker("honest"), town.worker("forger", "other-seed")
    judges = [validator(town, 0, Idler), validator(town, 1), validator(town, 2)]
    asyncio.run(town.live(town.trainer(), honest, forger, *judges))
    audit = town.audit()
    assert audit.findings == [] and slashed(audit) == {forger.key} and faults(audit) == {key_of(town, 0)}
    assert audit.state.nodes[forger.key].credits == 0 and audit.state.nodes[honest.key].credits > 0
    assert all(audit.decided[name] == 1 for name in audit.received)


def test_a_validator_that_dies_leaves_its_submissions_to_the_next(tmp_path, hurried):
    town = town_of_three(tmp_path)
    dying, honest = validator(town, 0), town.worker("honest")

    async def story():
        death = asyncio.create_task(dying.run())
        work = asyncio.create_task(town.live(town.trainer(), honest, validator(town, 1), validator(town, 2)))
        while not town.desk.state.accepted_groups:
            await asyncio.sleep(0.05)
        death.cancel()
        await work

    asyncio.run(story())
    audit = town.audit()
    assert audit.findings == [] and slashed(audit) == set() and audit.state.nodes[honest.key].refused == 0
    assert all(audit.decided[name] == 1 for name in audit.received)
