"""A run shows the first prompt of each environment once, when it begins, and goes on without it."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.config import TinyPolicy, load_run
from shoal.errors import ShoalError, StateError
from shoal.launch import prompt_preview_process
from shoal.launch.prompt_preview_process import PromptPreview
from shoal.launch.role_process import RoleProcess
from shoal.models.random_model import make_tiny
from shoal.run_folder import RunFolder

OWN = """
from shoal.env import Env, Step
class Own(Env):
    name, num_tasks = "own", 4
    def task(self, index, heldout=False): return index
    def reset(self, task): {begins}
    def step(self, state, action): return Step(state, "", True)
    def score(self, state): return 1.0
def environment(): return Own()
"""


RUN_FILE = """
name = "small"
steps = 2
[policy.tiny]
width = 16
heads = 2
kv_heads = 1
mlp_width = 16
[[envs]]
name = "arithmetic"
args = { digits = 1, operations = "+" }
[[envs]]
name = "./own.py"
label = "own"
"""


def folder_of(tmp_path: Path, begins: str) -> RunFolder:
    """A run's folder with a policy, before its coordinator starts."""
    (tmp_path / "own.py").write_text(OWN.format(begins=begins))
    (tmp_path / "run.toml").write_text(RUN_FILE)
    folder = RunFolder(tmp_path / "run")
    folder.prepare(load_run(tmp_path / "run.toml", []), tmp_path)
    make_tiny(TinyPolicy(width=16, layers=1, heads=2, kv_heads=1, mlp_width=16), folder.policy, 0, "float32")
    return folder


def said(folder: RunFolder) -> list[str]:
    """All that is said until there is no more to wait for."""
    command = [sys.executable, "-m", "shoal.cli.main", "role", "prompts", "--run-dir", str(folder.root)]
    role = RoleProcess("prompts", command, folder.logs / "prompts.log", 1)
    prompts, found = PromptPreview(folder, role), list[str]()
    deadline = time.monotonic() + 60
    while prompts._role is not None and time.monotonic() < deadline:
        found += prompts.look()
        time.sleep(0.05)
    assert prompts._role is None
    return found


def test_a_run_that_begins_shows_a_prompt_of_each_environment(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "return 0, [{'role': 'user', 'content': 'say \\x1b hi'}]")
    (text,) = said(folder)
    assert "first prompt of arithmetic, task 0: " in text and "first prompt of own, task 0: 11 tokens" in text
    assert "[[<|user|>]]say " in text and "[[<|assistant|>]]" in text and "\x1b" not in text
    folder.log.write_text("")
    assert said(folder) == [], "a run that goes on showed them when it began"


@pytest.mark.parametrize(
    ("begins", "says"),
    [
        (
            "return 1 // task, [{'role': 'user', 'content': 'hi'}]",
            r"first prompt of own: it cannot be shown: .*ZeroDivisionError",
        ),
        (
            "__import__('time').sleep(99)",
            r"^the first prompts cannot be shown: own: reset\(\) of task .*own\.py line \d.*prompts\.log",
        ),
    ],
)
def test_a_task_that_cannot_begin_does_not_stop_the_run(
    begins: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_preview_process, "PREVIEW_S", 15.0 if "sleep" in begins else 60.0)
    (text,) = said(folder_of(tmp_path, begins))
    assert re.search(says, text)


@pytest.mark.parametrize("begins", ["raise ValueError('no data')", "raise SystemExit", "__import__('os')._exit(3)"])
def test_a_run_of_which_no_task_can_begin_does_not_begin(begins: str, tmp_path: Path) -> None:
    with pytest.raises(
        StateError, match=r"no task of environment own that was tried can begin: .*(no data|SystemExit|_exit\(3\))"
    ):
        said(folder_of(tmp_path, begins))


def test_a_run_whose_prompts_are_all_too_long_does_not_begin_until_its_file_gives_them_room(tmp_path: Path) -> None:
    folder_of(tmp_path, "return 0, [{'role': 'user', 'content': 'word ' * 40}]")
    short = RUN_FILE.replace("[[envs]]", "[sampling]\nmax_turn_tokens = 8\nmax_tokens = 24\n[[envs]]", 1)
    (tmp_path / "run.toml").write_text(short.replace("small", "new"))
    typed = [sys.executable, "-m", "shoal.cli.main", "run", "run.toml"]
    done = subprocess.run(typed, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    error = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and error.startswith("error: no task of environment own can begin, "), done.stderr
    assert error.endswith("sampling.max_tokens = 24 leaves no room for a turn. Raise that key, or give shorter prompts")
    begun = RunFolder(tmp_path / "runs" / "new")
    assert not begun.log.exists() and not begun.policy.exists()
    (tmp_path / "longer.toml").write_text(short.replace("small", "new").replace("max_tokens = 24", "max_tokens = 240"))
    begun.prepare(load_run(tmp_path / "longer.toml", []), tmp_path)  # the same command begins the run
    assert "first prompt of own, task 0" in said(begun)[0]


@pytest.mark.parametrize("command", ["run", pytest.param("host", marks=pytest.mark.slow)])
def test_a_chat_template_that_refuses_a_first_prompt_begins_no_run(command: str, tmp_path: Path) -> None:
    """Its words, the environment and the remedy are in one line; once it takes them, the same command begins the run."""
    refuses = "{{ raise_exception('Conversation roles must alternate') }}"
    folder = folder_of(tmp_path, "return 0, [{'role': 'user', 'content': 'hi'}]")
    model = folder.policy.rename(tmp_path / "model")
    template = json.loads((model / "tokenizer_config.json").read_text())["chat_template"]
    (model / "chat_template.jinja").write_text(refuses)
    tiny = RUN_FILE[RUN_FILE.index("[policy.tiny]") : RUN_FILE.index("[[envs]]")]
    (tmp_path / "run.toml").write_text(RUN_FILE.replace(tiny, '[policy]\npath = "model"\n').replace("small", "own"))
    typed = [sys.executable, "-m", "shoal.cli.main", command, "run.toml"]
    done = subprocess.run(typed, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    error = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and error.startswith("error: environment arithmetic cannot begin task "), done.stderr
    assert "must alternate. Let the environment send others, or use a model that takes them" in error
    looked = [sys.executable, "-m", "shoal.cli.main", "doctor", "--recipe", "run.toml"]
    seen = subprocess.run(looked, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert seen.returncode == 1 and f"missing  prompts       {error.removeprefix('error: ')}" in seen.stdout, (
        seen.stdout
    )
    begun = RunFolder(tmp_path / "runs" / "own")
    assert not begun.root.exists()
    (model / "chat_template.jinja").write_text(template)
    begun.prepare(load_run(tmp_path / "run.toml", []), tmp_path)
    assert "first prompt of own, task 0" in said(begun)[0]
    fits = subprocess.run(looked, cwd=tmp_path, capture_output=True, text=True, timeout=120).stdout
    assert "ok       prompts       first prompt of own, task 0: " in fits and fits.endswith("The run fits.\n"), fits


@pytest.mark.parametrize("template", [
    "<|user|>hi<|end|><|assistant|>", "", "{% for m in messages if m.role != 'user' %}{{ m.content }}{% endfor %}",
])  # fmt: skip
def test_a_chat_template_that_shows_no_task_begins_no_run(template: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "return 0, [{'role': r, 'content': 'hi'} for r in ('system', 'user')]")
    (folder.policy / "chat_template.jinja").write_text(template)
    with pytest.raises(
        ShoalError, match=r"chat_template\.jinja\) makes one prompt of .* so no task is shown .* own chat"
    ):
        said(folder)
