"""What `shoal sft` makes from a recipe, what it shows meanwhile, and how it is stopped and goes on."""

import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as replace_struct

from shoal.chat.renderer import Renderer
from shoal.cli import main
from shoal.config import TinyPolicy
from shoal.envs.evaluate import evaluate
from shoal.errors import ConfigError, MessagesRefused, ShoalError, StateError
from shoal.evaluation_files import Evaluation
from shoal.jobs import cold_start_examples, sft
from shoal.jobs.cold_start_examples import scripted_games
from shoal.jobs.evaluate import planned
from shoal.models.config import write_json
from shoal.models.random_model import make_tiny
from shoal.protocol.messages import POLICY
from shoal.run_folder import COLD_START_RECIPE, cold_start_folder
from shoal.train.sft import FineTuning
from tests.envs import musing

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
    shutil.copytree(ROOT / "examples" / "environments" / "nim", tmp_path / "games" / "nim")
    recipe, elsewhere = tmp_path / "recipes" / "small.toml", tmp_path / "a" / "b"
    for folder in (recipe.parent, elsewhere):
        folder.mkdir(parents=True)
    recipe.write_text(RECIPE)
    monkeypatch.chdir(elsewhere)
    sft.main(recipe, tmp_path / "out", [])
    assert (tmp_path / "out" / "model.safetensors").exists()


SUMS = """
name = "sums"
episodes = 300
steps = 12
batch = 16
lr = 3e-3
max_tokens = 32
warmup_steps = 2
eval_episodes = 32
publish_dtype = "float32"
threads = 1
[policy.tiny]
width = 16
layers = 1
heads = 2
kv_heads = 1
mlp_width = 16
max_positions = 32
[env]
name = "arithmetic"
args = { digits = 1 }
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "sums.toml"
    path.write_text(SUMS)
    return path


def weights(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int, number: signal.Signals = signal.SIGINT) -> None:
    """Send this process a signal in its step number `steps`."""
    step = FineTuning.step

    def stopped(tuning: FineTuning) -> dict[str, object]:
        metrics = step(tuning)
        if tuning.steps_done == steps:
            signal.raise_signal(number)
        return metrics

    monkeypatch.setattr(FineTuning, "step", stopped)


def test_a_stopped_cold_start_goes_on_to_the_same_bytes(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sft.main(recipe, tmp_path / "whole", [])
    with monkeypatch.context() as patched:
        stop_after(patched, 7, signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            sft.main(recipe, tmp_path / "out", ["eval_every=5"])
    assert not (tmp_path / "out").exists(), "what is not done must not look so"
    assert (tmp_path / "out-checkpoints" / "step000007" / "model.safetensors").exists()
    steps = list[int]()
    step = FineTuning.step
    monkeypatch.setattr(FineTuning, "step", lambda tuning: (steps.append(tuning.steps_done), step(tuning))[1])
    tokens = sft.make(sft.load_sft(recipe), tmp_path, tmp_path / "out")
    assert steps == list(range(7, 12)) and weights(tmp_path / "out") == weights(tmp_path / "whole")
    assert tokens == sft.make(sft.load_sft(recipe), tmp_path, tmp_path / "whole")
    assert not (tmp_path / "out-checkpoints" / "state").exists()


def test_a_stop_in_an_evaluation_repeats_it_and_loses_no_step(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = sft.SftEvaluation.of

    def stopped(evaluation, checkpoint, progress):
        signal.raise_signal(signal.SIGINT)
        return asked(evaluation, checkpoint, progress)

    with monkeypatch.context() as patched:
        patched.setattr(sft.SftEvaluation, "of", stopped)
        with pytest.raises(KeyboardInterrupt):
            sft.main(recipe, tmp_path / "out", ["eval_every=5"])
    with caplog.at_level(logging.INFO, "sft"):
        sft.main(recipe, tmp_path / "out", ["eval_every=5"])
    assert "going on after step=5" in caplog.text
    assert re.findall(r"step=(\d+)/12 .*held-out", caplog.text) == ["5", "10", "12"]


def test_another_recipe_does_not_go_on_with_what_was_stopped(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        stop_after(patched, 3)
        with pytest.raises(KeyboardInterrupt):
            sft.main(recipe, tmp_path / "out", [])
    for change, said in (
        ("steps=20", "steps was 12 and is 20"),
        ("lr=0.1", r"lr was 0\.003 and is 0\.1"),
        ('player="wrong"', "player was right and is wrong. Restore it"),
        ("policy.tiny.width=32", r"recipe: policy\.tiny\.width was 16 and is 32\. Restore it"),
    ):
        with pytest.raises(StateError, match=f"{said}.*delete .*out-checkpoints to begin anew"):
            sft.main(recipe, tmp_path / "out", [change])
    of = tmp_path / "out-checkpoints" / COLD_START_RECIPE
    saved = json.loads(of.read_text())
    for other in (saved | {"removed": 1}, {key: saved[key] for key in saved if key != "lr"}):  # of another version
        of.write_text(json.dumps(other))
        with pytest.raises(StateError, match=r"missing.*\. Delete .*out-checkpoints to begin anew"):
            sft.main(recipe, tmp_path / "out", [])
    of.write_text(json.dumps(saved))
    sft.main(recipe, tmp_path / "out", ["eval_every=6", "stop_at=1.0", "eval_episodes=8"])


def test_an_environment_whose_file_was_changed_does_not_go_on_with_what_was_stopped(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "from shoal.envs.builtin.arithmetic import environment as sums\nenvironment = lambda: sums(digits={})\n"
    (tmp_path / "own.py").write_text(source.format(1))
    with monkeypatch.context() as patched:
        stop_after(patched, 3)
        with pytest.raises(KeyboardInterrupt):
            sft.main(recipe, tmp_path / "out", ["env.name=own.py", "env.args={}"])
    (tmp_path / "own.py").write_text(source.format(2))
    with pytest.raises(StateError, match=r"own\.py now gives other games: its file.* Restore it") as told:
        sft.main(recipe, tmp_path / "out", ["env.name=own.py", "env.args={}"])
    assert "recipe" not in str(told.value) and "games was" not in str(told.value)


def test_a_policy_whose_environment_fails_does_not_end_a_cold_start(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One win and 99 faults are not 100 %."""

    def evaluate_with_faults(*args: Any) -> Evaluation:
        return replace_struct(evaluate(*args), mean=1.0, low95=0.9, high95=1.0, faults=7)

    monkeypatch.setattr(sft, "evaluate", evaluate_with_faults)
    sft.main(recipe, tmp_path / "out", ["eval_every=2", "steps=4", "stop_at=0.9", "eval_episodes=8"])
    assert "stop_at=0.9 was not reached in 4 steps" in caplog.text


