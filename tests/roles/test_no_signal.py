"""A run whose environment scores all rollouts alike: it pauses, says why, shows two rollouts, and can be ended."""

import asyncio
import logging
import re

import pytest

from shoal.errors import StateError
from shoal.ledger.commands import Admin
from shoal.ledger.hints import IN_A_NEW_RUN
from shoal.ledger.status import waiting_for
from shoal.protocol.rollout_validation import ROOM_REMEDY
from shoal.roles.coordinator.status import StatusBoard
from shoal.runs.conversation import NewestSample, flat_samples, why_flat
from tests.roles.in_memory_run import Town, tiny_run

ALWAYS_HALF = """
from shoal.envs.builtin.arithmetic import Arithmetic, environment as sums

class AlwaysHalf(Arithmetic):
    def score(self, state):
        return 0.5

def environment(**args):
    made = sums(**args)
    made.__class__ = AlwaysHalf
    return made
"""


def test_a_run_without_signal_says_so_waits_and_can_be_drained(tmp_path):
    (tmp_path / "half.py").write_text(ALWAYS_HALF)
    rollouts = {"max_flat_groups": 10}
    town = Town(tmp_path / "run", tiny_run(envs=[{"name": str(tmp_path / "half.py")}], rollouts=rollouts))
    heard, samples, waited, talks = [], [], [], []

    async def host():
        while not StatusBoard(town.desk).status().pause_cause:
            await asyncio.sleep(0.05)
        accepted = town.desk.state.accepted_groups
        await asyncio.sleep(1.0)  # what is in hand is still judged, and nothing more is leased
        heard.append(StatusBoard(town.desk).status())
        waited.append(town.desk.state.accepted_groups - accepted)
        samples.extend(flat_samples(town.folder))
        watched = NewestSample(town.folder, own_files=True)
        talks.extend((watched.read(), watched.read(), NewestSample(town.folder).read()))
        await town.desk.book.submit(Admin("drain", "", town.desk.clock()))

    async def story():
        async with asyncio.TaskGroup() as group:
            group.create_task(host())
            await town.live(town.trainer(), town.validator(), town.worker("worker"))

    asyncio.run(story())
    status, state = heard[0], town.desk.state
    assert status.phase == "paused" and status.flat_groups >= 10 and status.flat_reward == 0.5
    assert status.waiting_for.startswith(f"the host: the last {status.flat_groups} groups have no signal: within each")
    assert "all rewards are equal, 0.5 on average" in status.waiting_for
    assert waited[0] <= 2 * 2, "two leases of a block of two groups were in hand"
    assert len(samples) == 2 and all("reward 0.50" in sample and "policy |" in sample for sample in samples)
    newest, again, from_outside = talks
    assert "its host's file, which a watcher does not run" in from_outside.title
    assert [who for who, _ in from_outside.turns][:2] == ["environment", "policy"]
    assert "reward 0.50" in newest.title and "policy" in dict(newest.turns) and again is None, "nothing new came"
    assert state.phase == "ended" and state.main.version == 0
    assert [node.accepted for node in state.members.values() if node.role == "worker"] == [state.accepted_groups]
    assert state.issued == sum(node.credits for node in state.members.values()) > 0
    assert town.audit().findings == []


def test_samples_of_rollouts_that_were_deleted_are_refused_in_words(tmp_path):
    (tmp_path / "half.py").write_text(ALWAYS_HALF)
    config = tiny_run(envs=[{"name": str(tmp_path / "half.py")}], rollouts={"max_flat_groups": 4})
    town = Town(tmp_path / "run", config)

    async def host():
        while not StatusBoard(town.desk).status().pause_cause:
            await asyncio.sleep(0.05)
        assert "have no signal" in waiting_for(town.desk.state)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(town.desk.state, "pause_cause", "alarm: collapse")
            assert "alarm: collapse paused the run" in waiting_for(town.desk.state), "what paused it comes first"
        for name, submission in town.desk.state.submissions.items():
            if submission.decided:
                town.desk.blobs.delete(name)
        with pytest.raises(StateError, match="is not kept any more"):
            flat_samples(town.folder)
        await town.desk.book.submit(Admin("drain", "", town.desk.clock()))

    async def story():
        async with asyncio.TaskGroup() as group:
            group.create_task(host())
            await town.live(town.trainer(), town.validator(), town.worker("worker"))

    asyncio.run(story())


