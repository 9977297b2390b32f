"""Encoding of a worker's groups as the bytes of a `Submission`.

Sampling proofs cost no bytes, because the seeds of the lease fix the choice. A run may also ask for proofs of activations.
"""

from collections.abc import Sequence

import numpy as np

from shoal.algos.toploc import prove
from shoal.engine.interface import PolicyScore
from shoal.errors import StateError
from shoal.protocol.constants import MAX_SUBMISSION_BYTES
from shoal.protocol.continuations import num_rollouts
from shoal.protocol.encoding import to_msgpack
from shoal.protocol.message_sizes import submission_bytes
from shoal.protocol.messages import EngineFacts, Group, Lease, Rules, Submission
from shoal.verification.check_context import by_group

REMEDY = (
    "Check this machine's memory. If other workers report the same, values of the policy overflow: its host may begin "
    'again from an earlier version, or with sampling.dtype = "float32" if it is not'
)


def encode_submission(
    run: str, lease: Lease, groups: Sequence[Group], engine: EngineFacts, proofs: tuple[bytes, ...] = ()
) -> bytes:
    """Encode the groups of a lease, in the lease's order, as msgpack `Submission` bytes.

    `proofs` holds one proof for each group, if the run asks for them. Raises `StateError` if a log-probability is not a
    finite number: validators would refuse the submission as fabricated, and this machine is at fault.
    """
    assert [g.slot for g in groups] == [s.slot for b in lease.blocks for s in b.slots], "groups must fill the lease"
    for group in groups:
        for index, rollout in enumerate(group.rollouts):
            if not np.isfinite(rollout.logprobs_P()).all():
                raise StateError(
                    f"not submitted: rollout {index} of slot {group.slot} has a log-probability that is not finite "
                    f"({engine.implementation}, {engine.dtype} on {engine.device}). {REMEDY}"
                )
    submission = Submission(
        run=run,
        lease=lease.id,
        version=lease.version,
        groups=tuple(to_msgpack(group) for group in groups),
        proofs=proofs,
        engine=engine,
    )
    return to_msgpack(submission)


def prove_activations(groups: Sequence[Group], scores: Sequence[PolicyScore]) -> tuple[bytes, ...]:
    """Make one proof for each group, from a prefill of all rows of their rollouts with hidden states.

    Raises `StateError` if a hidden state is not finite: this machine is at fault.
    """
    proofs = []
    for group, of_group in zip(groups, by_group(groups, scores), strict=True):
        if not group.rollouts:
            proofs.append(b"")
            continue
        try:
            proofs.append(prove([score.hidden_PD for score in of_group if score.hidden_PD is not None]))
        except ValueError as error:
            raise StateError(f"not submitted: no proof for slot {group.slot}: {error}. {REMEDY}") from None
    return tuple(proofs)


def largest_submission_bytes(lease: Lease, rules: Rules) -> int:
    """The most bytes that an honest submission for this lease can have.

    A validator refuses a larger one before decoding it, so the lease limits how much memory a stranger can make us use.
    """
    slots = [slot.slot for block in lease.blocks for slot in block.slots]
    most = max((num_rollouts(rules, slot)[1] for slot in slots), default=0)
    proofs = rules.proofs != "none"
    return min(MAX_SUBMISSION_BYTES, submission_bytes(len(slots), most, lease.sampling.all_tokens, proofs))
