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
from shoal.roles.coordinator.status import StatusCache
from shoal.roles.trainer import models
from shoal.run_folder import RunFolder
from shoal.step_metrics import read_metrics
from shoal.train import logprobs
from shoal.weights import base_model, publish
from shoal.weights.base_model import base_root, demand_same_base
from shoal.weights.fetch import fetch
from shoal.weights.fetch.chunks import Wanted, prepare
from shoal.weights.fetch.version_directory import VersionFolder
from shoal.weights.manifest import ManifestError, ManifestTrust, chunks_of, open_manifest, sign_manifest, weights_root
from shoal.weights.publish import PublishSettings
from tests.models.hub_server import COMMIT, fake_hub
from tests.roles.test_trainer_state import Killed
from tests.roles.testbed import TINY, RunTestbed, tiny_run

ADAPTER = {"policy": {"tiny": TINY["policy"]["tiny"], "adapter": {"rank": 2, "alpha": 8.0}}, "train": {"lr": 3e-2}}


def lived(root: Path, *cheats: str, **changes: object) -> RunTestbed:
    testbed = RunTestbed(root, tiny_run(**{**ADAPTER, **changes}))
    workers = [testbed.worker("worker-0"), testbed.worker("worker-1"), *(testbed.worker(c, cheat=c) for c in cheats)]
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), *workers))
    assert testbed.audit().findings == []
    return testbed


def adapter_of(testbed: RunTestbed, version: str = "final") -> dict[str, torch.Tensor]:
    return load_file(testbed.folder.checkpoints / version / lora_config.WEIGHTS)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of an adapter, with a cheater."""
    return lived(tmp_path_factory.mktemp("adapted") / "run", "other-seed", steps=4, storage={"checkpoint_every": 1})


@pytest.fixture
def hub(tmp_path):
    """A hub that serves the model in `tmp_path / "model"`."""
    pytest.importorskip("huggingface_hub")
    make_tiny(tiny_run().policy.tiny, tmp_path / "model", 3, "float32")
    with fake_hub() as hub:
        hub.models["ann/small"] = tmp_path / "model"
        yield hub


OWN = FileEntry(lora_config.WEIGHTS, 1, "cd" * 32, ("cd" * 32,))
SOURCE = f"hf:ann/small@{COMMIT}"


def manifest_of(*files: FileEntry, source: str = "") -> Manifest:
    base = AdapterBase("ef" * 32, source)
    return Manifest("run", "policy", 0, (), "float32", "cd" * 32, files, 1 << 20, 0.0, 0.0, base=base)


def test_a_run_learns_and_publishes_its_adapter_alone(finished):
    testbed = finished
    first, last = adapter_of(testbed, "v000000"), adapter_of(testbed)
    assert all((one == 0).all() for name, one in first.items() if "lora_B" in name)
    assert not any(one.equal(first[name]) for name, one in last.items())
    final, policy = testbed.folder.checkpoints / "final", testbed.folder.policy
    assert (final / "model.safetensors").samefile(policy / "model.safetensors"), "the base is on the disk once"
    manifests = [testbed.coordinator.kept.manifests[version] for version in range(5)]
    base = weights_root(policy)
    assert {manifest.base for manifest in manifests} == {AdapterBase(base)} == {AdapterBase(base_root(final))}
    sent = [sum(e.size for e in m.files if not {*e.chunks} <= chunks_of(before))
            for before, m in itertools.pairwise(manifests)]  # fmt: skip
    whole = (policy / "model.safetensors").stat().st_size
    assert max(sent) == (final / lora_config.WEIGHTS).stat().st_size < whole / 4
    assert testbed.weights() == manifests[4].root == weights_root(final)
    state = testbed.coordinator.state
    honest = [m for m in state.members.values() if m.name.startswith("worker-")]
    cheat = next(m for m in state.members.values() if m.name == "other-seed")
    assert all(member.credits > 0 for member in honest) and cheat.credits == 0
    # Any node's directory is a policy that can be opened without the run.
    engine = LocalEngine(1)
    engine.load(final, 4)
    assert load_policy(final).adapter is not None


def test_a_trainer_that_is_killed_comes_back_to_the_same_root(tmp_path, finished):
    testbed = RunTestbed(tmp_path / "killed", tiny_run(**{**ADAPTER, "steps": 4, "storage": {"state_every": 3}}))
    people = [testbed.validator(), testbed.worker("worker-0"), testbed.worker("worker-1")]
    asyncio.run(testbed.live(Killed(testbed, 1, 2, 3), *people))
    assert testbed.weights() == finished.weights()
    saved = next((testbed.folder.trainer).glob("v*/*.safetensors"))
    assert saved.stat().st_size < 5 * (testbed.folder.checkpoints / "final" / lora_config.WEIGHTS).stat().st_size


def test_a_trainer_in_bfloat16_has_the_base_in_memory_once(tmp_path, monkeypatch):
    """It recomputes what workers claim, with each version's adapter over the base that it learns on."""
    monkeypatch.setattr(logprobs, "open_policy", None)
    policy = {**ADAPTER["policy"], "dtype": "bfloat16"}
    testbed = lived(tmp_path / "run", steps=1, policy=policy, train={"lr": 3e-2, "dtype": "bfloat16"})
    (step,) = read_metrics(testbed.folder.metrics)
    assert step["denominators_s"] > 0


