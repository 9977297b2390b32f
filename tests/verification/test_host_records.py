"""Where the host plays the environments, checks compare with its record: nobody else can repeat what it said."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from shoal.protocol import messages
from shoal.protocol.audit_and_pay import MAX_REASON_CHARS
from shoal.protocol.constants import COMPLETIONS
from shoal.protocol.encoding import digest, to_msgpack
from shoal.protocol.messages.host_environments import rollout_digest
from shoal.verification.verify import verify_submission
from tests.verification.conftest import SubmissionCase


def recorded(group: messages.Group) -> messages.GroupRecord:
    """What the stage records of a group that it played; rewards count up."""
    return messages.GroupRecord(
        group.slot,
        tuple(
            messages.RolloutRecord(rollout_digest(r.token_ids, r.author, r.ending), r.ending, index / 4)
            for index, r in enumerate(group.rollouts)
        ),
    )


class Hosted(SubmissionCase):
    """The same lease in a run whose host plays. The judges have no environment."""

    def __init__(self, renderer, groups) -> None:
        super().__init__(renderer, groups=groups)
        blocks = tuple(msgspec.structs.replace(block, kind=COMPLETIONS) for block in self.lease.blocks)
        self.lease = msgspec.structs.replace(self.lease, blocks=blocks)
        self.tools = replace(self.tools, envs={})
        self.record = messages.Record("run-1", "lease-1", 3, tuple(recorded(group) for group in self.groups))

    def judged(self, body: bytes, audited=(), record: bytes | None = None) -> list[messages.GroupVerdict]:
        check = messages.Check(digest(body), self.lease, tuple(audited), 60.0)
        return list(
            verify_submission(body, check, self.tools, to_msgpack(self.record) if record is None else record).groups
        )


@pytest.fixture
def hosted(renderer, played):
    return Hosted(renderer, played)


def test_work_that_the_host_recorded_is_accepted_with_the_recorded_rewards(hosted):
    verdicts = hosted.judged(hosted.body(), audited=range(4))
    assert {verdict.outcome for verdict in verdicts} == {"accept"}
    assert [verdict.rewards for verdict in verdicts] == [(0.0, 0.25, 0.5, 0.75)] * 4
    assert all(verdict.audited for verdict in verdicts) and hosted.prefills == [16]


@pytest.mark.parametrize("field", ["token_ids", "author", "ending"])
def test_a_rollout_that_the_host_did_not_record_is_refused_and_nobody_is_slashed_for_it(hosted, field):
    rollout = hosted.groups[1].rollouts[2]
    tokens = rollout.tokens_T().copy()
    tokens[0] += 1
    author = rollout.author[:1] + b"\0" + rollout.author[2:] if rollout.author[1] else rollout.author
    author = author[:-1] + bytes([1 - author[-1]]) if author == rollout.author else author
    fields = {"token_ids": tokens.tobytes(), "ending": "length"}
    change = {field: fields[field]} if field in fields else {"author": author, "logprobs": logprobs_of(author)}
    verdicts = hosted.judged(hosted.body(hosted.edit(1, 2, **change)))
    assert [verdict.outcome for verdict in verdicts] == ["accept", "soft", "accept", "accept"]
    assert (verdicts[1].check, verdicts[1].rollout) == ("environment", 2)


def logprobs_of(author: bytes) -> bytes:
    return np.full(author.count(1), -1.0, dtype="<f4").tobytes()


def test_sampling_is_still_replayed_with_the_lease_seeds(hosted):
    hosted.gaps = lambda request: np.full(len(request.policy_positions), 5.0, dtype=np.float32)
    verdicts = hosted.judged(hosted.body(), audited=[2])
    assert [verdict.outcome for verdict in verdicts] == ["accept", "accept", "hard", "accept"]
    assert verdicts[2].check == "sampling"


def test_rollouts_that_are_left_out_are_missed(hosted):
    verdicts = hosted.judged(hosted.body(hosted.replace(0, rollouts=hosted.groups[0].rollouts[:-1])))
    assert (verdicts[0].outcome, verdicts[0].check) == ("soft", "complete")


def test_a_slot_that_the_host_could_not_begin_is_void_whatever_was_sent(hosted):
    void = msgspec.structs.replace(hosted.record.groups[3], rollouts=())
    hosted.record = msgspec.structs.replace(hosted.record, groups=(*hosted.record.groups[:3], void))
    for groups in (hosted.groups, hosted.replace(3, rollouts=())):
        verdicts = hosted.judged(hosted.body(groups))
        assert [verdict.outcome for verdict in verdicts] == ["accept"] * 3 + ["void"]


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 2e6])
def test_a_recorded_reward_that_no_log_can_hold_is_refused(hosted, reward):
    group = hosted.record.groups[0]
    worst = msgspec.structs.replace(group.rollouts[1], reward=reward)
    group = msgspec.structs.replace(group, rollouts=(group.rollouts[0], worst, *group.rollouts[2:]))
    hosted.record = msgspec.structs.replace(hosted.record, groups=(group, *hosted.record.groups[1:]))
    verdicts = hosted.judged(hosted.body())
    assert (verdicts[0].outcome, verdicts[0].check) == ("soft", "reward")


@pytest.mark.parametrize(
    "change",
    [{"run": "run-2"}, {"lease": "lease-2"}, {"version": 4}, {"groups": ()}, None],
    ids=["run", "lease", "version", "groups", "garbage"],
)
def test_a_record_that_is_not_of_the_lease_is_the_hosts_fault_and_costs_no_worker(hosted, change):
    record = b"garbage" if change is None else to_msgpack(msgspec.structs.replace(hosted.record, **change))
    for bytes_ in (record, b""):
        verdicts = hosted.judged(hosted.body(), record=bytes_)
        assert [verdict.outcome for verdict in verdicts] == ["void"] * 4


@pytest.mark.parametrize("why", ["", "reset() of task 10: it took longer than 4 s", "\u00a0" * 300])
def test_a_slot_that_the_host_could_not_fill_is_void_in_the_hosts_words(hosted, why):
    """They fit a verdict, however long they are."""
    void = messages.GroupRecord(hosted.groups[1].slot, (), why)
    hosted.record = msgspec.structs.replace(
        hosted.record, groups=(hosted.record.groups[0], void, *hosted.record.groups[2:])
    )
    verdict = hosted.judged(hosted.body())[1]
    said = why or "the host says so"
    assert verdict.outcome == "void" and verdict.detail.endswith(f"cannot begin: {said}") == said.isprintable()
    assert len(verdict.check + verdict.detail) <= MAX_REASON_CHARS and verdict.detail.isprintable()
