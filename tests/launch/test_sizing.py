"""Sizes that a run file leaves open are found from the memory that is free, once, and a resumed run keeps them."""

import io
from pathlib import Path

import msgspec
import pytest
import torch
from rich.console import Console

from shoal.cli import main
from shoal.config import (
    AdapterConfig,
    EnvConfig,
    PolicyConfig,
    RunConfig,
    SamplingConfig,
    TinyPolicy,
    load_run,
    preset_lr,
)
from shoal.config.validate_algorithm import MAX_PRESET_LR
from shoal.errors import StateError
from shoal.launch import doctor, sizing
from shoal.launch.local_run import open_local_run
from shoal.launch.memory_plan import MemoryReport, reports
from shoal.launch.sizing import resolve_sizes
from shoal.models.checkpoint import load_policy
from shoal.models.random_model import make_tiny, tiny_spec
from shoal.plan.sizes import spec_of
from shoal.run_folder import RunFolder
from shoal.train.learner import Learner
from shoal.views.terminal.live_view import LiveView
from tests.launch.test_memory_plan import LARGE, RECIPES, has_free

ON_GPU = [f"{section}.device=cuda" for section in ("train", "workers", "validators")]
OPEN = "train.microbatch_tokens=0"


def gsm8k(*changes: str) -> RunConfig:
    return load_run(RECIPES / "qwen3-0.6b-gsm8k.toml", [*ON_GPU, *changes], random_policy=True)


def on_gpu(config: RunConfig, tokens: int = 0) -> MemoryReport:
    if tokens:
        train = msgspec.structs.replace(config.train, microbatch_tokens=tokens)
        config = msgspec.structs.replace(config, train=train)
    return next(report for report in reports(config, LARGE, with_workers=False) if report.device == "cuda")


def tokens_with(gb: float, monkeypatch: pytest.MonkeyPatch, *changes: str) -> int:
    has_free(monkeypatch, gb)
    return resolve_sizes(gsm8k(OPEN, *changes), LARGE, with_workers=False).config.train.microbatch_tokens


def test_a_micro_batch_has_as_many_tokens_as_fit_with_room_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [tokens_with(gb, monkeypatch, "train.recompute=none", "eval.episodes=0") for gb in (25, 33, 45, 500)]
    assert found == sorted(found) and len({*found}) > 2 and found[-1] == sizing.MOST_TOKENS
    has_free(monkeypatch, 33)
    config = gsm8k("train.recompute=none", "eval.episodes=0")
    fitting, larger = on_gpu(config, found[1]), on_gpu(config, 2 * found[1])
    assert fitting.need <= (1 - sizing.SPARE) * 33e9 and not fitting.shared
    assert larger.shared or larger.need > (1 - sizing.SPARE) * 33e9


def test_a_micro_batch_has_room_for_the_longest_row_and_is_a_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tokens_with(1, monkeypatch) == 1024
    assert tokens_with(1, monkeypatch, "sampling.max_tokens=1025") == 2048
    assert tokens_with(1, monkeypatch, "sampling.max_tokens=30000", "rollouts.block_rollouts=8") == sizing.MOST_TOKENS


def test_a_smaller_micro_batch_is_preferred_to_shifts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = gsm8k("train.recompute=none", "eval.episodes=0")
    has_free(monkeypatch, 500)
    gb = on_gpu(config, 2048).need / 0.89e9
    has_free(monkeypatch, gb)
    assert not on_gpu(config, 2048).shared and on_gpu(config, 16384).shared
    assert tokens_with(gb, monkeypatch, "train.recompute=none", "eval.episodes=0") == 2048


def rows_with(gb: float, monkeypatch: pytest.MonkeyPatch, *changes: str) -> int:
    has_free(monkeypatch, gb)
    return resolve_sizes(gsm8k(*changes), LARGE, with_workers=False).config.eval.rows


def test_an_evaluation_plays_128_episodes_at_a_time_or_as_many_halves_as_memory_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [rows_with(gb, monkeypatch) for gb in (22, 24, 28, 80)]
    assert found[0] == sizing.LEAST_ROWS and found[-1] == 128 and found == sorted({*found})
    assert [rows_with(gb, monkeypatch, "eval.dtype=float32") for gb in (28, 80)] == [8, 64]


