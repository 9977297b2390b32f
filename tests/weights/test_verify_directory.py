"""The host's own nodes take versions from the coordinator's blobs: nobody is asked, and all is verified."""

import asyncio

import pytest

from shoal.net.blobs import FolderBlobs
from shoal.weights.fetch.fetch import fetch
from shoal.weights.fetch.version_directory import VersionFolder
from shoal.weights.file_ranges import Span, append_span, copy_span
from shoal.weights.publish import FolderSink, PublishSettings, publish
from tests.weights.checkpoints import CHUNK_BYTES, RUN, published, same


@pytest.fixture
def blobs(tmp_path, origin, checkpoint) -> FolderBlobs:
    """Those of a host that has published the checkpoint."""
    published(checkpoint, origin)
    blobs = FolderBlobs(tmp_path / "blobs")
    for chunk in origin.held.values():
        blobs.put(chunk)
    return blobs


def test_a_version_of_this_machine_comes_without_asking(tmp_path, checkpoint, origin, blobs):
    manifest = published(checkpoint, origin)
    directory = asyncio.run(fetch(manifest, [], VersionFolder(tmp_path / "cache", store=blobs.folder)))
    assert same(directory, checkpoint)
    assert all(path.stat().st_nlink == 1 for path in directory.iterdir()), "what is done to it is not done to the blobs"


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_damaged_blob_is_found_and_the_chunk_is_fetched(tmp_path, checkpoint, origin, blobs, file):
    manifest = published(checkpoint, origin)
    [entry] = [entry for entry in manifest.files if entry.path == file]
    damaged = blobs.path_of(entry.chunks[-1])
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    directory = asyncio.run(fetch(manifest, [origin], VersionFolder(tmp_path / "cache", store=blobs.folder)))
    assert same(directory, checkpoint)
    assert origin.asked == [entry.chunks[-1]]


def test_a_blob_that_is_missing_is_fetched(tmp_path, checkpoint, origin, blobs):
    manifest = published(checkpoint, origin)
    gone = manifest.files[0].chunks[0]
    blobs.delete(gone)
    directory = asyncio.run(fetch(manifest, [origin], VersionFolder(tmp_path / "cache", store=blobs.folder)))
    assert same(directory, checkpoint) and origin.asked == [gone]
    assert not list((tmp_path / "cache").glob(".partial-*"))


# --- what the trainer leaves ---


@pytest.mark.parametrize("chunk_bytes", [CHUNK_BYTES, 1 << 20])
def test_chunks_in_a_folder_are_those_that_would_be_sent(tmp_path, checkpoint, origin, chunk_bytes):
    release = PublishSettings(RUN, 3, "float32", chunk_bytes)
    sent = asyncio.run(publish(checkpoint, origin, release))
    left = asyncio.run(publish(checkpoint, FolderSink(tmp_path / "out"), release))
    assert left == sent
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == origin.held


def test_a_chunk_that_is_there_is_not_written_again(tmp_path, checkpoint):
    sink, file = FolderSink(tmp_path / "out"), checkpoint / "config.json"
    before = file.read_bytes()
    asyncio.run(sink.put_span("a" * 64, Span(file, 0, len(before))))
    asyncio.run(sink.put("a" * 64, b"other"))
    assert file.read_bytes() == before == (tmp_path / "out" / ("a" * 64)).read_bytes()


def test_part_of_a_file_is_copied(tmp_path):
    source = tmp_path / "source"
    source.write_bytes(bytes(range(256)) * 20)
    copy_span(Span(source, 100, 3000), tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()[100:3100]
    with (tmp_path / "short").open("xb", buffering=0) as file, pytest.raises(OSError, match="is shorter"):
        append_span(Span(source, 5000, 200), file.fileno())