def test_a_node_elsewhere_fetches_the_base_once_and_links_it(tmp_path, monkeypatch):
    fetched, prepare = [], fetch.prepare
    monkeypatch.setattr(fetch, "prepare", lambda *given, **more: fetched.append({w.name for w in given[2]})
                        or prepare(*given, **more))  # fmt: skip
    monkeypatch.setattr(fetch, "take_from_stock", lambda *_: False)  # as on another machine
    hashed, digests = [], base_model.digests_of
    monkeypatch.setattr(
        base_model, "digests_of", lambda weights, **more: hashed.extend(weights) or digests(weights, **more)
    )
    testbed = RunTestbed(tmp_path / "run", tiny_run(**{**ADAPTER, "steps": 2}))
    stranger = testbed.worker("stranger", own_files=False)
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), stranger))
    with_base = [names for names in fetched if "model.safetensors" in names]
    assert len(with_base) == 2 < len(fetched), "the validator and the stranger, once each"
    held = sorted((testbed.folder.nodes / "stranger" / "weights").glob("v*/model.safetensors"))
    assert len(held) >= 2 and all(path.samefile(held[0]) for path in held)
    assert hashed.count("model.norm.weight") <= 5, "trainer, stock, validator and stranger have files of their own"


def test_a_run_of_adapters_says_that_nodes_need_them(tmp_path):
    assert ADAPTERS in StatusCache(RunTestbed(tmp_path / "run", tiny_run(**ADAPTER)).coordinator).info().needs
    assert ADAPTERS not in StatusCache(RunTestbed(tmp_path / "plain", tiny_run()).coordinator).info().needs


def test_an_adapter_of_another_base_is_refused_by_its_own_message(finished):
    manifests = finished.coordinator.kept.manifests
    other = msgspec.structs.replace(manifests[1], base=AdapterBase("ee" * 32))
    with pytest.raises(PeerError, match=r"version 1 is an adapter of e{12}, and version 0"):
        demand_same_base(other, manifests[0])
    with pytest.raises(PeerError, match="is a whole policy"):
        demand_same_base(msgspec.structs.replace(manifests[1], base=None), manifests[0])


def test_a_node_leaves_a_host_that_changes_the_base(finished):
    """A host that replaces the base in the middle of a run would make each node fetch all of it again."""
    folder = finished.folder.nodes / "worker-0" / "weights"
    manifest = finished.coordinator.kept.manifests[4]
    other = msgspec.structs.replace(manifest, version=5, root="dd" * 32, base=AdapterBase("ee" * 32))
    with pytest.raises(PeerError, match=r"a run has one base\. Nothing was fetched"):
        asyncio.run(fetch.fetch(other, [], VersionFolder(folder)))


