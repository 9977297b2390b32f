"""The gym in real runs: two workers join from homes that have none of its environments, and train on all of them.

The foreign packages are those of `make foreign`. Versions 0.1 and 0.4 of verifiers exclude each other, so there are three
runs. Each also has arithmetic, because a tiny policy that knows nothing earns something there.
"""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.envs.adapters.conftest import interpreter, originals
from tests.graders.conftest import openai as openai
from tests.launch.test_join import SHOAL, begin, said
from tests.sandbox.needs import needs_bubblewrap

EXAMPLES = Path(__file__).parents[2] / "examples" / "environments"

pytestmark = pytest.mark.slow

RUN_FILE = """
name = "gym"
steps = 3
seed = 1
[policy.tiny]
width = 16
layers = 1
heads = 2
kv_heads = 1
mlp_width = 32
max_positions = 4096
[sampling]
max_turn_tokens = 8
max_tokens = 4000
[rollouts]
group_size = 4
block_rollouts = 16
batch_groups = 3
max_flat_groups = 0
max_staleness = 0
[eval]
episodes = 0
[[envs]]
name = "arithmetic"
weight = 3.0
args = { digits = 1, operations = "+" }
max_tokens = 40
"""

FOREIGN = """
import sys

sys.path += {folders}

from functools import partial

from shoal.env import {adapter}

environment = partial({adapter}, **{args})
"""


def write_foreign(folder: Path, label: str, version: str, adapter: str, **args: object) -> str:
    """Write the file of a foreign environment, as the how-to says, and return its entry in a run file."""
    packages = sorted(interpreter(version).parents[1].glob("lib/python*/site-packages"))
    folders = [str(path) for path in packages] + originals(version)
    name = f"my_{label}.py"  # not the name of the foreign module
    (folder / name).write_text(FOREIGN.format(folders=folders, adapter=adapter, args=args))
    return f'[[envs]]\nname = "{name}"\nlabel = "{label}"\n'


def play(folder: Path, envs: list[str]) -> set[str]:
    """Host a run of these environments, let two strangers join, and return the labels of what they were paid for."""
    (folder / "gym.toml").write_text(RUN_FILE + "".join(envs))
    host, workers = begin(folder, "host", "host", "gym.toml"), []
    try:
        url = said(folder, "host", r"shoal join (http://127\.0\.0\.1:\d+)\n")
        workers = [begin(folder, name, "join", url, "--threads", "1", "--name", name) for name in ("one", "two")]
        assert host.wait(timeout=500) == 0, said(folder, "host", "(?s).*")
        for name, worker in zip(("one", "two"), workers, strict=True):
            assert worker.wait(timeout=60) == 0, said(folder, name, "(?s).*")
            said(folder, name, r"left credits=[1-9]\d* accepted=[1-9]\d* refused=0")
    finally:
        for process in (*workers, host):
            process.kill()
            process.wait()
    for path in folder.glob("*.py"):
        path.unlink()  # an auditor has none of it either
    audit = subprocess.run([*SHOAL, "audit", "runs/gym", "--all"], cwd=folder, capture_output=True, text=True)
    assert audit.returncode == 0 and "the log agrees with what was recomputed" in audit.stdout, audit.stdout
    lines = [json.loads(line) for line in (folder / "runs/gym/metrics.jsonl").read_text().splitlines()]
    return {name.removeprefix("solve_rate/") for line in lines for name in line if name.startswith("solve_rate/")}


@needs_bubblewrap
def test_strangers_train_on_the_five_examples(tmp_path: Path, openai: Callable[..., object]) -> None:
    names = ["initials", "nim", "word-problems", "calculator"]
    envs = [f'[[envs]]\nname = "{EXAMPLES / name}"\nlabel = "{name}"\n' for name in names]
    judge = openai("compares").base_url  # type: ignore[attr-defined]
    envs.append(
        f'[[envs]]\nname = "{EXAMPLES / "explain"}"\nlabel = "explain"\nreproducible = false\n'
        f'args = {{ url = "{judge}", model = "compares" }}\n'
    )
    assert play(tmp_path, envs) == {*names, "explain", "arithmetic"}


def test_strangers_train_on_reasoning_gym_and_verifiers_v0(tmp_path: Path) -> None:
    tasks = ("basic_arithmetic", "caesar_cipher", "maze", "countdown", "leg_counting")
    envs = [write_foreign(tmp_path, task, "v0", "ReasoningGym", task=task, tasks=20, heldout=8) for task in tasks]
    unmodified = ("reasoning_gym_env", "tool_test") if originals("v0") else ()
    rows = {"num_train_examples": 20, "num_eval_examples": 8}
    envs += [write_foreign(tmp_path, name, "v0", "VerifiersV0", id=name, args=rows) for name in unmodified]
    assert play(tmp_path, envs) == {*tasks, *unmodified, "arithmetic"}


def test_strangers_train_on_textarena_and_verifiers_v1(tmp_path: Path) -> None:
    games = {"tictactoe": "TicTacToe-v0", "kuhn": "KuhnPoker-v0"}
    envs = [
        write_foreign(tmp_path, label, "v1", "TextArena", game=game, tasks=20, heldout=4)
        for label, game in games.items()
    ]
    unmodified = ("glossary", "kuhn_poker") if originals("v1") else ()
    more = {"glossary": {"heldout": 2}, "kuhn_poker": {"tasks": 20, "heldout": 8, "reward_bounds": [-2, 2]}}
    envs += [write_foreign(tmp_path, name, "v1", "VerifiersV1", id=name, **more[name]) for name in unmodified]
    assert play(tmp_path, envs) == {*games, *unmodified, "arithmetic"}
