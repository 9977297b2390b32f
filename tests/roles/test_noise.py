"""Noise families in whole runs: the log names the family, every role samples or replays with it, and cheats are refused."""

import asyncio
from pathlib import Path

import pytest

from shoal.config import RunConfig
from shoal.engine.native import LocalEngine
from shoal.protocol.noise import KEYED_32, KEYED_64, NOISES
from shoal.roles.auditor.rejudge_groups import AGREE, GroupChoice, audit_rollouts
from shoal.runs.log_follower import creation_of
from shoal.runs.log_source import FolderRun
from tests.nightly import first_of
from tests.roles.testbed import RunTestbed, tiny_run, weights_of_one_file

KEYED = (KEYED_32, KEYED_64)


def _config(family: str, **changes: object) -> RunConfig:
    return tiny_run(steps=2, sampling={"noise": family}, storage={"retain": "all"}, **changes)


@pytest.mark.parametrize("family", first_of(*KEYED))
def test_a_run_has_the_family_that_its_file_names(tmp_path: Path, family: str) -> None:
    config = _config(family)
    testbed = RunTestbed(tmp_path / "run", config)
    workers = [testbed.worker("host's"), testbed.worker("stranger", own_files=False)]
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), *workers))
    assert all(testbed.coordinator.state.members[worker.key].refused == 0 for worker in workers)
    assert testbed.audit().findings == []
    assert creation_of(testbed.folder.log).sampling.noise == family
    assert testbed.weights() == weights_of_one_file(config, tmp_path / "one")
    found = asyncio.run(audit_rollouts(FolderRun(testbed.folder.root), GroupChoice(), threads=1, own_files=False))
    assert found.disagreements == [] and found.with_model > 0 and found.exit_code() == AGREE


@pytest.mark.parametrize("family", first_of(*NOISES))
def test_work_of_another_family_is_refused(tmp_path: Path, family: str) -> None:
    """A worker that samples with the noise that is most at hand is as wrong as one that samples with its own luck."""
    testbed = RunTestbed(tmp_path / "run", _config(family))
    mistaken, honest = testbed.worker("mistaken"), testbed.worker("honest")
    others = [other for other in NOISES if other != family]
    mistaken.node.make_engine = lambda dtype, **named: LocalEngine(1, dtype, noise=others[0])
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), mistaken, honest))
    members = testbed.coordinator.state.members
    assert members[honest.key].credits > 0 == members[honest.key].refused
    assert members[mistaken.key].refused > 0 == members[mistaken.key].credits