def test_a_host_that_claims_the_same_base_with_other_files_or_another_source_is_refused():
    held = FileEntry("model.safetensors", 10, "ab" * 32, ())
    before = manifest_of(held, OWN, source=SOURCE)
    files = (msgspec.structs.replace(OWN, digest="dd" * 32), held)
    after = msgspec.structs.replace(before, version=1, files=files, root="ee" * 32)
    demand_same_base(after, before)
    another = msgspec.structs.replace(before.base, source=f"hf:eve/large@{COMMIT}")
    more = msgspec.structs.replace(held, path="model-00002-of-00002.safetensors")
    for changed in (
        {"base": another},
        *({"files": (msgspec.structs.replace(held, **change), OWN)} for change in
          ({"size": 1 << 40}, {"digest": "ee" * 32}, {"path": "other.safetensors"})),
        {"files": (held, more, OWN)},
    ):  # fmt: skip
        with pytest.raises(PeerError, match=r"versions 1 and 0 of the same run name other files or another source"):
            demand_same_base(msgspec.structs.replace(after, **changed), before)


def test_files_that_hold_another_base_than_the_manifest_names_are_refused(tmp_path, finished):
    directory, sink = finished.folder.checkpoints / "final", publish.FolderSink(tmp_path / "chunks")
    settings = PublishSettings("run", 1, "float32")
    manifest = asyncio.run(publish.publish(directory, sink, settings, adapts=AdapterBase("ee" * 32)))
    assert "belongs to base eeeeeeeeeeeeeeee" in base_model.fault_of_base(directory, manifest)


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


