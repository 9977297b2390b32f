"""An environment that says nothing between two turns: the policy's turn goes on, within its limit."""

from types import SimpleNamespace

import pytest

from shoal.chat.renderer import Renderer
from shoal.config import TinyPolicy
from shoal.envs.play_episodes import play_block
from shoal.envs.replay import replay_group
from shoal.envs.rollout_rules import Conversation
from shoal.models.random_model import make_tiny
from shoal.protocol.messages import Block, Sampling, Slot
from shoal.verification.checks_without_model import shape
from tests.envs.conftest import RandomEngine
from tests.envs.silent import Silent, with_template

SAMPLING = Sampling(temperature=1.0, max_turn_tokens=4, max_tokens=48)


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bare") / "policy"
    make_tiny(TinyPolicy(width=16, layers=1, heads=1, kv_heads=1, mlp_width=16), directory, 0, "float32")
    return Renderer.from_directory(with_template(directory))


def test_turns_without_words_between_them_are_one_turn_with_one_limit(bare):
    """The check `shape` sees no border between them, and would accuse the worker of too long a turn."""
    env = Silent()
    slots = tuple(Slot(i, f"{i:064x}", "silent", i % 8) for i in range(30))
    engine = RandomEngine(bare, ["a", "ab", "", "b"])
    groups = play_block(engine, bare, {"silent": env}, Block(0, slots), 8, SAMPLING)
    ctx = SimpleNamespace(
        rules=SimpleNamespace(group_size=8), tools=SimpleNamespace(renderer=bare), sampling=SAMPLING, due=8
    )
    assert [shape(group, ctx) for group in groups] == [None] * 30
    for group in groups:
        assert {r.problem for r in replay_group(env, bare, env.task(group.task), group.rollouts, SAMPLING)} == {""}
    asked = {request.max_new for call in engine.calls for request in call}
    assert asked == {1, 2, 3, 4}, "a turn that goes on has what is left"


def test_a_turn_that_has_all_its_tokens_when_the_environment_says_nothing_ends_by_length(bare):
    talk = Conversation(Silent(), bare, 0, SAMPLING)
    talk.write([*bare.encode("bbb"), bare.eos_id])
    assert (talk.ending, talk.room) == ("length", 0)
    talk = Conversation(Silent(), bare, 0, SAMPLING)
    talk.write([*bare.encode("bba"), bare.eos_id])
    assert (talk.ending, talk.room) == (None, 4), "it said something"
