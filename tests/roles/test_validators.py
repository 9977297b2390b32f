"""Whole runs with three validators, one of them bad: nobody honest is slashed, nothing is lost, all is decided once."""

import asyncio
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
from shoal.roles.coordinator.status import StatusBoard
from shoal.roles.coordinator.verdicts import _why_skipped, next_check, take_verdict
from shoal.roles.node.node import Node
from shoal.roles.validator import Validator
from tests.attacks.validators import Hangman, Idler
from tests.roles.in_memory_run import Town, tiny_run

HURRIED = Law(turn_s=0.5, recheck_rate=1.0)
"""Short turns and a recheck of every submission, so that a short run has what else only a long one has."""
OPENLY_HURRIED = [law_difference(HURRIED)]
"""What is found in such a run, and nothing else: constants of its own."""


def town_of_three(path, law=LAW):
    return Town(path / "run", tiny_run(validators={"count": 3}), law=law)


def validator(town, number, kind=Validator):
    home = town.folder.nodes / f"validator-{number}"
    client = town.client(town.folder.keys / f"validator-{number}.key")
    return kind(Node(client, client.key.public, town.options(home), partial(LocalEngine, 1)))


def key_of(town, number):
    return town.client(town.folder.keys / f"validator-{number}.key").key.public


def slashed(audit):
    return {entry.body.node for entry in audit.entries if isinstance(entry.body, Slash)}


def faults(audit):
    return {entry.body.validator for entry in audit.entries if isinstance(entry.body, ValidatorFault)}


def test_a_validator_that_refuses_everything_slashes_nobody_and_changes_no_byte(tmp_path):
    alone = Town(tmp_path / "alone", tiny_run(), law=HURRIED)
    asyncio.run(alone.live(alone.trainer(), alone.validator(), alone.worker("honest")))
    town = town_of_three(tmp_path, HURRIED)
    honest = town.worker("honest")
    judges = [validator(town, 0, Hangman), validator(town, 1), validator(town, 2)]
    asyncio.run(town.live(town.trainer(), honest, *judges))
    audit = town.audit()
    assert audit.findings == OPENLY_HURRIED and slashed(audit) == set() and town.weights() == alone.weights()
    node = audit.state.members[honest.key]
    assert node.credits > 0 and node.refused == node.failures == 0
    assert faults(audit) <= {key_of(town, 0)} and all(audit.decided[name] == 1 for name in audit.received)


def test_a_forger_is_slashed_by_two_honest_validators_and_the_idle_one_is_named(tmp_path):
    town = town_of_three(tmp_path, HURRIED)
    honest, forger = town.worker("honest"), town.worker("forger", "other-seed")
    judges = [validator(town, 0, Idler), validator(town, 1), validator(town, 2)]
    asyncio.run(town.live(town.trainer(), honest, forger, *judges))
    audit = town.audit()
    assert audit.findings == OPENLY_HURRIED and slashed(audit) == {forger.key} and faults(audit) == {key_of(town, 0)}
    assert audit.state.members[forger.key].credits == 0 and audit.state.members[honest.key].credits > 0
    assert all(audit.decided[name] == 1 for name in audit.received)


def test_a_validator_that_dies_leaves_its_submissions_to_the_next(tmp_path):
    town = town_of_three(tmp_path, HURRIED)
    dying, honest = validator(town, 0), town.worker("honest")

    async def story():
        death = asyncio.create_task(dying.run())
        work = asyncio.create_task(town.live(town.trainer(), honest, validator(town, 1), validator(town, 2)))
        while not town.desk.state.accepted_groups:
            await asyncio.sleep(0.05)
        death.cancel()
        await work

    asyncio.run(story())
    audit = town.audit()
    assert audit.findings == OPENLY_HURRIED and slashed(audit) == set() and audit.state.members[honest.key].refused == 0
    assert all(audit.decided[name] == 1 for name in audit.received)


async def until_submitted(town, *roles):
    """Let roles work until a submission waits for validators; returns its check for the first of two that joined."""
    for number in (0, 1):
        await validator(town, number).join()
    work = asyncio.create_task(town.live(*roles))
    while not town.desk.state.pending:
        assert not work.done(), work.exception()
        await asyncio.sleep(0.05)
    while not work.done():
        work.cancel()  # again: `wait_for` may swallow a cancellation if what it waits for ends at that moment
        await asyncio.wait([work], timeout=1.0)
    (check,) = [found for number in (0, 1) if (found := next_check(town.desk, key_of(town, number)))][:1]
    return check


async def asked(town):
    """A check, the validator whose turn it is, and another."""
    check = await until_submitted(town, town.trainer(), town.worker("honest"))
    first, second = sorted((key_of(town, 0), key_of(town, 1)), key=lambda key: key != check.project_for[0])
    return check, first, second


def all_accepted(check, projections):
    slots = [slot.slot for block in check.lease.blocks for slot in block.slots]
    groups = tuple(t.GroupVerdict(slot, True, "accept", rewards=(0.0,) * 8, tokens=1) for slot in slots)
    return t.Verdict(check.id, groups, projections)


