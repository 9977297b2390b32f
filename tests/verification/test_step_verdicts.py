"""Verdicts in runs that credit turns or steps: what they say, what it moves, and that workers have no say in it."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from shoal.envs.load import load_env
from shoal.envs.rollout_rules import Conversation
from shoal.protocol.algorithm_config import Algorithm, Composition, Steps, Turns
from shoal.protocol.encoding import digest, to_msgpack
from shoal.protocol.messages import POLICY, Check
from shoal.protocol.reward_rules import malformed_steps
from shoal.verification.verdict_diff import differences
from shoal.verification.verify import verify_submission
from tests.verification.conftest import RULES, SAMPLING, SubmissionCase

SUMS = str(Path(__file__).parents[2] / "examples" / "environments" / "running-sums")
TURNS, STEPS = Composition(credit=Turns()), Composition(credit=Steps())


def case_of(renderer, algorithm: Algorithm = TURNS, **args) -> SubmissionCase:
    envs = {"turns": load_env(SUMS, {"turns": True, **args}), "lines": load_env(SUMS, args)}
    case = SubmissionCase(renderer, envs)
    under(case, algorithm)
    return case


def under(case, algorithm):
    rules = msgspec.structs.replace(RULES, algorithm=algorithm)
    case.tools = dataclasses.replace(case.tools, info=SimpleNamespace(run="run-1", rules=rules))


@pytest.mark.parametrize(
    ("algorithm", "by_turns", "by_lines"),
    [
        (TURNS, [0.25] * 4, [1.0]),
        (STEPS, [0.25] * 4, [0.25] * 4),
        (Composition(credit=Steps(most=2)), [0.25, 0.75], [0.25, 0.75]),
    ],
)
def test_a_verdict_says_what_each_turn_or_step_earns(renderer, algorithm, by_turns, by_lines):
    case = case_of(renderer, algorithm)
    verdicts = case.judge(case.body())
    assert [verdict.outcome for verdict in verdicts] == ["accept"] * 4
    for verdict, group, expected in zip(verdicts, case.groups, [by_turns, by_lines] * 2, strict=True):
        assert verdict.rewards == (1.0, 0.0, 1.0, 0.0)
        assert [step.reward for step in verdict.steps[0]] == expected
        assert not any(step.reward for step in verdict.steps[1])
        assert not malformed_steps(verdict.steps, verdict.rewards, 16, 160, 1e6)
        for rollout, steps in zip(group.rollouts, verdict.steps, strict=True):
            assert all(rollout.author_T()[step.end] == POLICY for step in steps)
            assert steps[-1].end == len(rollout.author) - 1


def test_other_runs_say_nothing_of_steps(renderer):
    case = case_of(renderer, Composition())
    assert all(verdict.steps is msgspec.UNSET for verdict in case.judge(case.body()))


@pytest.mark.parametrize("of", ["rollout", "group"])
def test_a_worker_that_says_itself_what_its_turns_earn_is_refused(renderer, of):
    """It shifts reward between turns, with the same total. No field of what it sends can hold that."""
    case = case_of(renderer)
    groups = [msgspec.msgpack.decode(to_msgpack(group)) for group in case.groups]
    place = groups[0]["rollouts"][0] if of == "rollout" else groups[0]
    place["steps"] = [[3, 1.0], [9, 0.0]]
    honest = msgspec.msgpack.decode(case.body())
    honest["groups"] = [msgspec.msgpack.encode(group) for group in groups]
    first, *others = case.judge(msgspec.msgpack.encode(honest))
    assert (first.outcome, first.check) == ("hard", "shape") and first.steps is msgspec.UNSET
    assert all(other.outcome == "accept" for other in others)


def test_rewards_of_steps_that_no_verdict_can_say_are_the_environments_fault(renderer):
    case = case_of(renderer)
    step = type(case.envs["turns"]).step

    def boosted(self, state, action):
        """Turns earn and lose millions, which cancel."""
        found = step(self, state, action)
        return found._replace(reward=found.reward + 3e6 * (-1) ** found.state[1])

    case.envs["turns"].step = boosted.__get__(case.envs["turns"])
    first = case.judge(case.body())[0]
    assert (first.outcome, first.check, first.bound) == ("soft", "reward", 1e6)


def equalled(case, place=0):
    """The work with a group whose rollouts are all right, by another order of turns: totals are the same."""
    env, group = case.envs["turns"], case.groups[place]
    right = env.solution(env.task(group.task))
    rollouts = []
    for wrong in (0, 1, 2, 3):
        turns = [text if turn != wrong else "no" for turn, text in enumerate(right)]
        talk = played(case, env, group.task, turns)
        rollouts.append(talk.rollout(3))
    return case.replace(place, rollouts=tuple(rollouts))


def played(case, env, task, texts):
    renderer = case.tools.renderer
    talk = Conversation(env, renderer, env.task(task), SAMPLING)
    for text in texts:
        talk.write([*renderer.encode(text), renderer.eos_id])
    for row in talk.rows:
        row.logprobs = [-1.0] * sum(author > 0 for author in row.author)
    return talk


def test_a_group_of_equal_rewards_is_audited_by_what_its_turns_are_worth(renderer):
    case = case_of(renderer)
    body = case.body(equalled(case))
    for algorithm, audited in ((TURNS, True), (Composition(), False)):
        under(case, algorithm)
        asked = Check(digest(body), case.lease, (), 60.0, (0.5,) * 4, 0.05, 1e-3)
        first = verify_submission(body, asked, case.tools).groups[0]
        assert first.rewards == (0.75,) * 4 and (first.outcome, first.audited) == ("accept", audited)


def test_claims_against_the_turns_do_not_cancel_within_a_rollout(renderer):
    """Claims that are too low where a turn is worth more than usual, and too high where it is worth less."""
    case = case_of(renderer)
    case.groups = equalled(case)
    verdict = case.judge(case.body(), audited=(0,))[0]
    ctx = case.context()
    signs = ctx.signs_of_tokens(case.groups[0])
    ends = [step.end for step in verdict.steps[0]]
    assert [len(of) for of in signs] == [rollout.num_policy_tokens() for rollout in case.groups[0].rollouts]
    assert len(set(signs[0].tolist())) > 1 and len(ends) == 4
    assert verdict.off_weighted == 0.0
    lie = [np.asarray(-1.0 - 0.005 * of, np.float32) for of in signs]
    rollouts = tuple(
        msgspec.structs.replace(rollout, logprobs=claims.astype("<f4").tobytes())
        for rollout, claims in zip(case.groups[0].rollouts, lie, strict=True)
    )
    found = case.judge(case.body(case.replace(0, rollouts=rollouts)), audited=(0,))[0]
    moved = sum(np.abs(of).sum() for of in signs)
    assert found.off_weighted == pytest.approx(-0.005 * moved, rel=1e-3)
    under(case, Composition())
    blind = case.judge(case.body(case.replace(0, rollouts=rollouts)), audited=(0,))[0]
    assert blind.off_weighted == 0.0


def test_an_auditor_tells_which_steps_the_log_has_otherwise(renderer):
    case = case_of(renderer)
    (own, *_) = case.judge(case.body())
    first, *others = own.steps
    moved = (first[0]._replace(reward=0.0), *first[1:-1], first[-1]._replace(reward=0.5))
    booked = msgspec.structs.replace(own, steps=(moved, *others))
    (said,) = differences(booked, own, with_model=True)
    assert said.startswith("steps of rollout 0: the log says 0 to token") and "the environment gives 0.25 to" in said
    assert differences(own, own, with_model=True) == []
    assert len(differences(msgspec.structs.replace(own, steps=msgspec.UNSET), own, with_model=True)) == 4
