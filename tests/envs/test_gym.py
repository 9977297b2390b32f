"""The gym, each environment played by a tiny policy on this machine: the five examples, five tasks of reasoning_gym, two
games of textarena, and four unmodified environments from the repository of verifiers.

The foreign ones run in the interpreters of `make foreign`. The last four are not copied into this repository: name a folder
with checkouts of the releases v0.1.14 and v0.4.0 in SHOAL_VERIFIERS.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.chat.renderer import Renderer
from shoal.config import TinyPolicy
from shoal.engine.native import LocalEngine
from shoal.env import Message, Score, Step, require_index
from shoal.envs.evaluate import evaluate
from shoal.envs.load import load_env
from shoal.evaluation_files import Evaluation
from shoal.models.random_model import make_tiny
from shoal.protocol.messages import Sampling
from tests.envs.adapters.conftest import ORIGINALS, RELEASES, Distant
from tests.envs.adapters.conftest import distant as distant
from tests.graders.conftest import openai as openai
from tests.sandbox.needs import needs_bubblewrap

EXAMPLES = Path(__file__).parents[2] / "environments"
SAMPLING = Sampling(temperature=1.0, max_turn_tokens=12, max_tokens=4000)
EPISODES = 4

pytestmark = pytest.mark.slow

REASONING = ("basic_arithmetic", "caesar_cipher", "maze", "countdown", "leg_counting")
GAMES = ("TicTacToe-v0", "KuhnPoker-v0")
FROM_VERIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "reasoning_gym_env": ("verifiers_v0", {"args": {"num_train_examples": 20, "num_eval_examples": 8}}),
    "tool_test": ("verifiers_v0", {"args": {"num_train_examples": 20, "num_eval_examples": 8}}),
    "glossary": ("verifiers_v1", {"heldout": 2}),
    "kuhn_poker": ("verifiers_v1", {"tasks": 20, "heldout": 8, "reward_bounds": [-2, 2]}),
}


class Elsewhere:
    """An environment of another process, as if it were in this one. Each turn plays the whole episode again."""

    def __init__(self, there: Distant) -> None:
        about, self._there = there.about, there
        assert "refused" not in about, about
        self.name, self.reward_bounds = about["name"], tuple(about["reward_bounds"])
        self.num_tasks, self.num_heldout = about["num_tasks"], about["num_heldout"]
        self.tools, self.weights = about["tools"], about["weights"]

    def task(self, index: int, heldout: bool = False) -> tuple[int, bool]:
        require_index(index, self.num_heldout if heldout else self.num_tasks)
        return index, heldout

    def reset(self, task: tuple[int, bool]) -> tuple[Any, list[Message]]:
        played = self._there.play(task[0], heldout=task[1])
        return (task, (), played["scores"][-1]), played["told"][-1]

    def step(self, state: Any, action: str) -> Step:
        task, actions = state[0], (*state[1], str(action))
        played = self._there.play(task[0], *actions, heldout=task[1])
        return Step((task, actions, played["scores"][-1]), played["told"][-1], played["done"])

    def score(self, state: Any) -> float | Score:
        return Score(*state[2]) if isinstance(state[2], list) else state[2]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Any], Evaluation]]:
    """Plays an environment with a tiny policy."""
    folder = tmp_path_factory.mktemp("gym") / "policy"
    shape = TinyPolicy(width=16, layers=1, heads=2, kv_heads=1, mlp_width=32, max_positions=4096)
    make_tiny(shape, folder, seed=1, dtype="float32")
    engine, renderer = LocalEngine(threads=1), Renderer.from_directory(folder)
    engine.load(folder, 0)
    yield lambda env: evaluate(engine, renderer, env, EPISODES, 0, SAMPLING)


def is_whole(found: Evaluation, env: Any) -> bool:
    low, high = env.reward_bounds
    assert found.episodes == EPISODES and not found.fault, found.fault
    assert set(found.endings) <= {"environment", "length"} and low <= found.mean <= high
    return True


@needs_bubblewrap
@pytest.mark.parametrize("name", ["initials", "nim", "stones", "word-problems", "calculator", "explain"])
def test_an_example_is_played(name: str, played: Callable[[Any], Evaluation], openai: Callable[..., Any]) -> None:
    args = {"url": openai("compares").base_url, "model": "compares"} if name == "explain" else {}
    env = load_env(str(EXAMPLES / name), args)
    assert is_whole(played(env), env)


@pytest.mark.parametrize("task", REASONING)
def test_a_task_of_reasoning_gym_is_played(
    task: str, played: Callable[[Any], Evaluation], distant: Callable[..., Distant]
) -> None:
    env = Elsewhere(distant("reasoning_gym", task=task, tasks=20, heldout=8))
    assert is_whole(played(env), env)


@pytest.mark.parametrize("game", GAMES)
def test_a_game_of_textarena_is_played(
    game: str, played: Callable[[Any], Evaluation], distant: Callable[..., Distant]
) -> None:
    env = Elsewhere(distant("textarena", game=game, tasks=20, heldout=4))
    assert is_whole(played(env), env)


@pytest.mark.parametrize("name", FROM_VERIFIERS)
def test_an_unmodified_environment_of_verifiers_is_played(
    name: str, played: Callable[[Any], Evaluation], distant: Callable[..., Distant]
) -> None:
    module, args = FROM_VERIFIERS[name]
    release = RELEASES["v0" if module == "verifiers_v0" else "v1"]
    if not (Path(ORIGINALS or "/nowhere") / release / "environments" / name).is_dir():
        pytest.skip(
            f"verifiers {release} is not checked out: set SHOAL_VERIFIERS to the folder that holds the checkouts"
        )
    env = Elsewhere(distant(module, id=name, **args))
    assert is_whole(played(env), env)
    assert not [finding for finding in env._there.ask("check") if finding[1] == "failed"]
