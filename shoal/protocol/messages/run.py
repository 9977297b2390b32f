"""The run and its nodes, as messages: what a coordinator tells a stranger, and what a node says about itself.

They only hold data, and know no HTTP, storage or models.
"""

from typing import Any, Literal

import msgspec

from shoal.protocol.algorithm_config import Algorithm, Grpo
from shoal.protocol.constants import EPISODES
from shoal.protocol.messages.base import Fact, Message, Response
from shoal.protocol.messages.publishers import Publishers
from shoal.protocol.noise import PHILOX, FamilyName
from shoal.protocol.reward_shaping import Shaping


class Sampling(Message, frozen=True, omit_defaults=True):
    """How tokens are drawn. Temperature and seed alone decide it, because draws with top-p or top-k cannot be replayed."""

    temperature: float
    max_turn_tokens: int
    """Tokens that the policy may write in one turn, the stop token included."""
    max_tokens: int
    """Tokens of a row, including the prompt and the environment's text: usually the whole rollout."""
    max_rollout_tokens: int = 0
    """Tokens of all rows of a rollout; 0 is max_tokens. Sent only if it is set."""
    stops: Literal["control", "model"] = "control"
    """Which tokens end a turn: all control tokens, or those of the model, which are sent only if they are others."""
    noise: FamilyName = PHILOX
    """The noise that the seeds make. Sent only if it is another than philox."""

    @property
    def all_tokens(self) -> int:
        """Most tokens of a rollout, all its rows together."""
        return self.max_rollout_tokens or self.max_tokens


class EnvSpec(Message, frozen=True, omit_defaults=True):
    """An environment of the run, pinned."""

    name: str
    """A built-in name, a package such as owner/name@1.0.0, or a path to a Python file on the host."""
    digest: str
    """SHA-256 of its source. A node whose source has another digest refuses the run."""
    num_tasks: int
    weight: float
    """Share of the slots, relative to the weights of the other environments."""
    args: dict[str, Any]
    own_label: Fact = msgspec.field(default="", name="label")
    """Sent only if it differs from the name."""
    system: str = ""
    """System prompt; empty leaves the environment's own."""
    examples: tuple[dict[str, Any], ...] = ()
    """Messages before each task."""
    template: dict[str, Any] = {}
    """Arguments of the chat template."""
    parser: str = ""
    """Notation of tool calls; empty is the chat template's."""
    weights: dict[str, float] = {}
    """Weights of the parts of the reward."""
    max_turn_tokens: int = 0
    """Token limits below those of the run's `Sampling`; 0 is none of its own."""
    max_tokens: int = 0
    history: Fact = ""
    """What the policy reads of its earlier turns; empty leaves the environment's own choice."""
    shaping: Shaping | None = None
    """What the run adds to its rewards. Sent only if it is set."""
    kind: Fact = EPISODES
    """Who plays it: workers, or the host if it is "completions". All blocks of a run with one such environment are
    completions."""
    reproducible: bool = True
    """Whether the same actions always get the same answers. If not, leases share none, and equal bytes are not promised."""
    on_fault: Fact = ""
    """What becomes of a rollout on which it fails: it counts in nothing, or it has the lowest reward ("lowest")."""

    @property
    def label(self) -> str:
        """What slots and groups call this environment. No two environments of a run have the same label."""
        return self.own_label or self.name

    @property
    def has_settings(self) -> bool:
        """Whether a node must know more than the name and the arguments."""
        own = (
            self.system,
            self.examples,
            self.template,
            self.parser,
            self.weights,
            self.max_turn_tokens,
            self.max_tokens,
            self.history,
            self.shaping,
            self.on_fault,
        )
        return any(own)