def test_a_verdict_that_was_overtaken_is_asked_for_again_and_accuses_nobody(tmp_path):
    town = town_of_three(tmp_path, HURRIED)

    async def story():
        check, first, second = await asked(town)
        shown = dict.fromkeys((first, second), (0.1, 0.2, 0.3, 0.4))
        await take_verdict(town.desk, first, all_accepted(check, shown))
        town.desk.clock = lambda: check.deadline + 1000.0
        before = town.desk.blobs.size_bytes
        with pytest.raises(Refused, match="lacks a projection for each validator that has judged by now"):
            await take_verdict(town.desk, second, all_accepted(check, {second: shown[second]}))
        assert town.desk.blobs.size_bytes == before
        await take_verdict(town.desk, second, all_accepted(check, shown))

    asyncio.run(story())
    audit = town.audit()
    voices = [entry.body for entry in audit.entries if isinstance(entry.body, VerdictGiven)]
    assert len(voices) == 2 and all(voice.differs_from == () for voice in voices) and faults(audit) == set()


@pytest.mark.parametrize("same_slots", [True, False], ids=["the same slots", "other slots"])
def test_a_verdict_with_other_activations_is_accused_but_not_one_that_audits_other_slots(tmp_path, same_slots):
    town = town_of_three(tmp_path, HURRIED)

    async def story():
        check, first, second = await asked(town)
        await take_verdict(town.desk, first, all_accepted(check, {first: (0.1, 0.2, 0.3, 0.4)}))
        town.desk.clock = lambda: check.deadline + 1000.0
        verdict = all_accepted(check, {first: (0.4, 0.3, 0.2, 0.1), second: (0.1, 0.2, 0.3, 0.4)})
        if not same_slots:
            one, *others = verdict.groups
            refused = t.GroupVerdict(one.slot, False, "hard", "prompt", "prompt is not the task's")
            verdict = t.Verdict(verdict.submission, (refused, *others), verdict.projections)
        await take_verdict(town.desk, second, verdict)
        return first

    first = asyncio.run(story())
    *_, last = [entry.body for entry in town.audit().entries if isinstance(entry.body, VerdictGiven)]
    assert last.differs_from == ((first,) if same_slots else ())


def test_projections_are_private_until_all_have_judged(tmp_path):
    """A validator that could read an earlier one's projections could copy them."""
    town = town_of_three(tmp_path, HURRIED)

    async def story():
        check, first, second = await asked(town)
        shown = dict.fromkeys((first, second), (0.1, 0.2, 0.3, 0.4))
        await take_verdict(town.desk, first, all_accepted(check, shown))
        blob = town.desk.state.submissions[check.id].projections[first]
        assert not any(town.desk.kept.may_read(blob, key) for key in ("", second, town.desk.state.trainer_key))
        town.desk.clock = lambda: check.deadline + 1000.0
        await take_verdict(town.desk, second, all_accepted(check, shown))
        assert town.desk.kept.may_read(blob, "")

    asyncio.run(story())


def test_nothing_is_kept_of_projections_that_nobody_asked_for(tmp_path):
    town = town_of_three(tmp_path, HURRIED)

    async def story():
        check = await until_submitted(town, town.trainer(), town.worker("honest"))
        first = check.project_for[0]
        other = next(key for key in (key_of(town, 0), key_of(town, 1)) if key != first)
        town.desk.clock = lambda: check.deadline + 1000.0
        values = (0.1, 0.2, 0.3, 0.4)
        more = {f"{i:064x}": values for i in range(2000)}
        before = town.desk.blobs.size_bytes
        await take_verdict(town.desk, first, all_accepted(check, {first: values} | more))
        kept = town.desk.blobs.size_bytes
        assert kept - before < 200
        await take_verdict(town.desk, first, all_accepted(check, {first: (0.4, 0.3, 0.2, 0.1)}))  # a second time
        with pytest.raises(Refused, match="has not joined as a validator"):
            await take_verdict(town.desk, key_of(town, 2), all_accepted(check, more))
        assert town.desk.blobs.size_bytes == kept and other not in town.desk.state.submissions[check.id].verdicts

    asyncio.run(story())


def test_nothing_is_kept_of_projections_whose_verdict_is_refused(tmp_path):
    """A validator that sends other numbers each time must not fill the disk."""
    town = town_of_three(tmp_path, HURRIED)

    async def story():
        check, first, _ = await asked(town)
        before = town.desk.blobs.size_bytes
        verdict = all_accepted(check, {first: (0.1, 0.2, 0.3, 0.4)})
        rich = tuple(msgspec.structs.replace(group, rewards=(1e9,) * 8) for group in verdict.groups)
        with pytest.raises(Refused, match="rewards of size"):
            await take_verdict(town.desk, first, msgspec.structs.replace(verdict, groups=rich))
        assert town.desk.blobs.size_bytes == before

    asyncio.run(story())


