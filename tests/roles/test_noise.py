"""Noise families in whole runs: the log names the family, every role samples or replays with it, and cheats are refused."""

import asyncio
from pathlib import Path

import pytest

from shoal.config import RunConfig
from shoal.engine.dishonest import CHEATS
from shoal.engine.native import LocalEngine
from shoal.protocol.noise import KEYED_32, KEYED_64, NOISES
from shoal.roles.auditor.recompute import AGREE, GroupChoice, audit_rollouts
from shoal.runs.log import creation_of
from shoal.runs.public_run import FolderRun
from tests.nightly import first_of
from tests.roles.in_memory_run import Town, tiny_run, weights_of_one_file

KEYED = (KEYED_32, KEYED_64)


def _config(family: str, **changes: object) -> RunConfig:
    return tiny_run(steps=2, sampling={"noise": family}, storage={"retain": "all"}, **changes)


@pytest.mark.parametrize("family", first_of(*KEYED))
def test_a_run_has_the_family_that_its_file_names(tmp_path: Path, family: str) -> None:
    config = _config(family)
    town = Town(tmp_path / "run", config)
    workers = [town.worker("host's"), town.worker("stranger", own_files=False)]
    asyncio.run(town.live(town.trainer(), town.validator(), *workers))
    assert all(town.desk.state.members[worker.key].refused == 0 for worker in workers)
    assert town.audit().findings == []
    assert creation_of(town.folder.log).sampling.noise == family
    assert town.weights() == weights_of_one_file(config, tmp_path / "one")
    other = tiny_run(steps=2, storage={"retain": "all"})
    assert town.weights() != weights_of_one_file(other, tmp_path / "other")
    found = asyncio.run(audit_rollouts(FolderRun(town.folder.root), GroupChoice(), threads=1, own_files=False))
    assert found.disagreements == [] and found.with_model > 0 and found.exit_code() == AGREE


@pytest.mark.parametrize("cheat", first_of(*CHEATS))
@pytest.mark.parametrize("family", first_of(*KEYED))
def test_cheats_are_refused_in_every_family(tmp_path: Path, family: str, cheat: str) -> None:
    town = Town(tmp_path / "run", _config(family))
    cheater, honest = town.worker("cheater", cheat), town.worker("honest")
    asyncio.run(town.live(town.trainer(), town.validator(), cheater, honest))
    members = town.desk.state.members
    assert members[honest.key].credits > 0 == members[honest.key].refused
    if cheat != "old-weights":  # its work on version 0 is honest
        assert members[cheater.key].refused > 0 == members[cheater.key].credits


@pytest.mark.parametrize("family", first_of(*NOISES))
def test_work_of_another_family_is_refused(tmp_path: Path, family: str) -> None:
    """A worker that samples with the noise that is most at hand is as wrong as one that samples with its own luck."""
    town = Town(tmp_path / "run", _config(family))
    mistaken, honest = town.worker("mistaken"), town.worker("honest")
    others = [other for other in NOISES if other != family]
    mistaken.node.make_engine = lambda dtype, **named: LocalEngine(1, dtype, noise=others[0])
    asyncio.run(town.live(town.trainer(), town.validator(), mistaken, honest))
    members = town.desk.state.members
    assert members[honest.key].credits > 0 == members[honest.key].refused
    assert members[mistaken.key].refused > 0 == members[mistaken.key].credits
