"""The page of a run that this machine hosts: who starts it, how browsers find it, and what is written about it."""

import json
import os
import signal
import subprocess
import sys
import time

import httpx
import pytest
from starlette.testclient import TestClient

from shoal.launch.admin import invitation
from shoal.launch.preflight import onlookers
from shoal.net.server_address import port_of_living
from shoal.roles.coordinator.main import open_run
from shoal.roles.coordinator.routes import application
from shoal.run_folder import RunFolder
from tests.roles.testbed import tiny_run

BROWSER = {"accept": "text/html,*/*;q=0.8"}


def coordinator(tmp_path, **host):
    config = tiny_run(host=host)
    folder = RunFolder(tmp_path / "run")
    folder.prepare(config, tmp_path)
    return folder, TestClient(
        application(open_run(folder, config)), base_url="http://example.org:8470", follow_redirects=False
    )


def test_a_browser_is_led_to_the_page_and_other_programs_are_not(tmp_path):
    folder, client = coordinator(tmp_path)
    assert client.get("/", headers=BROWSER).text.startswith("shoal run")
    folder.dashboard_address.write_text(json.dumps({"port": 8480, "pid": os.getpid()}))
    answer = client.get("/", headers=BROWSER)
    assert (answer.status_code, answer.headers["location"]) == (307, "http://example.org:8480/")
    assert client.get("/").text.startswith("shoal run")


def test_the_page_of_a_process_that_ended_is_not_named(tmp_path):
    folder, client = coordinator(tmp_path)
    ended = subprocess.Popen(["true"])
    ended.wait()
    folder.dashboard_address.write_text(json.dumps({"port": 8480, "pid": ended.pid}))
    assert port_of_living(folder.dashboard_address) == 0
    assert client.get("/", headers=BROWSER).status_code == 200


def test_behind_a_proxy_a_page_with_a_url_is_named(tmp_path):
    url = "https://page.example.org"
    folder, client = coordinator(tmp_path, public_url="https://example.org", dashboard_url=url)
    folder.dashboard_address.write_text(json.dumps({"port": 8480, "pid": os.getpid()}))
    answer = client.get("/", headers=BROWSER)
    assert answer.headers.get("location", "") == url


def test_a_page_that_nobody_outside_reaches_is_told_in_words(tmp_path):
    folder, client = coordinator(tmp_path, public_url="https://example.org")
    assert "page:" not in client.get("/", headers=BROWSER).text
    folder.dashboard_address.write_text(json.dumps({"port": 8480, "pid": os.getpid()}))
    answer = client.get("/", headers=BROWSER)
    assert answer.status_code == 200 and "at port 8480" in answer.text and "host.dashboard_url" in answer.text


def test_behind_a_proxy_that_the_run_file_does_not_name_no_port_is_guessed(tmp_path):
    folder, client = coordinator(tmp_path)
    folder.dashboard_address.write_text(json.dumps({"port": 8480, "pid": os.getpid()}))
    answer = client.get("/", headers=BROWSER | {"x-forwarded-for": "192.0.2.1"})
    assert answer.status_code == 200 and "host.dashboard_url" in answer.text


def test_whom_no_way_leads_to_the_page_may_stay_at_the_text(tmp_path):
    _, client = coordinator(tmp_path, dashboard_url="https://page.example.org")
    assert client.get("/", headers=BROWSER).status_code == 307
    answer = client.get("/?text", headers=BROWSER)
    assert answer.status_code == 200 and "page:   https://page.example.org (if it does not open" in answer.text


def test_a_hosted_run_has_a_page_unless_its_run_file_says_no():
    assert onlookers(tiny_run(), hosts=True) == ["dashboard"]
    assert onlookers(tiny_run(), hosts=False) == []
    assert onlookers(tiny_run(host={"dashboard": False}), hosts=True) == []


def test_the_page_is_told_with_the_join_line(tmp_path):
    said = invitation("http://127.0.0.1:8470", tiny_run().host, tmp_path)
    assert "Watch it in a browser: http://127.0.0.1:8470" in said and "dashboard.url" in said
    assert "in a browser" not in invitation(
        "https://a.org", tiny_run(host={"public_url": "https://a.org"}).host, tmp_path
    )
    assert "dashboard.url" not in invitation(
        "http://127.0.0.1:8470", tiny_run(host={"dashboard": False}).host, tmp_path
    )


@pytest.mark.slow
def test_the_process_of_the_page_serves_what_it_tells(copied):
    folder = RunFolder(copied)
    command = [sys.executable, "-m", "shoal.cli.main", "role", "dashboard", "--run-dir", str(copied)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 30
        while not port_of_living(folder.dashboard_address) and time.monotonic() < deadline:
            time.sleep(0.1)
        link = folder.dashboard_link.read_text().strip()
        assert folder.dashboard_link.stat().st_mode & 0o777 == 0o600
        with httpx.Client(trust_env=False, follow_redirects=True) as browser:
            assert "You are the host" in browser.get(link, timeout=20).text
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
