"""What crosses the wire: the nouns of the protocol, as frozen values.

Every room speaks in these. They hold data and checks of their own shape, and know nothing of HTTP, storage or
models. Bulk arrays travel as little-endian bytes; `Rollout` gives them back as numpy arrays.

Axes: T tokens of one rollout, P tokens of it that the policy wrote (P <= T).
"""

import re
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.protocol.constants import MAX_FACT_CHARS

ENVIRONMENT, POLICY = 0, 1
"""Authors of a token."""

Ending = Literal["environment", "length", "error", "stop"]
"""How a rollout ended: the environment said so; a token limit; the environment raised; the policy's own stop
(completions leases only, where no environment answers)."""


_UNPRINTABLE = r"\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069"
"""Characters that control a terminal, or that hide or turn round what stands beside them."""

# guard: name-length, name-prints
Fact = Annotated[str, msgspec.Meta(max_length=MAX_FACT_CHARS, pattern=rf"\A[^{_UNPRINTABLE}]*\Z")]
"""What a node says of itself: short, and safe to show."""


def fact(text: str) -> str:
    """Any text as a `Fact`."""
    return re.sub(f"[{_UNPRINTABLE}]", "?", text)[:MAX_FACT_CHARS]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all that strangers send: immutable, no unknown fields."""


# --- the run ---


class Sampling(Message, frozen=True):
    """How tokens are drawn. Temperature and seed are the only parameters: top-p and top-k cannot be replayed."""

    temperature: float
    max_turn_tokens: int
    """Tokens that the policy may write in one turn, the stop token included."""
    max_tokens: int
    """Tokens of a whole rollout, prompt and environment included."""


class EnvSpec(Message, frozen=True, omit_defaults=True):
    """An environment of the run, pinned."""

    name: str
    """A built-in name, or a path to a Python file on the host."""
    digest: str
    """SHA-256 of its source; a node that has another refuses."""
    num_tasks: int
    weight: float
    """Share of slots, relative to the other environments."""
    args: dict[str, Any]
    own_label: Fact = msgspec.field(default="", name="label")
    """Sent only where the label is not the name: logs from before there were labels have none."""

    @property
    def label(self) -> str:
        """What slots and groups call this environment; no two of a run have the same."""
        return self.own_label or self.name


class Bounds(Message, frozen=True):
    """What honest arithmetic may do between a dtype that samples and one that replays; see `algos/sampling_evidence`."""

    gap: float
    """A token whose replay gap (logits / temperature + noise) exceeds this counts as flipped, nats."""
    flipped: float
    """Share of an honest node's tokens that are flipped, at most."""
    mean_gap: float
    """Mean gap of an honest node's tokens, each counted at most `gap`, at most; nats."""
    logprob: float
    """Largest |claimed - replayed| log-probability of one token that passes, nats."""


class Rules(Message, frozen=True):
    """The part of the run file that every node must know."""

    group_size: int
    block_groups: int
    batch_groups: int
    max_staleness: int
    steps: int
    lease_s: float
    audit_rate: float
    dtype: str
    """In which workers sample: float32, bfloat16 or int8. The manifest says in which a version is published."""
    bounds: dict[str, Bounds]
    """By "sampled/replayed", such as "bfloat16/float32": the run's dtype, and that of the validator's engine."""
    proofs: Literal["none", "toploc"] = "none"
    """What a worker proves of its activations: nothing, or one proof in TOPLOC's format for each group."""
    activation_error: float = 0.0
    """Mean relative error of a group's proof that passes."""
    worker_share: float = 1.0
    """Largest share of a batch's groups that one worker may fill, but always one group; 1 where max_staleness is 0."""
    paid_tokens: int = 0
    """Policy tokens paid for each rollout, on average over its group, at most; 0 pays all."""
    max_flat_groups: int = 0
    """Groups without signal in a row after which the run stops leasing and waits for its host; 0 never stops."""


class RunInfo(Message, frozen=True):
    """`GET /v1/run`: all that a stranger needs to take part."""

    run: str
    """Run id: made from the run's private seed when the run is created."""
    name: str
    protocol: int
    run_key: str
    """Ed25519 public key, hex, that signs receipts, and names who else may sign."""
    trainer_key: str
    """The key that publishes checkpoints."""
    head: str
    """Hash of the log's last event."""
    chain_end: str
    envs: tuple[EnvSpec, ...]
    sampling: Sampling
    rules: Rules
    phase: Literal["running", "paused", "draining", "ended"]
    version: int
    """Latest published policy version, -1 before the first."""


class Join(Message, frozen=True):
    """`POST /v1/nodes`: the key comes from the signature."""

    role: Literal["worker", "validator", "trainer", "relay"]
    name: Fact
    tokens_per_s: float
    """Measured speed of generation; 0 if not known."""
    implementation: Fact
    """Engine and its version, such as "shoal-local/torch-2.13.0"."""
    dtype: Fact
    device: Fact


