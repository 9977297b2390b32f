"""Whole runs with three validators, one of them bad: nobody honest is slashed, nothing is lost, all is decided once."""

import asyncio
import shutil
import time
from functools import partial

import msgspec
import pytest

from shoal.engine.native import LocalEngine
from shoal.ledger.constants import LAW, Law, law_difference
from shoal.ledger.errors import Refused
from shoal.ledger.members import ValidatorFault
from shoal.ledger.pay import Slash
from shoal.ledger.validator_turns import absent, silent
from shoal.ledger.verdicts import VerdictGiven
from shoal.protocol import messages as t
from shoal.roles.coordinator.status import StatusCache
from shoal.roles.coordinator.verdict_uploads import _why_skipped, next_check, take_verdict
from shoal.roles.node.lifecycle import Node
from shoal.roles.validator import Validator
from shoal.run_folder import RunFolder
from tests.attacks.validators import Hangman, Idler
from tests.roles.testbed import RunTestbed, tiny_run, weights_of_one_file

HURRIED = Law(turn_s=0.5, recheck_rate=1.0)
"""Short turns and a recheck of every submission, so that a short run has what else only a long one has."""
OPENLY_HURRIED = [law_difference(HURRIED)]
"""What is found in such a run, and nothing else: constants of its own."""


def testbed_of_three(path, law=LAW):
    return RunTestbed(path / "run", tiny_run(validators={"count": 3}), law=law)


def validator(testbed, number, kind=Validator):
    home = testbed.folder.nodes / f"validator-{number}"
    client = testbed.client(testbed.folder.keys / f"validator-{number}.key")
    return kind(Node(client, client.key.public, testbed.options(home), partial(LocalEngine, 1)))


def key_of(testbed, number):
    return testbed.client(testbed.folder.keys / f"validator-{number}.key").key.public


def slashed(audit):
    return {entry.body.node for entry in audit.entries if isinstance(entry.body, Slash)}


def faults(audit):
    return {entry.body.validator for entry in audit.entries if isinstance(entry.body, ValidatorFault)}


def test_a_validator_that_refuses_everything_slashes_nobody_and_changes_no_byte(tmp_path):
    testbed = testbed_of_three(tmp_path, HURRIED)
    honest = testbed.worker("honest")
    judges = [validator(testbed, 0, Hangman), validator(testbed, 1), validator(testbed, 2)]
    asyncio.run(testbed.live(testbed.trainer(), honest, *judges))
    audit = testbed.audit()
    assert audit.findings == OPENLY_HURRIED and slashed(audit) == set()
    assert testbed.weights() == weights_of_one_file(tiny_run(), tmp_path / "one")
    node = audit.state.members[honest.key]
    assert node.credits > 0 and node.refused == node.failures == 0
    assert faults(audit) <= {key_of(testbed, 0)} and all(audit.decided[name] == 1 for name in audit.received)


def test_a_forger_is_slashed_by_two_honest_validators_and_the_idle_one_is_named(tmp_path):
    testbed = testbed_of_three(tmp_path, HURRIED)
    honest, forger = testbed.worker("honest"), testbed.worker("forger", "other-seed")
    judges = [validator(testbed, 0, Idler), validator(testbed, 1), validator(testbed, 2)]
    asyncio.run(testbed.live(testbed.trainer(), honest, forger, *judges))
    audit = testbed.audit()
    assert audit.findings == OPENLY_HURRIED and slashed(audit) == {forger.key} and faults(audit) == {key_of(testbed, 0)}
    assert audit.state.members[forger.key].credits == 0 and audit.state.members[honest.key].credits > 0
    assert all(audit.decided[name] == 1 for name in audit.received)


@pytest.fixture(scope="module")
def waiting(tmp_path_factory):
    """The folder of a run in which a submission waits for the first two validators, and the time."""
    testbed = testbed_of_three(tmp_path_factory.mktemp("waiting"), HURRIED)

    async def scenario():
        for number in (0, 1):
            await validator(testbed, number).join()
        work = asyncio.create_task(testbed.live(testbed.trainer(), testbed.worker("honest")))
        while not testbed.coordinator.state.pending:
            assert not work.done(), work.exception()
            await asyncio.sleep(0.05)
        while not work.done():
            work.cancel()  # again: `wait_for` may swallow a cancellation if what it waits for ends at that moment
            await asyncio.wait([work], timeout=1.0)

    asyncio.run(scenario())
    return testbed.folder.root, time.time()


@pytest.fixture
def testbed(waiting, tmp_path):
    """The run, in a folder of its own."""
    root, now = waiting
    shutil.copytree(root, tmp_path / "run")
    return RunTestbed(tmp_path / "run", RunFolder(root).config(), clock=lambda: now)


