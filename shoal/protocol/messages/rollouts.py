"""Work: leases that cross the wire, and the rollouts that fill them.

Bulk arrays travel as little-endian bytes; `Rollout` gives them back as numpy arrays.

Axes: T tokens of one rollout or of one of its rows, P tokens of it that the policy wrote (P <= T).
"""

from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.protocol.constants import EPISODES, MAX_ROLLOUT_ROWS
from shoal.protocol.field_types import Fact, Message, Response, Said
from shoal.protocol.messages.run import Sampling

ENVIRONMENT, POLICY, UNTRAINED = 0, 1, 2
"""Authors of a token. UNTRAINED is the policy too: the token is sampled, checked and paid, but nothing is learned from it,
because the environment says so. Changing breaks: every rollout."""

Short = Annotated[str, msgspec.Meta(max_length=128)]  # guard: receipt-is-short
"""A hash, a key, a signature or a number, as text."""

Ending = Literal["environment", "length", "error", "stop"]
"""What ended a rollout: the environment, a token limit, an exception in the environment, or a stop of the policy itself
(only in leases for completions, where no environment answers)."""


class Parent(Message, frozen=True):
    """An accepted group whose rollouts are to be continued."""

    submission: Short
    index: int
    """The group's place in the submission."""
    digest: Short
    """SHA-256 of the group's bytes."""


class Slot(Message, frozen=True, omit_defaults=True):
    """A group that is still to be made. The seed decides environment and task; both are repeated here for convenience."""

    slot: int
    """Counted from 0 within a policy version."""
    seed: str
    """Slot seed, 32 bytes in hex."""
    env: str
    """Label of an environment of the run."""
    task: int
    parent: Parent | None = None
    """What a group of continuations continues; its seed, environment and task are then the parent's. None in such a slot:
    its group is empty, because nothing can be learned from what would be its parent."""


class Block(Message, frozen=True, omit_defaults=True):
    """Slots that are generated as one batch. So their bits do not depend on what else the worker generates."""

    index: int
    slots: tuple[Slot, ...]
    kind: Fact = EPISODES
    """What to generate for the slots; sent only if it is not "episodes". A node refuses a kind that it does not know."""


class Lease(Message, frozen=True):
    """The right and duty of one worker to fill some slots until the deadline."""

    id: Short
    worker: str
    version: int
    blocks: tuple[Block, ...]
    sampling: Sampling
    issued: float
    """Seconds since the epoch, by the coordinator's clock."""
    deadline: float


class LeaseRequest(Message, frozen=True):
    """`POST /v1/leases`: it names the leases that the worker holds, so that a repeated request changes nothing."""

    holding: tuple[str, ...] = ()
    tokens_per_s: float = 0.0
    returning: tuple[str, ...] = ()
    """Leases that a worker gives back unfilled. No lease is granted then."""
    stopped: int = -1
    """Index of the block because of which it gives them back: a call of an environment took too long in it, or ended its
    process. -1 if none did."""
    said: Said | msgspec.UnsetType = msgspec.UNSET
    """Which call that was, and what happened, for the host; it decides nothing."""


class LeaseAnswer(Response, frozen=True):
    """A lease, or when to come back and why."""

    lease: Lease | None
    retry_s: float
    reason: str
    terms: str = ""
    root: str = ""
    content: str = ""
    signature: str = ""
    """These four are as in the `Grant` of the lease."""


class Grant(Message, frozen=True):
    """A lease with all that decides its tokens, signed by the run key over the grant with an empty signature. So the host
    cannot deny what it asked for."""

    run: str
    lease: Lease
    terms: str
    """Digest of what the run says of its environments and groups: `promises.terms_of`."""
    root: str
    """Weights root of the lease's version, as the log has it."""
    content: str
    """Digest of the version's manifest without its dates: it also covers tokenizer and chat template."""
    signature: str


class RolloutRow(NamedTuple):
    """A row of a rollout: a sequence that the policy reads from its first token, as arrays."""

    tokens_T: NDArray[np.int32]
    author_T: NDArray[np.uint8]
    logprobs_P: NDArray[np.float32]
    start: int
    """Index in the rollout of the row's first token."""


