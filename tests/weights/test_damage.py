"""Random damage to chunks, patches, manifests and what is on disk: the version that is loaded is right, or there is none.

Places of damage: a source (an honest one beside it must suffice), the publisher (it signs damaged patches, so only the root
tells), the disk (some files of the base), and the bytes of a manifest. Each trial replays from its seed.
"""

import asyncio
import random
import shutil
from pathlib import Path

import msgspec
import pytest

from shoal.errors import ShoalError
from shoal.protocol import encoding
from shoal.protocol.messages import FileEntry
from shoal.weights.fetch.fetch import fetch
from shoal.weights.fetch.transfer import TransferEvents
from shoal.weights.fetch.version_directory import VersionFolder
from shoal.weights.manifest import ManifestError, ManifestTrust, open_manifest, weights_root
from tests.weights.checkpoints import CHUNK_BYTES, KEY, NOW, RUN, Chunks
from tests.weights.repository import signed
from tests.weights.test_apply_patches import Line

FLIP, CUT, REORDER = "flip", "cut", "reorder"


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Other bytes: with a flipped bit, cut, or with two runs exchanged."""
    while True:
        how = rng.choice((FLIP, CUT, REORDER))
        if how == FLIP:
            at = rng.randrange(8 * len(data))
            other = data[: at // 8] + bytes([data[at // 8] ^ 1 << at % 8]) + data[at // 8 + 1 :]
        elif how == CUT:
            other = data[: rng.randrange(len(data))]
        else:
            a, b, c = sorted(rng.randrange(len(data) + 1) for _ in range(3))
            other = data[:a] + data[b:c] + data[a:b] + data[c:]
        if other != data:
            return other


class Damaging(Chunks):
    """Damages some of the chunks that it sends, or sends another."""

    rng: random.Random

    def spoil(self, chunk: bytes) -> bytes:
        if self.rng.random() < 0.5:
            return chunk
        return damaged(chunk, self.rng) if self.rng.random() < 0.7 else self.held[self.rng.choice([*self.held])]


class Trial:
    """A client that has version 2 and loads version 3, in a folder of its own."""

    def __init__(self, line: Line, seed: int) -> None:
        self.rng, self.line = random.Random(seed), line
        self.folder = line.folder / f"trial-{seed}"
        shutil.copytree(line.folder / "client", self.folder)
        self.manifest = line.manifests[3]

    def load(self, *sources: Chunks) -> str:
        """The root of what is loaded; empty if nothing is."""
        scenario = fetch(
            self.manifest,
            sources or [self.line.chunks],
            VersionFolder(self.folder),
            manifest_of=self.line.manifest_of,
            events=TransferEvents(on_blame=lambda *_: None),
        )
        try:
            return weights_root(asyncio.run(scenario))
        except ShoalError:
            return ""

    def of_a_source(self) -> None:
        damaging = self.line.chunks.other(Damaging, "http://damaging")
        damaging.rng = self.rng  # type: ignore[attr-defined]
        assert self.load(damaging, self.line.chunks) == self.manifest.root

    def of_the_publisher(self) -> None:
        (patch,) = self.manifest.patches
        data = damaged(b"".join(self.line.chunks.held[chunk] for chunk in patch.file.chunks), self.rng) or b"x"
        chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
        self.line.chunks.held |= {encoding.digest(chunk): chunk for chunk in chunks}
        file = FileEntry(patch.file.path, len(data), encoding.digest(data), tuple(map(encoding.digest, chunks)))
        files = self.manifest.files
        if self.rng.random() < 0.5:  # so that there is no other way
            files = tuple(file for file in files if not file.path.endswith(".safetensors"))
        whole = len(files) == len(self.manifest.files)
        root = self.manifest.root
        patches = (msgspec.structs.replace(patch, file=file),)
        self.manifest = msgspec.structs.replace(self.manifest, files=files, patches=patches)
        assert self.load() in ((root,) if whole else (root, ""))

    def of_the_disk(self) -> None:
        files = [path for path in sorted(self.folder.rglob("*")) if path.is_file() and path.stat().st_size]
        for path in self.rng.sample(files, self.rng.randrange(1, len(files))):
            path.write_bytes(damaged(path.read_bytes(), self.rng))
        assert self.load() == self.manifest.root

    def of_the_manifest(self) -> None:
        good = signed(msgspec.structs.replace(self.manifest, issued=NOW, expires=NOW + 60))
        with pytest.raises(ManifestError):
            open_manifest(damaged(good, self.rng), ManifestTrust(RUN, (KEY.public,)), now=NOW, version=3)


def trials(folder: Path, seeds: range) -> None:
    line = Line(folder, count=4)
    line.load(2)
    for seed in seeds:
        trial = Trial(line, seed)
        (trial.of_a_source, trial.of_the_publisher, trial.of_the_disk, trial.of_the_manifest)[seed % 4]()
        shutil.rmtree(trial.folder)


def test_damage_never_loads_wrong_weights(tmp_path):
    trials(tmp_path, range(60))
