"""Each of `examples/environments` passes its check, is published and installed, and is played by a tiny policy."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import main
from shoal.config import TinyPolicy
from shoal.envs.dataset import digest_of
from shoal.envs.lint import CheckResult
from shoal.envs.lint.process_checks import check
from shoal.envs.load import load_env
from shoal.errors import ShoalError
from shoal.models.random_model import make_tiny
from tests.graders.conftest import openai as openai
from tests.sandbox.needs import needs_bubblewrap

EXAMPLES = Path(__file__).parents[1] / "examples" / "environments"
NAMES = ("initials", "nim", "running-sums", "stones", "word-problems", "calculator", "explain")
WITH_THE_HOST = ("calculator", "explain")
"""Not reproducible: one starts programs, the other asks a judge."""


@pytest.fixture
def args_of(openai: Callable[..., Any]) -> Callable[[str], dict[str, Any]]:
    """The arguments of an example, such as where its judge is."""
    return lambda name: {"url": openai("compares").base_url, "model": "compares"} if name == "explain" else {}


def faults(found: list[CheckResult]) -> list[CheckResult]:
    return [finding for finding in found if finding.outcome == "failed"]


def test_every_example_is_tried_and_is_short() -> None:
    assert {path.name for path in EXAMPLES.iterdir() if path.is_dir()} == set(NAMES)
    assert all(20 <= len((EXAMPLES / name / "environment.py").read_text().splitlines()) <= 80 for name in NAMES)


@needs_bubblewrap
@pytest.mark.parametrize("name", NAMES)
def test_an_example_passes_its_check(name: str, args_of: Callable[[str], dict[str, Any]]) -> None:
    found = check(str(EXAMPLES / name), args_of(name), sandboxed=name not in WITH_THE_HOST)
    assert faults(found) == []
    told = {finding.check: finding for finding in found}
    assert told["solutions"].outcome == told["right player"].outcome == told["reward hacks"].outcome == "passed"
    if name in WITH_THE_HOST:
        assert "stays with the host, as it declares" in told["processes" if name == "calculator" else "network"].detail
    else:
        assert {f.check for f in found if f.outcome == "skipped"} <= {"leaks"}


@needs_bubblewrap
@pytest.mark.parametrize(
    ("name", "kind"), [("calculator", "processes"), pytest.param("explain", "network", marks=pytest.mark.slow)]
)
def test_an_example_that_stays_with_the_host_is_told_how_to_be_checked(
    name: str, kind: str, args_of: Callable[[str], dict[str, Any]]
) -> None:
    told = {finding.check: finding.detail for finding in faults(check(str(EXAMPLES / name), args_of(name)))}
    assert "--no-sandbox" in told[kind]


@needs_bubblewrap
@pytest.mark.parametrize(
    "name", [name for name in NAMES if name != "explain"]
)  # it asks another machine: use its folder
def test_an_example_is_shared_installed_and_played(
    name: str, args_of: Callable[[str], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # other processes need theirs
    tiny = TinyPolicy(width=16, layers=1, heads=2, kv_heads=1, mlp_width=32, max_positions=512)
    make_tiny(tiny, tmp_path / "policy", seed=1, dtype="float32")
    hub = str(tmp_path / "hub")
    assert main.main(["env", "push", str(EXAMPLES / name), "--registry", hub]) in (0, None)
    assert main.main(["env", "install", f"shoal/{name}", "--registry", hub, "--yes"]) in (0, None)
    capsys.readouterr()
    command = [
        "eval", str(tmp_path / "policy"), "--env", f"shoal/{name}@0.1.0", "--env-args", json.dumps(args_of(name)),
        "--episodes", "6", "--max-turn-tokens", "24", "--json",
    ]  # fmt: skip
    assert main.main(command) in (0, None)
    figures = json.loads(capsys.readouterr().out)
    assert figures["episodes"] == 6 and figures["tasks"] == "heldout" and not figures["fault"]
    assert set(figures["endings"]) <= {"environment", "length"}


def test_the_word_problems_take_files_in_the_form_of_gsm8k(tmp_path: Path) -> None:
    question = {"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}
    other = {"question": "A thousand and a half?", "answer": "#### 1,000.50"}
    train, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    train.write_text(json.dumps(question) + "\n" + json.dumps(other) + "\n")
    test.write_text(json.dumps({"question": "One and one?", "answer": "#### 2"}) + "\n")
    args = {
        "path": str(train),
        "sha256": digest_of(train),
        "heldout_path": str(test),
        "heldout_sha256": digest_of(test),
    }
    env = load_env(str(EXAMPLES / "word-problems"), args)
    assert (env.num_tasks, env.num_heldout) == (2, 1)
    state, _ = env.reset(env.task(1))
    answers = ("so #### 1000.5", "it is 1,000.50.", "#### 1000", "", "#### 7\n#### 1,000.5")
    assert [env.score(env.step(state, text).state) for text in answers] == [1.0, 1.0, 0.0, 0.0, 1.0]
    train.write_text(train.read_text().replace("Two and two", "Two and one"))
    with pytest.raises(ShoalError, match=r"train\.jsonl has changed: its SHA-256 is"):
        load_env(str(EXAMPLES / "word-problems"), args)


def test_a_changed_problem_is_found_by_the_pin_of_the_package(tmp_path: Path) -> None:
    folder = tmp_path / "word-problems"
    shutil.copytree(EXAMPLES / "word-problems", folder)
    data = folder / "problems.jsonl"
    data.write_text(data.read_text().replace("3 fields", "4 fields"))
    with pytest.raises(ShoalError, match=r"problems\.jsonl has changed"):
        load_env(str(folder), {})


def test_nim_is_won_by_the_last_stone_and_lost_by_an_illegal_move() -> None:
    nim = load_env(str(EXAMPLES / "nim"), {})
    begun = nim.reset((1, 1, 1))[0]
    second = nim.step(begun, "1, 1")
    assert not second.done and second.reply == "Piles: 1 has 0, 2 has 0, 3 has 1."
    for move, score in (("3, 1", 1.0), ("2, 1", 0.0), ("3, 2", 0.0), ("", 0.0)):
        last = nim.step(second.state, move)
        assert last.done and nim.score(last.state) == score
    lost = nim.step(((0, 1, 1), False), "3, 1")
    assert lost.done and nim.score(lost.state) == 0.0, "the opponent takes the last stone"


def stones(**args: Any) -> Any:
    return load_env(str(EXAMPLES / "stones"), args)


def games_of(env: Any, player: str, heldout: bool, games: int) -> tuple[float, set[int]]:
    """Share of games that a player wins, and all numbers of stones that it was shown."""
    won, seen = 0, set[int]()
    for index in range(games):
        (state, opening), rng = env.reset(env.task(index, heldout)), random.Random(index)
        shown: str | None = opening[0]["content"]
        done = False
        while not done:
            seen.add(int(shown or 0))
            state, shown, done, *_ = env.step(state, env.players()[player](state, rng))
        won += bool(env.success(state))
    return won / games, seen


def test_stones_are_won_by_the_last_one_and_lost_by_an_illegal_move() -> None:
    env = stones(perfect=1.0)
    state, opening = env.reset((12, 0, False))
    assert opening == [{"role": "user", "content": "12"}]
    second = env.step(state, "2")
    assert second.restart and not second.done and second.reply in tuple("123456789")
    last = env.step(second.state, second.reply)
    assert last.done and env.success(last.state) and env.score(last.state) == 1.0
    for move in ("", "0", "-1", " 2", "²", "22", "a"):
        lost = env.step(state, move)
        assert lost.done and not env.success(lost.state)
    beaten = env.step(state, "3")
    assert beaten.done and not env.success(beaten.state), "a perfect opponent takes the last nine"


def test_training_on_stones_never_shows_a_heldout_number() -> None:
    env = stones()
    share, seen = games_of(env, "teacher", heldout=False, games=1500)
    assert not seen & set(env.heldout) and set(env.training) <= seen and 0.5 < share < 0.65
    share, seen = games_of(env, "right", heldout=True, games=100)
    assert share == 1.0 and seen & set(env.heldout)
    assert sorted(number % 10 for number in env.heldout) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert games_of(env, "wrong", heldout=True, games=10)[0] == 0.0


def test_the_teacher_of_stones_takes_all_that_it_may_and_is_cautious_otherwise() -> None:
    env = stones(cautious=0.5)
    assert env.habits(3) == ([3], [0.125])
    assert env.habits(10) == ([1, 2, 3, 4, 5, 6, 7, 8, 9], [0.5**taken for taken in range(1, 10)])
