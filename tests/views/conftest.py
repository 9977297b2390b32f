"""A short run with a cheater, which the tests of this folder read. It is made once; who changes it copies its folder."""

import asyncio
import contextlib
import json
import shutil
import sqlite3

import pytest

from tests.roles.testbed import RunTestbed, tiny_run
from tests.views.web.hostile_run import hostile_runs


@pytest.fixture(scope="session")
def testbed(tmp_path_factory):
    """Two steps with an honest worker and one that forges its log-probs."""
    changes = {"steps": 2, "storage": {"retain": "all"}, "rollouts": {"max_staleness": 1}}
    testbed = RunTestbed(tmp_path_factory.mktemp("watched") / "run", tiny_run(**changes))
    honest, cheater = testbed.worker("honest"), testbed.worker("cheater", "other-seed")
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), honest, cheater))
    testbed.folder.evaluations.mkdir(exist_ok=True)
    figures = {"mean": 0.5, "low95": 0.4, "high95": 0.6, "episodes": 100, "measure": "success", "tasks": "heldout"}
    secret = {"task": "held out", "turns": [["user", "a secret"]], "score": 1.0, "success": True, "ending": "environment",
              "tokens": 3}  # fmt: skip
    (testbed.folder.evaluations / "before.json").write_text(json.dumps(figures | {"transcripts": [secret]}))
    (testbed.folder.evaluations / "v000001.json").write_text('{"mean": 0.')
    return testbed


@pytest.fixture
def copied(testbed, tmp_path):
    """A copy of the run's folder, whose log nobody has open."""
    root = shutil.copytree(testbed.folder.root, tmp_path / "copy")
    with contextlib.closing(sqlite3.connect(root / "log.sqlite")) as log:
        log.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return root


@pytest.fixture
def hostile(testbed, tmp_path, monkeypatch):
    """A page whose run says hostile things wherever strangers may say something."""
    served_runs = hostile_runs(testbed.folder.root, tmp_path / "index.sqlite", monkeypatch)
    yield served_runs
    served_runs.close()


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium. Its driver has an event loop in this thread, so a module that has it begins none."""
    from tests.views.web.browser import CHROMIUM, QUIET, sync_api

    with sync_api.sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield made
        made.close()


@pytest.fixture
def complaints():
    """What a page wrote to the console, threw, or asked: faults, forbidden scripts, dialogs."""
    return []