class Rollout(Message, frozen=True, omit_defaults=True):
    """One attempt at a task, as bytes: token ids int32, authors uint8, and log-probs float32 of the policy's tokens.

    Usually it is one row. A further row opens where the policy reads something else than all tokens so far: a history
    without its earlier thoughts, or the view of another seat. The arrays then hold the rows one after another, in the
    order in which they opened.
    """

    token_ids: bytes
    author: bytes
    logprobs: bytes
    version: int
    ending: Ending
    starts: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_ROLLOUT_ROWS - 1)] = ()  # guard: few-starts
    """Indices at which the further rows begin. Sent only if there are any."""

    def tokens_T(self) -> NDArray[np.int32]:
        """Token ids, int32[T]. Raises ValueError if the bytes are not a whole number of them."""
        return np.frombuffer(self.token_ids, dtype="<i4")

    def author_T(self) -> NDArray[np.uint8]:
        """Who wrote each token, uint8[T]: ENVIRONMENT, POLICY or UNTRAINED."""
        return np.frombuffer(self.author, dtype="u1")

    def logprobs_P(self) -> NDArray[np.float32]:
        """Log-softmax(logits / temperature) of the policy's tokens, float32[P], nats."""
        return np.frombuffer(self.logprobs, dtype="<f4")

    def num_policy_tokens(self) -> int:
        """P, the number of tokens that are paid."""
        return self.author.count(POLICY) + self.author.count(UNTRAINED)

    def rows(self) -> list[RolloutRow]:
        """The rows, if the rollout has no flaw (`protocol/rollout_validation`). Token indices and noise count within a
        row."""
        tokens_T, author_T, logprobs_P = self.tokens_T(), self.author_T(), self.logprobs_P()
        if not self.starts:
            return [RolloutRow(tokens_T, author_T, logprobs_P, 0)]
        before_T = np.cumsum(author_T != ENVIRONMENT)  # policy tokens up to and with each token
        edges = list(pairwise((0, *self.starts, len(author_T))))
        counts = [0, *(int(before_T[end - 1]) for _, end in edges)]
        return [
            RolloutRow(tokens_T[begin:end], author_T[begin:end], logprobs_P[first:last], begin)
            for (begin, end), (first, last) in zip(edges, pairwise(counts), strict=True)
        ]


def make_rollout(
    tokens_T: Any, author_T: Any, logprobs_P: Any, *, version: int, ending: Ending, starts: tuple[int, ...] = ()
) -> Rollout:
    """Pack sequences or arrays into a `Rollout`; their shapes are those of its fields."""
    return Rollout(
        token_ids=np.asarray(tokens_T, dtype="<i4").tobytes(),
        author=np.asarray(author_T, dtype="u1").tobytes(),
        logprobs=np.asarray(logprobs_P, dtype="<f4").tobytes(),
        version=version,
        ending=ending,
        starts=starts,
    )


class Group(Message, frozen=True):
    """All rollouts of one task in one slot, in order of sample index."""

    slot: int
    task: int
    env: str
    """Label of the slot's environment."""
    rollouts: tuple[Rollout, ...]


class Parents(Message, frozen=True):
    """`GET /v1/leases/{id}/parents`, msgpack: what a lease of continuations continues."""

    groups: tuple[bytes, ...]
    """One encoded `Group` for each slot of the lease that names a parent, in the lease's order."""


class EngineFacts(Message, frozen=True):
    """What generated the tokens. The bounds of checks depend on it."""

    implementation: Fact
    dtype: Fact
    device: Fact


class Submission(Message, frozen=True):
    """`PUT /v1/leases/{id}/submission`, msgpack. Each group is encoded by itself, so that it has its own hash."""

    run: str
    lease: str
    version: int
    groups: tuple[bytes, ...]
    """One encoded `Group` for each slot of the lease, in the lease's order."""
    proofs: tuple[bytes, ...]
    """One for each group, or none."""
    engine: EngineFacts


class Receipt(Message, frozen=True):
    """Signed by the run key over the receipt with an empty signature. So the host cannot deny that it booked this
    submission as event `seq`, with the log's head `head`. Workers keep every receipt, so its texts are bounded."""

    run: Short
    lease: Short
    digest: Short
    seq: int
    head: Short
    time: float
    signature: Short
