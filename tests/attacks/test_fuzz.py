"""Mutated submissions: any bytes give a verdict for every slot, raise nothing and use bounded memory."""

import functools
import random
import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.engine.interface import PolicyScore
from shoal.protocol.encoding import to_msgpack
from shoal.protocol.messages import EngineFacts, Submission
from shoal.verification.encode_submission import largest_submission_bytes
from tests.attacks.attack_fixture import RULES, World, lease_of, make_policy

FUZZ = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class Oracle:
    """Scores that agree with any claim, so that mutations reach the last check, that of log-probs."""

    def score(self, requests, temperature):
        for request in requests:
            assert 0 < min(request.policy_positions) <= max(request.policy_positions) < len(request.token_ids)
            assert 0 <= min(request.token_ids) <= max(request.token_ids) < 64
        counts = [len(request.policy_positions) for request in requests]
        return [PolicyScore(np.full(n, -1.0, np.float32), np.zeros(n, np.float32), None) for n in counts]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    policy = make_policy(tmp_path_factory.mktemp("fuzz") / "policy", sharpen=40.0)
    lease = lease_of([[(0, "wordle", 3), (1, "arithmetic", 4)]])
    return World(policy, policy, policy, lease=lease, rules=msgspec.structs.replace(RULES, group_size=2))


def judged(world: World, body: bytes) -> set[str]:
    """The outcomes; asserts everything that a verdict promises."""
    verdicts = world.judge(body, engine=Oracle())
    for verdict in verdicts:
        assert verdict.outcome in ("accept", "soft", "hard")
        assert (verdict.outcome == "accept") == (verdict.check == "")
        assert np.isfinite([verdict.figure, verdict.bound]).all()
        assert len(verdict.detail) < 300 and verdict.detail.isprintable()
        assert msgspec.json.decode(msgspec.json.encode(verdict), type=type(verdict)) == verdict
    return {verdict.outcome for verdict in verdicts}


@FUZZ
@given(body=st.binary(max_size=400))
def test_random_bytes_always_give_a_verdict(world, body):
    assert judged(world, body) == {"hard"}


@FUZZ
@given(data=st.data())
def test_mutations_that_decode_always_give_a_verdict(world, data):
    """Mutations that decode: they reach the checks behind the decoder."""
    groups = list(world.honest_groups)
    place = data.draw(st.integers(0, 1))
    rollouts = list(groups[place].rollouts)
    index = data.draw(st.integers(0, len(rollouts) - 1))
    rollouts[index] = msgspec.structs.replace(rollouts[index], **data.draw(_rollout_lies(rollouts[index])))
    number = st.integers(-(2**63), 2**64 - 1)
    lies = {
        "rollouts": st.just(tuple(rollouts)),
        "slot": st.one_of(st.just(groups[place].slot), number),
        "task": st.one_of(st.just(groups[place].task), number),
        "env": st.one_of(st.just(groups[place].env), st.text(max_size=20)),
    }
    chosen = {"rollouts", *data.draw(st.lists(st.sampled_from(sorted(lies)), max_size=1))}
    groups[place] = msgspec.structs.replace(groups[place], **{name: data.draw(lies[name]) for name in sorted(chosen)})
    judged(world, world.encode(groups))


def _rollout_lies(rollout):
    """A few fields of a rollout replaced: arrays of any content, edited arrays, other versions and endings."""
    tokens, authors = rollout.tokens_T().tolist(), rollout.author_T().tolist()
    arrays = {
        "token_ids": st.one_of(
            _edited(tokens, st.integers(-1, 65)).map(functools.partial(_pack, "<i4")), st.binary(max_size=40)
        ),
        "author": st.one_of(
            _edited(authors, st.integers(0, 2)).map(functools.partial(_pack, "u1")), st.binary(max_size=9)
        ),
        "logprobs": st.one_of(
            _edited([-1.0] * sum(authors), st.floats(width=32)).map(functools.partial(_pack, "<f4")),
            st.binary(max_size=40),
        ),
        "version": st.integers(0, 4),
        "ending": st.sampled_from(["environment", "length", "error", "stop"]),
        "starts": st.lists(
            st.one_of(st.integers(-2, len(tokens) + 2), st.integers(-(2**63), 2**64 - 1)), min_size=1, max_size=4
        ).map(lambda starts: tuple(sorted(starts))),
    }
    return st.lists(st.sampled_from(sorted(arrays)), min_size=1, max_size=3, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: arrays[name] for name in names})
    )


def _edited(values, value):
    """The list with one item replaced, removed, or put in."""
    place = st.integers(0, max(0, len(values) - 1))
    return st.one_of(
        st.tuples(place, value).map(lambda edit: [*values[: edit[0]], edit[1], *values[edit[0] + 1 :]]),
        place.map(lambda at: values[:at] + values[at + 1 :]),
        st.tuples(place, value).map(lambda edit: [*values[: edit[0]], edit[1], *values[edit[0] :]]),
    )


def _pack(dtype, values):
    return np.array(values, dtype=dtype).tobytes()


def _hollow(largest: int) -> list[bytes]:
    """Bodies just below the size limit that would be large once decoded."""
    facts = EngineFacts("", "", "")
    empty_group = to_msgpack({"slot": 0, "task": 0, "env": "wordle", "rollouts": []})
    empty_rollout = {"token_ids": b"", "author": b"", "logprobs": b"", "version": 3, "ending": "stop"}
    many = (largest - 500) // len(to_msgpack(empty_rollout))
    crowd = to_msgpack({"slot": 0, "task": 0, "env": "wordle", "rollouts": [empty_rollout] * many})
    return [
        to_msgpack(Submission("run-1", "lease-1", 3, (b"",) * (largest // 3), (), facts)),
        to_msgpack(Submission("run-1", "lease-1", 3, (empty_group,) * (largest // 40), (), facts)),
        to_msgpack(Submission("run-1", "lease-1", 3, (crowd, empty_group), (), facts)),
        b"\x91" * largest,
        b"\xdd\xff\xff\xff\xff" + b"\xc0" * (largest - 5),
        random.Random(0).randbytes(largest),
    ]


def test_memory_is_bounded_by_what_the_lease_can_need(world):
    largest = largest_submission_bytes(world.lease, world.rules)
    for body in [*_hollow(largest), bytes(50 * largest)]:
        tracemalloc.start()
        assert judged(world, body) <= {"soft", "hard"}
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 16 * largest
