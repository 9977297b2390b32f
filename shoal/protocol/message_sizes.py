"""How large the messages of a run can become, and so what a run file may ask for and how much a lease may hold.

Pure. Each bound encodes the widest example of what a message repeats, so a new field is counted without a change here.
`tests/protocol/test_message_sizes.py` compares the bounds with real messages.
"""

from collections.abc import Iterable

import msgspec

from shoal.protocol.algorithm_config import step_credit_of, vine_of
from shoal.protocol.constants import CONTINUATIONS, EPISODES, MAX_JSON_BYTES, MAX_LEASE_BLOCKS, MAX_SUBMISSION_BYTES
from shoal.protocol.continuations import most_rollouts
from shoal.protocol.encoding import to_json
from shoal.protocol.messages import (
    BatchGroup,
    Block,
    EnvSpec,
    Faults,
    GroupVerdict,
    Parent,
    Rules,
    Sampling,
    Slot,
    StepReward,
)
from shoal.protocol.messages.run import kind_of
from shoal.protocol.reward_rules import MAX_FAULT_CHARS

BYTES_PER_TOKEN = 4 + 1 + 4
"""Token id, author, log-probability."""

PROOF_CHUNK_TOKENS, PROOF_CHUNK_BYTES = 32, 2 + 2 * 128
"""Tokens and bytes of one chunk in a proof of activations, as `algos/toploc` makes it."""

ROLLOUT_OVERHEAD_BYTES = 256
"""Field names, lengths, version, ending and starts of one rollout. The first four take about 85. A start takes up to 5, of
which 4 are those of the log-prob that the row's first token lacks."""

GROUP_OVERHEAD_BYTES = 1024
"""Field names, slot, task and the environment's label of one group."""

SUBMISSION_OVERHEAD_BYTES = 4096
"""Run, lease, version and engine facts of one submission."""

MESSAGE_OVERHEAD_BYTES = 16_384
"""What a JSON message holds once: names, times, and the keys and projections of about 60 validators."""

TURN_OVERHEAD_BYTES = 64
"""Lengths, ending and author of one rollout in a turn or its answer."""

ENV_LABEL_BYTES = 256
"""Room for an environment's label."""

REASON_BYTES = 512
"""Room for what a verdict says of a refused group."""

WIDE_INT, WIDE_FLOAT, HASH = 10**12, -1.2345678901234567e-300, "0" * 64
"""Widest values of messages."""


def submission_bytes(num_groups: int, group_size: int, max_tokens: int, proofs: bool) -> int:
    """Most bytes that an honest submission of this many groups can have."""
    return num_groups * group_bytes(group_size, max_tokens, proofs) + SUBMISSION_OVERHEAD_BYTES


def group_bytes(group_size: int, max_tokens: int, proofs: bool = False) -> int:
    """Most bytes that an honest group of so many rollouts can have, and its proof."""
    rollout = max_tokens * BYTES_PER_TOKEN + ROLLOUT_OVERHEAD_BYTES
    if proofs:
        rollout += -(-max_tokens // PROOF_CHUNK_TOKENS) * PROOF_CHUNK_BYTES
    return group_size * rollout + GROUP_OVERHEAD_BYTES


def turn_bytes(num_rollouts: int, max_turn_tokens: int) -> int:
    """Most bytes that one turn of a block can have."""
    return num_rollouts * (max_turn_tokens * 4 + TURN_OVERHEAD_BYTES) + GROUP_OVERHEAD_BYTES


def turn_answer_bytes(num_rollouts: int, max_tokens: int) -> int:
    """Most bytes that the answer to one turn of a block can have."""
    return turn_bytes(num_rollouts, max_tokens)


def most_lease_groups(
    group_size: int, max_tokens: int, proofs: bool, envs: Iterable[str], kind: str = EPISODES, steps: int = 0
) -> int:
    """Groups of the largest lease whose submission, check and verdict all fit into messages. Each rollout has at most so
    many steps with rewards of their own."""
    submitted = (MAX_SUBMISSION_BYTES - SUBMISSION_OVERHEAD_BYTES) // group_bytes(group_size, max_tokens, proofs)
    said = max(_check_bytes(envs, kind), _verdict_bytes(group_size, steps))
    return min(submitted, (MAX_JSON_BYTES - MESSAGE_OVERHEAD_BYTES) // said)


def most_lease_blocks(law: Rules, sampling: Sampling, envs: Iterable[EnvSpec], continued: bool = False) -> int:
    """Blocks of the largest lease of a run; of continuations, if `continued`."""
    specs = list(envs)
    labels, proofs, size = [env.label for env in specs], law.proofs != "none", law.group_size
    if continued and (vine := vine_of(law.algorithm)):
        size = most_rollouts(law, vine)
    kind = CONTINUATIONS if continued else kind_of(specs)
    credit = step_credit_of(law.algorithm)
    groups = most_lease_groups(size, sampling.all_tokens, proofs, labels, kind, credit.most if credit else 0)
    return max(1, min(MAX_LEASE_BLOCKS, groups // law.block_groups))


def most_batch_groups(group_size: int, continuations: int = 0, steps: int = 0) -> int:
    """Groups of the largest batch that fits into a message, if each has at most so many continuations, and each rollout so
    many steps with rewards of their own."""
    rewards = (WIDE_FLOAT,) * group_size, (WIDE_FLOAT,) * continuations
    faults = tuple(range(group_size)), tuple(range(continuations))
    member = BatchGroup(WIDE_INT, WIDE_INT, HASH, WIDE_INT, HASH, *rewards, _steps(group_size, steps), *faults)
    return (MAX_JSON_BYTES - MESSAGE_OVERHEAD_BYTES) // _listed(member)


def _check_bytes(envs: Iterable[str], kind: str) -> int:
    """Bytes of one group in a check, which holds the lease: a slot, at worst in a block of its own, and its draw."""
    label = max(ENV_LABEL_BYTES, *(len(to_json(env)) for env in envs), 0)
    slot = Slot(WIDE_INT, HASH, "x" * label, WIDE_INT, Parent(HASH, WIDE_INT, HASH) if kind == CONTINUATIONS else None)
    return _listed(Block(WIDE_INT, (slot,), kind)) + _listed(WIDE_INT) + _listed(WIDE_FLOAT)


def _steps(group_size: int, most: int) -> tuple[tuple[StepReward, ...], ...]:
    return ((StepReward(WIDE_INT, WIDE_FLOAT),) * most,) * group_size if most else ()


def _verdict_bytes(group_size: int, steps: int) -> int:
    """Bytes of one group in a verdict: accepted groups have rewards, others a reason."""
    indices = tuple(range(group_size))
    widest = GroupVerdict(
        WIDE_INT, False, "accept", "", "", WIDE_INT, WIDE_INT, WIDE_FLOAT, WIDE_FLOAT, (WIDE_FLOAT,) * group_size,
        WIDE_INT, WIDE_INT, WIDE_FLOAT, WIDE_FLOAT, WIDE_FLOAT,
        _steps(group_size, steps) or msgspec.UNSET,
        Faults(indices, indices, WIDE_FLOAT, "x" * MAX_FAULT_CHARS),
    )  # fmt: skip
    refused = msgspec.structs.replace(
        widest, outcome="soft", check="x" * REASON_BYTES, rewards=(), steps=msgspec.UNSET, faults=msgspec.UNSET
    )
    return max(_listed(widest), _listed(refused))


def _listed(value: object) -> int:
    return len(to_json(value)) + 1