def test_a_run_does_not_begin_at_a_directory_that_holds_an_adapter(tmp_path, finished):
    final = finished.folder.checkpoints / "final"
    for rank in (0, 2):
        policy = {"path": str(final), "adapter": {"rank": rank}}
        with pytest.raises(StateError, match="holds an adapter, and a run begins with a whole model"):
            RunTestbed(tmp_path / f"{rank}", tiny_run(policy=policy)).trainer()
    config = json.loads((final / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] is None, "no path of the host's machine is published"
    shutil.copytree(final, tmp_path / "copy")
    assert LoraBase.from_directory(tmp_path / "copy") == LoraBase(base_root(tmp_path / "copy"))


def test_a_base_on_a_hub_never_crosses_the_hosts_uplink(tmp_path, monkeypatch, hub):
    monkeypatch.setattr(models, "Hub", lambda: Hub(hub.url, tmp_path / "cache of the host"))
    monkeypatch.setattr(fetch, "Hub", lambda: Hub(hub.url, tmp_path / "cache of a node"))
    monkeypatch.setattr(fetch, "take_from_stock", lambda *_: False)  # as on another machine
    policy = {"path": "hf:ann/small@main", "adapter": ADAPTER["policy"]["adapter"]}
    models.start_policy(RunFolder(tmp_path / "run"), tiny_run(policy=policy))  # as the launcher does
    testbed = RunTestbed(tmp_path / "run", tiny_run(train=ADAPTER["train"], steps=1, policy=policy))
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("stranger", own_files=False)))
    assert testbed.audit().findings == []
    assert not (tmp_path / "cache of a node").exists(), "what it fetched counts as its versions do"
    assert not [*tmp_path.rglob(f"{base_model.OF_HUBS}/*")], "and has the names of the versions' files alone"
    for version in range(2):
        manifest = testbed.coordinator.kept.manifests[version]
        assert manifest.base == AdapterBase(weights_root(tmp_path / "model"), SOURCE)
        entry = next(entry for entry in manifest.files if entry.path == "model.safetensors")
        assert entry.chunks == () and entry.digest == base_model.file_digest(tmp_path / "model" / "model.safetensors")
        assert not testbed.coordinator.blobs.has(entry.digest), "the coordinator has no chunk of it"
    config = json.loads((testbed.folder.checkpoints / "final" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("ann/small", COMMIT)
    assert testbed.weights() == weights_root(testbed.folder.checkpoints / "final")


def test_a_hub_with_other_weights_than_the_manifests_is_refused(tmp_path, hub):
    path = tmp_path / "model" / "model.safetensors"
    data = path.read_bytes()
    entry = FileEntry(path.name, len(data), base_model.file_digest(path), ())
    asked = (manifest_of(entry, OWN, source=SOURCE), [path.name], Hub(hub.url, tmp_path / "cache"), tmp_path / "node")
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(StateError, match=r"has another hash than in the run's manifest.* It was deleted"):
        base_model.bases_of_hub(*asked, threading.Event())
    path.write_bytes(data)
    assert base_model.bases_of_hub(*asked, threading.Event())[path.name].read_bytes() == data


def test_a_wrong_file_in_the_users_own_cache_is_left_to_the_user(tmp_path, hub):
    size = (tmp_path / "model" / "model.safetensors").stat().st_size
    client = Hub(hub.url, tmp_path / "cache")
    client.bring(SOURCE, tmp_path / "here")
    manifest = manifest_of(FileEntry("model.safetensors", size, "ab" * 32, ()), source=SOURCE)
    with pytest.raises(StateError, match=r"Delete \S+/cache/\S+ and try again"):
        base_model.bases_of_hub(manifest, ["model.safetensors"], client, tmp_path / "node", threading.Event())
    assert client.files(SOURCE, {"model.safetensors": size}, tmp_path / "into"), "it is still there"


def test_a_cancelled_fetch_of_a_base_ends_at_once(tmp_path, hub):
    size = (tmp_path / "model" / "model.safetensors").stat().st_size
    manifest = manifest_of(FileEntry("model.safetensors", size, "ab" * 32, ()), source=SOURCE)
    hub.stalls.set()

    async def cancelled() -> float:
        before = {child.pid for child in psutil.Process().children()}
        client = Hub(hub.url, tmp_path / "cache")
        fetching = asyncio.create_task(base_model.from_hub(manifest, ["model.safetensors"], client, tmp_path / "node"))
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
    folder = base_model._of_hub(tmp_path, SOURCE)
    folder.mkdir(parents=True)
    base_model.forget_fetched(tmp_path, manifest_of(source=SOURCE))
    assert folder.exists()
    base_model.forget_fetched(tmp_path, manifest_of(source=f"hf:bob/other@{COMMIT}"))
    assert not folder.exists()


def opened(manifest: Manifest) -> Manifest:
    key = Key.generate()
    return open_manifest(to_json(sign_manifest(manifest, key, now=0.0)), ManifestTrust("run", [key.public]), now=None)


@pytest.mark.parametrize(
    ("base", "entry"),
    [
        (AdapterBase("ef" * 31, ""), {}),
        (AdapterBase("ef" * 32, "https://evil.example.org/model"), {}),
        (AdapterBase("ef" * 32, "hf:ann/small@main"), {}),  # a branch may move
        (AdapterBase("ef" * 32, ""), {"chunks": ()}),
        (AdapterBase("ef" * 32, SOURCE), {"chunks": ("ab" * 32,)}),
        (AdapterBase("ef" * 32, SOURCE), {"chunks": (), "size": 0}),
        (AdapterBase("ef" * 32, SOURCE), {"chunks": (), "digest": "x"}),
        (AdapterBase("ef" * 32, SOURCE), {"chunks": (), "path": "model.bin"}),
        (AdapterBase("ef" * 32, SOURCE), {"chunks": (), "path": "config.json"}),
    ],
)
def test_manifests_with_an_impossible_base_are_refused(base, entry):
    good = FileEntry("model.safetensors", 10, "ab" * 32, ("ab" * 32,))
    manifest = manifest_of(good, OWN)
    assert opened(manifest).base == manifest.base
    wrong = msgspec.structs.replace(manifest, base=base, files=(msgspec.structs.replace(good, **entry), OWN))
    with pytest.raises(ManifestError) as refused:
        opened(wrong)
    assert refused.value.code == "malformed"


def test_a_manifest_of_an_adapter_without_its_base_is_refused():
    with pytest.raises(ManifestError, match="lacks it or its base, or has patches"):
        opened(manifest_of(OWN))
