"""Continuations judged: honest ones pass, and each way to choose them is found. Parents are scripted games of two kinds of
environments, one with several turns; a real engine plays on and replays."""

import asyncio
import dataclasses
from types import SimpleNamespace

import msgspec
import pytest

from shoal.chat.renderer import Renderer
from shoal.config import TinyPolicy
from shoal.engine.dishonest import OtherSeed
from shoal.engine.native import LocalEngine
from shoal.envs.play_continuations import OtherStart, continue_block, opened
from shoal.envs.play_episodes import EpisodeAttempt
from shoal.models.random_model import make_tiny
from shoal.protocol import messages
from shoal.protocol.algorithm_config import Composition, Vine
from shoal.protocol.constants import CONTINUATIONS
from shoal.protocol.continuations import FIRST_BLOCK, branches, continued_slot
from shoal.protocol.encoding import digest, to_msgpack
from shoal.protocol.rollout_validation import most_bytes
from shoal.verification.branch_parents import OtherParents, fetch_parents, read_parents
from shoal.verification.verify import verify_submission
from tests.verification.conftest import ENGINE, RULES, SAMPLING, SubmissionCase

VINE = Vine(continuations=2, every=2, most=3)


def fetched(lease, of_run, bodies):
    async def fetch(name):
        return bodies[name]

    return asyncio.run(fetch_parents(lease, of_run, fetch))


class Vines:
    """A lease that continues the groups of a submission, and the work that fills it. Group 2 taught nothing."""

    def __init__(self, directory):
        self.renderer = Renderer.from_directory(directory)
        self.case = SubmissionCase(self.renderer)
        self.engine = LocalEngine(threads=1)
        self.engine.load(directory, self.case.lease.version)
        self.parents = [group if place != 2 else None for place, group in enumerate(self.case.groups)]
        encoded = [to_msgpack(group) for group in self.case.groups]
        self.parent_body = self.case.body()
        named = [
            messages.Parent(digest(self.parent_body), place, digest(data)) if self.parents[place] else None
            for place, data in enumerate(encoded)
        ]
        self.slots = [
            msgspec.structs.replace(slot, slot=continued_slot(slot.slot, 2), parent=parent)
            for slot, parent in zip(self.case.slots, named, strict=True)
        ]
        blocks = tuple(
            messages.Block(FIRST_BLOCK + b, tuple(self.slots[2 * b : 2 * b + 2]), CONTINUATIONS) for b in (0, 1)
        )
        self.lease = msgspec.structs.replace(self.case.lease, blocks=blocks)
        self.rules = msgspec.structs.replace(RULES, algorithm=Composition(credit=VINE))
        self.groups = self.play(self.engine)

    def play(self, engine, parents=None):
        parents = parents or self.parents
        return [
            group
            for b, block in enumerate(self.lease.blocks)
            for slots in [[*zip(block.slots, parents[2 * b : 2 * b + 2], strict=True)]]
            for group in continue_block(engine, self.renderer, self.case.envs, slots, VINE, 8, SAMPLING)
        ]

    def judge(self, groups=None, audited=True):
        groups = self.groups if groups is None else groups
        tools = dataclasses.replace(
            self.case.tools,
            info=SimpleNamespace(run="run-1", rules=self.rules),
            score=lambda requests: self.engine.score(requests, SAMPLING.temperature),
        )
        body = to_msgpack(
            messages.Submission("run-1", self.lease.id, self.lease.version, tuple(map(to_msgpack, groups)), (), ENGINE)
        )
        due = tuple(slot.slot for slot in self.slots) if audited else ()
        check = messages.Check(digest(body), self.lease, due, 60.0)
        bodies = {digest(self.parent_body): self.parent_body}
        given = read_parents(fetched(self.lease, self.rules, bodies), self.rules, self.lease, self.renderer.vocabulary)
        return verify_submission(body, check, tools, parents=given).groups

    def edit(self, place, change):
        """The work with the rollouts of one group changed."""
        group = self.groups[place]
        changed = msgspec.structs.replace(group, rollouts=tuple(change(list(group.rollouts))))
        return [*self.groups[:place], changed, *self.groups[place + 1 :]]