def asked(testbed):
    """A check, the validator whose turn it is, and another."""
    keys = key_of(testbed, 0), key_of(testbed, 1)
    check = next(check for key in keys if (check := next_check(testbed.coordinator, key)))
    first, second = sorted(keys, key=lambda key: key != check.project_for[0])
    return check, first, second


def all_accepted(check, projections):
    slots = [slot.slot for block in check.lease.blocks for slot in block.slots]
    groups = tuple(t.GroupVerdict(slot, True, "accept", rewards=(0.0,) * 8, tokens=1) for slot in slots)
    return t.Verdict(check.id, groups, projections)


def test_a_verdict_that_was_overtaken_is_asked_for_again_and_accuses_nobody(testbed):

    async def scenario():
        check, first, second = asked(testbed)
        shown = dict.fromkeys((first, second), (0.1, 0.2, 0.3, 0.4))
        await take_verdict(testbed.coordinator, first, all_accepted(check, shown))
        testbed.coordinator.clock = lambda: check.deadline + 1000.0
        before = testbed.coordinator.blobs.size_bytes
        with pytest.raises(Refused, match="lacks a projection for each validator that has judged by now"):
            await take_verdict(testbed.coordinator, second, all_accepted(check, {second: shown[second]}))
        assert testbed.coordinator.blobs.size_bytes == before
        await take_verdict(testbed.coordinator, second, all_accepted(check, shown))

    asyncio.run(scenario())
    audit = testbed.audit()
    voices = [entry.body for entry in audit.entries if isinstance(entry.body, VerdictGiven)]
    assert len(voices) == 2 and all(voice.differs_from == () for voice in voices) and faults(audit) == set()


@pytest.mark.parametrize("same_slots", [True, False], ids=["the same slots", "other slots"])
def test_a_verdict_with_other_activations_is_accused_but_not_one_that_audits_other_slots(testbed, same_slots):

    async def scenario():
        check, first, second = asked(testbed)
        await take_verdict(testbed.coordinator, first, all_accepted(check, {first: (0.1, 0.2, 0.3, 0.4)}))
        testbed.coordinator.clock = lambda: check.deadline + 1000.0
        verdict = all_accepted(check, {first: (0.4, 0.3, 0.2, 0.1), second: (0.1, 0.2, 0.3, 0.4)})
        if not same_slots:
            one, *others = verdict.groups
            refused = t.GroupVerdict(one.slot, False, "hard", "prompt", "prompt is not the task's")
            verdict = t.Verdict(verdict.submission, (refused, *others), verdict.projections)
        await take_verdict(testbed.coordinator, second, verdict)
        return first

    first = asyncio.run(scenario())
    *_, last = [entry.body for entry in testbed.audit().entries if isinstance(entry.body, VerdictGiven)]
    assert last.differs_from == ((first,) if same_slots else ())


def test_projections_are_private_until_all_have_judged(testbed):
    """A validator that could read an earlier one's projections could copy them."""

    async def scenario():
        check, first, second = asked(testbed)
        shown = dict.fromkeys((first, second), (0.1, 0.2, 0.3, 0.4))
        await take_verdict(testbed.coordinator, first, all_accepted(check, shown))
        blob = testbed.coordinator.state.submissions[check.id].projections[first]
        assert not any(
            testbed.coordinator.kept.may_read(blob, key) for key in ("", second, testbed.coordinator.state.trainer_key)
        )
        testbed.coordinator.clock = lambda: check.deadline + 1000.0
        await take_verdict(testbed.coordinator, second, all_accepted(check, shown))
        assert testbed.coordinator.kept.may_read(blob, "")

    asyncio.run(scenario())


def test_nothing_is_kept_of_projections_that_nobody_asked_for(testbed):

    async def scenario():
        check, first, other = asked(testbed)
        testbed.coordinator.clock = lambda: check.deadline + 1000.0
        values = (0.1, 0.2, 0.3, 0.4)
        more = {f"{i:064x}": values for i in range(2000)}
        before = testbed.coordinator.blobs.size_bytes
        await take_verdict(testbed.coordinator, first, all_accepted(check, {first: values} | more))
        kept = testbed.coordinator.blobs.size_bytes
        assert kept - before < 200
        await take_verdict(
            testbed.coordinator, first, all_accepted(check, {first: (0.4, 0.3, 0.2, 0.1)})
        )  # a second time
        with pytest.raises(Refused, match="has not joined as a validator"):
            await take_verdict(testbed.coordinator, key_of(testbed, 2), all_accepted(check, more))
        assert (
            testbed.coordinator.blobs.size_bytes == kept
            and other not in testbed.coordinator.state.submissions[check.id].verdicts
        )

    asyncio.run(scenario())