def test_a_suspended_validator_is_told_so_and_gets_no_more_submissions(tmp_path):
    town = town_of_three(tmp_path, HURRIED)

    async def story():
        await until_submitted(town, town.trainer(), town.worker("honest"))
        town.desk.state.members[key_of(town, 0)].standing = "suspended"
        with pytest.raises(Refused, match="gets no more submissions"):
            next_check(town.desk, key_of(town, 0))

    asyncio.run(story())


def test_what_was_sent_while_a_hosts_clock_was_ahead_is_judged_after_it_was_set_back(tmp_path):
    town = town_of_three(tmp_path, HURRIED)

    async def story():
        check = await until_submitted(town, town.trainer(), town.worker("honest"))
        true = town.desk.clock
        town.desk.clock = lambda: true() - 3600.0
        found = [next_check(town.desk, key_of(town, number)) for number in (0, 1)]
        assert check.id in [one.id for one in found if one]

    asyncio.run(story())


def test_a_validator_that_fell_silent_is_named_once_a_lease_could_have_been_filled(tmp_path):
    town = town_of_three(tmp_path)
    asyncio.run(until_submitted(town, town.trainer(), town.worker("honest")))
    board, began = StatusBoard(town.desk), town.desk.clock()
    for minutes, left, says in [(0.4, False, ""), (3, False, " silent for "), (3, True, " left")]:
        town.desk.clock = lambda minutes=minutes: began + 60.0 * minutes
        for number in (0, 1):
            town.desk.state.members[key_of(town, number)].left = left
        waits = board.status().waiting_for
        assert waits.startswith("validators: validator-") and ("admit another" in waits) == bool(says), waits
        assert says in waits[:80], "what is cropped is not the name"
        silent = [round(node.silent_s) for node in board.nodes() if node.role == "validator" and node.silent_s]
        assert silent == ([60 * minutes] * 2 if "silent" in says else [])
        town.desk.state.phase, before = "paused", town.desk.state.phase
        assert "validator" not in board.status().waiting_for, "the wait has another cause"
        town.desk.state.phase = before
    assert "silent" not in StatusBoard(town.desk).status().waiting_for, "the host has only just started"


def test_a_validator_that_joins_again_unchanged_is_not_silent_from_before(tmp_path):
    town, seqs = town_of_three(tmp_path), list[int]()

    async def join_again():
        async with town.client(town.folder.keys / "validator-0.key") as client:
            client.run = town.desk.state.run
            member = town.desk.state.members[key_of(town, 0)]
            join = t.Join("validator", member.name, 0.0, member.implementation, member.dtype, member.device)
            seqs.append(town.desk.state.seq)
            await client.post_json("/v1/nodes", join, t.NodeState)
            seqs.append(town.desk.state.seq)

    asyncio.run(until_submitted(town, town.trainer(), town.worker("honest")))
    board, began = StatusBoard(town.desk), town.desk.clock()
    assert "silent" not in board.status().waiting_for
    town.desk.clock = lambda: began + 180.0
    assert key_of(town, 0)[:12] in board.status().waiting_for
    asyncio.run(join_again())
    assert key_of(town, 0)[:12] not in board.status().waiting_for and seqs[0] == seqs[1]


def test_a_validator_that_is_skipped_is_named_while_verdicts_are_waited_for(tmp_path):
    town = town_of_three(tmp_path)
    asyncio.run(until_submitted(town, town.trainer(), town.worker("honest")))
    state, absent_key = town.desk.state, key_of(town, 0)
    turns = state.members[absent_key].turns
    turns.missed = turns.counted = LAW.missed_turns
    turns.counts_until = town.desk.clock() + 60.0
    assert f"is not waited for: validator-0 ({absent_key[:12]})" in StatusBoard(town.desk).status().waiting_for
    state.phase = "paused"
    assert "validator-0" not in StatusBoard(town.desk).status().waiting_for, "the host waits for itself"
    assert _why_skipped(state, absent_key) == "missed_turns=2"
    state.members[absent_key].standing, state.members[absent_key].last_reason = "suspended", "other activations"
    assert _why_skipped(state, absent_key) == "standing=suspended reason='other activations'"


def test_a_run_with_a_validator_that_joined_and_left_waits_for_it_twice_and_no_more(tmp_path):
    law = Law(turn_s=2.0)
    town = Town(tmp_path / "run", tiny_run(validators={"count": 2}, steps=4), law=law)
    gone = validator(town, 0)
    asyncio.run(gone.join())
    asyncio.run(town.live(town.trainer(), town.worker("honest"), validator(town, 1)))
    audit = town.audit()
    waits = [
        entry.time - audit.state.submissions[entry.body.submission].time
        for entry in audit.entries
        if isinstance(entry.body, VerdictGiven)
    ]
    assert audit.findings == [law_difference(law)] and silent(audit.state, town.desk.clock()) == {key_of(town, 0)}
    assert sum(wait >= law.turn_s for wait in waits) <= 2 * law.missed_turns < len(waits)
    skipped = absent(audit.state, town.desk.clock())
    assert f"is not waited for: validator-0 ({key_of(town, 0)[:12]})" in skipped
    assert StatusBoard(town.desk).status().waiting_for == "nothing: the run has ended"
