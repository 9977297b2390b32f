"""Forgers that make the environment fail, to choose which of a group's rewards count."""

import random

import msgspec
import numpy as np
import pytest

from shoal.env import Env, Step
from shoal.envs.builtin.arithmetic import environment as arithmetic
from shoal.envs.rollout_rules import Conversation
from shoal.ledger.group_advantages import teaches
from shoal.protocol.algorithm_config import Grpo
from shoal.protocol.audit_and_pay import influence
from shoal.protocol.encoding import digest
from shoal.protocol.messages import Check
from shoal.verification.verify import verify_submission
from tests.attacks.attack_fixture import LEASE, RULES, World, make_policy

RATE, DRAWS = 0.05, np.linspace(0, 1, 40, endpoint=False)


class Crashing(Env):
    """Sums, for which an answer that begins with a cross cannot be read."""

    name = "arithmetic"

    def __init__(self) -> None:
        self.env = arithmetic()
        self.num_tasks = self.env.num_tasks

    def task(self, index, heldout=False):
        return self.env.task(index)

    def reset(self, task):
        return self.env.reset(task)

    def step(self, state, action):
        if action.startswith("x"):
            raise ValueError(f"no number: {action!r:.20}")
        return Step(*self.env.step(state, action)[:3])

    def score(self, state):
        return self.env.score(state)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("policies")
    rules = msgspec.structs.replace(RULES, algorithm=Grpo(advantage="mean_std"), audit_rate=RATE)
    policy = make_policy(root / "honest", seed=0, sharpen=40.0)
    world = World(policy, policy, policy, rules=rules)
    world.envs["arithmetic"] = Crashing()
    return world


def written(world, group, texts):
    """A group in which these rollouts have another answer, with the log-probs that the policy gives it."""
    env, rollouts = world.envs["arithmetic"], list(group.rollouts)
    for index, text in texts.items():
        talk = Conversation(env, world.renderer, env.task(group.task), LEASE.sampling)
        tokens = [*world.renderer.encode(text), world.renderer.eos_id]
        talk.write(tokens, [-1.0] * len(tokens))
        rollouts[index] = talk.rollout(group.rollouts[0].version)
    forged = msgspec.structs.replace(group, rollouts=tuple(rollouts))
    place = next(i for i, other in enumerate(world.honest_groups) if other.slot == group.slot)
    groups = [*world.honest_groups[:place], forged, *world.honest_groups[place + 1 :]]
    scores = world.score(world.requests(groups))[place * 8 : place * 8 + 8]
    honest = [
        msgspec.structs.replace(rollout, logprobs=score.logprobs_P.astype("<f4").tobytes())
        if index in texts
        else rollout
        for index, (rollout, score) in enumerate(zip(rollouts, scores, strict=True))
    ]
    return msgspec.structs.replace(forged, rollouts=tuple(honest))


def verdicts_on(world, forged, mean_influence):
    """What validators say of a forged group, for draws from all of [0, 1)."""
    groups = [forged if group.slot == forged.slot else group for group in world.honest_groups]
    body, found = world.encode(groups), []
    for draw in DRAWS:
        check = Check(
            digest(body), LEASE, (), 60.0, (float(draw),) * len(world.slots), RATE, mean_influence
        )  # fmt: skip
        verdict = verify_submission(body, check, world.tools())
        found.append(next(group for group in verdict.groups if group.slot == forged.slot))
    return found


def test_a_forger_of_crashes_is_caught_at_least_as_often_as_one_of_rewards(world):
    """Both leave two rollouts of eight that decide: one makes six crash, the other writes right answers."""
    group = next(group for group in world.honest_groups if group.env == "arithmetic")
    env = world.envs["arithmetic"]
    right = env.env.players()["right"](env.reset(env.task(group.task))[0], random.Random(0))
    crashes = written(world, group, dict.fromkeys(range(6), "x"))
    rewards = written(world, group, dict.fromkeys(range(2), right))
    usual = influence((0.0, 1.0) * 4, group.rollouts[0].num_policy_tokens() * 8, world.rules.algorithm)
    caught = {
        name: [
            verdict.outcome == "hard" and verdict.check == "sampling" for verdict in verdicts_on(world, forged, usual)
        ]
        for name, forged in (("crashes", crashes), ("rewards", rewards))
    }
    assert all(caught["crashes"]) and 0 < sum(caught["rewards"]) < len(DRAWS)


def test_two_left_of_eight_teach_nothing_however_they_differ(world):
    assert teaches((1.0, *(0.0,) * 7), world.rules.algorithm)
    assert not teaches((1.0, *(0.0,) * 7), world.rules.algorithm, faults=(2, 3, 4, 5, 6, 7))
    assert teaches((1.0, *(0.0,) * 7), world.rules.algorithm, faults=(4, 5, 6, 7))


def test_an_honest_group_on_which_the_environment_fails_is_accepted_and_audited(world):
    """The policy wrote those answers, so nothing is forged."""
    env = world.envs["arithmetic"]
    step = env.step

    def fail_often(state, action):
        if len(action) % 2:
            raise ValueError("odd")
        return step(state, action)

    env.step = fail_often
    try:
        honest = World(world.honest, world.honest, world.honest, rules=world.rules)
        honest.envs["arithmetic"] = env
        groups = honest.play()
        verdicts = honest.judge(honest.encode(groups), audit=False)
    finally:
        del env.step
    failed = [verdict for verdict in verdicts if verdict.faults]
    assert failed and all(verdict.outcome == "accept" for verdict in verdicts)
    assert all(verdict.tokens > 0 for verdict in failed)
    assert all(verdict.audited == bool(verdict.faults) for verdict in verdicts)
