"""What `shoal sft` makes from a recipe."""

import shutil
from pathlib import Path

import pytest

from shoal.roles import sft

ROOT = Path(__file__).parents[2]
RECIPE = """
name = "small"
episodes = 4
steps = 1
batch = 4
max_tokens = 400
warmup_steps = 1
threads = 1
[policy.tiny]
width = 16
layers = 1
heads = 2
kv_heads = 1
mlp_width = 16
max_positions = 400
[env]
name = "../games/nim"
"""


def test_an_environment_is_found_beside_its_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "environments" / "nim", tmp_path / "games" / "nim")
    recipe, elsewhere = tmp_path / "recipes" / "small.toml", tmp_path / "a" / "b"
    for folder in (recipe.parent, elsewhere):
        folder.mkdir(parents=True)
    recipe.write_text(RECIPE)
    monkeypatch.chdir(elsewhere)
    sft.main(recipe, tmp_path / "out", [])
    assert (tmp_path / "out" / "model.safetensors").exists()
