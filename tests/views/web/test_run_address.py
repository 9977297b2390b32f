"""Where a run is read from: its host sees the folder on the page, and nobody else does, on any view."""

import json

import pytest

from shoal.errors import StateError
from shoal.run_folder import RunFolder
from shoal.runs.redact import public_url, without_paths
from shoal.typed_toml import to_tree
from shoal.views.web.page_request import ANY_PLACE
from tests.roles.testbed import tiny_run
from tests.views.web.conftest import viewer
from tests.views.web.test_pages import crawled


def with_host(root, **host):
    """Give the run file in a folder other settings of its host."""
    folder = RunFolder(root)
    tree = to_tree(folder.config())
    tree["host"] |= host
    folder.run_file.write_text(json.dumps(tree))
    return folder


def test_no_page_tells_the_public_where_the_folder_is(served_runs, testbed, tmp_path):
    root = str(testbed.folder.root)
    found = crawled(viewer(served_runs), ("/", "/compare"))
    views = {address.partition("/1/")[2].partition("/")[0].partition("?")[0] for address in found if "/1/" in address}
    assert {"groups", "nodes", "log", "csv", "chart.json", "alarms", "refusals", "versions"} <= views
    assert [address for address, answer in found.items() if root in answer.text or str(tmp_path) in answer.text] == []
    assert f"shoal audit {ANY_PLACE} --rollout" in "".join(answer.text for answer in found.values())
    [group, *_] = (address for address in found if "/1/groups/" in address)
    assert f"shoal audit {root} --rollout" in viewer(served_runs, is_host=True).get(group).text


def test_commands_name_the_address_that_each_viewer_can_use(copied, indexed):
    with_host(copied, public_url="https://shoal.example.org")
    served_runs = indexed(copied)
    number = served_runs.look().rows("SELECT id FROM groups WHERE public = 1")[0]["id"]
    key = served_runs.look().rows("SELECT key FROM nodes WHERE role = 'worker'")[0]["key"]
    for client, place in (
        (viewer(served_runs), "https://shoal.example.org"),
        (viewer(served_runs, is_host=True), str(copied)),
    ):
        assert f"shoal audit {place} --rollout" in client.get(f"/1/groups/{number}").text
        assert f"shoal credits {place} {key[:12]}" in client.get(f"/1/nodes/{key}").text
        assert f"Read from <bdi>{place}</bdi>" in client.get("/1/").text


def test_a_run_without_a_name_is_called_by_its_number_and_not_by_its_folder(tmp_path, indexed):
    folder = RunFolder(tmp_path / "secret-project")
    folder.prepare(tiny_run(), tmp_path)
    served_runs = indexed(folder.root)
    page = viewer(served_runs).get("/1/").text
    assert "secret-project" not in page and "<title>Overview · Run 1 · shoal</title>" in page


def test_errors_tell_the_public_no_path(served_runs, testbed, monkeypatch, caplog):
    root, reading = str(testbed.folder.root), served_runs.runs[0].reading
    number = served_runs.look().rows("SELECT id FROM groups WHERE public = 1")[0]["id"]

    def broken(*asked, **more):
        raise StateError(f"the log of {root} is broken, see /srv/other/place")

    anyone, host = viewer(served_runs), viewer(served_runs, is_host=True)
    monkeypatch.setattr(served_runs.runs[0].builder, "advance", broken)
    monkeypatch.setattr(reading, "group", broken)
    hidden, shown = (client.get(f"/1/groups/{number}").text for client in (anyone, host))
    assert "the log of RUN_FOLDER is broken, see …/place" in hidden and "/srv" not in hidden
    assert f"the log of {root} is broken" in shown
    served_runs.step()
    page = anyone.get("/1/").text
    assert "cannot be read now" in page and "the log of RUN_FOLDER" in page and root not in page
    assert "ask the run's host" in page and "ask the run's host" not in host.get("/1/").text
    assert root in caplog.text
    monkeypatch.setattr(served_runs, "look", lambda look=served_runs.look(): look)
    monkeypatch.setattr(served_runs.look(), "alarms", broken)
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
