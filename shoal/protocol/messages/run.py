"""The run and its nodes, as messages, with settings that a run file shares: sampling, environments, bounds, rewards."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec

from shoal.protocol.algorithm_config import Algorithm, Grpo
from shoal.protocol.constants import COMPLETIONS, EPISODES, MAX_ROLLOUT_TOKENS
from shoal.protocol.field_types import (
    Count,
    Fact,
    Finite,
    Fraction,
    Message,
    NonNegative,
    OpenShare,
    Positive,
    PositiveShare,
    Response,
    Share,
    Whole,
)
from shoal.protocol.noise import PHILOX, FamilyName

# --- sampling ---


class SamplingLimits(Message, frozen=True):
    """Temperature and token limits: `Sampling` of messages and `[sampling]` of a run file have them."""

    temperature: Positive
    """Divides the logits; below 1 is greedier, above 1 bolder."""
    max_turn_tokens: Count
    """Tokens that the policy may write in one turn, the stop token included."""
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_ROLLOUT_TOKENS)]
    """Tokens of a row, with the prompt and the environment's text: of a whole rollout, unless it has several rows."""
    max_rollout_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_ROLLOUT_TOKENS)] = 0
    """Tokens of all rows of a rollout, for environments with several seats or `history = "template"`; 0 is max_tokens."""

    @property
    def all_tokens(self) -> int:
        """Most tokens of a rollout, all its rows together."""
        return self.max_rollout_tokens or self.max_tokens


class Sampling(SamplingLimits, frozen=True, omit_defaults=True):
    """How tokens are drawn. Temperature and seed alone decide it, because draws with top-p or top-k cannot be replayed."""

    stops: Literal["control", "model"] = "control"
    """Which tokens end a turn: all control tokens, or those of the model, which are sent only if they are others."""
    noise: FamilyName = PHILOX
    """The noise that the seeds make. Sent only if it is another than philox."""


# --- environments ---


class LengthTarget(Message, frozen=True):
    """-weight for each token by which a rollout misses the length that its prompt asks for (INTELLECT-2)."""

    targets: tuple[int, ...]
    """Lengths, tokens. A task's index decides which of them its prompt asks for."""
    weight: float = 0.0003
    """Reward lost for each token of difference."""
    most: int = 0
    """Largest difference that counts, tokens; 0 is the largest target. It bounds the lowest reward."""
    say: str = " Think for {target} tokens before giving a response."
    """What the opening ends with; {target} stands for the number."""


class OverlongPenalty(Message, frozen=True):
    """-weight for a rollout that reaches a length, and less for one that comes near it (DAPO)."""

    limit: int
    """Length at which the penalty is whole, tokens."""
    buffer: int
    """How many tokens below the limit it begins."""
    weight: float = 1.0
    """The whole penalty."""


class RepetitionPenalty(Message, frozen=True):
    """-weight times the share of a rollout's sequences of tokens that occurred before in it."""

    size: int = 4
    """Tokens of a sequence."""
    weight: float = 1.0
    """Penalty of a rollout that only repeats itself."""


class Shaping(Message, frozen=True):
    """Terms that the run adds to the environment's score. They count the tokens that the policy wrote, stop tokens
    included."""

    length: LengthTarget | None = None
    overlong: OverlongPenalty | None = None
    repetition: RepetitionPenalty | None = None


class EnvSettings(Message, frozen=True, kw_only=True):
    """Settings of an environment beside its arguments: `EnvSpec` of messages and `[[envs]]` of a run file have them."""

    system: str = ""
    """System prompt. It takes the place of the environment's own."""
    examples: tuple[dict[str, Any], ...] = ()
    """Messages before each task, with `role` and `content`: pairs of a user's and an assistant's."""
    template: dict[str, Any] = {}
    """Arguments of the chat template, such as enable_thinking = false, or date = "2026-01-31"."""
    parser: str = ""
    """How the policy writes tool calls: hermes, qwen-xml, glm, deepseek, gemma, lfm, mistral, llama, harmony, atem, none.
    Empty takes what the chat template shows."""
    weights: dict[str, Finite] = {}
    """Weights of the parts of the reward, over those of the environment."""
    max_turn_tokens: Whole = 0
    """Tokens of one turn, if fewer than sampling.max_turn_tokens; 0 is the same."""
    max_tokens: Whole = 0
    """Tokens of a row, usually a whole rollout, if fewer than sampling.max_tokens; 0 is the same."""
    history: Literal["", "append", "template"] = ""
    """What the policy reads of its earlier turns: all tokens so far (append), or what the chat template shows of them
    (template), which may leave out thoughts. Empty is the environment's own choice, usually append."""
    shaping: Shaping | None = None
    """Terms that the run adds to the reward: a length to aim at, penalties near a limit and for repetition."""


