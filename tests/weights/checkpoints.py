"""Small checkpoints, and sources of their chunks that may lie or fail."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from shoal.errors import PeerError
from shoal.protocol import encoding
from shoal.protocol.messages import Manifest
from shoal.protocol.signing import Key
from shoal.weights.delta.tensor_codes import Weights
from shoal.weights.manifest import sign_manifest
from shoal.weights.publish import PublishSettings, publish

RUN, KEY, NOW = "run-1", Key(b"\x01" * 32), 1_800_000_000.0
CHUNK_BYTES = 1000


def make_checkpoint(directory: Path, seed: int = 0) -> Path:
    """An HF-style directory of some 8 kB, with files that must not travel."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    tensors = {"b.weight": rng.normal(size=(30, 40)), "a.weight": rng.normal(size=(20, 40)), "norm": np.ones(8)}
    save_file({name: value.astype(np.float32) for name, value in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    (directory / "tokenizer.json").write_text("{}" * 800)
    (directory / "modeling_evil.py").write_text("raise SystemExit")
    (directory / "pytorch_model.bin").write_bytes(b"pickle")
    (directory / ".hidden.json").write_text("{}")
    return directory


def write_checkpoint(directory: Path, weights: Weights) -> Path:
    """An HF-style directory with these weights, of any dtype."""
    directory.mkdir(parents=True)
    header, data = {}, b""
    for name, tensor in sorted(weights.items()):
        place = [len(data), len(data) + tensor.codes.nbytes]
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": place}
        data += tensor.codes.tobytes()
    head = encoding.to_json(header)
    (directory / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + data)
    (directory / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    return directory


class Chunks:
    """A sink and a source in memory. `before` may wait, raise or spoil."""

    def __init__(self, name: str = "http://origin") -> None:
        self.name, self.rank = name, 0
        self.held: dict[str, bytes] = {}
        self.asked: list[str] = []

    async def put(self, digest: str, chunk: bytes) -> None:
        assert encoding.digest(chunk) == digest
        self.held[digest] = chunk

    async def parts(self, digest: str, start: int, size: int) -> AsyncGenerator[bytes, None]:
        self.asked.append(digest)
        await self.before(len(self.asked))
        yield self.spoil(self.held[digest])[start:]

    async def close(self) -> None:
        pass

    async def before(self, count: int) -> None:
        await asyncio.sleep(0)

    def spoil(self, chunk: bytes) -> bytes:
        return chunk

    def other(self, kind: type["Chunks"], name: str) -> "Chunks":
        """Another source of the same chunks."""
        source = kind(name)
        source.held = self.held
        return source


class Lying(Chunks):
    """Flips a bit of each chunk."""

    def spoil(self, chunk: bytes) -> bytes:
        return bytes([chunk[0] ^ 1]) + chunk[1:]


class Short(Chunks):
    """Cuts each chunk."""

    def spoil(self, chunk: bytes) -> bytes:
        return chunk[:-1]


class Dying(Chunks):
    """Is gone after its second chunk."""

    async def before(self, count: int) -> None:
        if count > 2:
            raise PeerError(f"{self.name} gave no answer")


def published(directory: Path, chunks: Chunks, version: int = 3) -> Manifest:
    """Publish a checkpoint into memory and return its manifest as issued."""

    async def scenario() -> Manifest:
        return await publish(directory, chunks, PublishSettings(RUN, version, "float32", CHUNK_BYTES))

    signed = sign_manifest(asyncio.run(scenario()), KEY, now=NOW)
    return encoding.from_json(signed.body, Manifest)


def contents(directory: Path) -> dict[str, bytes]:
    """The files of a version's directory, without those that only this machine needs."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if not path.name.startswith(".")}


def same(directory: Path, checkpoint: Path) -> bool:
    """Whether a version's directory has the published files of a checkpoint, and no others."""
    published = ("config.json", "model.safetensors", "tokenizer.json")
    return contents(directory) == {name: (checkpoint / name).read_bytes() for name in published}
