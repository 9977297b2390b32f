"""Runs that credit turns or steps: the real roles over an in-memory network."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from shoal.ledger.batches import GroupAccepted
from shoal.ledger.status import batch_of
from shoal.ledger.verdicts import VerdictGiven
from shoal.protocol import messages as t
from shoal.protocol.encoding import from_msgpack
from shoal.roles.auditor.rejudge_groups import GroupChoice, examine
from shoal.runs.run_reader import open_run
from tests.roles.forgery import forged
from tests.roles.testbed import RunTestbed, tiny_run, weights_of_one_file

EVEN = """
from shoal.env import Env, Step


class Even(Env):
    name = "even"
    num_tasks = 64

    def task(self, index):
        return index

    def reset(self, task):
        return 0, [{"role": "user", "content": str(task)}]

    def step(self, turns, action):
        right = len(action) % 2 == 0
        return Step(turns + 1, None if turns else "+", turns == 1, reward=right / 2)

    def score(self, turns):
        return 0.0

    def success(self, turns):
        return False

    def players(self):
        return {"right": lambda turns, rng: "ab"}


environment = Even
"""
"""Each of two turns earns half where its text has an even number of characters: so every group has a signal."""
SUMS = str(Path(__file__).parents[2] / "examples" / "environments" / "running-sums" / "environment.py")
TURNS = {"algorithm": {"name": "composition", "credit": {"name": "turns"}}}
STEPS = {"algorithm": {"name": "composition", "credit": {"name": "steps", "most": 3}}}
CRITIC = {"algorithm": {"name": "ppo", "advantage": "gae", "credit": {"name": "turns"}}, "critic": {"lr": 1e-3}}


def credit_run(tmp_path, train=TURNS, turns=True, **changes):
    """A run that credits each of two turns, or the lines of running sums."""
    if turns:
        place = tmp_path / "even.py"
        place.write_text(EVEN)
        env = {"name": str(place)}
    else:
        env = {"name": SUMS, "args": {"sums": 2}}
    sampling = {"max_turn_tokens": 3 if turns else 12, "max_tokens": 64}
    return tiny_run(
        **{"steps": 2, "envs": [env], "sampling": sampling, "train": train, "storage": {"retain": "all"}} | changes
    )


def lived(tmp_path, config, workers=2):
    testbed = RunTestbed(tmp_path / "run", config)
    asyncio.run(
        testbed.live(testbed.trainer(), testbed.validator(), *(testbed.worker(f"worker-{i}") for i in range(workers)))
    )
    return testbed


def accepted(testbed):
    return [entry.body for entry in testbed.audit().entries if isinstance(entry.body, GroupAccepted)]


@pytest.mark.parametrize(
    ("train", "turns"),
    [(TURNS, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((STEPS, False), (CRITIC, True)))],
)
def test_a_run_that_credits_turns_or_steps_has_the_bytes_of_one_file(tmp_path, train, turns):
    config = credit_run(tmp_path, train, turns)
    testbed = lived(tmp_path, config)
    assert testbed.weights() == weights_of_one_file(config, tmp_path / "one")
    plain = credit_run(tmp_path, {"algorithm": {"name": "composition"}}, turns)
    assert testbed.weights() != weights_of_one_file(plain, tmp_path / "plain"), "the credit changes what is learned"
    assert testbed.audit().findings == []
    assert all(len(one.steps) == 8 and all(one.steps) for one in accepted(testbed))
    assert max(len(steps) for one in accepted(testbed) for steps in one.steps) in (2, 3)
    for member in batch_of(testbed.coordinator.state, 0).groups:
        body = from_msgpack(testbed.coordinator.blobs.get(member.submission), t.Submission).groups[member.index]
        rollouts = from_msgpack(body, t.Group).rollouts
        assert [steps[-1].end for steps in member.steps] == [len(rollout.author) - 1 for rollout in rollouts]
    with open_run(testbed.folder.root) as run:
        run.catch_up()
        read = run.group(run.place_of(member.version, member.slot))
    assert {rollout.advantage is not None for rollout in read.rollouts} == {train is not CRITIC}


def moved(group):
    if not group.steps:
        return group
    steps = tuple(
        (one[0]._replace(reward=reward), *(step._replace(reward=0.0) for step in one[1:])) if len(one) > 1 else one
        for one, reward in zip(group.steps, group.rewards, strict=True)
    )
    return msgspec.structs.replace(group, steps=steps)


def shifted(lines):
    """The log of a host whose validator moved reward between turns."""
    return [
        (time, msgspec.structs.replace(body, groups=tuple(map(moved, body.groups))))
        if isinstance(body, VerdictGiven)
        else (time, msgspec.structs.replace(body, steps=moved(body).steps))
        if isinstance(body, GroupAccepted)
        else (time, body)
        for time, body in lines
    ]


def test_an_auditor_finds_reward_that_was_moved_between_turns(tmp_path):
    testbed = lived(tmp_path, credit_run(tmp_path, steps=1), workers=1)
    assert any(moved(one).steps != one.steps for one in accepted(testbed))
    found = asyncio.run(examine(str(testbed.folder.root), GroupChoice(), 1, own_files=True))
    assert found.disagreements == [] and found.groups
    place = forged(testbed.folder.root, tmp_path / "moved", shifted)
    said = asyncio.run(examine(str(place), GroupChoice(), 1, own_files=True)).disagreements
    assert any("steps of rollout" in line for line in said), said