@pytest.fixture(scope="module")
def vines(tmp_path_factory):
    directory = tmp_path_factory.mktemp("policy")
    make_tiny(TinyPolicy(width=16, layers=1, heads=2, kv_heads=1, mlp_width=16), directory, 0, "float32")
    return Vines(directory)


def found(verdicts):
    return {
        verdict.slot % 2_000_000: (verdict.outcome, verdict.check)
        for verdict in verdicts
        if verdict.outcome != "accept"
    }


def test_honest_continuations_pass_every_check_and_only_what_was_written_is_paid(vines):
    verdicts = vines.judge()
    assert found(verdicts) == {} and all(verdict.audited for verdict in verdicts)
    for verdict, group, parent in zip(verdicts, vines.groups, vines.parents, strict=True):
        due = branches(parent, VINE) if parent else []
        assert len(verdict.rewards) == len(group.rollouts) == len(due)
        assert verdict.tokens == sum(rollout.num_policy_tokens() for rollout in group.rollouts)
        for rollout, branch in zip(group.rollouts, due, strict=True):
            assert rollout.author[: branch.position] == bytes(branch.position) and rollout.author[branch.position]
    assert not vines.groups[2].rollouts and verdicts[2].tokens == 0
    assert any(len({b.position for b in branches(p, VINE)}) > 3 for p in vines.parents if p)


def test_other_seeds_are_found(vines):
    forged = vines.play(OtherSeed(vines.engine))
    assert set(found(vines.judge(forged)).values()) == {("hard", "sampling")}


def test_continuations_of_another_rollout_or_another_parent_are_found(vines):
    swapped = msgspec.structs.replace(vines.parents[0], rollouts=vines.parents[0].rollouts[::-1])
    assert found(vines.judge(vines.play(vines.engine, [swapped, *vines.parents[1:]])))[0] == ("hard", "prompt")
    other = [msgspec.structs.replace(vines.groups[3], slot=vines.groups[1].slot, task=vines.groups[1].task)]
    assert found(vines.judge([vines.groups[0], *other, *vines.groups[2:]]))[1][0] == "hard"


def test_continuations_that_are_left_out_or_put_in_another_order_are_found(vines):
    assert found(vines.judge(vines.edit(1, lambda rollouts: rollouts[:-1]))) == {1: ("soft", "complete")}
    assert found(vines.judge(vines.edit(1, lambda rollouts: rollouts[2:])))[1] == ("hard", "prompt")
    assert found(vines.judge(vines.edit(1, lambda rollouts: [rollouts[1], rollouts[0], *rollouts[2:]]))) == {
        1: ("hard", "sampling")
    }
    assert found(vines.judge(vines.edit(1, lambda rollouts: [*rollouts, rollouts[0]])))[1] == ("hard", "shape")


def test_tokens_that_are_passed_off_as_the_parents_are_found(vines):
    """What the environment is said to have written is replayed by no seed."""

    def mask(rollouts):
        author = bytearray(rollouts[0].author)
        at = author.index(1)
        author[at] = 0
        rollouts[0] = msgspec.structs.replace(rollouts[0], author=bytes(author), logprobs=rollouts[0].logprobs[4:])
        return rollouts

    changed = vines.edit(1, mask)
    outcome = found(vines.judge(changed))[1]
    assert outcome == ("hard", "prompt")


def test_work_for_a_parent_that_taught_nothing_is_refused(vines):
    extra = [
        *vines.groups[:2],
        msgspec.structs.replace(vines.groups[2], rollouts=vines.groups[0].rollouts),
        vines.groups[3],
    ]
    assert found(vines.judge(extra))[2] == ("hard", "shape")


