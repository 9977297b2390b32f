"""Every run file that we ship can be run: it parses, its numbers fit, and its environments are there."""

from pathlib import Path

import pytest

from shoal.config import RunConfig, SftConfig, load_run, load_sft
from shoal.envs.load import BUILT_IN, load_env
from shoal.policy.tiny import tiny_spec

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
SFT = [path for path in RECIPES if "\n[env]\n" in path.read_text()]
"""Recipes of `shoal sft` have one environment, `[env]`; run files have a list, `[[envs]]`."""
RUNS = [path for path in RECIPES if path not in SFT]


def name(path: Path) -> str:
    return path.stem


def check_tiny_policy_has_room(config: RunConfig | SftConfig, max_tokens: int) -> None:
    if not config.policy.path:
        spec = tiny_spec(config.policy.tiny)
        assert spec.max_positions >= max_tokens, "policy.tiny.max_positions is below the longest rollout"


def test_the_arithmetic_and_qwen3_recipes_exist() -> None:
    assert {"arithmetic", "qwen3-gsm8k"} <= {path.stem for path in RUNS}


@pytest.mark.parametrize("path", RUNS, ids=name)
def test_run_file_parses_and_its_numbers_fit(path: Path) -> None:
    config = load_run(path)
    assert config.name == path.stem
    check_tiny_policy_has_room(config, config.sampling.max_tokens)


@pytest.mark.parametrize("path", RUNS, ids=name)
def test_environments_of_a_run_file_are_there(path: Path) -> None:
    for env in load_run(path).envs:
        if env.name in BUILT_IN:
            assert load_env(env.name, env.args).num_tasks > 0
        else:
            assert (path.parent / env.name).exists()


def test_quick_tables_fit_and_have_a_folder_of_their_own() -> None:
    for path in (path for path in RUNS if "[quick" in path.read_text()):
        quick, whole = load_run(path, quick=True), load_run(path)
        assert quick.name != whole.name and quick.steps <= whole.steps
        check_tiny_policy_has_room(quick, quick.sampling.max_tokens)


def test_sft_recipes_parse() -> None:
    for path in SFT:
        config = load_sft(path)
        check_tiny_policy_has_room(config, config.max_tokens)
        assert load_env(config.env.name, config.env.args).num_tasks > 0


def test_the_recipe_of_a_real_model_is_valid_without_a_download() -> None:
    config = load_run(next(path for path in RUNS if path.stem == "qwen3-gsm8k"))
    assert config.policy.path and not (RECIPES[0].parent / config.policy.path).exists()
