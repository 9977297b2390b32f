"""The bounds of messages, compared with the largest real ones."""

import math

import msgspec
import numpy as np
import pytest

from shoal.algos.toploc import CHUNK_TOKENS, MAX_K
from shoal.protocol import messages as t
from shoal.protocol.audit_and_pay import MAX_REASON_CHARS, MAX_REWARD
from shoal.protocol.constants import MAX_JSON_BYTES, MAX_LEASE_BLOCKS, MAX_ROLLOUT_ROWS, MAX_SUBMISSION_BYTES
from shoal.protocol.encoding import from_json, to_json, to_msgpack
from shoal.protocol.message_sizes import (
    BYTES_PER_TOKEN,
    REASON_BYTES,
    ROLLOUT_OVERHEAD_BYTES,
    most_batch_groups,
    most_lease_blocks,
    most_lease_groups,
    submission_bytes,
    turn_answer_bytes,
    turn_bytes,
)

HASH, REWARD, ENV = "f" * 64, -0.12345678901234567, "/home/somebody/environments/wordle.py"


def proof_bytes(num_tokens):
    """The most bytes in the proof of a rollout with this many policy tokens."""
    return -(-num_tokens // CHUNK_TOKENS) * (2 + 2 * MAX_K)


def submission(num_groups, group_size, max_tokens, proofs):
    tokens = np.full(max_tokens, 2**31 - 1)
    rollout = t.make_rollout(tokens, tokens % 2, np.full(max_tokens, -1.5), version=4095, ending="environment")
    group = to_msgpack(t.Group(10**9, 10**9, ENV, (rollout,) * group_size))
    proof = b"p" * (group_size * proof_bytes(max_tokens)) if proofs else b""
    facts = t.EngineFacts("shoal-local/torch-2.13.0", "bfloat16", "cuda")
    proven = (proof,) * num_groups if proofs else ()
    return to_msgpack(t.Submission("r" * 32, "123456", 4095, (group,) * num_groups, proven, facts))


@pytest.mark.parametrize("field", ["run", "lease", "digest", "head", "signature"])
def test_a_receipt_that_would_fill_a_workers_disk_is_refused(field):
    """A worker keeps a receipt for each lease."""
    honest = t.Receipt("r" * 32, "123456", HASH, 2**62, HASH, 1.7e9 + 1 / 3, "s" * 128)
    assert from_json(to_json(honest), t.Receipt) == honest
    with pytest.raises(ValueError, match=field):
        from_json(to_json(msgspec.structs.replace(honest, **{field: "x" * 129})), t.Receipt)


@pytest.mark.parametrize("shape", [(1, 2, 8, False), (7, 4, 100, True), (3, 16, 2000, False), (16, 8, 33, True)])
def test_a_full_submission_is_just_within_its_bound(shape):
    made = len(submission(*shape))
    assert made <= submission_bytes(*shape) <= 4 * made + 8192


def test_a_rollout_of_as_many_short_rows_as_possible_is_within_its_bound():
    """Its starts take the most bytes, because they are large, and its rows give the least room for them."""
    tokens, rows = 1 << 20, MAX_ROLLOUT_ROWS
    starts = tuple(range(tokens - 2 * rows + 2, tokens, 2))
    author = np.ones(tokens, np.uint8)
    author[[0, *starts]] = 0
    rollout = t.make_rollout(
        np.full(tokens, 2**31 - 1),
        author,
        np.full(tokens - rows, -1.5),
        version=4095,
        ending="environment",
        starts=starts,
    )
    group = to_msgpack(t.Group(10**9, 10**9, ENV, (rollout,)))
    facts = t.EngineFacts("shoal-local/torch-2.13.0", "bfloat16", "cuda")
    made = to_msgpack(t.Submission("r" * 32, "123456", 4095, (group,), (), facts))
    bare = len(to_msgpack(rollout)) - tokens * BYTES_PER_TOKEN
    assert len(rollout.rows()) == rows and bare <= ROLLOUT_OVERHEAD_BYTES
    assert len(made) <= submission_bytes(1, 1, tokens, False)


@pytest.mark.parametrize(("rollouts", "max_tokens"), [(1, 1), (16, 4), (64, 512), (4096, 10)])
def test_every_turn_and_its_answer_fit(rollouts, max_tokens):
    texts = tuple(np.full(max_tokens, i, dtype="<i4").tobytes() for i in range(rollouts))
    assert len(to_msgpack(t.EnvTurn(10**9, 10**9, texts))) <= turn_bytes(rollouts, max_tokens)
    said = tuple(t.EnvReply(i, max_tokens, "environment", 255) for i in range(rollouts))
    assert len(to_msgpack(t.TurnAnswer(texts, said))) <= turn_answer_bytes(rollouts, max_tokens)


LAWS = [(16, 4, 512), (16, 4, 8192), (16, 256, 512), (2, 1024, 16), (64, 1, 64), (4096, 1, 10)]


@pytest.mark.parametrize(("group_size", "block_groups", "max_tokens"), LAWS)
def test_every_message_about_the_largest_lease_fits(group_size, block_groups, max_tokens):
    law = t.Rules(group_size, block_groups, 4, 1, 10, 60.0, 1.0, "float32", {})
    sampling = t.Sampling(1.0, 8, max_tokens)
    blocks = most_lease_blocks(law, sampling, [t.EnvSpec(ENV, HASH, 10**9, 1.0, {})])
    assert 1 <= blocks <= MAX_LEASE_BLOCKS
    groups = blocks * block_groups
    slots = tuple(t.Slot(10**9 + i, HASH, ENV, 10**9) for i in range(block_groups))
    lease = t.Lease("123456", HASH, 4095, (t.Block(10**6, slots),) * blocks, sampling, 1.7e9 + 0.1, 1.7e9 + 0.1)
    validators = (HASH,) * 40
    check = t.Check(
        HASH, lease, tuple(range(10**9, 10**9 + groups)), 1.7e9, (REWARD,) * groups, REWARD, REWARD, validators
    )
    accepted = t.GroupVerdict(
        10**9, False, "accept", rewards=(REWARD,) * group_size, tokens=10**9, flipped=10**6, gap_sum=REWARD
    )
    refused = t.GroupVerdict(10**9, False, "soft", "c" * 20, "d" * 280, 4095, 10**6, REWARD, REWARD)
    shown = {f"{i:064}": (REWARD,) * 4 for i in range(40)}
    for said in (check, t.Verdict(HASH, (accepted,) * groups, shown), t.Verdict(HASH, (refused,) * groups, shown)):
        assert len(to_json(said)) <= MAX_JSON_BYTES
    assert submission_bytes(groups, group_size, max_tokens, False) <= MAX_SUBMISSION_BYTES


@pytest.mark.parametrize("group_size", [2, 16, 64, 4096])
def test_the_largest_batch_fits_and_twice_as_much_would_not(group_size):
    groups = most_batch_groups(group_size)
    member = t.BatchGroup(4095, 10**9, HASH, 4095, HASH, (REWARD,) * group_size)
    assert len(to_json(t.Batch(4095, (member,) * groups))) <= MAX_JSON_BYTES
    assert len(to_json(t.Batch(4095, (member,) * (2 * groups)))) > MAX_JSON_BYTES


def test_one_group_more_than_the_most_would_exceed_a_bound():
    most = most_lease_groups(16, 8192, True, [ENV])
    assert submission_bytes(most, 16, 8192, True) <= MAX_SUBMISSION_BYTES < submission_bytes(most + 1, 16, 8192, True)


def test_the_sizes_assumed_here_are_those_that_other_rooms_allow():
    assert REASON_BYTES > MAX_REASON_CHARS
    assert all(
        submission_bytes(1, 1, n, True) - submission_bytes(1, 1, n, False) == proof_bytes(n)
        for n in (1, 31, 32, 33, 999)
    )
    assert len(to_json(MAX_REWARD / math.pi)) <= 24
