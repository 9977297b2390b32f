"""A file as an answer: ranges, conditions and headers as caches expect them, and little memory for slow clients."""

import asyncio
import os
from pathlib import Path

import httpx
import pytest

from shoal.net import blobs
from shoal.net.blobs import FolderBlobs, blob_app, serve_blob
from shoal.net.connection_limits import ServerLimits
from tests.net.wires import run, serving

DATA = bytes(range(256)) * 1000
SIZE = len(DATA)


@pytest.fixture
def app(tmp_path):
    FolderBlobs(tmp_path).put(DATA)
    return blob_app(tmp_path, lambda: 0.0)


@pytest.fixture
def name(tmp_path):
    return FolderBlobs(tmp_path).put(DATA)


def ask(app, name, method="GET", **headers):
    async def send():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://toy") as http:
            return await http.request(
                method, f"/v1/blobs/{name}", headers={k.replace("_", "-"): v for k, v in headers.items()}
            )

    return asyncio.run(send())


def test_a_whole_blob_may_be_cached_for_ever(app, name):
    whole = ask(app, name)
    assert whole.status_code == 200 and whole.content == DATA
    assert whole.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert whole.headers["etag"] == f'"{name}"' and whole.headers["accept-ranges"] == "bytes"
    head = ask(app, name, "HEAD")
    assert head.content == b"" and head.headers["content-length"] == str(SIZE)


@pytest.mark.parametrize(
    ("asked", "status", "start", "end"),
    [
        ("bytes=10-19", 206, 10, 20),
        ("bytes=100-", 206, 100, SIZE),
        ("bytes=-5", 206, SIZE - 5, SIZE),
        (f"bytes=7-{10 * SIZE}", 206, 7, SIZE),
        (f"bytes=0-{SIZE - 1}", 200, 0, SIZE),
        ("bytes=0-4,10-14", 200, 0, SIZE),
        ("bytes=" + ",".join("0-" for _ in range(2000)), 200, 0, SIZE),
        ("pages=1-2", 200, 0, SIZE),
        ("bytes=-", 200, 0, SIZE),
        (f"bytes={SIZE}-", 416, 0, 0),
        ("bytes=20-10", 416, 0, 0),
        ("bytes=-0", 416, 0, 0),
    ],
)
def test_ranges(app, name, asked, status, start, end):
    answer = ask(app, name, range=asked)
    assert answer.status_code == status and answer.content == DATA[start:end]
    if status == 206:
        assert answer.headers["content-range"] == f"bytes {start}-{end - 1}/{SIZE}"


def test_what_a_cache_has_is_not_sent_again(app, name):
    etag = f'"{name}"'
    for condition in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        answer = ask(app, name, if_none_match=condition)
        assert answer.status_code == 304 and answer.content == b"" and answer.headers["etag"] == etag
    assert ask(app, name, if_none_match='"other"').status_code == 200
    assert ask(app, name, range="bytes=1-2", if_range=etag).status_code == 206
    assert ask(app, name, range="bytes=1-2", if_range='"other"').content == DATA


@pytest.mark.parametrize("name", ["0" * 64, "../keys/run.key", "x", "A" * 64])
def test_nothing_else_is_served(app, name):
    assert ask(app, name).status_code == 404


def test_many_slow_answers_hold_small_parts(monkeypatch):
    assert blobs._OpenAnswers.largest_part() == blobs.MOST_PART_BYTES
    monkeypatch.setattr(blobs._OpenAnswers, "count", 2000)
    assert blobs._OpenAnswers.largest_part() == blobs.FIRST_PART_BYTES


@pytest.mark.parametrize("size", [0, 65_536, 5_000_001])
def test_every_size_comes_whole_and_the_connection_goes_on(tmp_path, size):
    data = DATA * (size // SIZE + 1)
    name = FolderBlobs(tmp_path).put(data[:size])

    async def scenario():
        app = blob_app(tmp_path, lambda: 0.0)
        async with serving(app, ServerLimits()) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            for _ in range(9):
                assert (await http.get(f"/v1/blobs/{name}")).content == data[:size]
            middle = await http.get(f"/v1/blobs/{name}", headers={"range": f"bytes={size // 2}-"})
            assert middle.content == data[size // 2 : size]
        assert blobs._OpenAnswers.count == 0

    run(scenario())


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.rename(path.with_name("elsewhere"))])
def test_a_file_that_is_renamed_or_deleted_before_its_first_byte_is_sent_comes_whole(tmp_path, name, change):
    """As when a node that shares has fetched a version, or deletes one to make room."""
    answer, sent = serve_blob(tmp_path, name), []

    async def send(message):
        sent.append(message)

    change(tmp_path / name[:2] / name)
    asyncio.run(answer({"type": "http", "method": "GET", "headers": []}, None, send))
    assert b"".join(message.get("body", b"") for message in sent) == DATA


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="only Linux lists open files there")
def test_no_file_stays_open_after_an_answer_or_without_one(app, tmp_path, name):
    def num_open():
        return len(os.listdir("/proc/self/fd"))

    ask(app, name)
    before = num_open()
    for _ in range(20):
        serve_blob(tmp_path, name)
        ask(app, name)
        ask(app, name, "HEAD")
        ask(app, name, if_none_match=f'"{name}"')
        ask(app, name, range=f"bytes={SIZE}-")
    assert num_open() <= before
