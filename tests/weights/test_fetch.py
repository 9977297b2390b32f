"""Fetching: every byte is verified, bad sources are dropped, nothing is fetched twice, all or nothing is on disk."""

import asyncio
import errno
import gc
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest
from safetensors.numpy import load_file, save_file

from shoal.errors import NothingYet, PeerError, StateError
from shoal.net.blobs import FolderBlobs
from shoal.protocol import encoding
from shoal.protocol.messages import Manifest
from shoal.weights.fetch import chunks as pieces
from shoal.weights.fetch.fetch import fetch
from shoal.weights.fetch.scheduler import MOST_LANES
from shoal.weights.fetch.transfer import TransferEvents
from shoal.weights.fetch.version_directory import VersionFolder, directory_name
from shoal.weights.manifest import weights_root
from shoal.weights.publish import PublishHistory, PublishSettings, chunk_bytes_for, publish
from tests.weights.checkpoints import (
    CHUNK_BYTES,
    NOW,
    RUN,
    Chunks,
    Dying,
    Lying,
    Short,
    contents,
    make_checkpoint,
    published,
    same,
)  # fmt: skip


def run(manifest: Manifest, sources: list, folder: Path, **options: object) -> Path:
    keep, events = options.pop("keep", 2), TransferEvents(**options.pop("events", {}))  # type: ignore[arg-type]
    return asyncio.run(fetch(manifest, sources, VersionFolder(folder, keep), events=events, **options))  # type: ignore[arg-type]


def test_the_fetched_version_equals_the_published_one(checkpoint, origin, tmp_path):
    manifest = published(checkpoint, origin)
    directory = run(manifest, [origin], tmp_path / "cache")
    assert same(directory, checkpoint) and directory.name == directory_name(manifest)
    assert len(origin.asked) == len(set(origin.asked)) == len(origin.held)


def test_a_chunk_that_repeats_is_sent_and_fetched_once(checkpoint, origin, tmp_path):
    (checkpoint / "tokenizer.json").write_bytes(b"x" * 5500)
    manifest = published(checkpoint, origin)
    assert same(run(manifest, [origin], tmp_path / "cache"), checkpoint)
    assert len(origin.asked) == len(origin.held) < sum(len(entry.chunks) for entry in manifest.files)


def test_an_empty_file_travels(checkpoint, origin, tmp_path):
    (checkpoint / "tokenizer.json").write_bytes(b"")
    assert same(run(published(checkpoint, origin), [origin], tmp_path / "cache"), checkpoint)


