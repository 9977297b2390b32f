"""Verdicts in runs that credit turns or steps: what they say, what it moves, and that workers have no say in it."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from shoal.envs.load import load_env
from shoal.envs.rollout import Conversation
from shoal.protocol.algorithm_config import Algorithm, Composition, Steps, Turns
from shoal.protocol.encoding import digest, to_msgpack
from shoal.protocol.group_rewards import malformed_steps
from shoal.protocol.messages import POLICY, Check
from shoal.verification.verdict_diff import differences
from shoal.verification.verify import verify_submission
from tests.verification.conftest import RULES, SAMPLING, Desk

SUMS = str(Path(__file__).parents[2] / "environments" / "running-sums")
TURNS, STEPS = Composition(credit=Turns()), Composition(credit=Steps())


def desk_of(renderer, algorithm: Algorithm = TURNS, **args) -> Desk:
    envs = {"turns": load_env(SUMS, {"turns": True, **args}), "lines": load_env(SUMS, args)}
    desk = Desk(renderer, envs)
    under(desk, algorithm)
    return desk


def under(desk, algorithm):
    rules = msgspec.structs.replace(RULES, algorithm=algorithm)
    desk.tools = dataclasses.replace(desk.tools, info=SimpleNamespace(run="run-1", rules=rules))


@pytest.mark.parametrize(
    ("algorithm", "by_turns", "by_lines"),
    [
        (TURNS, [0.25] * 4, [1.0]),
        (STEPS, [0.25] * 4, [0.25] * 4),
        (Composition(credit=Steps(most=2)), [0.25, 0.75], [0.25, 0.75]),
    ],
)
def test_a_verdict_says_what_each_turn_or_step_earns(renderer, algorithm, by_turns, by_lines):
    desk = desk_of(renderer, algorithm)
    verdicts = desk.judge(desk.body())
    assert [verdict.outcome for verdict in verdicts] == ["accept"] * 4
    for verdict, group, expected in zip(verdicts, desk.groups, [by_turns, by_lines] * 2, strict=True):
        assert verdict.rewards == (1.0, 0.0, 1.0, 0.0)
        assert [step.reward for step in verdict.steps[0]] == expected
        assert not any(step.reward for step in verdict.steps[1])
        assert not malformed_steps(verdict.steps, verdict.rewards, 16, 160, 1e6)
        for rollout, steps in zip(group.rollouts, verdict.steps, strict=True):
            assert all(rollout.author_T()[step.end] == POLICY for step in steps)
            assert steps[-1].end == len(rollout.author) - 1


def test_other_runs_say_nothing_of_steps(renderer):
    desk = desk_of(renderer, Composition())
    assert all(verdict.steps is msgspec.UNSET for verdict in desk.judge(desk.body()))


@pytest.mark.parametrize("of", ["rollout", "group"])
def test_a_worker_that_says_itself_what_its_turns_earn_is_refused(renderer, of):
    """It shifts reward between turns, with the same total. No field of what it sends can hold that."""
    desk = desk_of(renderer)
    groups = [msgspec.msgpack.decode(to_msgpack(group)) for group in desk.groups]
    place = groups[0]["rollouts"][0] if of == "rollout" else groups[0]
    place["steps"] = [[3, 1.0], [9, 0.0]]
    honest = msgspec.msgpack.decode(desk.body())
    honest["groups"] = [msgspec.msgpack.encode(group) for group in groups]
    first, *others = desk.judge(msgspec.msgpack.encode(honest))
    assert (first.outcome, first.check) == ("hard", "shape") and first.steps is msgspec.UNSET
    assert all(other.outcome == "accept" for other in others)


def test_rewards_of_steps_that_no_verdict_can_say_are_the_environments_fault(renderer):
    desk = desk_of(renderer)
    step = type(desk.envs["turns"]).step

    def boosted(self, state, action):
        """Turns earn and lose millions, which cancel."""
        found = step(self, state, action)
        return found._replace(reward=found.reward + 3e6 * (-1) ** found.state[1])

    desk.envs["turns"].step = boosted.__get__(desk.envs["turns"])
    first = desk.judge(desk.body())[0]
    assert (first.outcome, first.check, first.bound) == ("soft", "reward", 1e6)


def equalled(desk, place=0):
    """The work with a group whose rollouts are all right, by another order of turns: totals are the same."""
    env, group = desk.envs["turns"], desk.groups[place]
    right = env.solution(env.task(group.task))
    rollouts = []
    for wrong in (0, 1, 2, 3):
        turns = [text if turn != wrong else "no" for turn, text in enumerate(right)]
        talk = played(desk, env, group.task, turns)
        rollouts.append(talk.rollout(3))
    return desk.replace(place, rollouts=tuple(rollouts))


def played(desk, env, task, texts):
    renderer = desk.tools.renderer
    talk = Conversation(env, renderer, env.task(task), SAMPLING)
    for text in texts:
        talk.write([*renderer.encode(text), renderer.eos_id])
    for row in talk.rows:
        row.logprobs = [-1.0] * sum(author > 0 for author in row.author)
    return talk


def test_a_group_of_equal_rewards_is_audited_by_what_its_turns_are_worth(renderer):
    desk = desk_of(renderer)
    body = desk.body(equalled(desk))
    for algorithm, audited in ((TURNS, True), (Composition(), False)):
        under(desk, algorithm)
        asked = Check(digest(body), desk.lease, (), 60.0, (0.5,) * 4, 0.05, 1e-3)
        first = verify_submission(body, asked, desk.tools).groups[0]
        assert first.rewards == (0.75,) * 4 and (first.outcome, first.audited) == ("accept", audited)


def test_claims_against_the_turns_do_not_cancel_within_a_rollout(renderer):
    """Claims that are too low where a turn is worth more than usual, and too high where it is worth less."""
    desk = desk_of(renderer)
    desk.groups = equalled(desk)
    verdict = desk.judge(desk.body(), audited=(0,))[0]
    ctx = desk.context()
    signs = ctx.signs_of_tokens(desk.groups[0])
    ends = [step.end for step in verdict.steps[0]]
    assert [len(of) for of in signs] == [rollout.num_policy_tokens() for rollout in desk.groups[0].rollouts]
    assert len(set(signs[0].tolist())) > 1 and len(ends) == 4
    assert verdict.off_weighted == 0.0
    lie = [np.asarray(-1.0 - 0.005 * of, np.float32) for of in signs]
    rollouts = tuple(
        msgspec.structs.replace(rollout, logprobs=claims.astype("<f4").tobytes())
        for rollout, claims in zip(desk.groups[0].rollouts, lie, strict=True)
    )
    found = desk.judge(desk.body(desk.replace(0, rollouts=rollouts)), audited=(0,))[0]
    moved = sum(np.abs(of).sum() for of in signs)
    assert found.off_weighted == pytest.approx(-0.005 * moved, rel=1e-3)
    under(desk, Composition())
    blind = desk.judge(desk.body(desk.replace(0, rollouts=rollouts)), audited=(0,))[0]
    assert blind.off_weighted == 0.0


def test_an_auditor_tells_which_steps_the_log_has_otherwise(renderer):
    desk = desk_of(renderer)
    (own, *_) = desk.judge(desk.body())
    first, *others = own.steps
    moved = (first[0]._replace(reward=0.0), *first[1:-1], first[-1]._replace(reward=0.5))
    booked = msgspec.structs.replace(own, steps=(moved, *others))
    (said,) = differences(booked, own, with_model=True)
    assert said.startswith("steps of rollout 0: the log says 0 to token") and "the environment gives 0.25 to" in said
    assert differences(own, own, with_model=True) == []
    assert len(differences(msgspec.structs.replace(own, steps=msgspec.UNSET), own, with_model=True)) == 4
