"""Runs that learn an adapter: the base is published and stored once, kills change no bit, and cheats are caught."""

import asyncio
import itertools
import json
import shutil
import threading
import time
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from safetensors.torch import load_file

from shoal.config import check_run
from shoal.engine.native import LocalEngine
from shoal.errors import ConfigError, PeerError, StateError
from shoal.models import lora_config
from shoal.models.checkpoint import load_policy
from shoal.models.hub_download import Hub
from shoal.models.lora_config import LoraBase
from shoal.models.random_model import make_tiny
from shoal.protocol.encoding import digest, to_json
from shoal.protocol.messages import AdapterBase, FileEntry, Manifest
from shoal.protocol.signing import Key
from shoal.protocol.tolerances import ADAPTERS
from shoal.roles.coordinator.status import StatusBoard
from shoal.roles.trainer import models
from shoal.run_folder import RunFolder
from shoal.train import behaviour_logprobs
from shoal.weights import base_model, publish
from shoal.weights.base_model import base_root, demand_same_base
from shoal.weights.fetch import fetch
from shoal.weights.fetch.chunks import Wanted, prepare
from shoal.weights.manifest import ManifestError, chunks_of, open_manifest, sign_manifest, weights_root
from tests.models.hub_server import COMMIT, fake_hub
from tests.roles.in_memory_run import TINY, Town, tiny_run
from tests.roles.test_trainer_state import Killed

ADAPTER = {"policy": {"tiny": TINY["policy"]["tiny"], "adapter": {"rank": 2, "alpha": 8.0}}, "train": {"lr": 3e-2}}


def lived(root: Path, *cheats: str, **changes: object) -> Town:
    town = Town(root, tiny_run(**{**ADAPTER, **changes}))
    workers = [town.worker("worker-0"), town.worker("worker-1"), *(town.worker(c, cheat=c) for c in cheats)]
    asyncio.run(town.live(town.trainer(), town.validator(), *workers))
    assert town.audit().findings == []
    return town


def adapter_of(town: Town, version: str = "final") -> dict[str, torch.Tensor]:
    return load_file(town.folder.checkpoints / version / lora_config.WEIGHTS)


def test_a_run_learns_and_publishes_its_adapter_alone(tmp_path):
    town = lived(tmp_path / "run", "other-seed", steps=4, storage={"checkpoint_every": 1})
    first, last = adapter_of(town, "v000000"), adapter_of(town)
    assert all((one == 0).all() for name, one in first.items() if "lora_B" in name)
    assert not any(one.equal(first[name]) for name, one in last.items())
    final, policy = town.folder.checkpoints / "final", town.folder.policy
    assert (final / "model.safetensors").samefile(policy / "model.safetensors"), "the base is on the disk once"
    manifests = [town.desk.kept.manifests[version] for version in range(5)]
    base = weights_root(policy)
    assert {manifest.base for manifest in manifests} == {AdapterBase(base)} == {AdapterBase(base_root(final))}
    sent = [sum(e.size for e in m.files if not {*e.chunks} <= chunks_of(before))
            for before, m in itertools.pairwise(manifests)]  # fmt: skip
    whole = (policy / "model.safetensors").stat().st_size
    assert max(sent) == (final / lora_config.WEIGHTS).stat().st_size < whole / 4
    assert town.weights() == manifests[4].root == weights_root(final)
    state = town.desk.state
    honest = [m for m in state.members.values() if m.name.startswith("worker-")]
    cheat = next(m for m in state.members.values() if m.name == "other-seed")
    assert all(member.credits > 0 for member in honest) and cheat.credits == 0
    # Any node's directory is a policy that can be opened without the run.
    engine = LocalEngine(1)
    engine.load(final, 4)
    assert load_policy(final).adapter is not None


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_trainer_that_is_killed_comes_back_to_the_same_root(tmp_path, every):
    storage = {"storage": {"state_every": every}}
    unbroken = lived(tmp_path / "unbroken", steps=4, **storage).weights()
    town = Town(tmp_path / "killed", tiny_run(**{**ADAPTER, "steps": 4, **storage}))

    people = [town.validator(), town.worker("worker-0"), town.worker("worker-1")]
    asyncio.run(town.live(Killed(town, 1, 2, 3), *people))
    assert town.weights() == unbroken
    saved = next((town.folder.trainer).glob("v*/*.safetensors"))
    assert saved.stat().st_size < 5 * (town.folder.checkpoints / "final" / lora_config.WEIGHTS).stat().st_size


