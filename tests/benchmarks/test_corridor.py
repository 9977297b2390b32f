"""The corridor with two keys, and the values of its walks, which are counted."""

import random

import pytest
import torch

from benchmarks.corridor.environment import TASKS, Corridor, opens, solved
from benchmarks.corridor.values import true_values
from shoal.config import TinyPolicy
from shoal.models.random_model import initialise, tiny_spec
from shoal.models.transformer import Transformer

TASK = (1, 0, 3, 2)
"""Start, keys, door: the shortest walk is l, r r r, l."""
LETTERS = {"l": 17, "r": 23}


def test_the_door_opens_to_both_keys_and_no_earlier():
    assert solved(TASK) == "lrrrl" and opens(TASK, "lrrrl") and opens(TASK, "lrrrllll")
    assert not opens(TASK, "lrrr") and not opens(TASK, "rrl") and not opens(TASK, "lrxrrl")
    assert opens(TASK, "llrrrl"), "a wall is not passed"
    assert all(opens(task, solved(task)) and len(solved(task)) <= 12 for task in TASKS) and len(TASKS) == 180


def test_it_is_an_environment_whose_solution_scores_1():
    env = Corridor()
    for index in range(env.num_heldout):
        task = env.task(index, heldout=True)
        state, messages = env.reset(task)
        assert env.score(env.step(state, env.solution(task)[0]).state) == 1.0 and "keys" in messages[0]["content"]
        assert env.score(env.step(state, "lr").state) == 0.0


@pytest.fixture
def model():
    policy = Transformer(tiny_spec(TinyPolicy(width=16, layers=1, heads=2, kv_heads=1, mlp_width=24, max_positions=64)))
    initialise(policy, 3)
    with torch.no_grad():
        policy.head_weight().zero_()[[17, 23]] = torch.randn(2, 16, generator=torch.Generator().manual_seed(1))
    return policy


def test_the_value_of_a_beginning_is_the_chance_of_the_walks_that_open_the_door(model):
    opening = [6, 7, 8]
    values = true_values(model, TASK, opening, LETTERS, most_steps=6)
    assert values["lrrrl"] == 1.0 and values["llllll"] == 0.0 and 0 < values[""] < 1
    rng, opened = random.Random(0), 0
    for walk in ("", "lr", "lrrr"):
        chance = _next(model, opening, walk)
        assert values[walk] == pytest.approx(sum(p * values[walk + letter] for letter, p in chance.items()), abs=1e-6)
    for _ in range(400):  # the policy's own walks
        walk = ""
        while len(walk) < 6 and not opens(TASK, walk):
            chance = _cached(model, opening, walk)
            drawn = rng.random()
            letter = "l" if drawn < chance["l"] else "r" if drawn < chance["l"] + chance["r"] else ""
            if not letter:
                break
            walk += letter
        opened += opens(TASK, walk)
    assert opened / 400 == pytest.approx(values[""], abs=4 * (values[""] / 400) ** 0.5 + 0.01)


_KNOWN = {}


def _cached(model, opening, walk):
    if walk not in _KNOWN:
        _KNOWN[walk] = _next(model, opening, walk)
    return _KNOWN[walk]


def _next(model, opening, walk):
    with torch.no_grad():
        hidden = model.hidden(torch.tensor([[*opening, *(LETTERS[letter] for letter in walk)]]))
        p_V = torch.softmax(model.logits(hidden[:, -1]), -1)[0]
    return {letter: p_V[index].item() for letter, index in LETTERS.items()}