def test_shards_and_their_index_travel_and_have_the_same_root(checkpoint, origin, tmp_path):
    whole = weights_root(checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    places = {name: f"model-{i:05}-of-00003.safetensors" for i, name in enumerate(sorted(tensors), 1)}
    for name, file in places.items():
        save_file({name: tensors[name]}, checkpoint / file)
    (checkpoint / "model.safetensors.index.json").write_bytes(encoding.to_json({"weight_map": places}))
    manifest = published(checkpoint, origin)
    directory = run(manifest, [origin], tmp_path / "weights")
    assert manifest.root == whole == weights_root(directory)
    assert {*places.values(), "model.safetensors.index.json"} < contents(directory).keys()


def test_a_version_on_disk_is_not_fetched_again(checkpoint, origin, tmp_path):
    manifest = published(checkpoint, origin)
    first = run(manifest, [origin], tmp_path / "cache")
    assert run(manifest, [], tmp_path / "cache") == first


def test_chunks_that_the_sink_keeps_are_not_sent_again(checkpoint, origin):
    first = published(checkpoint, origin)
    kept = {chunk for file in first.files for chunk in file.chunks}
    sent = Chunks()
    scenario = publish(checkpoint, sent, PublishSettings(RUN, 4, "float32", CHUNK_BYTES), PublishHistory(sent=kept))
    assert asyncio.run(scenario).files == first.files and not sent.held


def test_big_versions_have_smaller_chunks_up_to_a_number_of_them():
    sizes = [10**6, 64 << 20, 10**9, 4 << 30, 5 * 10**9, 14 * 10**9, 62 * 10**9]
    assert [chunk_bytes_for(size) >> 20 for size in sizes] == [8, 1, 1, 1, 2, 4, 8]


def test_a_version_that_was_damaged_on_disk_is_repaired(checkpoint, origin, tmp_path):
    manifest = published(checkpoint, origin)
    directory = run(manifest, [origin], tmp_path / "cache")
    data = bytearray((directory / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (directory / "model.safetensors").write_bytes(data)
    origin.asked.clear()
    assert same(run(manifest, [origin], tmp_path / "cache"), checkpoint)
    assert len(origin.asked) == 1


@pytest.mark.parametrize("kind", [Lying, Short, Dying])
def test_a_bad_source_is_named_and_another_one_used(kind, checkpoint, origin, tmp_path):
    manifest = published(checkpoint, origin)
    bad = origin.other(kind, "http://bad")
    blamed: list[tuple[str, str]] = []
    directory = run(manifest, [bad, origin], tmp_path / "cache", events={"on_blame": lambda *told: blamed.append(told)})
    assert same(directory, checkpoint)
    assert [source for source, _ in blamed] == ["http://bad"] and len(bad.asked) <= 2 + MOST_LANES


def test_when_all_sources_are_bad_each_fault_is_named(checkpoint, origin, tmp_path):
    manifest = published(checkpoint, origin)
    sources = [origin.other(Lying, "http://liar"), origin.other(Dying, "http://dead")]
    with pytest.raises(PeerError, match=r"chunks not fetched: (.*liar: sent wrong.*dead|.*dead.*liar: sent wrong)"):
        run(manifest, sources, tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [f".partial-{directory_name(manifest)}"]


def test_a_fetch_without_sources_says_so(checkpoint, origin, tmp_path):
    with pytest.raises(PeerError, match="no source"):
        run(published(checkpoint, origin), [], tmp_path / "cache")


def test_a_killed_fetch_goes_on_where_it_stopped(checkpoint, origin, tmp_path):
    manifest = published(checkpoint, origin)
    blobs = FolderBlobs(tmp_path / "blobs")
    for chunk in origin.held.values():
        blobs.put(chunk)
    (tmp_path / "manifest.json").write_bytes(encoding.to_json(manifest))
    victim = subprocess.run([sys.executable, "-c", _VICTIM, str(tmp_path)], check=False)
    assert victim.returncode == -9
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [f".partial-{directory_name(manifest)}"]
    assert same(run(manifest, [origin], tmp_path / "cache"), checkpoint)
    assert len(origin.asked) == len(origin.held) - 4


_VICTIM = """
import asyncio, os, signal, sys
from pathlib import Path
from shoal.net.blobs import FolderBlobs
from shoal.protocol import encoding as wire
from shoal.protocol.messages import Manifest
from shoal.weights.fetch.fetch import fetch
from shoal.weights.fetch.version_directory import VersionFolder

home = Path(sys.argv[1])
blobs = FolderBlobs(home / "blobs")

class Source:
    name, rank, count = "http://origin", 0, 0

    async def parts(self, digest, start, size):
        self.count += 1
        if self.count == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        yield blobs.get(digest)[start:]

    async def close(self):
        pass

manifest = wire.from_json((home / "manifest.json").read_bytes(), Manifest)
asyncio.run(fetch(manifest, [Source()], VersionFolder(home / "cache")))
"""


def test_chunks_of_a_version_on_disk_are_reused(checkpoint, origin, tmp_path):
    run(published(checkpoint, origin, version=3), [origin], tmp_path / "cache")
    other = make_checkpoint(tmp_path / "next", seed=1)
    manifest = published(other, origin, version=4)
    origin.asked.clear()
    assert same(run(manifest, [origin], tmp_path / "cache"), other)
    weights = next(entry for entry in manifest.files if entry.path == "model.safetensors")
    assert set(origin.asked) <= set(weights.chunks)


def test_the_newest_versions_are_kept(checkpoint, origin, tmp_path):
    names = []
    for version in range(1, 5):
        manifest = published(make_checkpoint(tmp_path / f"c{version}", seed=version), origin, version=version)
        names.append(run(manifest, [origin], tmp_path / "cache", keep=2).name)
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == names[2:]


def test_an_older_version_fetched_on_purpose_is_kept_with_the_newest(checkpoint, origin, tmp_path):
    manifests = [published(make_checkpoint(tmp_path / f"c{v}", seed=v), origin, version=v) for v in (1, 2, 3)]
    for manifest in (manifests[1], manifests[2], manifests[0]):
        run(manifest, [origin], tmp_path / "cache", keep=2)
    kept = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert kept == [directory_name(manifests[0]), directory_name(manifests[2])]


def test_weights_without_the_promised_root_are_refused(checkpoint, origin, tmp_path):
    manifest = msgspec.structs.replace(published(checkpoint, origin), root="0" * 64)
    with pytest.raises(StateError, match=r"weights root.*publisher is at fault"):
        run(manifest, [origin], tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_chunks_that_do_not_give_the_files_hash_are_refused(checkpoint, origin, tmp_path):
    manifest = published(checkpoint, origin)
    files = tuple(
        msgspec.structs.replace(entry, digest="0" * 64) if len(entry.chunks) > 1 else entry for entry in manifest.files
    )
    with pytest.raises(StateError, match=r"tokenizer.json has another hash"):
        run(msgspec.structs.replace(manifest, files=files), [origin], tmp_path / "cache")


def test_one_hash_of_two_sizes_is_the_publishers_fault(checkpoint, origin, tmp_path):
    """No source could serve both, and honest ones would be blamed."""
    manifest = published(checkpoint, origin)
    first, last = manifest.files[1].chunks[0], manifest.files[1].chunks[-1]
    assert manifest.files[1].size % CHUNK_BYTES and first != last
    chunks = (*manifest.files[1].chunks[:-1], first)
    files = (manifest.files[0], msgspec.structs.replace(manifest.files[1], chunks=chunks), *manifest.files[2:])
    with pytest.raises(StateError, match="publisher is at fault"):
        run(msgspec.structs.replace(manifest, files=files), [origin], tmp_path / "cache")
    assert origin.asked == []


def test_a_disk_that_is_too_small_is_reported_before_anything_is_fetched(checkpoint, origin, tmp_path, monkeypatch):
    monkeypatch.setattr(pieces.shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(StateError, match="100 are free"):
        run(published(checkpoint, origin), [origin], tmp_path / "cache")
    assert origin.asked == []


def test_a_disk_that_fills_up_is_a_state_error_and_loses_nothing(checkpoint, origin, tmp_path, monkeypatch):
    manifest = published(checkpoint, origin)
    take, taken = pieces.Chunk.take, []

    def full(piece: pieces.Chunk, part: Path) -> None:
        if len(taken) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        take(piece, part)
        taken.append(piece)

    with monkeypatch.context() as broken:
        broken.setattr(pieces.Chunk, "take", full)
        with pytest.raises(StateError, match=r"No space left.*Free some space"):
            run(manifest, [origin], tmp_path / "cache")
        gc.collect()
        gc.disable()  # a file that is open takes disk even if it is deleted
        try:
            with pytest.raises(StateError, match="No space left"):
                run(manifest, [origin], tmp_path / "cache")
            assert not [file for file in psutil.Process().open_files() if Path(file.path).is_relative_to(tmp_path)]
        finally:
            gc.enable()
    origin.asked.clear()
    assert same(run(manifest, [origin], tmp_path / "cache"), checkpoint)
    assert len(origin.asked) == len(origin.held) - 3


def test_a_chunk_that_one_source_lacks_is_fetched_from_another(checkpoint, origin, tmp_path):
    class Empty(Chunks):
        async def before(self, count: int) -> None:
            raise NothingYet("there is no blob")

    manifest = published(checkpoint, origin)
    assert same(run(manifest, [origin.other(Empty, "http://new"), origin], tmp_path / "cache"), checkpoint)


def test_a_directory_without_weights_is_not_published(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(StateError):
        published(tmp_path / "empty", Chunks())


def test_a_version_that_was_signed_again_is_not_fetched_again(tmp_path, checkpoint, origin):
    manifest = published(checkpoint, origin)
    first = run(manifest, [origin], tmp_path / "weights")
    asked = len(origin.asked)
    later = msgspec.structs.replace(manifest, issued=NOW + 9e5, expires=NOW + 9e5 + 60)
    assert run(later, [origin], tmp_path / "weights") == first and len(origin.asked) == asked


def test_versions_that_fail_one_after_another_leave_one_unfinished_directory(checkpoint, origin, tmp_path):
    """A host could publish such versions until the disk is full."""
    manifests = [published(make_checkpoint(tmp_path / f"c{v}", seed=v), origin, version=v) for v in (5, 4, 6)]
    for manifest in manifests:
        with pytest.raises(PeerError):
            run(manifest, [origin.other(Dying, "http://dead")], tmp_path / "cache")
    (left,) = (tmp_path / "cache").iterdir()
    assert left.name == f".partial-{directory_name(manifests[-1])}"
