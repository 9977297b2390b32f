"""A run whose environment scores all rollouts alike: it pauses, says why, shows two rollouts, and can be ended."""

import asyncio
import re

import pytest

from shoal.errors import StateError
from shoal.ledger.commands import Admin
from shoal.ledger.status import awaited
from shoal.protocol.messages import AdminRequest
from shoal.roles.coordinator.status import StatusCache
from shoal.runs.rollout_samples import NewestSample, flat_samples, why_flat
from tests.roles.testbed import RunTestbed, tiny_run

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


async def once_paused(testbed, look):
    """Live, look at the run once it has paused, and drain it."""

    async def host():
        while not StatusCache(testbed.coordinator).status().pause_cause:
            await asyncio.sleep(0.05)
        await look()
        await testbed.coordinator.log_writer.submit(Admin("drain", AdminRequest(), testbed.coordinator.clock()))

    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        group.create_task(host())
        await testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("worker"))


def test_a_run_without_signal_says_so_waits_and_can_be_drained(tmp_path):
    (tmp_path / "half.py").write_text(ALWAYS_HALF)
    rollouts = {"max_flat_groups": 10}
    testbed = RunTestbed(tmp_path / "run", tiny_run(envs=[{"name": str(tmp_path / "half.py")}], rollouts=rollouts))
    heard, samples, waited, talks = [], [], [], []

    async def look():
        accepted = testbed.coordinator.state.accepted_groups
        await asyncio.sleep(1.0)  # what is in hand is still judged, and nothing more is leased
        heard.append(StatusCache(testbed.coordinator).status())
        waited.append(testbed.coordinator.state.accepted_groups - accepted)
        samples.extend(flat_samples(testbed.folder))
        watched = NewestSample(testbed.folder, own_files=True)
        talks.extend((watched.read(), watched.read(), NewestSample(testbed.folder).read()))

    asyncio.run(once_paused(testbed, look))
    status, state = heard[0], testbed.coordinator.state
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
    assert testbed.audit().findings == []


def test_samples_of_rollouts_that_were_deleted_are_refused_in_words(tmp_path):
    (tmp_path / "half.py").write_text(ALWAYS_HALF)
    config = tiny_run(envs=[{"name": str(tmp_path / "half.py")}], rollouts={"max_flat_groups": 4})
    testbed = RunTestbed(tmp_path / "run", config)

    async def look():
        assert "have no signal" in awaited(testbed.coordinator.state)[0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(testbed.coordinator.state, "pause_cause", "alarm: collapse")
            assert "alarm: collapse paused the run" in awaited(testbed.coordinator.state)[0], (
                "what paused it comes first"
            )
        for name, submission in testbed.coordinator.state.submissions.items():
            if submission.decided:
                testbed.coordinator.blobs.delete(name)
        with pytest.raises(StateError, match="is not kept any more"):
            flat_samples(testbed.folder)

    asyncio.run(once_paused(testbed, look))


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
    testbed = RunTestbed(tmp_path / "run", tiny_run(envs=[env], rollouts={"max_flat_groups": 4}, sampling=sampling))

    asyncio.run(once_paused(testbed, lambda: asyncio.sleep(0)))
    assert re.match(named, why_flat(testbed.folder))