def test_a_trainer_in_bfloat16_has_the_base_in_memory_once(tmp_path, monkeypatch):
    """It recomputes what workers claim, with each version's adapter over the base that it learns on."""
    monkeypatch.setattr(behaviour_logprobs, "open_policy", None)
    policy = {**ADAPTER["policy"], "dtype": "bfloat16"}
    town = lived(tmp_path / "run", steps=2, policy=policy, train={"lr": 3e-2, "dtype": "bfloat16"})
    steps = [json.loads(line) for line in town.folder.metrics.read_text().splitlines()]
    assert len(steps) == 2 and all(step["denominators_s"] > 0 for step in steps)


def test_two_seeds_end_in_other_adapters_and_the_same_base_bytes(tmp_path):
    make_tiny(tiny_run().policy.tiny, tmp_path / "base", 3, "float32")
    policy = {"path": str(tmp_path / "base"), "adapter": ADAPTER["policy"]["adapter"]}
    one, two = (lived(tmp_path / f"{seed}", seed=seed, steps=1, policy=policy) for seed in (5, 6))
    assert one.weights() != two.weights()
    assert one.desk.kept.manifests[0].base == two.desk.kept.manifests[0].base
    assert one.desk.kept.manifests[0].root != two.desk.kept.manifests[0].root, "A is drawn from the run"


def test_a_node_elsewhere_fetches_the_base_once_and_links_it(tmp_path, monkeypatch):
    fetched, prepare = [], fetch.prepare
    monkeypatch.setattr(fetch, "prepare", lambda *given, **more: fetched.append({w.name for w in given[2]})
                        or prepare(*given, **more))  # fmt: skip
    monkeypatch.setattr(fetch, "take_from_stock", lambda *_: False)  # as on another machine
    hashed, digests = [], base_model.digests_of
    monkeypatch.setattr(
        base_model, "digests_of", lambda weights, **more: hashed.extend(weights) or digests(weights, **more)
    )
    town = Town(tmp_path / "run", tiny_run(**{**ADAPTER, "steps": 3}))
    stranger = town.worker("stranger", own_files=False)
    asyncio.run(town.live(town.trainer(), town.validator(), stranger))
    with_base = [names for names in fetched if "model.safetensors" in names]
    assert len(with_base) == 2 < len(fetched), "the validator and the stranger, once each"
    held = sorted((town.folder.nodes / "stranger" / "weights").glob("v*/model.safetensors"))
    assert len(held) >= 2 and all(path.samefile(held[0]) for path in held)
    assert hashed.count("model.norm.weight") <= 5, "trainer, stock, validator and stranger have files of their own"


def test_a_run_of_adapters_says_that_nodes_need_them(tmp_path):
    assert ADAPTERS in StatusBoard(Town(tmp_path / "run", tiny_run(**ADAPTER)).desk).info().needs
    assert ADAPTERS not in StatusBoard(Town(tmp_path / "plain", tiny_run()).desk).info().needs


def test_an_adapter_of_another_base_is_refused_by_its_own_message(tmp_path):
    town = lived(tmp_path / "run", steps=1)
    manifests = town.desk.kept.manifests
    other = msgspec.structs.replace(manifests[1], base=AdapterBase("ee" * 32))
    with pytest.raises(
        PeerError, match=r"version 1 is an adapter of e{12}, and version 0 of the same run is an adapter"
    ):
        demand_same_base(other, manifests[0])
    with pytest.raises(PeerError, match="is a whole policy"):
        demand_same_base(msgspec.structs.replace(manifests[1], base=None), manifests[0])


def test_a_node_leaves_a_host_that_changes_the_base(tmp_path):
    """A host that replaces the base in the middle of a run would make each node fetch all of it again."""
    town = lived(tmp_path / "run", steps=1)
    folder = town.folder.nodes / "worker-0" / "weights"
    other = msgspec.structs.replace(town.desk.kept.manifests[1], version=2, root="dd" * 32, base=AdapterBase("ee" * 32))
    with pytest.raises(PeerError, match=r"a run has one base\. Nothing was fetched"):
        asyncio.run(fetch.fetch(other, [], folder))


