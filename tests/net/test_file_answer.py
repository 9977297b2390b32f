"""A file as an answer: ranges, conditions and headers as caches expect them, and little memory for slow clients."""

import asyncio

import httpx
import pytest

from shoal.net import file_answer
from shoal.net.blobs import FolderBlobs
from shoal.net.connections import Limits
from shoal.net.shelf import shelf
from tests.net.wires import run, serving

DATA = bytes(range(256)) * 1000
SIZE = len(DATA)


@pytest.fixture
def app(tmp_path):
    FolderBlobs(tmp_path).put(DATA)
    return shelf(tmp_path, lambda: 0.0)


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
    assert file_answer._Open.largest_part() == file_answer.MOST_PART_BYTES
    monkeypatch.setattr(file_answer._Open, "count", 2000)
    assert file_answer._Open.largest_part() == file_answer.FIRST_PART_BYTES


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 5_000_001])
def test_every_size_comes_whole_and_the_connection_goes_on(tmp_path, size):
    data = DATA * (size // SIZE + 1)
    name = FolderBlobs(tmp_path).put(data[:size])

    async def story():
        app = shelf(tmp_path, lambda: 0.0)
        async with serving(app, Limits()) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            for _ in range(3):
                assert (await http.get(f"/v1/blobs/{name}")).content == data[:size]
            middle = await http.get(f"/v1/blobs/{name}", headers={"range": f"bytes={size // 2}-"})
            assert middle.content == data[size // 2 : size]
        assert file_answer._Open.count == 0

    run(story())