def test_a_continuation_cut_short_is_found(vines):
    def cut(rollouts):
        longest = max(range(len(rollouts)), key=lambda i: rollouts[i].num_policy_tokens())
        whole = rollouts[longest]
        assert whole.num_policy_tokens() > 1
        rollouts[longest] = msgspec.structs.replace(
            whole, token_ids=whole.token_ids[:-4], author=whole.author[:-1], logprobs=whole.logprobs[:-4]
        )
        return rollouts

    assert found(vines.judge(vines.edit(1, cut)))[1] == ("hard", "ending")


def test_a_lease_whose_parents_are_not_in_their_submissions_judges_nobody(vines):
    name = digest(vines.parent_body)
    assert list(fetched(vines.lease, vines.rules, {name: vines.parent_body})) == [
        slot.parent.digest for slot in vines.slots if slot.parent
    ]
    slots = tuple(msgspec.structs.replace(slot, parent=messages.Parent(name, 1, "0" * 64)) for slot in vines.slots[:2])
    wrong = msgspec.structs.replace(vines.lease, blocks=(messages.Block(FIRST_BLOCK, slots, CONTINUATIONS),))
    with pytest.raises(OtherParents, match="is not there"):
        fetched(wrong, vines.rules, {name: vines.parent_body})
    slot = msgspec.structs.replace(slots[0], parent=messages.Parent("../log\n", 0, "0" * 64))
    wrong = msgspec.structs.replace(vines.lease, blocks=(messages.Block(FIRST_BLOCK, (slot,), CONTINUATIONS),))
    with pytest.raises(OtherParents, match="no name"):
        fetched(wrong, vines.rules, {})


def test_bodies_of_parents_are_read_one_by_one_and_only_what_is_named_is_kept(vines):
    """A lease may name 64 submissions of up to 64 MB each."""
    held = set()

    class Body(bytes):
        def __del__(self):
            held.discard(id(self))

    data = to_msgpack(vines.parents[1])
    pad = (b"x" * 100_000,)
    honest = msgspec.msgpack.decode(vines.parent_body, type=messages.Submission)
    bodies = [to_msgpack(msgspec.structs.replace(honest, lease=f"{i}", groups=(data, *pad))) for i in range(5)]
    names = {digest(body): body for body in bodies}
    slots = tuple(
        msgspec.structs.replace(vines.slots[0], parent=messages.Parent(name, 0, digest(data))) for name in names
    )
    lease = msgspec.structs.replace(vines.lease, blocks=(messages.Block(FIRST_BLOCK, slots, CONTINUATIONS),))

    async def fetch(name):
        assert not held, "the body before is held still"
        body = Body(names[name])
        held.add(id(body))
        return body

    found = asyncio.run(fetch_parents(lease, vines.rules, fetch))
    assert found == {digest(data): data}


def test_a_lease_that_names_more_than_any_submission_may_hold_is_refused(vines, monkeypatch):
    """A host may list any number of slots in a block."""
    bodies = {digest(vines.parent_body): vines.parent_body}
    both = sum(map(len, fetched(vines.lease, vines.rules, bodies).values()))
    monkeypatch.setattr("shoal.verification.branch_parents.MAX_SUBMISSION_BYTES", both)
    assert len(fetched(vines.lease, vines.rules, bodies)) == 3
    monkeypatch.setattr("shoal.verification.branch_parents.MAX_SUBMISSION_BYTES", both - 1)
    with pytest.raises(OtherParents, match="bytes in all"):
        fetched(vines.lease, vines.rules, bodies)


def test_a_parent_of_a_size_that_no_honest_group_has_is_not_kept_and_nothing_is_due_in_its_slot(vines):
    most = most_bytes(vines.rules, SAMPLING, 0)
    forged = with_other_parent(vines, b"x" * (most + 1))
    name = forged.slots[1].parent.digest
    assert fetched(forged.lease, forged.rules, {digest(forged.parent_body): forged.parent_body})[name] == b""
    assert found(forged.judge(forged.edit(1, lambda rollouts: []))) == {}