def test_a_host_that_claims_the_same_base_with_other_files_or_another_source_is_refused():
    first = AdapterBase("ef" * 32, f"hf:ann/small@{COMMIT}")
    held = FileEntry("model.safetensors", 10, "ab" * 32, ())
    own = FileEntry(lora_config.WEIGHTS, 1, "cd" * 32, ("cd" * 32,))
    before = Manifest("run", "policy", 0, (), "float32", "cd" * 32, (held, own), 1 << 20, 0.0, 0.0, base=first)
    after = msgspec.structs.replace(
        before, version=1, files=(msgspec.structs.replace(own, digest="dd" * 32), held), root="ee" * 32
    )
    demand_same_base(after, before)
    another = msgspec.structs.replace(first, source=f"hf:eve/large@{COMMIT}")
    more = msgspec.structs.replace(held, path="model-00002-of-00002.safetensors")
    for changed in (
        {"base": another},
        *({"files": (msgspec.structs.replace(held, **change), own)} for change in
          ({"size": 1 << 40}, {"digest": "ee" * 32}, {"path": "other.safetensors"})),
        {"files": (held, more, own)},
    ):  # fmt: skip
        with pytest.raises(PeerError, match=r"versions 1 and 0 of the same run name other files or another source"):
            demand_same_base(msgspec.structs.replace(after, **changed), before)


def test_files_that_hold_another_base_than_the_manifest_names_are_refused(tmp_path):
    town = lived(tmp_path / "run", steps=1)

    async def forged():
        directory = town.folder.checkpoints / "final"
        sink = publish.FolderSink(tmp_path / "chunks")
        return await publish.publish(
            directory, sink, run="run", version=1, dtype="float32", adapts=AdapterBase("ee" * 32)
        )

    manifest = asyncio.run(forged())
    assert "belongs to base eeeeeeeeeeeeeeee…, and its files hold base" in base_model.fault_of_base(
        town.folder.checkpoints / "final", manifest
    )


def test_a_file_that_a_fetch_shares_with_others_is_never_written(tmp_path):
    """A fetch that was killed may leave another name of a file in the cache of a hub."""
    (tmp_path / "cache").write_bytes(b"a base of others")
    (tmp_path / "folder" / ".partial-v").mkdir(parents=True)
    (tmp_path / "folder" / ".partial-v" / "model.safetensors").hardlink_to(tmp_path / "cache")
    other = b"wrong, but as long"[:16]
    entry = FileEntry("model.safetensors", 16, digest(other), (digest(other),))
    wanted = [Wanted(entry.path, entry, 1 << 20)]
    missing = prepare(tmp_path / "folder", tmp_path / "folder" / ".partial-v", wanted, 1)
    missing[0].write(other)
    assert (tmp_path / "cache").read_bytes() == b"a base of others"
    assert (tmp_path / "folder" / ".partial-v" / "model.safetensors").read_bytes() == other


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rank": -1}, "policy.adapter.rank = -1: must be from 0 to 512"),
        ({"rank": 513}, "policy.adapter.rank = 513: must be from 0 to 512"),
        ({"rank": 4, "alpha": 0.0}, "policy.adapter.alpha = 0.0: must be above 0"),
        ({"rank": 4, "targets": ["q_proj", "embed"]}, "policy.adapter.targets has 'embed'; known are q_proj"),
        ({"rank": 4, "targets": []}, "is empty, or names a matrix twice"),
        ({"rank": 4, "targets": ["q_proj", "q_proj"]}, "is empty, or names a matrix twice"),
    ],
)
def test_run_files_that_ask_for_an_impossible_adapter_are_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        check_run(tiny_run(policy={"adapter": change}))


def test_an_adapter_in_int8_is_refused():
    with pytest.raises(ConfigError, match="rounds whole matrices"):
        check_run(tiny_run(policy={"adapter": {"rank": 4}}, sampling={"dtype": "int8"}))
    with pytest.raises(ConfigError, match="rounds what was learned when it is published"):
        check_run(tiny_run(policy={"adapter": {"rank": 4}, "dtype": "int8"}))


