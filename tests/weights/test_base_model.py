"""The base of adapters: its hash is remembered for as long as its files, their names and their index are the same."""

import hashlib
import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from shoal.errors import StateError
from shoal.models import safetensors_header
from shoal.models.lora_config import CONFIG
from shoal.models.safetensors_header import INDEX
from shoal.protocol.encoding import to_json
from shoal.protocol.messages import AdapterBase, FileEntry, Manifest
from shoal.weights.base_model import base_root, bases_here, link_from
from shoal.weights.manifest import MANIFEST_FILE, weights_root


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two files with the same tensors, of which the index names the first; beside an adapter's config."""
    for number, name in enumerate(("one", "two")):
        (tmp_path / name).mkdir()
        save_file({"a": torch.full((4,), float(number))}, tmp_path / name / "model.safetensors")
    both = tmp_path / "both"
    both.mkdir()
    for name in ("one", "two"):
        (both / f"{name}.safetensors").hardlink_to(tmp_path / name / "model.safetensors")
    (both / CONFIG).write_text("{}")
    take(both, "one")
    return both


def take(directory: Path, shard: str) -> None:
    (directory / INDEX).write_text(json.dumps({"weight_map": {"a": f"{shard}.safetensors"}}))


def test_another_index_over_the_same_files_is_another_base(directory):
    assert base_root(directory) == weights_root(directory.parent / "one")
    take(directory, "two")
    assert base_root(directory) == weights_root(directory.parent / "two")


def test_an_index_that_places_tensors_otherwise_in_the_same_shards_is_another_base(directory):
    keys = []
    for shards in (("one", "two"), ("two", "one")):
        places = {tensor: f"{shard}.safetensors" for tensor, shard in zip("ab", shards, strict=True)}
        (directory / INDEX).write_text(json.dumps({"weight_map": places}))
        keys.append(safetensors_header.key_of_base(directory))
    assert keys[0] != keys[1]


def test_another_name_of_a_file_is_another_base(directory):
    take(directory, "two")
    assert base_root(directory) == weights_root(directory.parent / "two")
    (directory / "one.safetensors").rename(directory / "model.safetensors")  # which is taken before an index
    assert base_root(directory) == weights_root(directory.parent / "one")


def test_an_index_that_is_too_large_is_refused_unread(directory, monkeypatch):
    monkeypatch.setattr(safetensors_header, "MAX_INDEX_BYTES", 10)
    with pytest.raises(StateError, match=r"index\.json is larger than 10 bytes"):
        safetensors_header.key_of_base(directory)


def test_a_stray_copy_of_the_weights_is_no_part_of_a_base(tmp_path):
    model, target = tmp_path / "model", tmp_path / "target"
    for folder in (model, target):
        folder.mkdir()
    save_file({"a": torch.zeros(4)}, model / "model.safetensors")
    key = safetensors_header.key_of_base(model)
    (model / "consolidated.safetensors").write_bytes(b"the same in another format")
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))  # which one file makes void
    assert safetensors_header.files_of_base(model) == [model / "model.safetensors"]
    link_from(model, target)
    assert [path.name for path in target.iterdir()] == ["model.safetensors"]
    (model / INDEX).unlink()
    assert safetensors_header.key_of_base(model) == key


def test_only_the_shards_that_the_index_names_are_a_base(directory):
    target = directory.parent / "target"
    target.mkdir()
    link_from(directory, target)
    assert {path.name for path in target.iterdir()} == {"one.safetensors", INDEX}


def test_a_base_that_another_run_left_here_is_not_fetched_again(directory, tmp_path):
    weights = directory.parent / "one" / "model.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    entry = FileEntry("model.safetensors", weights.stat().st_size, digest, ())
    old = Manifest("old", "policy", 3, (), "float32", "cd" * 32, (entry,), 1 << 20, 0.0, 0.0,
                   base=AdapterBase("ef" * 32, "hf:ann/small@" + "c" * 40))  # fmt: skip
    kept = tmp_path / "node" / "v000003-cdcdcdcdcdcd"
    kept.mkdir(parents=True)
    (kept / MANIFEST_FILE).write_bytes(to_json(old))
    (kept / "model.safetensors").hardlink_to(weights)
    new = msgspec.structs.replace(old, run="new", version=0, base=AdapterBase("ab" * 32, ""))
    assert bases_here(tmp_path / "node", new) == {"model.safetensors": kept / "model.safetensors"}
    other = msgspec.structs.replace(new, files=(msgspec.structs.replace(entry, digest="ab" * 32),))
    assert bases_here(tmp_path / "node", other) == {}