def test_nothing_is_kept_of_projections_whose_verdict_is_refused(testbed):
    """A validator that sends other numbers each time must not fill the disk."""

    async def scenario():
        check, first, _ = asked(testbed)
        before = testbed.coordinator.blobs.size_bytes
        verdict = all_accepted(check, {first: (0.1, 0.2, 0.3, 0.4)})
        rich = tuple(msgspec.structs.replace(group, rewards=(1e9,) * 8) for group in verdict.groups)
        with pytest.raises(Refused, match="rewards of size"):
            await take_verdict(testbed.coordinator, first, msgspec.structs.replace(verdict, groups=rich))
        assert testbed.coordinator.blobs.size_bytes == before

    asyncio.run(scenario())


def test_a_suspended_validator_is_told_so_and_gets_no_more_submissions(testbed):
    testbed.coordinator.state.members[key_of(testbed, 0)].standing = "suspended"
    with pytest.raises(Refused, match="gets no more submissions"):
        next_check(testbed.coordinator, key_of(testbed, 0))


def test_what_was_sent_while_a_hosts_clock_was_ahead_is_judged_after_it_was_set_back(testbed):
    (check, *_), true = asked(testbed), testbed.coordinator.clock
    testbed.coordinator.clock = lambda: true() - 3600.0
    assert asked(testbed)[0].id == check.id


def test_a_validator_that_fell_silent_is_named_once_a_lease_could_have_been_filled(testbed):
    status_cache, began = StatusCache(testbed.coordinator), testbed.coordinator.clock()
    for minutes, left, says in [(0.06, False, ""), (3, False, " silent for "), (3, True, " left")]:
        testbed.coordinator.clock = lambda minutes=minutes: began + 60.0 * minutes
        for number in (0, 1):
            testbed.coordinator.state.members[key_of(testbed, number)].left = left
        waits, remedy = status_cache.status().waiting_for, status_cache.status().remedy
        assert waits.startswith("validators: validator-") and ("admit another" in remedy) == bool(says), waits
        assert says in waits[:80], "what is cropped is not the name"
        silent = [round(node.silent_s) for node in status_cache.nodes() if node.role == "validator" and node.silent_s]
        assert silent == ([60 * minutes] * 2 if "silent" in says else [])
        testbed.coordinator.state.phase, before = "paused", testbed.coordinator.state.phase
        assert "validator" not in status_cache.status().waiting_for, "the wait has another cause"
        testbed.coordinator.state.phase = before
    assert "silent" not in StatusCache(testbed.coordinator).status().waiting_for, "the host has only just started"


def test_a_validator_that_is_skipped_is_named_while_verdicts_are_waited_for(testbed):
    state, absent_key = testbed.coordinator.state, key_of(testbed, 0)
    turns = state.members[absent_key].turns
    turns.missed = turns.counted = LAW.missed_turns
    turns.counts_until = testbed.coordinator.clock() + 60.0
    assert (
        f"is not waited for: validator-0 ({absent_key[:12]})" in StatusCache(testbed.coordinator).status().waiting_for
    )
    state.phase = "paused"
    assert "validator-0" not in StatusCache(testbed.coordinator).status().waiting_for, "the host waits for itself"
    assert _why_skipped(state, absent_key) == "missed_turns=2"
    state.members[absent_key].standing, state.members[absent_key].last_reason = "suspended", "other activations"
    assert _why_skipped(state, absent_key) == "standing=suspended reason='other activations'"


def test_a_run_with_a_validator_that_joined_and_left_waits_for_it_twice_and_no_more(tmp_path):
    law = Law(turn_s=2.0)
    testbed = RunTestbed(tmp_path / "run", tiny_run(validators={"count": 2}, steps=4), law=law)
    gone = validator(testbed, 0)
    asyncio.run(gone.join())
    asyncio.run(testbed.live(testbed.trainer(), testbed.worker("honest"), validator(testbed, 1)))
    audit = testbed.audit()
    waits = [
        entry.time - audit.state.submissions[entry.body.submission].time
        for entry in audit.entries
        if isinstance(entry.body, VerdictGiven)
    ]
    assert audit.findings == [law_difference(law)] and silent(audit.state, testbed.coordinator.clock()) == {
        key_of(testbed, 0)
    }
    assert sum(wait >= law.turn_s for wait in waits) <= 2 * law.missed_turns < len(waits)
    skipped = absent(audit.state, testbed.coordinator.clock())
    assert f"is not waited for: validator-0 ({key_of(testbed, 0)[:12]})" in skipped
    assert StatusCache(testbed.coordinator).status().waiting_for == "nothing: the run has ended"
