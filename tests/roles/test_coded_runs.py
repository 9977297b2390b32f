"""Runs whose adapters are over a base in NF4: the host codes it once, nodes get the bytes, and all agree."""

import asyncio
import json
import shutil
from pathlib import Path

import msgspec
import pytest
import torch

from shoal.config import check_run
from shoal.engine.native import LocalEngine
from shoal.errors import ConfigError, PeerError, StateError
from shoal.jobs import merge_adapter
from shoal.models.checkpoint import load_policy, tensors_of, write_nf4
from shoal.models.hub_download import Hub
from shoal.models.nf4_layout import is_coded
from shoal.models.random_model import make_tiny
from shoal.protocol.constants import VLLM
from shoal.protocol.messages import AdapterBase
from shoal.protocol.tolerances import ADAPTERS, CODED_BASE
from shoal.roles.coordinator.status import StatusCache
from shoal.roles.trainer import models
from shoal.run_folder import RunFolder
from shoal.weights import base_model
from shoal.weights.base_model import base_root
from shoal.weights.engine_loader import demand_engine_fits
from shoal.weights.fetch import fetch
from shoal.weights.manifest import weights_root
from tests.models.hub_server import fake_hub
from tests.roles.test_trainer_state import Killed
from tests.roles.testbed import RunTestbed, tiny_run

SHAPE = {"width": 64, "layers": 2, "heads": 2, "kv_heads": 1, "mlp_width": 128, "max_positions": 64}
ADAPTER = {"rank": 2, "alpha": 8.0, "base": "nf4"}
CODED = {"policy": {"tiny": SHAPE, "adapter": ADAPTER}, "train": {"lr": 3e-2}}


def lived(root: Path, *cheats: str, **changes: object) -> RunTestbed:
    testbed = RunTestbed(root, tiny_run(**{**CODED, **changes}))
    workers = [
        testbed.worker("worker-0"),
        testbed.worker("stranger", own_files=False),
        *(testbed.worker(c, cheat=c) for c in cheats),
    ]
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), *workers))
    assert testbed.audit().findings == []
    return testbed


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunTestbed:
    return lived(tmp_path_factory.mktemp("coded") / "run", "other-seed", steps=2, storage={"checkpoint_every": 1})


def test_a_run_over_codes_learns_is_verified_and_merged(tmp_path: Path, finished: RunTestbed) -> None:
    testbed = finished
    final, policy = testbed.folder.checkpoints / "final", testbed.folder.policy
    assert is_coded(policy) and (final / "model.safetensors").samefile(policy / "model.safetensors")
    manifests = [testbed.coordinator.kept.manifests[version] for version in range(3)]
    assert (
        {manifest.base for manifest in manifests}
        == {AdapterBase(weights_root(policy))}
        == {AdapterBase(base_root(final))}
    )
    whole = weights_root(final)
    assert testbed.weights() == manifests[2].root == whole != manifests[0].root
    credits = {member.name: member.credits for member in testbed.coordinator.state.members.values()}
    assert credits["other-seed"] == 0 < min(credits["worker-0"], credits["stranger"])
    held = next((testbed.folder.nodes / "stranger" / "weights").glob("v*"))
    assert tensors_of(held).keys() == tensors_of(final).keys(), "a node has the codes, and no other weights"
    said = merge_adapter.main(final, None, tmp_path / "merged", "", 1)
    assert "a whole model in float32" in said and "0.00 % of them" in said
    with torch.no_grad():
        logits = [merge_adapter._logits(load_policy(directory)) for directory in (tmp_path / "merged", final)]
    assert torch.allclose(*logits, atol=1e-4) and not is_coded(tmp_path / "merged")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trainer_that_is_killed_comes_back_to_the_same_root(tmp_path: Path, dtype: str) -> None:
    changes = {"policy": CODED["policy"] | {"dtype": dtype}, "steps": 3}
    unbroken = lived(tmp_path / "unbroken", **changes).weights()
    testbed = RunTestbed(tmp_path / "killed", tiny_run(**{**CODED, **changes}))
    asyncio.run(
        testbed.live(Killed(testbed, 1, 2), testbed.validator(), testbed.worker("worker-0"), testbed.worker("worker-1"))
    )
    assert testbed.weights() == unbroken