def with_other_parent(vines, data, place=1):
    """The same lease, in which one slot continues other bytes, which some validator accepted."""
    theirs = msgspec.msgpack.decode(vines.parent_body, type=messages.Submission)
    groups = (*theirs.groups[:place], data, *theirs.groups[place + 1 :])
    body = to_msgpack(msgspec.structs.replace(theirs, groups=groups))
    other = object.__new__(Vines)
    other.__dict__ |= vines.__dict__ | {"parent_body": body}
    digests = [slot.parent and slot.parent.digest for slot in vines.slots]
    digests[place] = digest(data)
    other.slots = [
        msgspec.structs.replace(slot, parent=named and messages.Parent(digest(body), index, named))
        for index, (slot, named) in enumerate(zip(vines.slots, digests, strict=True))
    ]
    blocks = tuple(
        messages.Block(FIRST_BLOCK + b, tuple(other.slots[2 * b : 2 * b + 2]), CONTINUATIONS) for b in (0, 1)
    )
    other.lease = msgspec.structs.replace(vines.lease, blocks=blocks)
    return other


def test_in_a_slot_whose_parent_is_no_group_a_validator_expects_nothing(vines):
    first = vines.parents[1].rollouts[0]
    cut = msgspec.structs.replace(first, author=first.author[:-1])
    flawed = to_msgpack(msgspec.structs.replace(vines.parents[1], rollouts=(cut,)))
    for data in (b"no group", flawed):
        forged = with_other_parent(vines, data)
        assert found(forged.judge()) == {1: ("hard", "shape")}
        nothing = forged.edit(1, lambda rollouts: [])
        assert found(forged.judge(nothing)) == {}


def forgeries(vines):
    """Forms of the first parent, of several turns, that its environment does not play."""
    parent = vines.parents[0]
    first, stops = parent.rollouts[0], vines.renderer.stop_ids
    ids, author = first.tokens_T().tolist(), list(first.author)
    word = next(token for token in range(vines.renderer.vocabulary) if token not in stops)
    begin = author.index(1)
    end = author.index(0, begin)
    last = max(i for i in range(end, len(ids)) if ids[i] in stops)
    other_prompt = [ids[0] ^ 1, *ids[1:]]
    endless_turn = [*ids[:begin], *[word] * (last - begin), *ids[last:]]
    for tokens in (other_prompt, endless_turn):
        written = b"".join(token.to_bytes(4, "little") for token in tokens)
        forged = msgspec.structs.replace(first, token_ids=written)
        yield msgspec.structs.replace(parent, rollouts=(forged, *parent.rollouts[1:]))


def test_a_parent_that_the_environment_does_not_play_so_voids_its_slot_and_nothing_else(vines):
    """Whatever is sent for it: nothing, as honest workers do, or the work of somebody who knows of the forgery."""
    for forged in forgeries(vines):
        theirs = with_other_parent(vines, to_msgpack(forged), place=0)
        played = vines.play(vines.engine, [forged, *vines.parents[1:]])
        assert played == vines.edit(0, lambda rollouts: [])
        for sent in (played, vines.groups):
            assert found(theirs.judge(sent)) == {0: ("void", "environment")}


def test_an_environment_that_does_not_play_alike_twice_continues_nothing(vines, monkeypatch):
    monkeypatch.setattr("shoal.envs.play_continuations.is_played_so", lambda *asked: True)
    for forged in forgeries(vines):
        with pytest.raises(OtherStart, match="than a moment ago"):
            vines.play(vines.engine, [forged, *vines.parents[1:]])
    _, endless_turn = forgeries(vines)
    slot = vines.slots[0]
    env = vines.case.envs[slot.env]
    episode = EpisodeAttempt(env, env.task(slot.task), bytes(32))
    with pytest.raises(OtherStart, match="than a moment ago"):
        opened(episode, vines.renderer, SAMPLING, endless_turn.rollouts[0].tokens_T().tolist())