class NodeState(Message, frozen=True):
    """What the coordinator knows of a node."""

    key: str
    role: str
    name: str
    standing: Literal["new", "good", "quarantined", "suspended", "kicked"]
    credits: int
    """Policy tokens accepted and not slashed."""
    accepted: int
    refused: int
    """Groups."""
    lapsed: int
    """Leases."""
    reasons: dict[str, int]
    """Refused groups by the check that refused them."""
    last_reason: str
    """The latest of them in full."""
    vested: int = 0
    """Of the credits, those that a slash can no longer take."""
    leases: int = 0
    """Ever granted; `lapsed` are a share of them."""
    influence: float = 0.0
    """Of its groups that the trainer learned from: the sum of mean |reward - group mean| times policy tokens."""
    stale: int = 0
    """Leases that were closed without cost because their version became too old; not counted in `lapsed`."""


# --- work ---


class Slot(Message, frozen=True):
    """One group still to be made: the seed decides environment and task, which stand here for convenience."""

    slot: int
    """Counted from 0 within a policy version."""
    seed: str
    """Slot seed, 32 bytes in hex."""
    env: str
    """Label of an environment of the run."""
    task: int


class Block(Message, frozen=True):
    """Slots that are generated as one batch, so that their bits do not depend on what else a worker was given."""

    index: int
    slots: tuple[Slot, ...]


class Lease(Message, frozen=True):
    """The right and duty of one worker to fill some slots until the deadline."""

    id: str
    worker: str
    version: int
    blocks: tuple[Block, ...]
    sampling: Sampling
    issued: float
    """Seconds since the epoch, by the coordinator's clock."""
    deadline: float


class LeaseRequest(Message, frozen=True):
    """`POST /v1/leases`: the leases in hand are named, so that a repeated request changes nothing."""

    holding: tuple[str, ...] = ()
    tokens_per_s: float = 0.0
    returning: tuple[str, ...] = ()
    """Leases given back unfilled by a worker that stops; none is granted then."""


class LeaseAnswer(Message, frozen=True):
    """A lease, or when to come back and why."""

    lease: Lease | None
    retry_s: float
    reason: str


class Rollout(Message, frozen=True):
    """One attempt at a task, as bytes: token ids int32, author uint8, log-probs float32 of the policy's tokens."""

    token_ids: bytes
    author: bytes
    logprobs: bytes
    version: int
    ending: Ending

    def tokens_T(self) -> NDArray[np.int32]:
        """Token ids, int32[T]. Raises ValueError if the bytes are not a whole number of them."""
        return np.frombuffer(self.token_ids, dtype="<i4")

    def author_T(self) -> NDArray[np.uint8]:
        """Who wrote each token, uint8[T]: ENVIRONMENT or POLICY."""
        return np.frombuffer(self.author, dtype="u1")

    def logprobs_P(self) -> NDArray[np.float32]:
        """Log-softmax(logits / temperature) at the policy's own tokens, float32[P], nats."""
        return np.frombuffer(self.logprobs, dtype="<f4")

    def num_policy_tokens(self) -> int:
        """P: what is paid for."""
        return self.author.count(POLICY)


def make_rollout(tokens_T: Any, author_T: Any, logprobs_P: Any, *, version: int, ending: Ending) -> Rollout:
    """Pack sequences or arrays into a `Rollout`; shapes as its fields."""
    return Rollout(
        token_ids=np.asarray(tokens_T, dtype="<i4").tobytes(),
        author=np.asarray(author_T, dtype="u1").tobytes(),
        logprobs=np.asarray(logprobs_P, dtype="<f4").tobytes(),
        version=version,
        ending=ending,
    )


class Group(Message, frozen=True):
    """All rollouts of one task in one slot, in order of sample index."""

    slot: int
    task: int
    env: str
    """Label of the slot's environment."""
    rollouts: tuple[Rollout, ...]


class EngineFacts(Message, frozen=True):
    """What made the tokens: verifying bounds depend on it."""

    implementation: Fact
    dtype: Fact
    device: Fact


class Submission(Message, frozen=True):
    """`PUT /v1/leases/{id}/submission`, msgpack. Each group is its own msgpack bytes, so that it has a hash of its own."""

    run: str
    lease: str
    version: int
    groups: tuple[bytes, ...]
    """One encoded `Group` for each slot of the lease, in the lease's order."""
    proofs: tuple[bytes, ...]
    """One for each group, or none at all."""
    engine: EngineFacts


class Receipt(Message, frozen=True):
    """Signed by the run key over the receipt with an empty signature: the coordinator cannot later deny the submission."""

    run: str
    lease: str
    digest: str
    seq: int
    head: str
    time: float
    signature: str


