"""Adapters by the commands that people type: a host, a stranger that joins over HTTP, kills, merging, and an audit."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from shoal.models.checkpoint import load_policy
from shoal.run_folder import RunFolder
from shoal.weights.base_model import base_root
from shoal.weights.manifest import weights_root
from tests.launch.test_join import SHOAL, begin, said
from tests.launch.test_supervisor import RUN_FILE, STEPS

ADAPTED = RUN_FILE.replace("[[envs]]", "[policy.adapter]\nrank = 4\n\n[[envs]]", 1)


def run(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*SHOAL, *words], cwd=folder, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
def test_a_stranger_joins_a_run_of_adapters_and_fetches_its_base_once(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(ADAPTED)
    values = ("steps=4000", "eval.episodes=0", "workers.cheating=0", "workers.count=1")
    host = begin(tmp_path, "host", "host", "small.toml", *(word for value in values for word in ("--set", value)))
    worker = None
    try:
        url = said(tmp_path, "host", r"shoal join (http://127\.0\.0\.1:\d+)\n")
        worker = begin(tmp_path, "worker", "join", url, "--threads", "1", "--name", "stranger")
        said(tmp_path, "worker", r"(?s)accepted groups=\d+ credits=\+\d+.*accepted groups=\d+ credits=\+\d+")
        worker.send_signal(signal.SIGINT)
        assert worker.wait(timeout=60) == 0, said(tmp_path, "worker", "(?s).*")
        said(tmp_path, "worker", r"left credits=[1-9]\d* accepted=[1-9]\d* refused=0")
        held = sorted((tmp_path / "worker-home").rglob("v*/model.safetensors"))
        assert held and all(path.samefile(held[0]) for path in held)
        assert all((path.parent / "adapter_model.safetensors").exists() for path in held)
        host.send_signal(signal.SIGINT)
        assert host.wait(timeout=60) == 130
    finally:
        for process in (worker, host):
            if process is not None:
                process.kill()
                process.wait()


@pytest.mark.slow
def test_a_run_of_adapters_ends_is_audited_and_merged(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(ADAPTED.replace(STEPS, "steps = 4"))
    done = run(tmp_path, "run", "small.toml", "--set", "eval.episodes=16")
    assert done.returncode == 0, done.stdout + done.stderr
    root = tmp_path / "runs" / "small"
    final = root / "checkpoints" / "final"
    summary = json.loads((root / "summary.json").read_text())
    assert summary["credits"]["cheater-0"]["credits"] == 0 < summary["credits"]["worker-0"]["credits"]
    assert summary["weights_hash"] == weights_root(final) and base_root(final) == weights_root(RunFolder(root).policy)
    audit = run(tmp_path, "audit", str(root), "--sample", "4")
    assert audit.returncode == 0 and "the log agrees with what was recomputed" in audit.stdout, (
        audit.stdout + audit.stderr
    )
    merged = run(tmp_path, "policy", "merge", str(final), "--out", "merged")
    assert merged.returncode == 0 and "logits differ by at most" in merged.stdout, merged.stdout + merged.stderr
    assert load_policy(tmp_path / "merged").adapter is None and load_policy(final).adapter is not None
    played = run(tmp_path, "eval", str(final), "--env", "arithmetic", "--episodes", "4", "--max-tokens", "24")
    assert played.returncode == 0, played.stderr


def test_a_base_that_cannot_be_coded_is_said_in_one_line_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(ADAPTED.replace("rank = 4", 'rank = 4\nbase = "nf4"'))
    refused = run(tmp_path, "run", "small.toml")
    assert refused.returncode == 2 and "q_proj.weight has 32. Leave it out, or choose another model" in refused.stderr
    assert refused.stderr.count("\n") == 1 and not (tmp_path / "runs" / "small").exists()
