"""A run with --random-policy: a scaled-down twin of each recipe of a real model really runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.config import load_run
from shoal.launch.random_policy import _make, random_policy
from shoal.models.checkpoint import find_tensors
from shoal.models.lora_config import WEIGHTS
from shoal.run_folder import RunFolder

RECIPES = Path(__file__).parents[2] / "recipes"

SMALL = (
    "steps=2", "sampling.max_turn_tokens=12", "sampling.max_tokens=128", "rollouts.group_size=4",
    "rollouts.block_rollouts=8", "rollouts.batch_groups=2", "rollouts.max_staleness=0", "verify.audit_rate=1.0",
    "train.threads=1", "workers.count=1", "validators.count=1", "train.lr=1e-3",
)  # fmt: skip


def twin_of(shape: str, folder: Path) -> Path:
    """The shape with the same keys and small numbers."""
    config = json.loads((RECIPES / "shapes" / shape / "config.json").read_text())
    small = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 2000, "eos_token_id": 1999,
        "max_position_embeddings": 512,
    }  # fmt: skip
    (folder / "shape").mkdir()
    twin = config | {key: value for key, value in small.items() if key in config}
    (folder / "shape" / "config.json").write_text(json.dumps(twin))
    return folder / "shape"


def run(folder: Path, recipe: str, *overrides: str, more: tuple[str, ...] = ()) -> "subprocess.CompletedProcess[str]":
    sets = [part for override in overrides for part in ("--set", override)]
    command = [sys.executable, "-m", "shoal.cli.main", "run", str(RECIPES / f"{recipe}.toml"), "--random-policy", *more]
    return subprocess.run([*command, *sets], cwd=folder, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "shape"),
    [("qwen3-0.6b-gsm8k", "qwen3-0.6b"), ("qwen3-8b-lora", "qwen3-8b"), ("olmoe", "olmoe-1b-7b")],
)
def test_a_small_twin_of_a_recipe_runs_and_is_resumed(recipe: str, shape: str, tmp_path: Path) -> None:
    twin = f"policy.path={twin_of(shape, tmp_path)}"
    done = run(tmp_path, recipe, twin, *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Random policy: " in done.stdout and "knows no language" in done.stdout
    root = tmp_path / "runs" / f"{recipe}-random"
    first = (root / "policy" / "model.safetensors").read_bytes()
    summary = json.loads((root / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["credits"]["worker-0"]["credits"] == summary["tokens"] > 0
    learned = WEIGHTS if (root / "checkpoints" / "final" / WEIGHTS).exists() else "model.safetensors"
    assert (learned == WEIGHTS) == ("lora" in recipe)
    begun, ended = (root / "checkpoints" / version / learned for version in ("v000000", "final"))
    assert begun.read_bytes() != ended.read_bytes()
    moved = root.rename(tmp_path / "moved")
    again = run(tmp_path, recipe, twin, *SMALL, more=("--out", str(moved)))
    assert again.returncode == 0, again.stdout + again.stderr
    assert (moved / "policy" / "model.safetensors").read_bytes() == first and not root.exists()


def test_a_moved_folder_is_that_of_the_same_run(tmp_path: Path) -> None:
    shape = twin_of("qwen3-0.6b", tmp_path)
    config = load_run(RECIPES / "qwen3-0.6b-gsm8k.toml", [f"policy.path={shape}"], random_policy=True)
    folder = RunFolder(tmp_path / "run")
    folder.policy.mkdir(parents=True)
    assert "in the shape of shape" in random_policy(config, RECIPES, folder, True)
    assert not folder.prepare(config, RECIPES)
    moved = RunFolder(folder.root.rename(tmp_path / "moved"))
    random_policy(config, RECIPES, moved, True)
    assert moved.prepare(config, RECIPES), "it is resumed"


def test_a_run_in_int8_begins_with_random_weights_in_full_precision(tmp_path: Path) -> None:
    shape = twin_of("qwen3-0.6b", tmp_path)
    config = load_run(RECIPES / "qwen3-0.6b-gsm8k.toml", ["policy.dtype=int8", "train.dtype="], random_policy=True)
    _make(shape, tmp_path / "policy", config)
    assert {one.dtype for one in find_tensors(tmp_path / "policy").values()} == {"F32"}


def test_nothing_is_made_where_the_run_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shoal.launch.memory_plan.free_on", lambda device: 10**9)
    out = tmp_path / "run"
    command = ["run", str(RECIPES / "qwen3-0.6b-gsm8k.toml"), "--random-policy", "--out", str(out)]
    assert main.main(command) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: this run needs about") and said.count("\n") == 1
    assert not (out / "policy").exists()


@pytest.mark.parametrize(
    ("override", "says"),
    [("policy.path=nowhere", "--random-policy needs a model's shape"), ("policy.dtype=float16", "policy.dtype")],
)
def test_what_cannot_be_made_is_said_in_one_line(
    override: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(RECIPES / "qwen3-0.6b-gsm8k.toml")
    assert main.main(["run", recipe, "--random-policy", "--out", str(tmp_path / "run"), "--set", override]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1