# --- judgement ---


class Check(Message, frozen=True):
    """`GET /v1/checks`: one submission for a validator to judge."""

    id: str
    """The submission's digest: fetch it from `/v1/blobs/{id}`."""
    lease: Lease
    audited: tuple[int, ...]
    """Slots drawn for the checks that need the model."""
    deadline: float
    draws: tuple[float, ...] = ()
    """One for each slot, in [0, 1): with the rewards they decide which further groups are audited."""
    rate: float = 1.0
    mean_influence: float = 0.0
    """Of the run's groups when these draws were made; see `protocol.audits.must_audit`."""
    project_for: tuple[str, ...] = ()
    """Keys to project the activations for: the validator's own, and of those who judged before it."""


class GroupVerdict(Message, frozen=True):
    """What a validator found of one group. Accepts have an empty `check`."""

    slot: int
    audited: bool
    outcome: Literal["accept", "void", "soft", "hard"]
    """Void: the environment itself fails on this task, as anyone can see: no pay, no blame, no rollouts."""
    check: str = ""
    detail: str = ""
    rollout: int = -1
    position: int = -1
    figure: float = 0.0
    bound: float = 0.0
    rewards: tuple[float, ...] = ()
    """As recomputed; empty unless accepted."""
    tokens: int = 0
    """Policy tokens of the group: the credit."""
    flipped: int = 0
    """Tokens whose gap exceeds the bound; 0 unless audited."""
    gap_sum: float = 0.0
    """Sum of the tokens' gaps, each counted at most the bound, nats; 0 unless audited."""


class Verdict(Message, frozen=True):
    """`PUT /v1/checks/{id}/verdict`."""

    submission: str
    groups: tuple[GroupVerdict, ...]
    projections: dict[str, tuple[float, ...]] = {}
    """Of the audited groups' activations, by validator key as the check asks; see `algos/projection`."""


# --- learning ---


class BatchGroup(Message, frozen=True):
    """A member of a batch, by hash."""

    version: int
    slot: int
    submission: str
    index: int
    """Its place in the submission."""
    digest: str
    """Of the group's bytes."""
    rewards: tuple[float, ...]


class Batch(Message, frozen=True):
    """`GET /v1/batches/{step}`: a value, not a moment."""

    step: int
    groups: tuple[BatchGroup, ...]


# --- weights ---


class FileEntry(Message, frozen=True):
    """A file of a checkpoint: a safe relative name and the chunks that make it up, in order."""

    path: str
    size: int
    digest: str
    chunks: tuple[str, ...]


class Manifest(Message, frozen=True):
    """What a policy version consists of. Signed as bytes, inside `SignedManifest`."""

    run: str
    stream: str
    version: int
    parents: tuple[int, ...]
    dtype: str
    root: str
    """Weights root: Merkle root over the published tensors only."""
    files: tuple[FileEntry, ...]
    chunk_bytes: int
    issued: float
    expires: float


class SignedManifest(Message, frozen=True):
    """The manifest's bytes as signed, with the key and signature in hex."""

    body: bytes
    key: str
    signature: str


# --- the log ---


class Event(Message, frozen=True):
    """One line of the log, as stored and hashed: `prev` is the hash of the event before."""

    seq: int
    time: float
    kind: str
    body: msgspec.Raw
    prev: str


class Refusal(Message, frozen=True):
    """Body of every 4xx and 5xx: what happened, why, and what to do."""

    error: str
    code: str
    """Stable word such as "superseded", "too_large", "not_admitted"."""


class CheckAnswer(Message, frozen=True):
    """Answer to `GET /v1/checks`: a submission to judge, or why there is none."""

    check: Check | None
    reason: str


class Status(Message, frozen=True):
    """`GET /v1/status`: where the run stands, and what it waits for."""

    name: str
    phase: str
    version: int
    steps: int
    accepted: int
    """Groups."""
    refused: dict[str, int]
    """Groups by check."""
    in_flight: int
    """Groups leased or not yet judged."""
    pending: int
    """Submissions not yet judged."""
    waiting_for: str
    waiting_s: float
    flat_groups: int = 0
    """Accepted in a row without signal: the rewards within each are all equal."""
    flat_reward: float = 0.0
    """Their mean reward."""
    pause_cause: str = ""
    """Why a paused run stopped by itself, such as "no signal"; empty where the host paused it."""


class StateHash(Message, frozen=True):
    """`GET /v1/state`: what a replay of the log up to `seq` must give."""

    seq: int
    head: str
    state_hash: str


class AdminRequest(Message, frozen=True):
    """`POST /v1/admin/{action}`: the node meant, by name or by the start of its key, where the action needs one."""

    node: str = ""


class Done(Message, frozen=True):
    """Answer to a write that has nothing else to say."""

    seq: int
    """Number of the log's last event."""
