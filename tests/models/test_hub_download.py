"""Models from a hub: what is fetched and what is not, the cache without network, and one line for each refusal."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.config import TinyPolicy, check_run
from shoal.errors import ConfigError, StateError
from shoal.models import hub_download as hub_module
from shoal.models.checkpoint import load_policy, save_policy
from shoal.models.hub_download import Hub, source_of
from shoal.models.random_model import make_tiny
from shoal.protocol.hub_reference import hub_ref
from tests.models.hub_server import COMMIT, FakeHub, fake_hub
from tests.roles.testbed import tiny_run

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed: pip install '.[hub]'")

TINY = TinyPolicy(width=32, layers=2, heads=2, kv_heads=1, mlp_width=48, max_positions=64)
NAME = "hf:ann/small@main"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    make_tiny(TINY, tmp_path / "model", 3, "float32")
    (tmp_path / "model" / "modeling_small.py").write_text("raise SystemExit('code of a model ran')")
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"a pickle")
    (tmp_path / "model" / "consolidated.safetensors").write_bytes(b"another copy")
    with fake_hub() as served:
        served.models["ann/small"] = tmp_path / "model"
        yield served


def reached(hub: FakeHub, tmp_path: Path) -> Hub:
    return Hub(hub.url, tmp_path / "cache")


def test_a_model_is_fetched_without_code_and_opens(hub, tmp_path):
    said: list[str] = []
    reached(hub, tmp_path).bring(NAME, tmp_path / "here", said.append)
    names = {path.name for path in (tmp_path / "here").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", ".hub"} <= names
    assert not names & {"modeling_small.py", "pytorch_model.bin", "consolidated.safetensors"}
    assert not [asked for asked in hub.asked if ".py" in asked or ".bin" in asked or "consolidated" in asked]
    assert source_of(tmp_path / "here") == f"hf:ann/small@{COMMIT}", "the branch was pinned to its commit"
    assert said and COMMIT in said[0]
    ours, theirs = load_policy(tmp_path / "here"), load_policy(tmp_path / "model")
    assert all(a.equal(b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_a_second_use_and_one_without_network_take_the_cache(hub, tmp_path):
    reached(hub, tmp_path).bring(NAME, tmp_path / "first")
    sent = hub.sent_bytes
    reached(hub, tmp_path).bring(NAME, tmp_path / "second")
    assert hub.sent_bytes - sent < 10_000, "only the list of files"
    Hub("http://127.0.0.1:9", tmp_path / "cache").bring(NAME, tmp_path / "third")
    assert source_of(tmp_path / "third") == f"hf:ann/small@{COMMIT}"
    assert (tmp_path / "third" / "model.safetensors").read_bytes() == (
        tmp_path / "model/model.safetensors"
    ).read_bytes()
    with pytest.raises(StateError, match="is not in the hub's cache, and the hub cannot be reached"):
        Hub("http://127.0.0.1:9", tmp_path / "empty").bring(NAME, tmp_path / "fourth")
    assert not (tmp_path / "fourth").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hf:ann/absent@main", "the hub has no such model, or it is private"),
        ("hf:ann/gated@main", "is gated: accept its terms on the hub, and log in"),
        ("hf:ann/small@v9", "the hub has no revision 'v9' of it"),
        ("hf:ann/code@main", "has no config.json with weights in safetensors"),
    ],
)
def test_models_that_cannot_be_had_are_refused_by_one_line(hub, tmp_path, name, said):
    hub.gated.add("ann/gated")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "model.py").write_text("")
    hub.models["ann/code"] = tmp_path / "code"
    with pytest.raises(StateError, match=said) as refused:
        reached(hub, tmp_path).bring(name, tmp_path / "here")
    assert "\n" not in str(refused.value) and not (tmp_path / "here").exists()


def test_a_file_that_is_too_large_is_not_fetched(hub, tmp_path):
    with (tmp_path / "model" / "tokenizer.json").open("ab") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(StateError, match=r"tokenizer.json has more than 67108864 bytes"):
        reached(hub, tmp_path).bring(NAME, tmp_path / "here")
    assert not [asked for asked in hub.asked if "/resolve/" in asked]


def test_weights_of_another_size_than_the_manifests_are_not_fetched(hub, tmp_path):
    source, size = f"hf:ann/small@{COMMIT}", (tmp_path / "model/model.safetensors").stat().st_size
    found = reached(hub, tmp_path).files(source, {"model.safetensors": size}, tmp_path / "into")
    assert found["model.safetensors"].read_bytes() == (tmp_path / "model/model.safetensors").read_bytes()
    for name, wanted in (
        ("model.safetensors", size + 1),
        ("model-00001-of-00001.safetensors", size),
        ("config.json", 9),
    ):
        with pytest.raises(StateError, match="the run's base is not that model"):
            reached(hub, tmp_path / "other").files(source, {name: wanted}, tmp_path / "another")
    assert not (tmp_path / "another").exists(), "nothing was fetched"


def test_a_fetch_that_was_cut_short_goes_on(hub, tmp_path):
    hub.cut_after = 20_000
    for _ in range(3):
        try:
            reached(hub, tmp_path).bring(NAME, tmp_path / "here")
            break
        except StateError as error:
            assert "Try again: the files that are here are kept" in str(error)
    assert (tmp_path / "here/model.safetensors").read_bytes() == (tmp_path / "model/model.safetensors").read_bytes()


def test_a_part_of_a_model_in_the_cache_is_not_taken_for_the_model_without_network(hub, tmp_path):
    save_policy(load_policy(tmp_path / "model"), tmp_path / "parts", "float32", tmp_path / "model", shard_bytes=8000)
    hub.models["ann/small"] = tmp_path / "parts"
    shards = sorted(path.name for path in (tmp_path / "parts").glob("model-*"))
    assert len(shards) > 2
    reached(hub, tmp_path).bring(NAME, tmp_path / "whole")
    away = Hub("http://127.0.0.1:9", tmp_path / "cache")
    away.bring(NAME, tmp_path / "again")
    snapshot = tmp_path / "cache" / "models--ann--small" / "snapshots" / COMMIT
    sizes = {name: (tmp_path / "parts" / name).stat().st_size for name in shards}
    for lacking in (shards[-1], "model.safetensors.index.json", "config.json", "tokenizer.json"):
        held = snapshot / lacking
        name = "model.safetensors" if lacking.endswith("index.json") else lacking
        held.rename(tmp_path / "away")
        with pytest.raises(StateError, match=rf"{name} is not in the hub's cache.*connect and try again: what is here"):
            away.bring(NAME, tmp_path / "part")
        assert not (tmp_path / "part").exists()
        if lacking in shards:
            with pytest.raises(StateError, match="connect and try again"):
                away.files(f"hf:ann/small@{COMMIT}", sizes, tmp_path / "into")
        (tmp_path / "away").rename(held)
    reached(hub, tmp_path / "fresh").bring(NAME, tmp_path / "other")
    got = [asked.rpartition("/")[2] for asked in hub.asked if asked.startswith("GET") and "/resolve/" in asked]
    assert got[-len(shards) :] == shards, "weights come last"


def test_names_that_lead_out_of_the_cache_are_not_looked_up(hub, tmp_path):
    reached(hub, tmp_path).bring(NAME, tmp_path / "here")
    path = tmp_path / "cache" / "models--ann--small" / "snapshots" / COMMIT / "other.txt"
    path.write_text("not of this model")
    with pytest.raises(StateError, match="the run's base is not that model"):
        reached(hub, tmp_path).files(f"hf:ann/small@{COMMIT}", {"other.txt": path.stat().st_size}, tmp_path / "into")


def test_only_what_the_cache_lacks_must_fit_on_its_disk(hub, tmp_path, monkeypatch):
    looked = []

    def none_free(folder: Path) -> int:
        looked.append(folder)
        return 0

    monkeypatch.setattr(hub_module, "free_below", none_free)
    with pytest.raises(StateError, match=r"needs \d+ bytes in .*cache, and 0 are free: free some space$"):
        reached(hub, tmp_path).bring(NAME, tmp_path / "here")
    assert looked == [tmp_path / "cache"] and not [asked for asked in hub.asked if "/resolve/" in asked]
    monkeypatch.undo()
    reached(hub, tmp_path).bring(NAME, tmp_path / "first")
    monkeypatch.setattr(hub_module, "free_below", none_free)
    reached(hub, tmp_path).bring(NAME, tmp_path / "second")


def test_a_disk_that_fills_up_while_a_model_is_fetched_is_named_with_its_remedy(hub, tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", full)
    with pytest.raises(StateError, match=r"No space left on device. Free some space: the files that are here are kept"):
        reached(hub, tmp_path).bring(NAME, tmp_path / "here")


def test_a_model_must_fit_on_the_disk_that_it_is_copied_to(hub, tmp_path, monkeypatch):
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second disk")
    monkeypatch.setattr(hub_module, "free_below", lambda folder: 0 if folder == other / "runs" else 1 << 40)
    with pytest.raises(StateError, match=r"needs \d+ bytes in /dev/shm/runs, and 0 are free: free some space$"):
        reached(hub, tmp_path).bring(NAME, other / "runs" / "policy")


@pytest.mark.parametrize("name", ["hf:small@main", "hf:ann/small", "hf:ann/../small@main", "hf:ann/small@", "hf:a b/c@d",
                                  "hf:ann/small@../../x", "hf:/etc/passwd@main", "hf:a--b/small@main",
                                  "hf:ann-/small@main", "hf:ann/small.@main", "hf:ann/small.git@main"])  # fmt: skip
def test_other_names_are_refused(name):
    assert hub_ref(name) is None
    with pytest.raises(ConfigError, match="a model on a hub is hf:OWNER/NAME@REVISION"):
        check_run(tiny_run(policy={"path": name}))


def test_the_command_line_says_in_one_line_that_a_model_is_absent(hub, tmp_path):
    recipe = tmp_path / "run.toml"
    recipe.write_text(
        'name = "absent"\nsteps = 1\n[policy]\npath = "hf:ann/absent@main"\n[[envs]]\nname = "arithmetic"\n'
    )
    done = subprocess.run(
        [sys.executable, "-m", "shoal.cli.main", "run", str(recipe), "--out", str(tmp_path / "out")],
        env=os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2 and "the hub has no such model" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
