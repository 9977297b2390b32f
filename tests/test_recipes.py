"""Every run file that we ship can be run: it parses, its numbers fit, and its environments are there."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.config import RunConfig, SftConfig, load_run, load_sft
from shoal.config.stages import load_stages, settings_of
from shoal.envs.load import BUILT_IN, load_env
from shoal.humanize import data_size
from shoal.launch import memory_plan
from shoal.launch.doctor import in_words
from shoal.launch.memory_plan import disk_of, reports, roles_of
from shoal.launch.pipeline.job_inputs import demand_doable
from shoal.launch.sizing import resolve_sizes
from shoal.models.random_model import tiny_spec
from shoal.plan.sizes import sizes_of, spec_of

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
SFT = [path for path in RECIPES if "\n[env]\n" in path.read_text()]
"""Recipes of `shoal sft` have one environment, `[env]`; run files have a list, `[[envs]]`."""
RUNS = [path for path in RECIPES if path not in SFT]


REAL = [path for path in RUNS if "\n[random]\n" in path.read_text()]
"""Those of real models, which can be run with random weights of the same shape."""


def name(path: Path) -> str:
    return path.stem


STAGES = [path for path in sorted((ROOT / "recipes").rglob("*.toml")) if "[[stages]]" in path.read_text()]
"""Files of `shoal stages`, beside whose recipes they are."""


def check_tiny_policy_has_room(config: RunConfig | SftConfig, max_tokens: int) -> None:
    if not config.policy.path:
        spec = tiny_spec(config.policy.tiny)
        assert spec.max_positions >= max_tokens, "policy.tiny.max_positions is below the longest rollout"


def test_the_arithmetic_and_qwen3_recipes_exist() -> None:
    assert {"arithmetic", "qwen3-0.6b-gsm8k"} <= {path.stem for path in RUNS}


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
        name = config.env.name if config.env.name in BUILT_IN else str(path.parent / config.env.name)
        assert load_env(name, config.env.args).num_tasks > 0


def test_the_recipes_of_stages_exist() -> None:
    assert {path.stem for path in STAGES} >= {"sums", "r1", "r1-zero", "preferences", "intellect2"}


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("path", STAGES, ids=name)
def test_every_stage_can_be_done_whole_and_quick(path: Path, quick: bool) -> None:
    config = load_stages(path, quick=quick)
    assert config.name == path.stem + "-quick" * quick
    for stage in config.stages:
        settings = settings_of(stage, path.parent)
        demand_doable(stage, settings, path.parent)
        if isinstance(settings, SftConfig):
            check_tiny_policy_has_room(settings, settings.max_tokens)
        if isinstance(settings, RunConfig):
            check_tiny_policy_has_room(settings, settings.sampling.max_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("path", STAGES, ids=name)
def test_the_quick_form_of_stages_runs_to_its_report(path: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shoal.cli.main", "stages", str(path), "--quick", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    ends = json.loads((tmp_path / "out" / "report.json").read_bytes())["stages"]
    assert [end["name"] for end in ends] == [stage.name for stage in load_stages(path, quick=True).stages]


def test_the_recipes_of_real_models_exist() -> None:
    assert {path.stem for path in REAL} >= {"qwen3-0.6b-gsm8k", "qwen3-8b-lora", "olmoe"}


@pytest.mark.parametrize("path", REAL, ids=name)
def test_the_recipe_of_a_real_model_is_valid_without_a_download(path: Path) -> None:
    config = load_run(path)
    assert config.policy.path and not (path.parent / config.policy.path).exists()


@pytest.mark.parametrize("path", REAL, ids=name)
def test_with_a_random_policy_a_recipe_names_a_shape_and_an_environment_that_are_there(path: Path) -> None:
    config, real = load_run(path, random_policy=True), load_run(path)
    assert (config.name, config.steps) == (f"{path.stem}-random", real.steps)
    assert (path.parent / config.policy.path / "config.json").is_file()
    assert [load_env(str(path.parent / env.name), env.args).num_tasks for env in config.envs] == [256]
    assert (config.sampling, config.rollouts, config.train) == (real.sampling, real.rollouts, real.train)


@pytest.mark.parametrize("path", REAL, ids=name)
def test_a_recipe_states_the_memory_disk_and_bytes_that_the_preflight_reckons(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu = [f"{section}.device=cuda" for section in ("train", "workers", "validators")]
    config = load_run(path, on_a_gpu, random_policy=True)
    text = path.read_text()
    gpu_gb = int(re.findall(r"GPU of (\d+) GB", text)[0])
    monkeypatch.setattr(memory_plan, "free_on", lambda device: gpu_gb * 10**9)
    spec = spec_of(config, path.parent)
    config = resolve_sizes(config, spec, with_workers=False).config
    need = {report.device: report.need for report in reports(config, spec, with_workers=False)}
    reckoned = {
        "GPU memory": data_size(need["cuda"]),
        "CPU memory": data_size(need["cpu"]),
        "disk": data_size(disk_of(config, path.parent, with_workers=False)),
        "bytes": f"{in_words(sizes_of(config, path.parent))}, to each worker",
    }
    for what, size in reckoned.items():
        assert f"#     {what:<13} {size}\n" in text, f"{path}: {what} is {size}"


@pytest.mark.parametrize(("stem", "rows", "shared"), [("qwen3-0.6b-gsm8k", 16, False), ("qwen3-8b-lora", 8, True)])
def test_a_recipe_states_how_many_episodes_its_gpu_evaluates_at_a_time(
    stem: str, rows: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ROOT / "recipes" / f"{stem}.toml"
    asked = [f"{section}.device=cuda" for section in ("train", "workers", "validators")]
    config = load_run(path, [*asked, "eval.episodes=128"], random_policy=True)
    monkeypatch.setattr(memory_plan, "free_on", lambda device: 24 * 10**9)
    spec = spec_of(config, path.parent)
    found = resolve_sizes(config, spec, with_workers=False).config
    assert found.eval.rows == rows and f" {rows} episodes at a time" in path.read_text()
    need = {report.device: report for report in reports(found, spec, with_workers=False)}
    assert need["cuda"].need <= 24e9 and need["cuda"].shared == shared
    assert f" {data_size(need['cpu'].need)}" in path.read_text()


def test_the_recipe_of_8b_states_what_a_base_in_nf4_takes() -> None:
    path = ROOT / "recipes" / "qwen3-8b-lora.toml"
    asked = [f"{section}.device=cuda" for section in ("train", "workers", "validators")]
    asked += ["workers.count=1", "validators.count=1", "policy.adapter.base=nf4"]
    config = load_run(path, asked, random_policy=True)
    roles = {role.name: role.on("cuda") for role in roles_of(config, spec_of(config, path.parent), with_workers=True)}
    text = path.read_text()
    for name in ("trainer", "validator", "worker"):
        assert f"#     {name:<13} {data_size(roles[name])} of GPU memory\n" in text, data_size(roles[name])
    assert f"#     bytes in nf4  {in_words(sizes_of(config, path.parent))}, to each worker\n" in text
    assert roles["trainer"] + roles["validator"] < 24e9


def test_each_role_of_the_adapter_of_8b_fits_a_gpu_of_24_gb() -> None:
    path = ROOT / "recipes" / "qwen3-8b-lora.toml"
    on_a_gpu = [f"{section}.device=cuda" for section in ("train", "workers", "validators")]
    config = load_run(path, [*on_a_gpu, "workers.count=1", "validators.count=1"], random_policy=True)
    roles = {role.name: role for role in roles_of(config, spec_of(config, path.parent), with_workers=True)}
    assert {"trainer", "worker", "validator"} < roles.keys()
    assert max(role.on("cuda") for role in roles.values()) <= 24e9
    version = sizes_of(config, path.parent).version
    assert version / (2 * spec_of(config, path.parent).num_parameters()) < 0.02


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.toml"], "missing.toml"),
        (["arithmetic.toml", "--set", "train.lrr=1"], "lrr"),
        (["arithmetic.toml", "--set", "policy.path=nowhere"], "nowhere"),
    ],
)
def test_one_file_refuses_in_one_line(arguments: list[str], said: str, tmp_path: Path) -> None:
    script, where = ROOT / "recipes" / "one_file.py", ROOT / "recipes"
    done = subprocess.run(
        [sys.executable, script, *arguments, "--out", str(tmp_path / "out")], cwd=where, capture_output=True, text=True
    )
    (line,) = done.stderr.strip().split("\n")
    assert done.returncode == 2 and line.startswith("error: ") and said in line