FAILS = ALWAYS_HALF.replace("return 0.5", 'raise ValueError("judge not configured")')
CUT = r"A token limit ended \d+ of the"
FAILED = r"Errors of the environment ended (\d+) of the \1 .*logs/worker\*\.log"


@pytest.mark.parametrize(
    ("source", "settings", "sampling", "named"),
    [
        (ALWAYS_HALF, {}, {"max_turn_tokens": 1}, f"{CUT}.*: raise sampling.max_turn_tokens = 1 "),
        (ALWAYS_HALF, {"max_turn_tokens": 1}, {}, f"{CUT}.*: raise envs.max_turn_tokens = 1 "),
        (ALWAYS_HALF, {"max_turn_tokens": 1, "solved": 0.5}, {}, "$"),
        (FAILS, {"on_fault": "lowest"}, {}, FAILED),
    ],
)
def test_what_ended_most_rollouts_without_signal_is_named(tmp_path, source, settings, sampling, named):
    (tmp_path / "half.py").write_text(source)
    env = {"name": str(tmp_path / "half.py"), **settings}
    town = Town(tmp_path / "run", tiny_run(envs=[env], rollouts={"max_flat_groups": 4}, sampling=sampling))

    async def host():
        while not StatusBoard(town.desk).status().pause_cause:
            await asyncio.sleep(0.05)
        await town.desk.book.submit(Admin("drain", "", town.desk.clock()))

    async def story():
        async with asyncio.TaskGroup() as group:
            group.create_task(host())
            await town.live(town.trainer(), town.validator(), town.worker("worker"))

    asyncio.run(asyncio.wait_for(story(), 120))
    assert re.match(named, why_flat(town.folder))


LONG = """
from shoal.envs.builtin.arithmetic import Arithmetic, environment as sums


class Long(Arithmetic):
    def reset(self, task):
        state, messages = super().reset(task)
        return state, [{"role": "user", "content": messages[0]["content"] * 40}]


def environment(**args):
    made = sums(**args)
    made.__class__ = Long
    return made
"""


def test_a_run_whose_prompts_leave_no_room_pauses_and_names_length_and_key(tmp_path, caplog):
    (tmp_path / "long.py").write_text(LONG)
    rollouts = {"max_flat_groups": 10}
    town = Town(tmp_path / "run", tiny_run(envs=[{"name": str(tmp_path / "long.py")}], rollouts=rollouts))
    heard = []

    async def host():
        while not StatusBoard(town.desk).status().pause_cause:
            await asyncio.sleep(0.05)
        heard.append(StatusBoard(town.desk).status())
        await town.desk.book.submit(Admin("drain", "", town.desk.clock()))

    async def story():
        async with asyncio.TaskGroup() as group:
            group.create_task(host())
            await town.live(town.trainer(), town.validator(), town.worker("worker"))

    with caplog.at_level("WARNING"):
        asyncio.run(asyncio.wait_for(story(), 120))
    status = heard[0]
    assert status.phase == "paused" and status.flat_groups >= 10 and status.accepted == 0
    assert re.search(
        r"the tasks of \d+ of them can never begin; the last: task \d+ of long cannot begin: its prompt takes \d+ tokens, "
        r"and sampling\.max_tokens = \d+ leaves no room for a turn",
        status.waiting_for,
    )
    assert status.waiting_for.endswith(f"{ROOM_REMEDY}{IN_A_NEW_RUN}") and "resume" not in status.waiting_for
    said = [line for line in map(logging.LogRecord.getMessage, caplog.records) if "cannot begin" in line]
    assert len(said) == len(set(said)) and any(line.startswith("void slot: environment: task") for line in said)
    assert any(line.startswith("task cannot begin env=") for line in said)
