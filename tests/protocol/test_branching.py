"""Continuations: where rollouts are continued, with which seeds, and what a continuation must begin with."""

import msgspec
import numpy as np
import pytest

from shoal.protocol.algorithm_config import Composition, Dapo, Grpo, Vine, vine_of
from shoal.protocol.continuations import (
    FIRST_BLOCK,
    Branch,
    branches,
    continued_slot,
    is_continued,
    is_continued_slot,
    num_rollouts,
    other_prefix,
    parent_slot,
    places,
    seeds_of,
    whole_author,
)
from shoal.protocol.encoding import to_json
from shoal.protocol.host_signatures import terms_of
from shoal.protocol.messages import BatchGroup, Group, Parent, Slot, make_rollout
from shoal.protocol.seed_chain import continuation_seed, sample_seed
from tests.ledger.ledger_fixture import rules

VINE = Vine(continuations=2, every=3, most=2)


def rollout(author, tokens=None, **fields):
    tokens = list(range(len(author))) if tokens is None else tokens
    logprobs = [-1.0] * sum(a > 0 for a in author)
    return make_rollout(tokens, author, logprobs, version=0, ending="environment", **fields)


@pytest.mark.parametrize(
    ("learned", "expected"),
    [(1, ()), (3, ()), (4, (5,)), (6, (5,)), (7, (5, 8)), (9, (5, 8)), (10, (8,)), (12, (8,)), (13, (8, 14))],
)
def test_places_are_every_so_many_learned_tokens_and_never_the_first_nor_too_many(learned, expected):
    assert places(rollout([0, 0] + [1] * learned), VINE) == expected


def test_places_count_learned_tokens_across_turns_and_leave_out_those_of_other_rows():
    assert places(rollout([0, 1, 1, 0, 0, 2, 2, 1, 0, 1, 1]), Vine(every=2, most=9)) == (7, 10)
    assert places(rollout([0, 1, 1, 1, 1, 0, 1, 1, 1, 1], starts=(5,)), Vine(every=1, most=9)) == ()
    assert places(rollout([0, 0, 2, 2, 2, 2]), Vine(every=1)) == ()


def test_branches_come_by_rollout_then_place_then_number_each_with_a_seed_of_its_own():
    group = Group(4, 0, "e", (rollout([0] + [1] * 7), rollout([0, 1]), rollout([0] + [1] * 4)))
    found = branches(group, VINE)
    assert found == [
        Branch(0, 4, 0),
        Branch(0, 4, 1),
        Branch(0, 7, 0),
        Branch(0, 7, 1),
        Branch(2, 4, 0),
        Branch(2, 4, 1),
    ]
    slot = Slot(continued_slot(4, 2), "11" * 32, "e", 0, Parent("", 0, ""))
    seeds = seeds_of(slot, 6, found)
    assert len(set(seeds)) == 6 and seeds[2] == continuation_seed(bytes.fromhex("11" * 32), 0, 7, 0)
    assert not {*seeds} & {sample_seed(bytes.fromhex("11" * 32), i) for i in range(8)}


def test_slots_of_continuations_are_those_of_their_blocks():
    assert continued_slot(5, 2) == 2 * FIRST_BLOCK + 5 and parent_slot(continued_slot(5, 2), 2) == 5
    assert is_continued(continued_slot(5, 2) // 2) and is_continued_slot(continued_slot(0, 2), 2)
    assert not is_continued(FIRST_BLOCK - 1) and not is_continued_slot(5, 2)
    of_run = rules(algorithm=Composition(credit=VINE))
    assert num_rollouts(of_run, continued_slot(5, 2)) == (0, 16) and num_rollouts(of_run, 5) == (4, 4)
    assert num_rollouts(rules(), continued_slot(5, 2)) == (4, 4)


PARENT = rollout([0, 0, 1, 1, 1, 0, 1, 1], tokens=[9, 8, 1, 2, 3, 7, 4, 5])


@pytest.mark.parametrize(
    ("author", "tokens", "at"),
    [
        ([0, 0, 0, 0, 1, 1], [9, 8, 1, 2, 6, 6], -1),
        ([0, 0, 0, 0, 1], [9, 8, 1, 2, 3], -1),
        ([0, 0, 0, 0, 1, 1], [9, 8, 1, 1, 6, 6], 3),
        ([0, 0, 0, 1, 1, 1], [9, 8, 1, 2, 6, 6], 3),
        ([0, 0, 0, 0, 0, 1], [9, 8, 1, 2, 6, 6], 4),
        ([0, 0, 0], [9, 8, 1], 3),
    ],
)
def test_a_continuation_begins_with_its_parents_tokens_and_goes_on_at_once(author, tokens, at):
    assert other_prefix(rollout(author, tokens), PARENT, 4) == at


def test_a_row_that_opens_within_the_prefix_is_another_prefix():
    assert other_prefix(rollout([0, 0, 0, 0, 1, 1], [9, 8, 1, 2, 6, 6], starts=(2,)), PARENT, 4) == 2


def test_the_authors_of_a_whole_rollout_come_from_its_parent_and_a_turn_has_one():
    assert whole_author(PARENT, np.array([0] * 6 + [1, 1, 0, 1], "u1"), 6, frozenset()).tolist() == [
        0, 0, 1, 1, 1, 0, 1, 1, 0, 1,
    ]  # fmt: skip
    masked = whole_author(PARENT, np.array([0] * 7 + [2, 0, 1], "u1"), 7, frozenset())
    assert masked.tolist() == [0, 0, 1, 1, 1, 0, 2, 2, 0, 1]
    after_a_stop = whole_author(rollout([0, 1, 1], [9, 1, 2]), np.array([0, 0, 2], "u1"), 2, frozenset({1}))
    assert after_a_stop.tolist() == [0, 1, 2]


def test_only_runs_with_vines_sign_for_continuations():
    plain, vines = rules(algorithm=Dapo()), rules(algorithm=Dapo(credit=VINE))
    assert vine_of(Grpo()) is vine_of(plain.algorithm) is None and vine_of(vines.algorithm) == VINE
    other = rules(algorithm=Dapo(credit=msgspec.structs.replace(VINE, every=4)))
    assert len({terms_of((), plain), terms_of((), vines), terms_of((), other)}) == 3
    assert terms_of((), plain) == terms_of((), rules())


def test_messages_without_continuations_have_the_bytes_that_they_had():
    assert to_json(Slot(1, "a", "e", 2)) == b'{"slot":1,"seed":"a","env":"e","task":2}'
    assert b"continuations" not in to_json(BatchGroup(0, 1, "a", 0, "b", (1.0,)))
    assert b"credit" not in to_json(Composition()) and b"credit" not in to_json(rules(algorithm=Dapo()))