def test_the_base_is_coded_once_whatever_is_killed_meanwhile(tmp_path: Path) -> None:
    folder, config = RunFolder(tmp_path / "run"), tiny_run(**CODED)
    make_tiny(config.policy.tiny, folder.policy, 5, "float32")  # a trainer was killed before it coded it
    coded = tensors_of(models.start_policy(folder, config))
    before = (folder.policy / "model.safetensors").stat().st_ino
    assert tensors_of(models.start_policy(folder, config)) == coded
    assert (folder.policy / "model.safetensors").stat().st_ino == before


def test_a_run_may_begin_with_the_codes_of_another_and_must_name_them(tmp_path: Path) -> None:
    make_tiny(tiny_run(**CODED).policy.tiny, tmp_path / "plain", 3, "float32")
    write_nf4(tmp_path / "plain", tmp_path / "codes")

    def begun(name: str, **policy: object) -> Path:
        run = tiny_run(policy={"path": str(tmp_path / "codes"), **policy})
        models.first_model(RunFolder(tmp_path / name), run, torch.float32)
        return RunFolder(tmp_path / name).policy

    assert tensors_of(begun("named", adapter=ADAPTER)) == tensors_of(tmp_path / "codes")
    for name, policy in (("whole", {}), ("unnamed", {"adapter": {"rank": 2}})):
        with pytest.raises(StateError, match=r'a model in NF4, on which only adapters learn: set .*base = "nf4"'):
            begun(name, **policy)


def test_the_codes_of_a_hubs_model_are_published_as_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    make_tiny(tiny_run(**CODED).policy.tiny, tmp_path / "model", 3, "float32")
    with fake_hub() as hub:
        hub.models["ann/small"] = tmp_path / "model"
        monkeypatch.setattr(models, "Hub", lambda: Hub(hub.url, tmp_path / "cache"))
        monkeypatch.setattr(fetch, "Hub", lambda: Hub(hub.url, tmp_path / "cache of a node"))
        monkeypatch.setattr(fetch, "take_from_stock", lambda *_: False)  # as on another machine
        policy = {"path": "hf:ann/small@main", "adapter": ADAPTER}
        models.start_policy(RunFolder(tmp_path / "run"), tiny_run(policy=policy))  # as the launcher does
        testbed = RunTestbed(tmp_path / "run", tiny_run(train=CODED["train"], steps=1, policy=policy))
        asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("stranger", own_files=False)))
    assert not (tmp_path / "cache of a node").exists() and not list(tmp_path.rglob(f"{base_model.OF_HUBS}/*"))
    manifest = testbed.coordinator.kept.manifests[1]
    entry = next(entry for entry in manifest.files if entry.path == "model.safetensors")
    assert manifest.base == AdapterBase(weights_root(testbed.folder.policy)) and entry.chunks
    assert entry.size < 0.5 * (tmp_path / "model" / "model.safetensors").stat().st_size


def test_nodes_are_told_and_vllm_stays_away(tmp_path: Path) -> None:
    testbed = RunTestbed(tmp_path / "run", tiny_run(**CODED))
    run = StatusCache(testbed.coordinator).info()
    assert run.needs == (ADAPTERS, CODED_BASE)
    bounds = run.rules.bounds | {"vllm:float32/float32": run.rules.bounds["float32/float32"]}
    measured = msgspec.structs.replace(run, rules=msgspec.structs.replace(run.rules, bounds=bounds))
    with pytest.raises(PeerError, match="adapters of a model in NF4, which only shoal's own engine reads"):
        demand_engine_fits(measured, VLLM)
    plain = {"policy": {"tiny": SHAPE, "adapter": {"rank": 2}}}
    assert CODED_BASE not in StatusCache(RunTestbed(tmp_path / "plain", tiny_run(**plain)).coordinator).info().needs


def test_codes_without_an_adapter_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r'policy.adapter.base = "nf4" rounds a model that does not learn.*: set the rank'
    ):
        check_run(tiny_run(policy={"adapter": {"base": "nf4"}}))


def test_a_node_that_changed_a_byte_of_the_codes_is_found_out(tmp_path: Path, finished: RunTestbed) -> None:
    """Weights that differ from what all others hold are another version's root, and no file of this one."""
    shutil.copytree(finished.folder.checkpoints / "final", tmp_path / "copy")
    path = tmp_path / "copy" / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    start = header["model.layers.0.mlp.up_proj.weight_nf4"]["data_offsets"][0] + 8 + length
    path.write_bytes(data[:start] + bytes([data[start] ^ 1]) + data[start + 1 :])
    assert weights_root(tmp_path / "copy") != finished.weights()
    engine = LocalEngine(1)
    engine.load(tmp_path / "copy", 1)  # it is a policy, but another
