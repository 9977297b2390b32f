"""Pages of runs whose logs are indexed to their ends, and their viewers."""

import contextlib
import json
import shutil

import pytest
from starlette.testclient import TestClient

from shoal.views.web.app import page_app
from shoal.views.web.served_runs import ServedRuns

TOKEN = "t" * 43


def viewer(served_runs, is_host=False, token=TOKEN):
    """A browser that looks at the page."""
    client = TestClient(page_app(served_runs, token))
    if is_host:
        assert client.get(f"/?token={token}").status_code == 200
    return client


@pytest.fixture
def indexed(tmp_path):
    """Makes the page of some runs, and closes it after the test."""
    with contextlib.ExitStack() as stack:

        def made(*places, index=tmp_path / "index.sqlite", **options):
            served_runs = stack.enter_context(contextlib.closing(ServedRuns(index, [*map(str, places)], **options)))
            while served_runs.step():
                pass
            return served_runs

        yield made


@pytest.fixture
def folder_with_metrics(tmp_path):
    """Makes the folder of a run that has these metrics and no log."""

    def made(*lines):
        (root := tmp_path / "run").mkdir()
        (root / "run.json").write_text("{}")
        (root / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return root

    return made


@pytest.fixture(scope="session")
def whole_index(testbed, tmp_path_factory):
    """The index of the run, made once."""
    index = tmp_path_factory.mktemp("whole") / "index.sqlite"
    with contextlib.closing(ServedRuns(index, [str(testbed.folder.root)])) as served_runs:
        served_runs.catch_up()
    return index


@pytest.fixture
def served_runs(testbed, indexed, whole_index, tmp_path):
    shutil.copy(whole_index, tmp_path / "index.sqlite")
    return indexed(testbed.folder.root)


@pytest.fixture
def anyone(served_runs):
    return viewer(served_runs)


@pytest.fixture
def host(served_runs):
    return viewer(served_runs, is_host=True)