@pytest.mark.parametrize("every", [0, 6])
def test_a_cold_start_deletes_nothing_but_checkpoints_of_its_own(recipe: Path, tmp_path: Path, every: int) -> None:
    folder = tmp_path / "out-checkpoints"
    (folder / "mine").mkdir(parents=True)
    (folder / "mine" / "notes.txt").write_text("mine")
    for changes in ([f"eval_every={every}"], ["steps=8", f"eval_every={every}"]):
        sft.main(recipe, tmp_path / "out", changes)
        assert (folder / "mine" / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in folder.glob("step*")) == (["step000006", "step000008"] if every else [])
    (folder / "recipe.json").unlink(missing_ok=True)
    foreign = folder / "step000006" / "model.safetensors"
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("of something else")
    with pytest.raises(StateError, match=r"step000006 would be replaced.*move it away, or choose another --out"):
        sft.main(recipe, tmp_path / "out", [f"eval_every={every}"])
    assert foreign.read_text() == "of something else"


def test_wins_are_shown_beside_the_loss_and_are_those_of_the_command_that_is_printed(
    recipe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a folder" / "out"
    out.parent.mkdir()
    with caplog.at_level(logging.INFO, "sft"):
        words = ["--eval-every", "4", "--set", "stop_at=0.0", "--set", "seed=3", "--set", 'env.system="3 4 5"']
        assert main.main(["sft", str(recipe), "--out", str(out), *words]) == 0
    assert re.findall(r"step=(\d+)/12 loss=", caplog.text) == [str(step) for step in range(1, 13) if step != 11]
    lines = re.findall(r"step=(\d+)/12 loss=\S+ nats wins=([\d.]+)%", caplog.text)
    assert [step for step, _ in lines] == ["4", "8", "12"]
    assert {path.name for path in out.with_name("out-checkpoints").iterdir()} == {
        "step000004", "step000008", "step000012", "recipe.json",
    }  # fmt: skip
    command = shlex.split(caplog.text.split("next: ")[1].strip())
    assert command[2] == str(out)
    figures = tmp_path / "figures.json"
    for checkpoint, (_, wins) in ((out, lines[-1]), (out.with_name("out-checkpoints") / "step000004", lines[0])):
        assert main.main([command[1], str(checkpoint), *command[3:], "--samples", "1", "--out", str(figures)]) == 0
        told = dict(zip(command[3::2], map(int, command[4::2]), strict=True))
        limits = planned(checkpoint).sampling  # without those that are printed
        assert (limits.max_turn_tokens, limits.max_tokens) == (told["--max-turn-tokens"], told["--max-tokens"])
        found = json.loads(figures.read_text())
        assert f"{100 * found['mean']:.1f}" == wins and found["episodes"] == 32 and "3 4 5" in str(found["transcripts"])


def test_it_stops_at_the_first_evaluation_that_reaches_the_share(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shares = iter([0.1, 0.5, 0.9])
    monkeypatch.setattr(sft.SftEvaluation, "share", lambda evaluation, figures: next(shares))
    with caplog.at_level(logging.INFO, "sft"):
        assert (
            main.main(["sft", str(recipe), "--out", str(tmp_path / "out"), "--eval-every", "4", "--stop-at", "0.4"])
            == 0
        )
    assert "after step=8" in caplog.text and "was not reached" not in caplog.text
    assert weights(tmp_path / "out") == weights(tmp_path / "out-checkpoints" / "step000008")


@pytest.mark.parametrize(
    ("every", "shares", "said"),
    [
        (4, (0.1, 0.93), r"stop_at=0\.4 was overshot: the share is 0\.93 at step=8\. .*eval_every \(now 4\) to 1 and"),
        (40, (0.93,), r"at step=12\. To stop earlier, lower eval_every \(now 40\) to 3 and start again"),
        (1, (0.93,), r"at step=1\. To stop earlier, lower lr \(now 0\.003\) and start again"),
        (4, (0.1, 0.5), ""),
    ],
)
def test_a_share_that_is_overshot_is_said_with_what_stops_earlier(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    every: int, shares: tuple[float, ...], said: str,
) -> None:  # fmt: skip
    coming = iter(shares)
    monkeypatch.setattr(sft.SftEvaluation, "share", lambda evaluation, figures: next(coming))
    sft.main(recipe, tmp_path / "out", [f"eval_every={every}", "stop_at=0.4", "eval_episodes=2"])
    assert re.search(said, caplog.text) if said else "overshot" not in caplog.text


@pytest.mark.parametrize(
    ("known", "entropy", "said"),
    [
        (0.74, 0.155, r"64 episodes on training tasks\n.*much better on training tasks than on held-out ones\. Let"),
        (0.5, 0.05, r"its entropy is 0\.050 nats a token, below 0\.1\. Let"),
        (0.5, 0.155, ""),
    ],
)
def test_a_policy_that_is_too_certain_for_rl_is_told_at_the_end(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    known: float, entropy: float, said: str,
) -> None:  # fmt: skip
    step, played = FineTuning.step, sft.evaluate

    def scored(engine: Any, renderer: Any, env: Any, *rest: Any) -> Evaluation:
        found = played(engine, renderer, env, *rest)
        return replace_struct(found, mean=0.4 if found.tasks == "heldout" else known)

    monkeypatch.setattr(FineTuning, "step", lambda tuning: step(tuning) | {"entropy_nats": entropy})
    monkeypatch.setattr(sft, "evaluate", scored)
    with caplog.at_level(logging.INFO, "sft"):
        sft.main(recipe, tmp_path / "out", ["eval_every=12"])
    assert re.search(said, caplog.text) if said else "too certain" not in caplog.text
    assert caplog.text.count("on training tasks") >= 1
    caplog.clear()
    sft.main(recipe, tmp_path / "short", ["stop_at=0.9", "eval_every=12"])
    fewer, more = "take fewer steps" in caplog.text, "raise steps" in caplog.text
    assert not fewer and more == (not said), "steps are not to be fewer and more at once"
    assert "stop_at=0.9 was not reached in 12 steps: raise " in caplog.text


SHOUT = """
from shoal.env import Env, Step

class Shout(Env):
    name, num_tasks = "shout", 4
    def task(self, index, heldout=False):
        return "abcd"[index]
    def reset(self, task):
        return task, [{"role": "user", "content": task}]
    def step(self, state, action):
        return Step(state, None, True)
    def score(self, state):
        return 0.0
    def players(self):
        return {"right": lambda state, rng: state.upper()}
environment = Shout
"""


@pytest.fixture
def shout(tmp_path: Path):
    """Writes an environment like SHOUT with some of its text replaced, and gives the recipe that names it."""

    def write(*pairs: tuple[str, str]) -> Path:
        source = SHOUT
        for now, then in pairs:
            source = source.replace(now, then, 1)
        (tmp_path / "shout.py").write_text(source)
        (tmp_path / "start.toml").write_text(RECIPE.replace("../games/nim", str(tmp_path / "shout.py")))
        return tmp_path / "start.toml"

    return write


UPPER = "state.upper()"


def test_an_answer_that_the_tokenizer_changes_is_told(tmp_path: Path, shout, caplog: pytest.LogCaptureFixture) -> None:
    sft.main(shout(), tmp_path / "out", [])
    assert re.search("tokenizer makes '([a-d])' of '([A-D])', so it can never write", caplog.text)
    assert "the player right earns the lowest reward, 0, in all" in caplog.text


THINKING = """{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}
{%- if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""


@pytest.mark.parametrize(
    ("turn", "shown"), [
        ("'<think>hm</think>' + state", None), ("'<think>hm ' + state", None), ("'hm</think>' + state", None),
        ("'<think></think>' + state", "[abcd]"), ("state", "[abcd]"),
    ],
)  # fmt: skip
def test_a_player_thinks_only_where_the_prompt_has_not_closed_the_thought(
    tmp_path: Path, shout, turn: str, shown: str | None
) -> None:
    config = sft.load_sft(shout((UPPER, turn)), ["env.template={enable_thinking=false}"])
    make_tiny(config.policy.tiny, tmp_path / "m", 1, "float32")
    (tmp_path / "m" / "chat_template.jinja").write_text(THINKING)
    renderer = Renderer.from_directory(tmp_path / "m")
    if shown is None:
        with pytest.raises(
            ConfigError, match=r"^player = right: this prompt has closed the thought: .*\(env\.template\)$"
        ):
            scripted_games(config, renderer)
        return
    for tokens, author in scripted_games(config, renderer):
        written = [token for token, who in zip(tokens, author, strict=True) if who == POLICY]
        assert re.fullmatch(shown, renderer.decode(written)) and renderer.decode(tokens).count("<think>") == 1


def test_tools_whose_calls_nobody_reads_are_told_with_the_key_of_the_recipe(
    tmp_path: Path, shout, caplog: pytest.LogCaptureFixture
) -> None:
    tools = '"shout", 4\n    tools = ({"type": "function", "function": {"name": "add", "parameters": {}}},)'
    recipe = shout(('"shout", 4', tools), (UPPER, "state"))
    for parser, is_told in (("", True), ("hermes", False), ("none", False)):
        caplog.clear()
        sft.main(recipe, tmp_path / f"out{parser}", [f"env.parser={parser}"] if parser else [])
        found = re.findall(r"tool calls of shout are not read: .* Set env\.parser to one of hermes, ", caplog.text)
        assert len(found) == is_told


def test_an_end_token_at_the_end_of_an_answer_is_that_of_its_turn_and_one_within_is_refused(
    tmp_path: Path, shout, caplog: pytest.LogCaptureFixture
) -> None:
    made = []
    for ending in ("", "<|end|>", "<|end|>\\n"):
        config = sft.load_sft(shout((UPPER, f'state + "{ending}"')))
        make_tiny(config.policy.tiny, tmp_path / "tiny", 0, "float32")
        made.append(scripted_games(config, Renderer.from_directory(tmp_path / "tiny")))
    assert made[0] == made[1] == made[2] and "can never write" not in caplog.text
    recipe = shout((UPPER, 'state + "<|end|>b"'))
    with pytest.raises(sft.ConfigError, match=r"player = right: it writes '[a-d]<\|end\|>b', .* reads '<\|end\|>'"):
        sft.main(recipe, tmp_path / "out", [])


def test_max_tokens_limits_each_row_of_a_game_by_itself(tmp_path: Path) -> None:
    (tmp_path / "musing.toml").write_text(RECIPE.replace("../games/nim", str(Path(musing.__file__))))
    config = sft.load_sft(tmp_path / "musing.toml")
    make_tiny(config.policy.tiny, tmp_path / "tiny", 0, "float32")
    renderer = Renderer.from_directory(musing.with_template(tmp_path / "tiny"))
    rows = scripted_games(config, renderer)
    longest = max(len(tokens) for tokens, _ in rows)
    assert len(rows) == 3 * config.episodes and sum(len(tokens) for tokens, _ in rows[:3]) > longest
    assert scripted_games(replace_struct(config, max_tokens=longest), renderer) == rows
    with pytest.raises(
        sft.ConfigError, match=rf"no game fits in max_tokens = {longest - 1}: the shortest takes {longest}"
    ):
        scripted_games(replace_struct(config, max_tokens=longest - 1), renderer)


@pytest.mark.parametrize(
    ("now", "then", "says"),
    [
        ("from shoal", "import sys; sys.exit(0)\nfrom shoal", r"cannot load .*: SystemExit: 0"),
        ('return "abcd"[index]', 'return "ab"[index]', r"cannot make task [23]: .*line 7: IndexError"),
        ('return "abcd"[index]', "raise SystemExit", r"cannot make task 0: .*line 7: SystemExit"),
        (
            'return {"right": lambda',
            '1 / 0; return {"right": lambda',
            r"players\(\) of shout fails: .*ZeroDivisionError",
        ),
        ("state.upper()", "__import__('sys').exit(0)", r"player = right fails: .*line 15: SystemExit: 0"),
        (UPPER, "{'role': 'assistant', 'content': state}", "a text, and the player right returned dict"),
        ("state.upper()", "next(iter(()))", r"player = right fails: .*line 15: StopIteration"),
        ("state.upper()", "'\\ud800'", "half of a surrogate pair"),
        ("state, None, True", "type('Mute', (str,), {'__str__': len})(), 1", "each game of the player right fails"),
        (
            "return Step(",
            "raise type('Mute', (Exception,), {'__str__': len})\n        (",
            "fails; .*Mute: its text raises",
        ),
    ],
)
def test_code_that_raises_is_named_in_one_line(now: str, then: str, says: str, tmp_path: Path, shout) -> None:
    """None ends the command by itself: a shell would go on without the model."""
    with pytest.raises(ShoalError, match=says) as refused:
        sft.main(shout((now, then)), tmp_path / "out", [])
    assert "\n" not in str(refused.value)


def test_games_that_no_row_can_hold_are_told_from_a_player_that_writes_nothing(
    tmp_path: Path, shout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_start_examples, "MOST_TOKENS", 8)
    with pytest.raises(sft.ConfigError, match="no game of environment shout fits in 8 tokens"):
        sft.main(shout(('"content": task', '"content": task * 20')), tmp_path / "out", ["max_tokens=7"])


@pytest.mark.parametrize("template", ["", "always the same", "{{ messages | length }}"])
def test_a_template_that_shows_no_task_is_refused(template: str, tmp_path: Path, shout) -> None:
    config = sft.load_sft(shout((UPPER, "state")))
    start = tmp_path / "tiny"
    make_tiny(config.policy.tiny, start, 0, "float32")
    (start / "chat_template.jinja").write_text(template)
    with pytest.raises(MessagesRefused, match=r"one prompt of any messages, so no task is shown"):
        scripted_games(config, Renderer.from_directory(start))


@pytest.mark.parametrize(("heldout", "tasks", "both"), [("aybc", "training", "3 of 4"), ("wxyz", "training", ""),
                                                        ("wxyz", "all", "4 of 4")])  # fmt: skip
def test_held_out_tasks_that_are_learned_from_are_counted(
    tmp_path: Path, shout, caplog: pytest.LogCaptureFixture, heldout: str, tasks: str, both: str
) -> None:
    recipe = shout(
        ('"abcd"[index]', f'("{heldout}" if heldout else "abcd")[index]'),
        ('num_tasks = "shout", 4', 'num_tasks, num_heldout = "shout", 4, 4'),
    )
    sft.main(recipe, tmp_path / "out", [f"tasks={tasks}", "episodes=40"])
    found = re.findall(r"(\d+ of \d+) held-out tasks are among the training tasks", caplog.text)
    assert found == ([both] if both else [])


def test_a_recipe_without_a_learning_rate_gets_that_of_the_policys_size_which_is_said(
    recipe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sft.main(recipe, tmp_path / "given", ["steps=2"])
    recipe.write_text(SUMS.replace("lr = 3e-3\n", ""))
    with caplog.at_level(logging.INFO, "sft"):
        sft.main(recipe, tmp_path / "left", ["steps=2"])
    assert "lr=0.003, the preset for 3648 parameters" in caplog.text
    assert weights(tmp_path / "left") == weights(tmp_path / "given")


GUESSES = """
from shoal.env import Env, Step, require_index


class Guesses(Env):
    name, num_tasks, num_heldout = "guesses", 10, 10

    def task(self, index, heldout=False):
        require_index(index, 10)
        return "1" if index < 4 else str(index)

    def reset(self, task):
        return (task, ""), [{"role": "user", "content": "?"}]

    def step(self, state, action):
        return Step((state[0], action), None, True)

    def score(self, state):
        return float(state[0] == state[1])

    def players(self):
        return {"right": lambda state, rng: state[0], "wrong": lambda state, rng: "no"}


environment = Guesses
"""


def test_a_share_that_the_most_frequent_answer_would_reach_is_refused(tmp_path: Path, recipe: Path) -> None:
    (tmp_path / "guesses.py").write_text(GUESSES)
    recipe.write_text(SUMS.replace('"arithmetic"\nargs = { digits = 1 }', '"guesses.py"'))
    with pytest.raises(
        sft.ConfigError, match=r"stop_at = 0\.4 may be reached by guessing: one answer is right in 4\d% of"
    ):
        sft.main(recipe, tmp_path / "out", ["stop_at=0.4"])
    for also, advice in ((8, "Set stop_at to 0.95, or let"), (9, "Let"), (10, "Let")):
        (tmp_path / "guesses.py").write_text(GUESSES.replace("index < 4", f"index < {also}"))
        with pytest.raises(sft.ConfigError, match=rf"games\. {advice} the environment vary its answers more"):
            sft.main(recipe, tmp_path / "out", ["stop_at=0.4"])
    (tmp_path / "guesses.py").write_text(GUESSES)
    assert not (tmp_path / "out").exists()
    for enough in ("stop_at=0.65", "stop_at=0"):
        sft.main(recipe, tmp_path / "out", [enough, "steps=1"])


@pytest.mark.parametrize("command", ["sft", "eval"])
def test_threads_of_a_command_that_computes_wait_without_spinning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "")
    monkeypatch.delenv("OMP_WAIT_POLICY")
    words = {"sft": ["none.toml", "--out", str(tmp_path / "out")], "eval": [str(tmp_path / "none"), "--env", "wordle"]}
    assert main.main([command, *words[command]]) == 2
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


def test_a_killed_cold_start_leaves_nothing_outside_its_folder_and_the_next_clears_that(
    recipe: Path, tmp_path: Path
) -> None:
    (temporary := tmp_path / "tmp").mkdir()
    out, environ = tmp_path / "out", os.environ | {"TMPDIR": str(temporary)}
    command = [sys.executable, "-m", "shoal.cli.main", "sft", str(recipe), "--out", str(out), "--set"]
    process = subprocess.Popen([*command, "steps=99999"], stderr=subprocess.PIPE, text=True, env=environ)
    assert process.stderr is not None
    for line in process.stderr:
        if "step=1/" in line:
            break
    process.kill()
    process.communicate()
    beside = cold_start_folder(out)
    (left,) = beside.iterdir()
    assert left.name.endswith(f"-{process.pid}") and not any(temporary.glob("shoal*"))
    others = [beside / "start-20240601", left.with_name(f"{left.name}0123456789"), left.with_name(".start-host-9")]
    for other in others:
        other.mkdir()
    subprocess.run([*command, "steps=1"], check=True, env=environ, capture_output=True)
    assert {*beside.iterdir()} == {*others, beside / "recipe.json"} and (out / "model.safetensors").exists()


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000])
def test_what_no_path_can_be_is_refused_with_the_key(recipe: Path, tmp_path: Path, path: str) -> None:
    tiny, env = SUMS.index("[policy.tiny]"), SUMS.index("[env]")
    recipe.write_text(f"{SUMS[:tiny]}[policy]\npath = {json.dumps(path)}\n{SUMS[env:]}")
    with pytest.raises(ConfigError, match=r"^policy\.path = "):
        sft.main(recipe, tmp_path / "out", [])
    assert not (tmp_path / "out-checkpoints").exists()


def test_ctrl_c_ends_the_command_with_its_exit_code(recipe: Path, tmp_path: Path) -> None:
    words = ["sft", str(recipe), "--out", str(tmp_path / "out"), "--set", "steps=99999"]
    command = [sys.executable, "-m", "shoal.cli.main", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "step=20/" in line:
            break
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(60) == 130 and "the same command continues" in rest and "Traceback" not in rest


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            ["max_tokens=4"],
            r"no game fits in max_tokens = 4: the shortest takes \d+\. Raise max_tokens to at least that$",
        ),
        (["max_tokens=4", "policy.tiny.max_positions=8"], r"that, and policy\.tiny\.max_positions \(now 8\), too$"),
        (
            ["policy.tiny.max_positions=8"],
            r"game takes 10 tokens, and policy\.tiny\.max_positions = 8: raise policy\.tiny\.max_positions to at least 10$",
        ),
        (["policy.tiny.max_positions=9"], r"max_positions = 9: raise policy\.tiny\.max_positions to at least 10$"),
        (["steps=0"], "steps = 0: must be at least 1"),
        (["batch=0"], "batch = 0: must be at least 1"),
        (["episodes=-1"], "episodes = -1: must be at least 1"),
        (["stop_at=1.4"], r"stop_at = 1\.4: must be "),
        (["stop_at=nan"], "stop_at = nan: must be "),
        (["eval_every=-1"], "eval_every = -1: must be "),
        (["eval_episodes=0"], "eval_episodes = 0: must be "),
    ],
)
def test_a_recipe_that_cannot_train_is_refused_with_its_keys(
    recipe: Path, tmp_path: Path, changes: list[str], said: str
) -> None:
    with pytest.raises(sft.ConfigError, match=said):
        sft.main(recipe, tmp_path / "out", changes)
    assert not (tmp_path / "out").exists()


def test_max_tokens_is_lowered_only_to_what_holds_each_prompt_and_an_answer(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / "environments" / "nim", tmp_path / "games" / "nim")
    recipe = tmp_path / "recipes" / "small.toml"
    recipe.parent.mkdir()
    recipe.write_text(RECIPE.replace("episodes = 4", "episodes = 40"))
    with pytest.raises(
        sft.ConfigError, match=r"max_positions = 150: raise policy\.tiny\.max_positions to at least 381$"
    ):
        sft.main(recipe, tmp_path / "out", ["policy.tiny.max_positions=150"])
    with pytest.raises(sft.ConfigError, match=r"lower max_tokens \(now 400\) to 380, or raise \S+ to at least 381$"):
        sft.main(recipe, tmp_path / "out", ["policy.tiny.max_positions=380"])
    sft.main(recipe, tmp_path / "out", ["policy.tiny.max_positions=380", "max_tokens=380"])
    assert weights(tmp_path / "out")


def test_games_that_are_too_long_are_left_out_whole_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first words of a game that was cut would teach an answer without its end."""
    nim = shutil.copytree(ROOT / "examples" / "environments" / "nim", tmp_path / "nim")
    (tmp_path / "small.toml").write_text(
        RECIPE.replace("../games/nim", str(nim)).replace("episodes = 4", "episodes = 40")
    )
    config = sft.load_sft(tmp_path / "small.toml")
    make_tiny(config.policy.tiny, tmp_path / "tiny", 0, "float32")
    renderer = Renderer.from_directory(tmp_path / "tiny")
    for most, all_fit in ((4000, True), (400, False)):
        caplog.clear()
        games = scripted_games(replace_struct(config, max_tokens=most), renderer)
        left = [int(number) for number in re.findall(r"(\d+) of 40 games are longer than max_tokens", caplog.text)]
        assert len(games) + sum(left) == 40 and (not left) == all_fit
        for tokens, author in games:
            assert [token for token, who in zip(tokens, author, strict=True) if who == POLICY][-1] in renderer.stop_ids


FAILS = """
from shoal.env import Env, Step
class Odd(Env):
    name, num_tasks, num_heldout = "odd", 2, 0
    def __init__(self, failing=()):
        self.failing = failing
    def task(self, index, heldout=False):
        return index
    def reset(self, task):
        return task, "task"
    def step(self, state, action):
        if state in self.failing:
            raise ValueError("no reply to that")
        return Step(state, None, True)
    def score(self, state):
        return 1.0
    def players(self):
        return {"one": lambda state, rng: str(state)}
environment = Odd
"""


def test_games_that_fail_teach_nothing_and_are_counted_with_their_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "odd.py").write_text(FAILS.replace('"task"', '[{"role": "user", "content": "task"}]'))
    recipe = RECIPE.replace("../games/nim", str(tmp_path / "odd.py")).replace(
        "episodes = 4", 'player = "one"\nepisodes = 40'
    )
    (tmp_path / "odd.toml").write_text(recipe)
    for failing, fails in (((), False), ((1,), True)):
        caplog.clear()
        config = sft.load_sft(tmp_path / "odd.toml", [f"env.args.failing={list(failing)}"])
        make_tiny(config.policy.tiny, tmp_path / f"tiny{len(failing)}", 0, "float32")
        with caplog.at_level("INFO", "sft"):
            games = scripted_games(config, Renderer.from_directory(tmp_path / f"tiny{len(failing)}"))
        said = re.findall(r"(\d+) of 40 games fail, and are left out; the first: .*no reply to that", caplog.text)
        assert len(said) == fails and len(games) + sum(map(int, said)) == 40 and f"games={len(games)}" in caplog.text
    with pytest.raises(sft.ConfigError, match=r"each game of the player one fails; the first: .*no reply to that"):
        sft.main(tmp_path / "odd.toml", tmp_path / "out", ["env.args.failing=[0, 1]"])


def test_a_start_that_another_recipe_makes_is_refused_with_the_command(recipe: Path, tmp_path: Path) -> None:
    later = tmp_path / "later.toml"
    later.write_text(re.sub(r"\[policy.tiny\](.|\n)*(?=\[env\])", '[policy]\npath = "sums"\n', SUMS))
    with pytest.raises(StateError) as refused:
        sft.main(later, tmp_path / "out", [])
    assert f"shoal sft {recipe} --out {tmp_path / 'sums'}" in str(refused.value)


def test_a_cold_start_keeps_the_generation_config_of_the_model_that_it_begins_with(tmp_path: Path) -> None:
    generation = {"eos_token_id": [5], "pad_token_id": 3, "temperature": 0.6, "top_k": 20}
    tiny = TinyPolicy(width=16, layers=1, heads=2, kv_heads=1, mlp_width=16, max_positions=32)
    make_tiny(tiny, tmp_path / "own", 1, "float32")
    write_json(tmp_path / "own" / "generation_config.json", generation)
    recipe = tmp_path / "later.toml"
    recipe.write_text(re.sub(r"\[policy.tiny\](.|\n)*(?=\[env\])", '[policy]\npath = "own"\n', SUMS))
    sft.main(recipe, tmp_path / "out", ["steps=3", "eval_every=2"])
    for directory in (tmp_path / "out", tmp_path / "out-checkpoints" / "step000002"):
        assert json.loads((directory / "generation_config.json").read_text()) == generation


@pytest.mark.parametrize("own_model", [False, True])
def test_a_result_that_no_folder_can_hold_is_refused_at_once(recipe: Path, tmp_path: Path, own_model: bool) -> None:
    (tmp_path / "file").touch()
    if own_model:
        sft.main(recipe, tmp_path / "model", ["steps=1"])
        tiny, env = SUMS.index("[policy.tiny]"), SUMS.index("[env]")
        recipe.write_text(f'{SUMS[:tiny]}[policy]\npath = "{tmp_path / "model"}"\n{SUMS[env:]}')
    with pytest.raises(StateError, match=r"Not a directory.* or choose another --out"):
        sft.main(recipe, tmp_path / "file" / "out", [])