def test_a_run_that_evaluates_nothing_or_says_how_leaves_nothing_to_find(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows_with(1, monkeypatch, "eval.episodes=0") == 0
    assert rows_with(1, monkeypatch, "eval.rows=100") == 100
    has_free(monkeypatch, 1)
    assert "plays 8 episodes at a time" in resolve_sizes(gsm8k(), LARGE, with_workers=False).lines[0]


def test_training_is_sized_before_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    has_free(monkeypatch, 26)
    both = resolve_sizes(gsm8k(OPEN), LARGE, with_workers=False).config
    has_free(monkeypatch, 26)
    least = resolve_sizes(gsm8k(OPEN, f"eval.rows={sizing.LEAST_ROWS}"), LARGE, with_workers=False).config
    assert both.train == least.train and both.eval.rows >= sizing.LEAST_ROWS
    assert on_gpu(both).need <= 26e9 and not on_gpu(both).shared


def test_a_number_in_the_run_file_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    has_free(monkeypatch, 1)
    config = gsm8k("eval.episodes=0")
    assert resolve_sizes(config, LARGE, with_workers=False) == (config, ())


def test_the_launcher_says_what_it_found_and_a_resumed_run_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folder = load_run(RECIPES / "wordle.toml", [OPEN]), RunFolder(tmp_path / "run")

    def begin(gb: float) -> str:
        has_free(monkeypatch, gb)
        folder.prepare(config, RECIPES)
        view = LiveView(Console(file=(told := io.StringIO()), width=300))
        local_run = open_local_run(folder.root, 0, True, lambda: view)
        local_run.supervisor.request_stop()  # before it starts anything
        local_run.run(None)
        return told.getvalue()

    said, found = begin(100), folder.config().train.microbatch_tokens
    assert found == 16384 and "A micro-batch has 16384 tokens in this run" in said
    again = begin(99)
    assert folder.config().train.microbatch_tokens == found and "micro-batch" not in again
    folder.log.touch()
    folder.prepare(load_run(RECIPES / "wordle.toml", [f"train.microbatch_tokens={found}"]), RECIPES)
    with pytest.raises(StateError, match=r"train\.microbatch_tokens"):
        folder.prepare(load_run(RECIPES / "wordle.toml", ["train.microbatch_tokens=2048"]), RECIPES)


def test_what_does_not_fit_leaves_no_size_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, folder = load_run(RECIPES / "wordle.toml", [OPEN]), RunFolder(tmp_path / "run")
    folder.prepare(config, RECIPES)
    has_free(monkeypatch, 0.1)
    with pytest.raises(StateError, match="this run needs about"):
        open_local_run(folder.root, 0, True, lambda: pytest.fail("it began"))
    assert folder.config().train.microbatch_tokens == 0


def test_doctor_says_the_size_that_a_run_would_find(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    has_free(monkeypatch, 100)
    path = RECIPES / "wordle.toml"
    assert main.main(["doctor", "--recipe", str(path), "--set", OPEN]) == 0
    assert "A micro-batch has 16384 tokens in this run" in capsys.readouterr().out
    config = load_run(path, ["train.microbatch_tokens=512"])
    small = next(reports(config, spec_of(config, RECIPES), with_workers=True))
    lines = list(doctor.fit(path, [OPEN], small.need / 0.85e9))
    assert lines[0].found.startswith("A micro-batch has ") and "16384" not in lines[0].found
    assert all(line.state == "ok" for line in lines)


def test_doctor_counts_a_teacher_beside_the_run_file_wherever_it_is_asked(tmp_path: Path) -> None:
    make_tiny(TinyPolicy(width=64, layers=2, heads=2, kv_heads=1, mlp_width=64), tmp_path / "teacher", 0, "float32")
    path, run = tmp_path / "run.toml", 'name = "r"\nsteps = 1\n[[envs]]\nname = "arithmetic"\n'
    path.write_text(f'{run}[train]\nteacher = "teacher"\n[train.algorithm]\nname = "cispo"\nadvantage = "teacher"\n')
    (told,) = [line.found for line in doctor.fit(path, [], 0) if line.what == "trainer"]
    assert "teacher " in told and "teacher at work" in told


def test_a_run_file_without_a_learning_rate_gets_that_of_the_policys_size_which_is_said_and_kept(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.toml"
    path.write_text('name = "r"\nsteps = 1\n[[envs]]\nname = "arithmetic"\n')
    folder = RunFolder(tmp_path / "run")
    folder.prepare(load_run(path), tmp_path)
    view = LiveView(Console(file=(told := io.StringIO()), width=300))
    local_run = open_local_run(folder.root, 0, True, lambda: view)
    local_run.supervisor.request_stop()  # before it starts anything
    local_run.run(None)
    assert "The learning rate is 0.0005 in this run: the preset for 804,224 parameters that learn" in told.getvalue()
    assert folder.config().train.lr == 5e-4
    folder.log.touch()
    folder.prepare(load_run(path), tmp_path)
    assert folder.config().train.lr == 5e-4
    with pytest.raises(StateError, match=r"train\.lr"):
        folder.prepare(load_run(path, ["train.lr=0.0"]), tmp_path)


@pytest.mark.parametrize("tied", [False, True])
def test_a_learner_without_a_learning_rate_takes_the_one_that_the_launcher_finds(tmp_path: Path, tied: bool) -> None:
    tiny = TinyPolicy(width=192, layers=3, heads=2, kv_heads=1, mlp_width=512, tied=tied)
    make_tiny(tiny, tmp_path, 0, "float32")
    config = RunConfig(name="r", steps=4, envs=(EnvConfig("arithmetic"),), policy=PolicyConfig(tiny=tiny))
    found = resolve_sizes(config, tiny_spec(tiny), with_workers=True).config.train
    learner = Learner(load_policy(tmp_path, torch.float32), config.train, SamplingConfig(), steps=4)
    assert found.lr == learner.config.lr < MAX_PRESET_LR
    again = Learner(load_policy(tmp_path, torch.float32), found, SamplingConfig(), steps=4)
    assert again.config.lr == found.lr


def test_only_the_parameters_of_an_adapter_count_for_the_learning_rate() -> None:
    config = load_run(RECIPES / "qwen3-8b-lora.toml", ["train.lr=-1"], random_policy=True)
    whole = msgspec.structs.replace(config, policy=msgspec.structs.replace(config.policy, adapter=AdapterConfig()))
    rates = [resolve_sizes(one, LARGE, with_workers=False).config.train.lr for one in (config, whole)]
    assert rates == [preset_lr(LARGE.adapter_parameters(config.policy.adapter.rank)), 1e-6]
    assert rates[0] > 10 * rates[1]
