"""What `benchmarks/whole_system.py` compares must be the same work: 32 tokens shown, exactly 64 written, on both sides."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.whole_system import ALPHABET, RECIPE, SHARED_SETTINGS, Look, Watch, between, make_policy
from shoal.chat.renderer import Renderer
from shoal.config import load_run
from shoal.engine.interface import EngineRequest
from shoal.engine.native import LocalEngine
from shoal.envs.lint import check_env
from shoal.envs.load import load_env

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
ENV = str(RECIPE.parent / "envs" / "vowels.py")


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bench") / "policy"
    make_policy(directory)
    return directory


def test_the_run_file_asks_for_what_is_compared():
    config = load_run(RECIPE)
    assert config.rollouts.batch_groups * config.rollouts.group_size == 256
    assert (config.rollouts.group_size, config.rollouts.max_staleness) == (16, 1)
    assert (config.sampling.max_turn_tokens, config.sampling.max_tokens) == (64, 96)
    assert all(hasattr(config.train, name) for name in SHARED_SETTINGS)


def test_a_prompt_is_32_tokens_and_nothing_that_the_policy_can_write_ends_a_turn(policy):
    renderer = Renderer.from_directory(policy)
    env = load_env(ENV, {})
    for index in (0, 1, env.num_tasks - 1):
        opening = renderer.start(env.reset(env.task(index))[1])
        assert len(opening) == 32
        assert max(opening) < 64
    assert min(renderer.stop_ids) == renderer.vocabulary == 64


def test_a_turn_has_64_tokens_and_reads_as_64_characters(policy):
    engine, renderer = LocalEngine(threads=1), Renderer.from_directory(policy)
    engine.load(policy, 0)
    request = EngineRequest("r", [0] * 32, bytes(32), 64, renderer.stop_ids)
    (turn,) = engine.extend([request], 1.0)
    written = renderer.decode(turn.token_ids)
    assert len(turn.token_ids) == len(written) == 64
    assert written == "".join(ALPHABET[token] for token in turn.token_ids)


def test_vowels_score():
    env = load_env(ENV, {})
    state, _ = env.reset(env.task(0))
    assert env.score(env.step(state, "aE" * 16 + "xy" * 16)[0]) == 0.5
    assert env.score(env.step(state, "")[0]) == 0.0
    assert [finding for finding in check_env(env) if finding.outcome == "failed"] == []


def test_costs_are_those_between_two_measurements(tmp_path):
    lines = [f'{{"step":{step},"time_s":{10.0 + 2 * step},"reward_mean":0.5}}' for step in range(5)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    before = Look(1, Counter(trainer=2.0, worker=1.0), Counter(train=1.0))
    after = Look(5, Counter(trainer=8.0, worker=3.0), Counter(train=7.0))
    figures = between(before, after, Watch(None, tmp_path, None))
    assert figures.cpu_by_role_s == {"trainer": 1.5, "worker": 0.5}
    assert (figures.cpu_s, figures.wall_s) == (2.0, 2.0)
    assert figures.cpu_by_job_s == {"train": 1.5}


@pytest.mark.parametrize("peer", sorted(PEERS.glob("*.py")), ids=lambda path: path.stem)
def test_a_peer_says_what_it_is_where_nothing_that_it_measures_is_installed(peer: Path) -> None:
    told = subprocess.run([sys.executable, "-SEs", str(peer), "--help"], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0 and told.stdout == f"{ast.get_docstring(ast.parse(peer.read_text()), clean=False)}\n"
