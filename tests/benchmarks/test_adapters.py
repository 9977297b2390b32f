"""What `benchmarks/adapters.py` watches, and how it judges what it found."""

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import adapters
from benchmarks.adapted import curves, size
from benchmarks.real.resident import peak_mb
from benchmarks.whole_system import make_policy
from shoal.config import load_run
from shoal.models.checkpoint import find_tensors
from shoal.models.parameter_counts import parameters_of
from shoal.models.random_model import tiny_spec

SIZED = {"peak_gb_most": 5.9, "disk_gb": 4.9, "step_share": 0.017, "logits_off": 1e-4, "logits_moved": 2.0}


def side(ends: list[float], rise: float) -> list[curves.Result]:
    """Results of runs of eight steps that rise to these ends."""
    return [{"rewards": [end - rise] * 2 + [end - rise / 2] * 4 + [end] * 2, "cpu_s": 1.0} for end in ends]


def test_the_curves_are_of_25m_parameters_with_an_adapter_and_no_turn_can_end_early(tmp_path: Path) -> None:
    config = load_run(curves.RECIPE)
    assert parameters_of(tiny_spec(curves.SHAPE)) == pytest.approx(25e6, rel=0.03)
    assert config.policy.adapter.rank == 8 and config.rollouts.max_staleness == 0
    args = config.envs[0].args
    assert (args["new"], args["shown"] + args["new"]) == (config.sampling.max_turn_tokens, config.sampling.max_tokens)
    make_policy(tmp_path / "policy", shape=curves.SMALL)
    assert find_tensors(tmp_path / "policy")["model.embed_tokens.weight"].shape == (64, 64)


def test_ends_are_compared_by_students_t_and_by_the_rise() -> None:
    found = curves.compared({"shoal": side([0.5, 0.6, 0.7], 0.3), "trl": side([0.55, 0.65, 0.75], 0.3)})
    # Three ends a side with deviation 0.1: noise = 2.776 sqrt(2 * 0.01 / 3).
    assert found["noise"] == pytest.approx(2.776 * (0.02 / 3) ** 0.5)
    assert found["difference"] == pytest.approx(-0.05) and found["difference_over_rise"] == pytest.approx(1 / 6)
    assert found["shoal"]["quarters"] == pytest.approx([0.3, 0.45, 0.45, 0.6])
    assert adapters.missed_curves(found) == ["the ends differ by 0.167 of the rise, bar 0.1"]


def test_more_seeds_than_can_be_compared_are_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    curves.compared({name: side([0.5, 0.6, 0.7, 0.8, 0.9], 0.3) for name in curves.SIDES})
    monkeypatch.setattr(sys, "argv", ["adapters.py", "--quick", "--only", "", "--seeds", "1,2,3,4,5,6"])
    with pytest.raises(SystemExit, match="6 seeds, at most 5 can be compared"):
        adapters.main()


def test_what_a_quick_run_found_is_not_kept_for_a_whole_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(size, "run", lambda root, steps, *rest: root.mkdir(parents=True) or steps)
    empty = {"peak_gb": {}, "base_gb": 1.0, "disk_gb": 1.0, "step_mb": 1.0, "step_share": 0.1}
    monkeypatch.setattr(size, "figures", lambda steps, run: empty | {"steps": steps})
    monkeypatch.setattr(curves, "make_policy", lambda directory, shape: directory.mkdir())
    monkeypatch.setattr(
        curves, "_ours", lambda config, policy, folder: {"rewards": [0.1] * 4, "cpu_s": float(policy.name[7:])}
    )
    for _ in range(2):
        for quick, steps, shape in ((True, 2, curves.SMALL), (False, adapters.STEPS, curves.SHAPE)):
            assert adapters.run_size(Namespace(quick=quick), None, tmp_path)["steps"] == steps
            assert curves.result_of("shoal", 1, 4, shape, Path(), tmp_path)["cpu_s"] == shape.width


def test_each_missed_bar_is_told() -> None:
    flat = curves.compared({"shoal": side([0.5, 0.501, 0.502], 0.01), "trl": side([0.4, 0.401, 0.402], 0.3)})
    assert [fault.split()[0] for fault in adapters.missed_curves(flat)] == ["shoal", "the", "the"]
    assert adapters.missed_size(SIZED) == []
    for name, bar in adapters.SIZE_BARS.items():
        assert adapters.missed_size(SIZED | {name: bar * 1.1}) == [f"{name} = {bar * 1.1:.3g}, bar {bar}"]
    assert "moves a logit by 0.01" in adapters.missed_size(SIZED | {"logits_moved": 0.01})[0]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells the peak of another process")
def test_the_peak_of_a_process_is_known_until_it_ends() -> None:
    command = [sys.executable, "-c", "data = bytearray(50_000_000); print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert 50 < peak_mb(process.pid) < 100
        process.kill()
        process.wait()
    with pytest.raises((FileNotFoundError, ProcessLookupError)):
        peak_mb(process.pid)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells the peak of another process")
def test_the_command_runs_both_parts_and_ends_with_a_line_of_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["adapters.py", "--quick", "--keep", str(tmp_path)])
    assert adapters.main() == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["benchmark"] == "adapters" and (found["size"]["steps"], found["curves"]["steps"]) == (2, 4)
    assert {"coordinator", "trainer", "validator", "worker"} <= found["size"]["peak_gb"].keys()
    assert 0 < found["size"]["step_share"] < 0.3 and found["size"]["refused"] == 0
    assert found["curves"]["shoal"]["cpu_s"] > 0
    assert not (tmp_path / "sized").exists()