def test_a_run_does_not_begin_at_a_directory_that_holds_an_adapter(tmp_path):
    town = lived(tmp_path / "run", steps=1)
    for rank in (0, 2):
        policy = {"path": str(town.folder.checkpoints / "final"), "adapter": {"rank": rank}}
        with pytest.raises(StateError, match="holds an adapter, and a run begins with a whole model"):
            Town(tmp_path / f"{rank}", tiny_run(policy=policy)).trainer()
    config = json.loads((town.folder.checkpoints / "final" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] is None, "no path of the host's machine is published"
    shutil.copytree(town.folder.checkpoints / "final", tmp_path / "copy")
    assert LoraBase.from_directory(tmp_path / "copy") == LoraBase(base_root(tmp_path / "copy"))


def test_a_base_on_a_hub_never_crosses_the_hosts_uplink(tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub")
    make_tiny(tiny_run().policy.tiny, tmp_path / "model", 3, "float32")
    with fake_hub() as hub:
        hub.models["ann/small"] = tmp_path / "model"
        monkeypatch.setattr(models, "Hub", lambda: Hub(hub.url, tmp_path / "cache of the host"))
        monkeypatch.setattr(fetch, "Hub", lambda: Hub(hub.url, tmp_path / "cache of a node"))
        monkeypatch.setattr(fetch, "take_from_stock", lambda *_: False)  # as on another machine
        policy = {"path": "hf:ann/small@main", "adapter": ADAPTER["policy"]["adapter"]}
        models.start_policy(RunFolder(tmp_path / "run"), tiny_run(policy=policy))  # as the launcher does
        town = Town(tmp_path / "run", tiny_run(train=ADAPTER["train"], steps=2, policy=policy))
        asyncio.run(town.live(town.trainer(), town.validator(), town.worker("stranger", own_files=False)))
        assert town.audit().findings == []
    assert not (tmp_path / "cache of a node").exists(), "what it fetched counts as its versions do"
    assert not [*tmp_path.rglob(f"{base_model.OF_HUBS}/*")], "and has the names of the versions' files alone"
    source = f"hf:ann/small@{COMMIT}"
    for version in range(3):
        manifest = town.desk.kept.manifests[version]
        assert manifest.base == AdapterBase(weights_root(tmp_path / "model"), source)
        entry = next(entry for entry in manifest.files if entry.path == "model.safetensors")
        assert entry.chunks == () and entry.digest == base_model.file_digest(tmp_path / "model" / "model.safetensors")
        assert not town.desk.blobs.has(entry.digest), "the coordinator has no chunk of it"
    config = json.loads((town.folder.checkpoints / "final" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("ann/small", COMMIT)
    assert town.weights() == weights_root(town.folder.checkpoints / "final")


def test_a_hub_with_other_weights_than_the_manifests_is_refused(tmp_path):
    pytest.importorskip("huggingface_hub")
    make_tiny(tiny_run().policy.tiny, tmp_path / "model", 3, "float32")
    path = tmp_path / "model" / "model.safetensors"
    data = path.read_bytes()
    with fake_hub() as hub:
        hub.models["ann/small"] = tmp_path / "model"
        entry = FileEntry("model.safetensors", len(data), base_model.file_digest(path), ())
        own = FileEntry(lora_config.WEIGHTS, 1, "ab" * 32, ("ab" * 32,))
        manifest = Manifest("run", "policy", 0, (), "float32", "cd" * 32, (entry, own), 1 << 20, 0.0, 0.0,
                            base=AdapterBase("ef" * 32, f"hf:ann/small@{COMMIT}"))  # fmt: skip
        found = base_model.bases_of_hub(
            manifest, ["model.safetensors"], Hub(hub.url, tmp_path / "cache"), tmp_path, threading.Event()
        )
        assert found["model.safetensors"].read_bytes() == data
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        asked = (manifest, ["model.safetensors"], Hub(hub.url, tmp_path / "cache"), tmp_path / "other")
        with pytest.raises(
            StateError, match=r"has another hash than in the run's manifest.* It was deleted: try again"
        ):
            base_model.bases_of_hub(*asked, threading.Event())
        path.write_bytes(data)
        assert base_model.bases_of_hub(*asked, threading.Event())["model.safetensors"].read_bytes() == data


def test_a_wrong_file_in_the_users_own_cache_is_left_to_the_user(tmp_path):
    pytest.importorskip("huggingface_hub")
    make_tiny(tiny_run().policy.tiny, tmp_path / "model", 3, "float32")
    source, size = f"hf:ann/small@{COMMIT}", (tmp_path / "model" / "model.safetensors").stat().st_size
    with fake_hub() as served:
        served.models["ann/small"] = tmp_path / "model"
        hub = Hub(served.url, tmp_path / "cache")
        hub.bring(source, tmp_path / "here")
        entry = FileEntry("model.safetensors", size, "ab" * 32, ())
        manifest = Manifest("run", "policy", 0, (), "float32", "cd" * 32, (entry,), 1 << 20, 0.0, 0.0,
                            base=AdapterBase("ef" * 32, source))  # fmt: skip
        with pytest.raises(StateError, match=r"Delete \S+/cache/\S+ and try again"):
            base_model.bases_of_hub(manifest, ["model.safetensors"], hub, tmp_path / "node", threading.Event())
        assert hub.files(source, {"model.safetensors": size}, tmp_path / "into"), "it is still there"


def test_a_cancelled_fetch_of_a_base_ends_at_once(tmp_path):
    pytest.importorskip("huggingface_hub")
    make_tiny(tiny_run().policy.tiny, tmp_path / "model", 3, "float32")
    size = (tmp_path / "model" / "model.safetensors").stat().st_size
    entry = FileEntry("model.safetensors", size, "ab" * 32, ())
    manifest = Manifest("run", "policy", 0, (), "float32", "cd" * 32, (entry,), 1 << 20, 0.0, 0.0,
                        base=AdapterBase("ef" * 32, f"hf:ann/small@{COMMIT}"))  # fmt: skip

    async def cancelled() -> float:
        with fake_hub() as hub:
            hub.models["ann/small"] = tmp_path / "model"
            hub.stalls.set()
            before = {child.pid for child in psutil.Process().children()}
            fetching = asyncio.create_task(
                base_model.from_hub(manifest, [entry.path], Hub(hub.url, tmp_path / "cache"), tmp_path / "node")
            )
            assert await asyncio.to_thread(hub.stalled.wait, 60)
            fetching.cancel()
            at = time.monotonic()
            with pytest.raises(asyncio.CancelledError):
                await fetching
            assert {child.pid for child in psutil.Process().children()} <= before
            assert not [*tmp_path.rglob("*.incomplete")]
            return time.monotonic() - at

    assert asyncio.run(cancelled()) < 5


def test_only_one_base_of_a_hub_is_kept_beside_the_versions(tmp_path):
    manifests = [
        Manifest("run", "policy", 0, (), "float32", "cd" * 32, (), 1 << 20, 0.0, 0.0, base=base)
        for base in (AdapterBase("ef" * 32, f"hf:ann/small@{COMMIT}"), AdapterBase("ef" * 32, f"hf:bob/other@{COMMIT}"))
    ]
    folder = base_model._of_hub(tmp_path, f"hf:ann/small@{COMMIT}")
    folder.mkdir(parents=True)
    base_model.forget_fetched(tmp_path, manifests[0])
    assert folder.exists()
    base_model.forget_fetched(tmp_path, manifests[1])
    assert not folder.exists()


@pytest.mark.parametrize(
    ("base", "entry"),
    [
        (AdapterBase("ef" * 31, ""), {}),
        (AdapterBase("ef" * 32, "https://evil.example.org/model"), {}),
        (AdapterBase("ef" * 32, "hf:ann/small@main"), {}),  # a branch may move
        (AdapterBase("ef" * 32, ""), {"chunks": ()}),
        (AdapterBase("ef" * 32, f"hf:ann/small@{COMMIT}"), {"chunks": ("ab" * 32,)}),
        (AdapterBase("ef" * 32, f"hf:ann/small@{COMMIT}"), {"chunks": (), "size": 0}),
        (AdapterBase("ef" * 32, f"hf:ann/small@{COMMIT}"), {"chunks": (), "digest": "x"}),
        (AdapterBase("ef" * 32, f"hf:ann/small@{COMMIT}"), {"chunks": (), "path": "model.bin"}),
        (AdapterBase("ef" * 32, f"hf:ann/small@{COMMIT}"), {"chunks": (), "path": "config.json"}),
    ],
)
def test_manifests_with_an_impossible_base_are_refused(base, entry):
    key = Key.generate()
    good = FileEntry("model.safetensors", 10, "ab" * 32, ("ab" * 32,))
    own = FileEntry(lora_config.WEIGHTS, 1, "cd" * 32, ("cd" * 32,))
    manifest = Manifest("run", "policy", 0, (), "float32", "cd" * 32, (good, own), 1 << 20, 0.0, 0.0,
                        base=AdapterBase("ef" * 32))  # fmt: skip

    def opened(manifest: Manifest) -> Manifest:
        return open_manifest(to_json(sign_manifest(manifest, key, now=0.0)), run="run", keys=[key.public], now=None)

    assert opened(manifest).base == AdapterBase("ef" * 32)
    wrong = msgspec.structs.replace(manifest, base=base, files=(msgspec.structs.replace(good, **entry), own))
    with pytest.raises(ManifestError) as refused:
        opened(wrong)
    assert refused.value.code == "malformed"


def test_a_manifest_of_an_adapter_without_its_base_is_refused():
    key = Key.generate()
    own = FileEntry(lora_config.WEIGHTS, 1, "cd" * 32, ("cd" * 32,))
    manifest = Manifest("run", "policy", 0, (), "float32", "cd" * 32, (own,), 1 << 20, 0.0, 0.0,
                        base=AdapterBase("ef" * 32))  # fmt: skip
    with pytest.raises(ManifestError, match="lacks it or its base, or has patches"):
        open_manifest(to_json(sign_manifest(manifest, key, now=0.0)), run="run", keys=[key.public], now=None)
