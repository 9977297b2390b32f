"""A whole run whose policy shoal's own code cannot compute, and the run files that cannot be started."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shoal
from shoal.cli.main import main
from shoal.config import load_run
from shoal.errors import StateError
from shoal.launch.preflight import demand_computable
from shoal.run_folder import RunFolder
from tests.engine.architectures import write_any
from tests.launch.test_supervisor import RUN_FILE, STEPS

GPT2_FILE = RUN_FILE.replace(STEPS, "steps = 3").replace(
    RUN_FILE[RUN_FILE.index("[policy.tiny]") : RUN_FILE.index("[[envs]]")],
    '[policy]\npath = "gpt2"\nimplementation = "auto"\n',
)


def run(folder: Path, *overrides: str) -> "subprocess.CompletedProcess[str]":
    (folder / "any.toml").write_text(GPT2_FILE)
    sets = [part for override in overrides for part in ("--set", override)]
    command = [sys.executable, "-m", "shoal.cli.main", "run", "any.toml", *sets]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
def test_a_run_of_another_architecture_learns_catches_a_cheat_and_is_audited(tmp_path: Path) -> None:
    import transformers

    write_any("gpt2", tmp_path / "gpt2", sharpen=0.5)
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    root = tmp_path / "runs" / "small"
    first, last = (
        transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        for directory in (tmp_path / "gpt2", root / "checkpoints" / "final")
    )
    assert not torch.equal(first.lm_head.weight, last.lm_head.weight)
    summary = json.loads((root / "summary.json").read_text())
    assert summary["steps"] == 3 and summary["credits"]["worker-0"]["credits"] == summary["tokens"] > 0
    assert summary["credits"]["cheater-0"]["credits"] == 0 and summary["refused"].keys() == {"sampling"}
    audit = subprocess.run(
        [sys.executable, "-m", "shoal.cli.main", "audit", str(root), "--sample", "6"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert "the log agrees with what was recomputed" in audit.stdout, audit.stdout


def test_its_checkpoint_is_evaluated_by_the_command_and_from_python(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_any("gpt2", tmp_path / "gpt2")
    options = ["--episodes", "4", "--max-turn-tokens", "4", "--max-tokens", "32", "--threads", "1", "--device", "cpu"]
    assert main(["eval", str(tmp_path / "gpt2"), "--env", "arithmetic", *options]) == 0
    assert "over 4 episodes" in capsys.readouterr().out
    assert shoal.policy(tmp_path / "gpt2").max_positions == 256


def test_a_mixture_of_experts_in_bfloat16_needs_bounds_that_were_measured(tmp_path: Path) -> None:
    write_any("olmoe", tmp_path / "olmoe")
    (tmp_path / "any.toml").write_text(GPT2_FILE)
    changes = ["policy.path=olmoe", "policy.dtype=bfloat16"]
    config = load_run(tmp_path / "any.toml", changes)
    with pytest.raises(StateError, match=r"shoal calibrate RUN_FILE") as refused:
        demand_computable(tmp_path / "olmoe", config)
    assert "\n" not in str(refused.value)
    own = [f"verify.bounds.bfloat16/{dtype}.flipped=0.02" for dtype in ("bfloat16", "float32")]
    proofs = ["verify.proofs=toploc", "verify.activation_error=0.02"]
    for some in (own[:1], own[1:], [*own, proofs[0]]):
        with pytest.raises(StateError, match=r"shoal calibrate RUN_FILE"):
            demand_computable(tmp_path / "olmoe", load_run(tmp_path / "any.toml", [*changes, *some]))
    for more in (["sampling.dtype=float32"], own, [*own, *proofs]):
        demand_computable(tmp_path / "olmoe", load_run(tmp_path / "any.toml", [*changes, *more]))


@pytest.mark.parametrize(
    "command", ["run", *(pytest.param(name, marks=pytest.mark.slow) for name in ("host", "doctor"))]
)
def test_what_only_the_loaded_model_shows_is_said_before_anything_starts(command: str, tmp_path: Path) -> None:
    directory = write_any("gpt2", tmp_path / "gpt2")
    plain = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(plain | {"sliding_window": 4096}))
    (tmp_path / "any.toml").write_text(GPT2_FILE)

    def typed(*words: str) -> "subprocess.CompletedProcess[str]":
        line = [sys.executable, "-m", "shoal.cli.main", *words]
        return subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=200)

    words = ("doctor", "--recipe") if command == "doctor" else (command,)
    refused = typed(*words, "any.toml")
    said = refused.stdout if command == "doctor" else refused.stderr
    assert refused.returncode == (1 if command == "doctor" else 2), said
    assert "it has sliding_window = 4096, by which its cache forgets" in said and "Set sliding_window to null" in said
    log = RunFolder(tmp_path / "runs" / "small").log
    assert not log.exists()
    if command == "doctor":
        (directory / "config.json").write_text(json.dumps(plain))
        assert "transformers computes with it" in typed(*words, "any.toml").stdout


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ('policy.implementation=""', 'set policy.implementation = "auto"'),
        ("sampling.dtype=int8", "sampling.dtype"),
        ("train.packing=flat", "train.packing"),
        ("policy.adapter.rank=8", "leave policy.adapter out"),
        ('policy.path=""', "set policy.path"),
        ("sampling.max_tokens=1000", "set sampling.max_tokens = 256"),
    ],
)
def test_what_such_a_run_cannot_do_is_said_before_anything_starts(
    override: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_any("gpt2", tmp_path / "gpt2")
    (tmp_path / "any.toml").write_text(GPT2_FILE)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "any.toml", "--set", override]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1