class Bounds(Message, frozen=True):
    """How far honest arithmetic may differ between the dtype that samples and the one that replays; see
    `algos/sampling_evidence`."""

    gap: float
    """A token whose replay gap (logits / temperature + noise) exceeds this counts as flipped, nats."""
    flipped: float
    """Largest share of an honest node's tokens that are flipped."""
    mean_gap: float
    """Largest mean gap of an honest node's tokens, nats. A gap above `gap` counts as `gap`."""
    logprob: float
    """Largest |claimed - replayed| log-probability of a token that passes, nats."""
    logprob_mean: float = 0.0
    """Largest mean of claimed - replayed log-probabilities of an honest node's tokens, nats. 0 judges no sums of them."""
    largest_logit: float = 0.0
    """Up to this largest |logit / temperature| at a token, `gap` and `logprob` hold as they are. Above it they grow in
    proportion, as rounding errors do. 0: they never grow."""


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
    """The dtype in which workers sample: float32, bfloat16 or int8. A manifest names the one of the published version."""
    bounds: dict[str, Bounds]
    """Bounds by "sampled/recomputed", such as "bfloat16/float32": the run's dtype, and that of the validator's engine."""
    proofs: Literal["none", "toploc"] = "none"
    """What a worker proves about its activations: nothing, or one proof in TOPLOC's format for each group."""
    activation_error: float = 0.0
    """Largest mean relative error of a group's proof that passes."""
    worker_share: float = 1.0
    """Largest share of a batch's groups that one worker may fill, but always one group; 1 if max_staleness is 0."""
    paid_tokens: int = 0
    """Most policy tokens that are paid for each rollout, on average over its group; 0 pays all."""
    max_flat_groups: int = 0
    """Groups without signal in a row after which the run stops leasing and waits for its host; 0 never stops."""
    algorithm: Algorithm = Grpo()
    """Decides which groups have signal, and what their rollouts are worth."""
    quarantine_s: float = 30.0
    """Length of a worker's first quarantine, seconds."""


class RunVersions(Response, frozen=True):
    """What a node reads of `GET /v1/run` before it reads the rest, which it may not understand."""

    protocol: int
    rules_version: int = 0


class RunInfo(Response, frozen=True, omit_defaults=True):
    """`GET /v1/run`: all that a stranger needs to take part."""

    run: str
    """Run id: made from the run's secret when the run is created."""
    name: str
    protocol: int
    run_key: str
    """Ed25519 public key, hex. It signs receipts and says who else may sign."""
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
    needs: tuple[Fact, ...] = ()
    """What the run's versions ask of an engine, such as "adapters": see `shoal/protocol/required_features.py`."""
    rules_version: int = 0
    """Version of the ledger's rules that the log follows, see `shoal/ledger/constants.py`. A node of another one
    refuses."""
    origin: str = ""
    """Below this URL chunks and manifests are named by their hashes; ":PORT/PATH" is on the host that was asked. Empty, and
    not sent: the coordinator itself serves them."""
    root_key: str = ""
    """The key that names publishers; empty: the run key."""
    publishers: Publishers | None = None
    """All publishers, once the first was replaced."""

    @property
    def root(self) -> str:
        """The key that names publishers."""
        return self.root_key or self.run_key

    @property
    def all_publishers(self) -> Publishers:
        """All publishers, as the coordinator tells them."""
        return self.publishers or Publishers(self.trainer_key)


class Join(Message, frozen=True):
    """`POST /v1/nodes`: what a node says about itself. Its key comes from the signature."""

    role: Literal["worker", "validator", "trainer"]
    name: Fact
    tokens_per_s: float
    """Measured speed of generation; 0 if unknown."""
    implementation: Fact
    """Engine and its version, such as "shoal-local/torch-2.13.0"."""
    dtype: Fact
    device: Fact


class NodeState(Response, frozen=True):
    """What the coordinator knows about a node."""

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
    """The latest reason in full."""
    vested: int = 0
    """The part of `credits` that a slash can no longer take."""
    leases: int = 0
    """All that were ever granted, including the lapsed ones."""
    influence: float = 0.0
    """Sum over its groups that the trainer learned from, see `protocol.audit_selection.influence`."""
    stale: int = 0
    """Leases closed at no cost: their version was too old, or the host's environment hung. Not counted in `lapsed`."""
    left: bool = False
    """Whether it left and has not joined again."""
    given: int = 0
    """Blocks that were ever leased to it."""
    unfilled: int = 0
    """Of these, blocks that it dropped, or that another worker made because it was late."""
    silent_s: float = 0.0
    """For how long it has asked for nothing: a worker that is not at work, or a validator that owes a verdict or missed
    turns; 0 if it is not silent."""
    forked: bool = False
    """Whether it says that it has seen an event which this log lacks."""
