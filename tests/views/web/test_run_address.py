"""Where a run is read from: its host sees the folder on the page, and nobody else does, on any view."""

import json

import pytest
from starlette.testclient import TestClient

from shoal.errors import StateError
from shoal.run_folder import RunFolder
from shoal.runs.redact import public_url, without_paths
from shoal.tree import to_tree
from shoal.views.web.app import page_app
from shoal.views.web.page_request import ANY_PLACE
from shoal.views.web.page_runs import PageRuns
from tests.roles.in_memory_run import tiny_run
from tests.views.web.test_pages import TOKEN, crawled


def page_of(root, tmp_path):
    shelf = PageRuns(tmp_path / "index.sqlite", [str(root)])
    while shelf.step():
        pass
    return shelf


def as_host(shelf):
    client = TestClient(page_app(shelf, TOKEN))
    client.get(f"/?token={TOKEN}")
    return client


@pytest.fixture
def shelf(town, tmp_path):
    shelf = page_of(town.folder.root, tmp_path)
    yield shelf
    shelf.close()


def with_host(root, **host):
    """Give the run file in a folder other settings of its host."""
    folder = RunFolder(root)
    tree = to_tree(folder.config())
    tree["host"] |= host
    folder.run_file.write_text(json.dumps(tree))
    return folder


def test_no_page_tells_the_public_where_the_folder_is(shelf, town, tmp_path):
    root = str(town.folder.root)
    found = crawled(TestClient(page_app(shelf, TOKEN)), ("/", "/compare"))
    views = {address.partition("/1/")[2].partition("/")[0].partition("?")[0] for address in found if "/1/" in address}
    assert {"groups", "nodes", "log", "csv", "chart.json", "alarms", "refusals", "versions"} <= views
    assert [address for address, answer in found.items() if root in answer.text or str(tmp_path) in answer.text] == []
    told = crawled(as_host(shelf), ("/", "/compare"))
    assert f"shoal audit {root} --rollout" in "".join(answer.text for answer in told.values())


def test_commands_name_the_address_that_each_viewer_can_use(copied, tmp_path):
    with_host(copied, public_url="https://shoal.example.org")
    shelf = page_of(copied, tmp_path)
    number = shelf.look().rows("SELECT id FROM groups WHERE public = 1")[0]["id"]
    key = shelf.look().rows("SELECT key FROM nodes WHERE role = 'worker'")[0]["key"]
    for client, place in (
        (TestClient(page_app(shelf, TOKEN)), "https://shoal.example.org"),
        (as_host(shelf), str(copied)),
    ):
        assert f"shoal audit {place} --rollout" in client.get(f"/1/groups/{number}").text
        assert f"shoal credits {place} {key[:12]}" in client.get(f"/1/nodes/{key}").text
        assert f"Read from <bdi>{place}</bdi>" in client.get("/1/").text
    shelf.close()


def test_without_a_public_address_a_command_says_what_to_put_there(shelf):
    number = shelf.look().rows("SELECT id FROM groups WHERE public = 1")[0]["id"]
    assert f"shoal audit {ANY_PLACE} --rollout" in TestClient(page_app(shelf, TOKEN)).get(f"/1/groups/{number}").text


def test_a_run_without_a_name_is_called_by_its_number_and_not_by_its_folder(tmp_path):
    folder = RunFolder(tmp_path / "secret-project")
    folder.prepare(tiny_run(), tmp_path)
    shelf = page_of(folder.root, tmp_path)
    page = TestClient(page_app(shelf, TOKEN)).get("/1/").text
    assert "secret-project" not in page and "<title>Overview · Run 1 · shoal</title>" in page
    shelf.close()


def test_errors_tell_the_public_no_path(shelf, town, monkeypatch, caplog):
    root, reading = str(town.folder.root), shelf.runs[0].reading
    number = shelf.look().rows("SELECT id FROM groups WHERE public = 1")[0]["id"]

    def broken(*asked, **more):
        raise StateError(f"the log of {root} is broken, see /srv/other/place")

    anyone, host = TestClient(page_app(shelf, TOKEN)), as_host(shelf)
    monkeypatch.setattr(shelf.runs[0].builder, "advance", broken)
    monkeypatch.setattr(reading, "group", broken)
    hidden, shown = (client.get(f"/1/groups/{number}").text for client in (anyone, host))
    assert "the log of RUN_FOLDER is broken, see …/place" in hidden and "/srv" not in hidden
    assert f"the log of {root} is broken" in shown
    shelf.step()
    page = anyone.get("/1/").text
    assert "cannot be read now" in page and "the log of RUN_FOLDER" in page and root not in page
    assert "ask the run's host" in page and "ask the run's host" not in host.get("/1/").text
    assert root in caplog.text
    monkeypatch.setattr(shelf, "look", lambda look=shelf.look(): look)
    monkeypatch.setattr(shelf.look(), "alarms", broken)
    fault = anyone.get("/1/alarms")
    assert fault.status_code == 503 and "RUN_FOLDER is broken" in fault.text and root not in fault.text


@pytest.mark.parametrize(
    "words, told",
    [
        ("the log of /srv/my runs/one is broken", "the log of RUN_FOLDER is broken"),
        ("/srv/my runs/one/policy is not there yet", "RUN_FOLDER/policy is not there yet"),
        ("the index /tmp/page-x/index.sqlite cannot be read: 1/2", "the index …/index.sqlite cannot be read: 1/2"),
        ("https://example.org/v1/run does not answer", "https://example.org/v1/run does not answer"),
        ("'/home/somebody/env.py' (/home/x)", "'…/env.py' (…/x)"),
    ],
)
def test_an_error_keeps_the_name_of_a_file_and_loses_where_it_is(words, told):
    assert without_paths(words, "/srv/my runs/one") == told


@pytest.mark.parametrize(
    "host, address",
    [
        ({}, ""),
        ({"bind": "0.0.0.0"}, ""),
        ({"bind": "192.0.2.7"}, "http://192.0.2.7:8470"),
        ({"bind": "0.0.0.0", "public_url": "https://shoal.example.org/run"}, "https://shoal.example.org/run"),
        ({"public_url": "https://x.org/$(reboot)"}, ""),
        ({"public_url": "javascript:alert(1)"}, ""),
    ],
)
def test_others_are_told_an_address_only_if_they_can_reach_it(tmp_path, host, address):
    folder = RunFolder(tmp_path / "run")
    folder.prepare(tiny_run(), tmp_path)
    with_host(folder.root, **host)
    folder.address.write_text(json.dumps({"url": "", "pid": 1, "port": 8470}))
    assert public_url(str(folder.root)) == address
    assert public_url("https://other.example.org") == "https://other.example.org"
