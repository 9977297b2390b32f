"""Blobs: bytes under the name of a hash have that hash, and are complete or absent."""

import asyncio
import errno
import os

import httpx
import pytest
from starlette.routing import Route

from shoal.errors import NothingYet, StateError
from shoal.net import server
from shoal.net.blobs import FolderBlobs
from shoal.net.connection_limits import ServerLimits
from shoal.protocol import encoding
from shoal.protocol.encoding import is_digest
from tests.low_memory import no_more_files
from tests.net.wires import request, run, serving, wires

DATA = b"some bytes" * 100


@pytest.fixture
def blobs(tmp_path):
    return FolderBlobs(tmp_path / "blobs")


def test_a_blob_that_is_put_can_be_read_and_is_counted_once(blobs):
    digest = blobs.put(DATA)
    assert digest == encoding.digest(DATA) and blobs.put(DATA) == digest
    assert blobs.get(digest) == DATA and blobs.has(digest)
    assert blobs.size_bytes == len(DATA) and [path.name for path in blobs.folder.glob("??/*")] == [digest]
    assert (blobs.folder / digest[:2] / digest).read_bytes() == DATA


def test_a_deleted_blob_is_gone_and_no_longer_counted(blobs):
    digest = blobs.put(DATA)
    blobs.delete(digest)
    blobs.delete(digest)
    assert not blobs.has(digest) and blobs.size_bytes == 0
    with pytest.raises(NothingYet):
        blobs.get(digest)


def test_an_opened_folder_knows_its_size_and_drops_what_was_half_written(blobs):
    blobs.put(DATA)
    (blobs.folder / "unfinished" / "crashed").write_bytes(b"half")
    again = FolderBlobs(blobs.folder)
    assert again.size_bytes == len(DATA)
    assert list((blobs.folder / "unfinished").iterdir()) == []


def test_an_upload_is_kept_under_its_hash_or_leaves_nothing(blobs):
    with blobs.upload() as upload:
        upload.write(DATA[:300])
        upload.write(DATA[300:])
        assert upload.read() == DATA and upload.size == len(DATA) and not blobs.has(encoding.digest(DATA))
        upload.keep(encoding.digest(DATA))
    assert blobs.get(encoding.digest(DATA)) == DATA and blobs.size_bytes == len(DATA)
    with blobs.upload() as dropped:
        dropped.write(b"other")
    assert [path.name for path in blobs.folder.glob("??/*")] == [encoding.digest(DATA)] and blobs.size_bytes == len(
        DATA
    )
    assert list((blobs.folder / "unfinished").iterdir()) == []


def test_a_damaged_blob_is_refused_and_repaired_by_the_next_put(blobs):
    digest = blobs.put(DATA)
    (blobs.folder / digest[:2] / digest).write_bytes(b"S" + DATA[1:])
    with pytest.raises(StateError, match="damaged"):
        blobs.get(digest)
    blobs.put(DATA)
    assert blobs.get(digest) == DATA and blobs.size_bytes == len(DATA)


@pytest.mark.parametrize(
    "name", ["", "..", "../../etc/passwd", "A" * 64, "0" * 63, "0" * 65, "0" * 64 + "\n", "/" * 64, "٠" * 64]
)
def test_a_name_that_is_no_hash_reaches_no_file(blobs, name):
    assert not is_digest(name)
    for use in (blobs.get, blobs.has, blobs.delete, blobs.serve):
        with pytest.raises(NothingYet, match="not the SHA-256"):
            use(name)


def test_a_full_disk_is_a_state_error_and_leaves_no_trace(blobs, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StateError, match=r"No space left.*Free some space"):
        blobs.put(DATA)
    assert not blobs.has(encoding.digest(DATA)) and blobs.size_bytes == 0
    assert list((blobs.folder / "unfinished").iterdir()) == []


def test_too_many_open_files_are_not_reported_as_a_full_disk(blobs):
    with no_more_files(), pytest.raises(StateError) as caught:
        blobs.put(DATA)
    assert "too many files" in str(caught.value) and "space" not in str(caught.value)
    blobs.put(DATA)


def test_a_full_disk_is_a_507_to_the_peer(blobs, monkeypatch):
    async def put(request):
        return server.answer({"digest": blobs.put(await request.body())})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    response = ask(server.application([Route("/", put, methods=["PUT"])]), "PUT", "/", content=DATA)
    assert response.status_code == 507 and b"Free some space" in response.content


def test_a_blob_is_served_whole_or_by_range(blobs):
    async def get(request):
        return blobs.serve(request.path_params["digest"])

    app = server.application([Route("/{digest}", get)])
    digest = blobs.put(DATA)
    assert ask(app, "GET", f"/{digest}").content == DATA
    part = ask(app, "GET", f"/{digest}", headers={"range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, DATA[10:20])
    assert ask(app, "GET", f"/{'0' * 64}").status_code == 404


def ask(app, method, path, **options):
    async def send():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://toy") as http:
            return await http.request(method, path, **options)

    return asyncio.run(send())


def test_unfinished_uploads_count_until_they_end(tmp_path):
    blobs = FolderBlobs(tmp_path)
    with blobs.upload() as upload:
        upload.write(DATA)
        assert blobs.size_bytes == len(DATA)
    assert blobs.size_bytes == 0


@pytest.mark.parametrize("size", [1, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_blobs_come_one_after_another_on_one_connection(blobs, size):
    """The answer must be over for the server when the client has all of it: else the next request comes too early."""
    data = bytes(size)
    digest = blobs.put(data)

    async def get(request):
        return blobs.serve(request.path_params["digest"])

    async def scenario():
        async with (
            serving(server.application([Route("/{digest}", get)]), ServerLimits()) as port,
            wires(port) as (wire_,),
        ):
            for _ in range(10):
                wire_.send(request("GET", f"/{digest}"))
                assert await wire_.answer() == (200, data)

    run(scenario())
