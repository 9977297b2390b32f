"""A run without signal on this machine, as its host sees it: it pauses, shows two rollouts, and ends when drained."""

import subprocess
import sys
import threading
from pathlib import Path

from tests.launch.test_supervisor import RUN_FILE, wait_for
from tests.roles.test_no_signal import ALWAYS_HALF


def test_a_run_without_signal_shows_its_host_two_rollouts_and_ends_when_drained(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text(ALWAYS_HALF)
    edits = (
        ('name = "arithmetic"', 'name = "half.py"'),
        ("batch_groups = 4", "batch_groups = 4\nmax_flat_groups = 12"),
        ("episodes = 32", "episodes = 0"),
        ("cheating = 1", "cheating = 0"),
    )
    run_file = RUN_FILE
    for old, new in edits:
        assert old in run_file
        run_file = run_file.replace(old, new)
    (tmp_path / "small.toml").write_text(run_file)
    shoal, said = [sys.executable, "-m", "shoal.cli.main"], list[str]()
    run = subprocess.Popen(
        [*shoal, "run", "small.toml"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert run.stdout is not None
    reader = threading.Thread(target=said.extend, args=(run.stdout,))
    reader.start()
    wait_for("the pause", lambda: any("restarts the count" in line for line in said), run)
    text = "".join(said)
    assert "The run has paused itself and waits for the host: the last " in text
    assert "have no signal: within each all rewards are equal, 0.5 on average" in text
    assert "then `shoal admin resume runs/small` or `shoal admin drain runs/small`" in text
    assert "shoal admin" not in text.split("Accepted work stays paid. ")[1].splitlines()[0], "said above"
    assert text.count("reward 0.50 · ended by") == 2 and text.count("policy |") >= 2
    drained = subprocess.run([*shoal, "admin", "drain", "runs/small"], cwd=tmp_path, capture_output=True, text=True)
    assert drained.returncode == 0, drained.stderr
    assert run.wait(timeout=90) == 0
    reader.join()
    assert text.count("The run has paused itself") == "".join(said).count("The run has paused itself") == 1
    assert any(
        line.startswith("The pause is over: the run is ") for line in said[said.index(text.splitlines(True)[-1]) :]
    )
