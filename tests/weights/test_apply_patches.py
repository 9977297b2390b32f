"""Versions by patches: the same bytes as the whole version, another way where a patch fails, and never wrong weights."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from shoal.errors import NothingYet, PeerError, StateError
from shoal.protocol import encoding
from shoal.protocol.messages import FileEntry, Manifest
from shoal.weights.delta.tensor_codes import coded_directory
from shoal.weights.fetch.fetch import MOST_MANIFESTS, MOST_NAMES, fetch
from shoal.weights.fetch.version_directory import VersionFolder, follow
from shoal.weights.manifest import ManifestError, is_whole, weights_root
from shoal.weights.publish import PatchBase, PublishHistory, PublishSettings, publish
from tests.weights.checkpoints import CHUNK_BYTES, RUN, Chunks, Dying, Lying, write_checkpoint
from tests.weights.test_download_plan import manifest
from tests.weights.versions import series


class Line:
    """Published versions, each with a patch from the one before, and whole every `anchor_every` versions."""

    def __init__(self, folder: Path, count: int = 6, anchor_every: int = 1, **options: object) -> None:
        self.folder, self.chunks = folder, Chunks()
        self.manifests: list[Manifest] = []
        self.directories: list[Path] = []
        self.asked_for: list[int] = []
        base = None
        for version, weights in enumerate(series(count, **options)):  # type: ignore[arg-type]
            directory = write_checkpoint(folder / f"published-{version}", weights)
            release, history = PublishSettings(RUN, version, "bfloat16", CHUNK_BYTES), PublishHistory(base=base)
            scenario = publish(directory, self.chunks, release, history, whole=version % anchor_every == 0)
            self.manifests.append(asyncio.run(scenario))
            self.directories.append(directory)
            base = PatchBase(version, self.manifests[-1].root, coded_directory(directory))

    async def manifest_of(self, version: int) -> Manifest:
        self.asked_for.append(version)
        return self.manifests[version]

    def load(
        self, version: int, *sources: Chunks, manifest_of: Callable[[int], Awaitable[Manifest]] | None = None
    ) -> Path:
        """A version as a client loads it."""
        self.chunks.asked.clear()
        scenario = fetch(
            self.manifests[version],
            sources or [self.chunks],
            VersionFolder(self.folder / "client"),
            manifest_of=manifest_of or self.manifest_of,
        )
        return asyncio.run(scenario)

    def has(self, directory: Path, version: int) -> bool:
        """Whether a directory is a published version, byte for byte, and nothing else."""
        mine, theirs = (
            {path.name: path.read_bytes() for path in one.iterdir() if not path.name.startswith(".")}
            for one in (directory, self.directories[version])
        )
        return mine == theirs and not list(directory.parent.glob(".partial*"))

    def change_patch(self, version: int, change: Callable[[bytes], bytes]) -> None:
        """The publisher signs another patch than the right one."""
        manifest = self.manifests[version]
        (patch,) = manifest.patches
        data = change(b"".join(self.chunks.held[chunk] for chunk in patch.file.chunks))
        chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
        self.chunks.held |= {encoding.digest(chunk): chunk for chunk in chunks}
        file = FileEntry(patch.file.path, len(data), encoding.digest(data), tuple(map(encoding.digest, chunks)))
        self.manifests[version] = msgspec.structs.replace(
            manifest, patches=(msgspec.structs.replace(patch, file=file),)
        )


@pytest.fixture
def line(tmp_path) -> Line:
    return Line(tmp_path)


def bytes_asked(line: Line) -> int:
    return sum(len(line.chunks.held[chunk]) for chunk in line.chunks.asked)


def test_a_node_follows_by_patches_and_has_the_bytes_of_the_whole_version(line):
    assert line.has(line.load(0), 0)
    whole = bytes_asked(line)
    for version in range(1, 6):
        assert line.has(line.load(version), version)
        assert 0 < bytes_asked(line) < whole / 10
    assert line.asked_for == []


def test_a_node_that_skipped_versions_takes_a_chain(line):
    line.load(1)
    assert line.has(line.load(5), 5) and line.asked_for == [4, 3, 2]


def test_versions_that_are_published_as_patches_only_begin_at_the_newest_whole_one(tmp_path):
    line = Line(tmp_path, anchor_every=3)
    assert [is_whole(manifest) for manifest in line.manifests] == [True, False, False, True, False, False]
    assert line.has(line.load(5), 5) and line.asked_for == [4, 3]
    assert line.has(line.load(2), 2)


def test_a_fetch_of_the_whole_version_before_that_was_cut_short_goes_on(tmp_path):
    """A slow newcomer needs more time for it than its line is ever up."""
    line = Line(tmp_path, anchor_every=3)
    anchor = {chunk for file in line.manifests[3].files for chunk in file.chunks}
    dying = line.chunks.other(Dying, "http://dying")
    with pytest.raises(PeerError):
        line.load(4, dying)
    assert line.has(line.load(4), 4)
    assert 0 < len(anchor & set(line.chunks.asked)) < len(anchor)


def test_a_step_that_changes_most_values_is_published_whole_and_has_no_patch(tmp_path):
    line = Line(tmp_path, count=3, anchor_every=9, dtype="F32")
    assert all(is_whole(manifest) and not manifest.patches for manifest in line.manifests)
    assert line.has(line.load(2), 2)


@pytest.mark.parametrize(
    "change",
    [lambda data: data[:-1], lambda data: data + b"x", lambda data: b"", lambda data: b"x" * len(data),
     lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:]],
)  # fmt: skip
def test_a_patch_that_cannot_be_used_or_leads_elsewhere_is_replaced_by_the_whole_version(line, change):
    line.load(2)
    line.change_patch(3, change)
    assert line.has(line.load(3), 3)


def test_a_patch_that_there_is_no_memory_for_is_replaced_by_the_whole_version(line, monkeypatch):
    def without_memory(*_: object, **__: object) -> None:
        raise MemoryError

    line.load(2)
    monkeypatch.setattr("shoal.weights.fetch.version_directory.apply_patch", without_memory)
    assert line.has(line.load(3), 3)


def test_a_wrong_patch_without_another_way_makes_no_version(tmp_path):
    line = Line(tmp_path, anchor_every=9)
    line.load(1)
    line.change_patch(2, lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:])
    with pytest.raises(ValueError, match=r"cannot be used|the weights root is"):
        line.load(2)
    assert not list((tmp_path / "client").glob("v000002*"))


def test_the_patch_of_another_version_is_noticed_by_the_root(line):
    line.load(3)
    other = line.manifests[3].patches[0].file
    line.change_patch(4, lambda _: b"".join(line.chunks.held[chunk] for chunk in other.chunks))
    assert line.has(line.load(4), 4)


def test_a_base_that_was_damaged_on_disk_is_dropped_and_the_version_still_comes(tmp_path):
    line = Line(tmp_path, anchor_every=3)
    base = line.load(1) / "model.safetensors"
    base.write_bytes(base.read_bytes()[:-2] + b"xx")
    assert line.has(line.load(2), 2) and not base.exists()


def test_a_base_that_is_in_use_is_not_deleted_when_it_is_damaged(tmp_path):
    """A tokenizer that is started again reads its files."""
    line = Line(tmp_path, anchor_every=3)
    used = line.load(1)
    (used / "model.safetensors").write_bytes((used / "model.safetensors").read_bytes()[:-2] + b"xx")
    scenario = fetch(
        line.manifests[2],
        [line.chunks],
        VersionFolder(line.folder / "client", in_use=used),
        manifest_of=line.manifest_of,
    )
    assert line.has(asyncio.run(scenario), 2) and (used / "config.json").exists()


def test_a_base_that_vanished_is_no_base(tmp_path, monkeypatch):
    line = Line(tmp_path, anchor_every=3)
    used = line.load(1)

    def vanished(*args: object) -> None:
        monkeypatch.undo()
        shutil.rmtree(used)
        raise StateError("no such file")

    monkeypatch.setattr("shoal.weights.fetch.fetch.follow", vanished)
    assert line.has(line.load(2), 2)


def test_the_folder_stays_within_the_disk_of_two_versions_more_than_are_kept(tmp_path, monkeypatch):
    line, dirs = Line(tmp_path, count=8, anchor_every=4), []
    most = sum(path.stat().st_size for path in line.directories[0].iterdir()) + 4000

    def noted(base: Path, partial: Path, target: Path, *args: object) -> None:
        dirs.append([path.name[:7] for path in sorted(target.parent.glob("v*"))])
        follow(base, partial, target, *args)  # type: ignore[arg-type]
        taken = sum(path.stat().st_size for path in target.parent.rglob("*") if path.is_file())
        assert taken <= 4 * most

    async def not_between(version: int) -> Manifest:
        if version in (2, 3):
            raise NothingYet("gone")
        return line.manifests[version]

    monkeypatch.setattr("shoal.weights.fetch.fetch.follow", noted)
    for version in (0, 1, 6):
        scenario = fetch(
            line.manifests[version],
            [line.chunks],
            VersionFolder(line.folder / "client", max_bytes=most),
            manifest_of=not_between,
        )
        assert line.has(asyncio.run(scenario), version)
    assert dirs == [["v000000"], ["v000001", "v000004"]]


def test_patches_that_take_more_disk_than_a_version_may_are_not_fetched(tmp_path):
    line = Line(tmp_path, count=6, anchor_every=6)
    patches = [manifest.patches[0].file.size for manifest in line.manifests[1:]]
    line.load(0)
    room = sum(patches[:4]) + sum(file.size for file in line.manifests[1].files)
    for version in (4, 5):
        scenario = fetch(
            line.manifests[version],
            [line.chunks],
            VersionFolder(line.folder / "client", max_bytes=room),
            manifest_of=line.manifest_of,
        )
        if version == 4:
            assert line.has(asyncio.run(scenario), 4)
            shutil.rmtree(next((line.folder / "client").glob("v000004*")))
        else:
            with pytest.raises(
                ManifestError, match=r"patches that lead to version 5 have more than .* --max-disk"
            ) as refused:
                asyncio.run(scenario)
            assert refused.value.code == "too-long"


def test_a_lying_source_of_a_patch_is_left_and_another_one_used(line):
    line.load(2)
    assert line.has(line.load(3, line.chunks.other(Lying, "http://liar"), line.chunks), 3)


def test_a_node_without_the_manifests_between_takes_the_whole_version(line):
    async def nobody(version: int) -> Manifest:
        raise NothingYet("gone")

    line.load(1)
    assert line.has(line.load(5, manifest_of=nobody), 5)


@pytest.mark.parametrize(("names", "most"), [(1, MOST_MANIFESTS), (MOST_NAMES // 10, 11)])
def test_versions_without_end_are_not_asked_for(tmp_path, names, most):
    """Each is patched from eight others and none is whole: before, a fetch asked for a thousand manifests."""
    asked, digests = [], tuple(f"{name:064x}" for name in range(names))

    def patched(version: int) -> Manifest:
        bases = [base for base in range(version - 1, version - 32, -4) if base >= 0]
        files = (FileEntry("config.json", names, "0" * 64, digests),)
        return msgspec.structs.replace(manifest(version, dict.fromkeys(bases, 10), whole=False), files=files)

    async def manifest_of(version: int) -> Manifest:
        asked.append(version)
        return patched(version)

    with pytest.raises(NothingYet, match="no version that they start from could be fetched"):
        asyncio.run(fetch(patched(1000), [], VersionFolder(tmp_path), manifest_of=manifest_of))
    assert len(asked) <= most


def test_the_version_in_use_stays_however_old_it_is(line):
    loaded = line.load(0)
    for version in (2, 3, 4):
        asyncio.run(
            fetch(line.manifests[version], [line.chunks], VersionFolder(line.folder / "client", keep=2, in_use=loaded))
        )
    left = sorted(path.name[:7] for path in (line.folder / "client").glob("v*"))
    assert left == ["v000000", "v000004"]


def test_another_runs_version_is_no_base(line):
    line.load(2)
    known = next((line.folder / "client").glob("v000002-*/.manifest"))
    known.write_bytes(known.read_bytes().replace(RUN.encode(), b"run-2"))
    line.load(3)
    assert bytes_asked(line) > 10_000


def test_what_a_kill_left_half_patched_is_begun_anew(line, monkeypatch):
    line.load(2)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("shoal.weights.fetch.version_directory.finish", killed)
        line.load(3)
    left = next((line.folder / "client").glob(".partial-*"))
    assert weights_root(left) == line.manifests[3].root, "patched, but not named"
    (left / "model.safetensors").write_bytes((left / "model.safetensors").read_bytes()[:-2] + b"xx")
    assert line.has(line.load(3), 3)


def test_a_patch_whose_chunks_are_gone_is_replaced_by_the_whole_version(line):
    class Gone(Chunks):
        async def before(self, count: int) -> None:
            if self.asked[-1] in missing:
                raise PeerError("gone")

    line.load(2)
    missing = set(line.manifests[3].patches[0].file.chunks)
    assert line.has(line.load(3, line.chunks.other(Gone, "http://gone"), line.chunks.other(Gone, "http://two")), 3)