class EnvPlayers(EnvSettings, frozen=True, kw_only=True):
    """Who plays an environment of the run, and what becomes of its faults. All this is sent after the settings."""

    kind: Fact = EPISODES
    """Who plays it: workers, or the host if it is "completions". All blocks of a run with one such environment are
    completions."""
    reproducible: bool = True
    """Whether the same actions always get the same answers. If not, leases share none, and equal bytes are not promised."""
    on_fault: Literal["", "lowest"] = ""
    """What becomes of a rollout on which it fails: it counts in nothing, or it has the lowest reward ("lowest")."""


class EnvSpec(EnvPlayers, frozen=True, omit_defaults=True):
    """An environment of the run, pinned. Settings are sent only if they are not the defaults."""

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

    @property
    def label(self) -> str:
        """What slots and groups call this environment. No two environments of a run have the same label."""
        return self.own_label or self.name


def kind_of(envs: Iterable[EnvSpec]) -> str:
    """The kind of a run's blocks. If the host plays one environment, it plays all."""
    return COMPLETIONS if any(env.kind == COMPLETIONS for env in envs) else EPISODES


# --- what validators allow ---


Proofs = Literal["none", "toploc"]
"""Of activations: nothing, or one proof in TOPLOC's format for each group."""


class Bounds(Message, frozen=True):
    """How much honest work may differ between the dtypes that sample and recompute; `shoal calibrate` measures it. A side
    may also name another kind of engine than the embedded one, as KIND:DTYPE, such as "remote:bfloat16/float32". A node
    that claims this kind then has the smaller of both values. `shoal` has one, transformers."""

    gap: Positive
    """A recomputed token further than this from the best choice (logits / temperature + noise) counts as flipped, nats."""
    flipped: OpenShare
    """Largest share of flipped tokens of an honest node."""
    mean_gap: Positive
    """Largest mean gap of an honest node's tokens, each counted at most `gap`; nats."""
    logprob: Positive
    """Largest |claimed - recomputed| log-probability of one token, nats. If it is above a tenth of ln(1 + epsilon), or if
    `largest_logit` lets it grow, the trainer computes the denominators of the importance ratio itself."""
    logprob_mean: NonNegative = 0.0
    """Largest mean of claimed - recomputed log-probabilities of an honest node's tokens, nats: a KL divergence. Sums that
    lean one way by clearly more than twice that a token are refused. 0 in a run file means a fiftieth of `logprob`."""
    largest_logit: NonNegative = 0.0
    """Up to this largest |logit / temperature| at a token, `gap` and `logprob` hold as they are. Above it they grow in
    proportion, as rounding errors do. 0: they never grow."""


class Rules(Message, frozen=True):
    """The part of the run file that every node must know."""

    group_size: Count
    block_groups: Count
    batch_groups: Count
    max_staleness: Whole
    steps: Count
    lease_s: Positive
    audit_rate: Share
    dtype: str
    """The dtype in which workers sample: float32, bfloat16 or int8. A manifest names the one of the published version."""
    bounds: dict[str, Bounds]
    """Bounds by "sampled/recomputed", such as "bfloat16/float32": the run's dtype, and that of the validator's engine."""
    proofs: Proofs = "none"
    """What a worker proves about its activations."""
    activation_error: Fraction = 0.0
    """Largest mean relative error of a group's proof that passes."""
    worker_share: PositiveShare = 1.0
    """Largest share of a batch's groups that one worker may fill, but always one group; 1 if max_staleness is 0."""
    paid_tokens: Whole = 0
    """Most policy tokens that are paid for each rollout, on average over its group; 0 pays all."""
    max_flat_groups: Whole = 0
    """Groups without signal in a row after which the run stops leasing and waits for its host; 0 never stops."""
    algorithm: Algorithm = Grpo()
    """Decides which groups have signal, and what their rollouts are worth."""
    quarantine_s: NonNegative = 30.0
    """Length of a worker's first quarantine, seconds."""


# --- the run ---


class Rotation(Message, frozen=True):
    """The root key's word that another key publishes from a version on. Its predecessor signs nothing more."""

    run: str
    stream: str
    key: str
    """The new publisher."""
    since: int
    """The first version that it publishes."""
    serial: int
    """1, 2, ...: of each rotation one more than of the last."""
    created: int
    """When the root signed it, seconds since the epoch. What the predecessor signs later is refused."""
    signature: str
    """By the root key, over the same with an empty signature."""


class Publishers(Message, frozen=True):
    """All publishers of a run, in order."""

    first: str
    """Named by the run's first event."""
    rotations: tuple[Rotation, ...] = ()

    @property
    def newest(self) -> str:
        """The only key that may publish and renew now."""
        return self.rotations[-1].key if self.rotations else self.first

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.first, *(rotation.key for rotation in self.rotations))


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
    """What the run's versions ask of an engine, such as "adapters": see `shoal/protocol/tolerances.py`."""
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
    """Sum over its groups that the trainer learned from, see `protocol.audit_and_pay.influence`."""
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
