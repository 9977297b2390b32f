"""The run file: every knob of a run with its unit, and how a TOML file becomes one.

Called by the CLI and by every role. This is the only file that reads the process environment. The sections stand
together here, not beside their owners, because the run file is one document for its reader and the coordinator
must read all of it without importing torch.
"""

import contextlib
import ipaddress
import math
import operator
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from shoal.errors import ConfigError
from shoal.protocol.constants import (
    CHAIN_LENGTH,
    MAX_BLOCK_ROLLOUTS,
    MAX_FACT_CHARS,
    MAX_GROUP_ROLLOUTS,
    MAX_ROLLOUT_TOKENS,
)
from shoal.protocol.sizes import most_batch_groups, most_lease_groups
from shoal.protocol.types import fact
from shoal.tree import Section, changed_keys, from_tree, merge, read_toml, set_key, to_tree

T = TypeVar("T")


class TinyPolicy(Section, frozen=True):
    """A model made from scratch, when `policy.path` is empty."""

    family: Literal["llama", "qwen2", "qwen3"] = "qwen3"
    """Architecture, as Hugging Face's transformers names it."""
    width: int = 128
    """Hidden size."""
    layers: int = 4
    """Transformer blocks."""
    heads: int = 4
    """Query heads; they divide the width."""
    kv_heads: int = 2
    """Key and value heads; they divide the query heads."""
    mlp_width: int = 384
    """Intermediate size."""
    max_positions: int = 512
    """Longest sequence, tokens."""
    tied: bool = False
    """Output head shares the embedding."""


class PolicyConfig(Section, frozen=True):
    """The language model."""

    path: str = ""
    """HF-format directory to start from, relative to the run file; empty makes `tiny` from the run's seed."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which versions are published, and sampled unless `sampling.dtype` says otherwise."""
    tiny: TinyPolicy = TinyPolicy()


class EnvConfig(Section, frozen=True):
    """One environment of the run."""

    name: str
    """Built-in name, or path to a Python file relative to the run file."""
    weight: float = 1.0
    """Share of slots, relative to the other environments."""
    args: dict[str, Any] = {}
    """Arguments of the environment."""
    label: str = ""
    """What the run calls it; empty takes the name, or the name of the file without `.py`. No two may be equal."""

    def __post_init__(self) -> None:
        if not self.label:
            msgspec.structs.force_setattr(self, "label", Path(self.name).name.removesuffix(".py"))


class SamplingConfig(Section, frozen=True):
    """How tokens are drawn."""

    temperature: float = 1.0
    """Divides the logits; below 1 is greedier, above 1 bolder."""
    max_turn_tokens: int = 64
    """Tokens that the policy may write in one turn, the stop token included."""
    max_tokens: int = 512
    """Tokens of a whole rollout."""
    dtype: Literal["", "float32", "bfloat16", "int8"] = ""
    """Precision in which workers sample; empty is that of the published policy. int8 rounds the matrices alone."""


class RolloutsConfig(Section, frozen=True):
    """Groups, blocks and batches."""

    group_size: int = 16
    """Rollouts of one task."""
    block_rollouts: int = 64
    """Rollouts generated as one batch; a multiple of group_size."""
    batch_groups: int = 16
    """Groups with signal that make one training step."""
    max_staleness: int = 1
    """Policy versions between the one that sampled a rollout and the one that learns from it; 0 is synchronous."""
    lease_s: float = 120.0
    """Seconds that a worker has for one block before it is leased again."""
    paid_tokens: int = 0
    """Policy tokens paid for each rollout, on average over its group, at most; 0 pays all."""
    max_flat_groups: int = 500
    """Groups in a row whose rewards are all equal, after which the run stops leasing and waits for its host; 0 never
    stops. Where one group in a hundred teaches something, 500 that do not follow each other once in 150 times."""


class TrainConfig(Section, frozen=True):
    """The trainer."""

    algorithm: Literal["grpo"] = "grpo"
    """Which loss of `shoal/algos` turns rows into a number."""
    advantage: Literal["mean", "mean_std"] = "mean"
    """Reward minus group mean, or that divided by the group's standard deviation."""
    lr: float = 1e-4
    """Learning rate at its highest."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up; linear and cosine fall to a tenth."""
    warmup_steps: int = 5
    """Steps in which the learning rate climbs from 0."""
    beta1: float = 0.9
    """AdamW's decay of the mean gradient, per step."""
    beta2: float = 0.95
    """AdamW's decay of the mean squared gradient, per step."""
    weight_decay: float = 0.0
    """AdamW's pull of the weights towards 0, per unit of learning rate."""
    max_grad_norm: float = 1.0
    """A longer gradient is scaled down to this norm."""
    epsilon: float = 0.2
    """Clip range of the importance ratio, both sides."""
    delta: float = 4.0
    """Upper bound of the ratio where the advantage is negative (INTELLECT-2)."""
    entropy_bonus: float = 0.0
    """Weight of the mean entropy, nats per token."""
    microbatch_tokens: int = 2048
    """Padded tokens of one forward pass."""
    threads: int = 1
    """CPU threads of the trainer."""


class BoundsConfig(Section, frozen=True):
    """What honest arithmetic may do between a dtype that samples and one that replays; `shoal calibrate` measures it."""

    gap: float
    """A replayed token further than this from the best choice counts as flipped, nats."""
    flipped: float
    """Share of an honest node's tokens that are flipped, at most."""
    mean_gap: float
    """Mean gap of an honest node's tokens, each counted at most `gap`, at most; nats."""
    logprob: float
    """Largest |claimed - replayed| log-probability of one token, nats."""


BOUNDS = {
    "float32/float32": BoundsConfig(gap=1e-3, flipped=1e-5, mean_gap=1e-7, logprob=0.01),
    "bfloat16/bfloat16": BoundsConfig(gap=0.4, flipped=1e-3, mean_gap=5e-4, logprob=0.5),
    "bfloat16/float32": BoundsConfig(gap=0.4, flipped=1e-3, mean_gap=5e-4, logprob=0.5),
    "int8/int8": BoundsConfig(gap=1e-3, flipped=1e-5, mean_gap=1e-7, logprob=0.01),
}
"""Bounds of a run that gives none of its own: generous, for hardware that nobody measured."""


ACTIVATION_ERROR = {"float32": 0.001, "bfloat16": 0.008, "int8": 0.001}
"""Bound of a run that gives none, by the dtype that samples: above what `benchmarks/toploc.py` shows of honest work."""


class VerifyConfig(Section, frozen=True):
    """What validators demand."""

    audit_rate: float = 1.0
    """Share of groups whose sampling and log-probs are replayed with the model; 1 when max_staleness is 0."""
    quarantine_s: float = 30.0
    """Length of a worker's first quarantine, seconds; each of its earlier refused submissions doubles it, up to an hour. A
    worker gets no leases in quarantine. The cause is a hard failure, every third refused submission, or too much noise."""
    bounds: dict[str, BoundsConfig] = msgspec.field(default_factory=lambda: dict(BOUNDS))
    """By "sampled/replayed": the run's dtype, and that of the validator's engine."""
    proofs: Literal["none", "toploc"] = "none"
    """What workers prove of their activations: nothing, or one proof in TOPLOC's format for each group."""
    activation_error: float = 0.0
    """Mean relative error of a group's proof that passes; 0 takes 0.008 where workers sample in bfloat16, else 0.001.
    `shoal calibrate` measures it."""
    worker_share: float = 1.0
    """Largest share of a batch's groups that one worker may fill; 1 when max_staleness is 0."""


class WorkersConfig(Section, frozen=True):
    """Workers that `shoal run` starts on this machine."""

    count: int = 2
    """Honest workers."""
    cheating: int = 0
    """Further workers that cheat, to show that they are caught."""
    threads: int = 1
    """CPU threads of each."""


class ValidatorsConfig(Section, frozen=True):
    """Validators that the host starts."""

    count: int = 1
    """Validators: 0 (others are admitted), 1, or 3 and more. A refusal needs one, a slash two; of exactly two, one that
    lies makes forging free."""
    threads: int = 1
    """CPU threads of each."""


class HostConfig(Section, frozen=True):
    """Where the coordinator listens."""

    bind: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 takes requests from other machines."""
    port: int = 0
    """0 takes a free port and keeps it for resuming."""
    public_url: str = ""
    """What others should type, when a proxy with TLS stands before us."""
    trusted_proxies: tuple[str, ...] = ("127.0.0.1", "::1")
    """Addresses or networks of proxies: their X-Forwarded-For is believed, and no cap by address holds for them."""

    @property
    def is_reached_by_others(self) -> bool:
        """Whether other machines can send requests: directly, or through a proxy with a public URL."""
        return bool(self.public_url) or not is_loopback(self.bind)  # guard: public-url-is-a-way-in


class EvalConfig(Section, frozen=True):
    """Held-out evaluation before and after."""

    episodes: int = 512
    """Sampled episodes on held-out tasks of each environment; 0 turns it off."""
    samples: int = 2
    """Transcripts shown, of each environment."""


class StorageConfig(Section, frozen=True):
    """The run's folder."""

    retain: Literal["all", "batches", "window"] = "window"
    """Bodies of submissions kept: all; those that were trained on; or those of the last `window_steps` steps."""
    window_steps: int = 16
    """Training steps that `retain = "window"` keeps."""
    quota_mb: int = 2048
    """Disk that blobs may take; past it the coordinator pauses leases."""
    checkpoint_every: int = 25
    """Steps between checkpoints kept as HF directories."""


class RunConfig(Section, frozen=True, kw_only=True):
    """A run file."""

    name: str
    """Names the run and its folder, runs/NAME."""
    steps: int
    """Training steps."""
    seed: int = -1
    """Fixes every random choice of the run; -1 makes a private seed, as a run that other machines reach must have."""
    policy: PolicyConfig = PolicyConfig()
    envs: tuple[EnvConfig, ...]
    sampling: SamplingConfig = SamplingConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    train: TrainConfig = TrainConfig()
    verify: VerifyConfig = VerifyConfig()
    workers: WorkersConfig = WorkersConfig()
    validators: ValidatorsConfig = ValidatorsConfig()
    host: HostConfig = HostConfig()
    eval: EvalConfig = EvalConfig()
    storage: StorageConfig = StorageConfig()

    @property
    def sampled_dtype(self) -> str:
        """Precision in which workers sample, and validators replay."""
        return self.sampling.dtype or self.policy.dtype


class SftConfig(Section, frozen=True, kw_only=True):
    """Supervised fine-tuning from an environment's scripted player: the recipe of `shoal sft`."""

    name: str
    """Names the recipe in its output."""
    seed: int = 0
    """Fixes the first weights, the games and their order."""
    policy: PolicyConfig = PolicyConfig()
    env: EnvConfig
    """Whose scripted right player is imitated."""
    player: str = "right"
    """Which of the environment's scripted players is learned from."""
    tasks: Literal["training", "all"] = "training"
    """Which tasks the player plays; "all" adds the held-out ones, which are then held out of RL alone."""
    episodes: int = 4096
    """Scripted games to learn from."""
    steps: int = 300
    """Training steps."""
    batch: int = 128
    """Episodes a step."""
    lr: float = 1e-3
    """Learning rate at its highest; it falls to a tenth along a cosine."""
    warmup_steps: int = 20
    """Steps in which the learning rate climbs from 0."""
    max_grad_norm: float = 1.0
    """A longer gradient is scaled down to this norm."""
    max_tokens: int = 512
    """Longer episodes are left out, tokens."""
    publish_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of the files that are written."""
    threads: int = 2
    """CPU threads."""


SAFE_TO_CHANGE = (
    "steps", "workers", "validators", "host", "eval", "storage", "train.threads", "verify.quarantine_s",
    "rollouts.lease_s", "rollouts.max_flat_groups",
)  # fmt: skip
"""Keys (or whole sections) of a run file that may differ when a run is resumed."""


AT_LEAST_0 = (
    "workers.count", "workers.cheating", "validators.count", "eval.episodes", "eval.samples", "rollouts.max_flat_groups",
)  # fmt: skip
AT_LEAST_1 = (
    "steps", "train.threads", "workers.threads", "validators.threads", "train.microbatch_tokens",
    "storage.checkpoint_every", "storage.quota_mb",
)  # fmt: skip


def load_run(path: Path, overrides: list[str] | None = None, quick: bool = False) -> RunConfig:
    """Read a run file, apply `key.sub=value` overrides, and check that the numbers fit each other.

    A run file may hold a table `[quick]`: keys that stand over the others when `quick` is asked for, for a short
    taste of the same run, in a folder of its own. Raises `ConfigError` naming the key, and the nearest known key
    when it is unknown.
    """
    tree = read_toml(path)
    quick_tree = tree.pop("quick", None)
    if quick:
        if not isinstance(quick_tree, dict):
            raise ConfigError(f"{path} has no [quick] table, so it cannot be run with --quick: leave --quick out")
        tree = merge(tree, {"name": f"{tree.get('name')}-quick"} | quick_tree)
    config = _convert(merge(_built_in(), tree), overrides or [], RunConfig, path)
    check_run(config)
    return config


def _built_in() -> dict[str, Any]:
    """What a run file's own bounds stand over, pair by pair and key by key."""
    return {"verify": {"bounds": {pair: to_tree(bounds) for pair, bounds in BOUNDS.items()}}}


def load_sft(path: Path, overrides: list[str] | None = None) -> SftConfig:
    """Read an SFT recipe; as `load_run`."""
    return _convert(read_toml(path), overrides or [], SftConfig, path)


def check_run(config: RunConfig) -> None:
    """Raise `ConfigError` where keys contradict each other."""
    rollouts, sampling = config.rollouts, config.sampling
    positions = config.policy.tiny.max_positions
    demands = [
        *_at_least(0, AT_LEAST_0, config),
        *_at_least(1, AT_LEAST_1, config),
        (re.fullmatch(r"[\w.-]*\w", config.name) is not None, f"name = {config.name!r}: letters, digits, - _ . only"),
        (config.steps < CHAIN_LENGTH, f"steps = {config.steps}: must be below {CHAIN_LENGTH}, the length of a chain"),
        *_bounds_fit(config),
        (
            config.seed < 0 or not config.host.is_reached_by_others,  # guard: private-seed
            f"seed = {config.seed}: every secret of the run follows from it, and this run is open to other machines "
            f"(host.bind = {config.host.bind!r}, host.public_url = {config.host.public_url!r}). For a private seed "
            "leave seed out or give --set seed=-1, with --out for a new run if this one has begun",
        ),
        (
            config.validators.count != 2,  # guard: two-validators-are-no-majority
            "validators.count = 2: of two, one that lies makes forging free, because nothing is slashed that it does "
            "not also refuse. Use 1, or 3 and more",
        ),
        (0 <= config.verify.activation_error < 1, "verify.activation_error: between 0 and 1, a share of the value"),
        (bool(config.envs), "envs: at least one [[envs]] section is needed"),
        (all(e.weight > 0 for e in config.envs), "envs.weight: must be above 0"),
        *_labels_fit(config.envs),
        (rollouts.group_size >= 2, "rollouts.group_size: at least 2, or no group has signal"),
        (
            rollouts.block_rollouts > 0 and rollouts.block_rollouts % max(1, rollouts.group_size) == 0,
            f"rollouts.block_rollouts = {rollouts.block_rollouts}: must be a multiple of group_size = "
            f"{rollouts.group_size}",
        ),
        (rollouts.batch_groups >= 1, "rollouts.batch_groups: at least 1"),
        (rollouts.max_staleness >= 0, "rollouts.max_staleness: at least 0"),
        (rollouts.lease_s > 0, "rollouts.lease_s: must be above 0"),
        (0 < sampling.temperature < math.inf, "sampling.temperature: must be above 0"),
        (0 <= config.train.lr < math.inf, "train.lr: at least 0, and finite"),
        (
            bool(config.policy.path) or sampling.max_tokens <= positions,
            f"sampling.max_tokens = {sampling.max_tokens}: at most policy.tiny.max_positions = {positions}",
        ),
        (0 < sampling.max_turn_tokens <= sampling.max_tokens, "sampling.max_turn_tokens: between 1 and max_tokens"),
        (0.0 <= config.verify.audit_rate <= 1.0, "verify.audit_rate: between 0 and 1"),
        (
            rollouts.max_staleness > 0 or config.verify.audit_rate == 1.0,
            "verify.audit_rate: must be 1 when rollouts.max_staleness is 0 (everything is audited then)",
        ),
        (
            0 < config.verify.worker_share <= 1,
            "verify.worker_share: above 0 and at most 1, a share of a batch's groups",
        ),
        (
            rollouts.max_staleness > 0 or config.verify.worker_share == 1.0,
            "verify.worker_share: must be 1 when rollouts.max_staleness is 0 (a batch goes by slot number then)",
        ),
        *_addresses_are_read(config.host.trusted_proxies),
        (rollouts.paid_tokens >= 0, "rollouts.paid_tokens: at least 0, and 0 pays all"),
        *_messages_fit(config),
    ]
    for holds, message in demands:
        if not holds:
            raise ConfigError(message)


def _labels_fit(envs: Sequence[EnvConfig]) -> Iterator[tuple[bool, str]]:
    """Slots, groups and metrics name an environment by its label."""
    for label in [env.label for env in envs]:
        fits = bool(label) and label == fact(label) == label.strip()
        yield fits, f"envs.label = {label!r}: 1 to {MAX_FACT_CHARS} printable characters, without a space at either end"
    for label, count in Counter(env.label for env in envs).items():
        yield count == 1, f'{count} [[envs]] are labelled {label}: give each its own, such as label = "{label}-2"'


def _addresses_are_read(names: Iterable[str]) -> Iterator[tuple[bool, str]]:
    for name in names:
        try:
            ipaddress.ip_network(name, strict=False)
        except ValueError as error:
            yield False, f"host.trusted_proxies: {error}: write an address or a network, such as 10.0.0.0/8"


def _messages_fit(config: RunConfig) -> Iterator[tuple[bool, str]]:
    """A block travels as one submission and one verdict, a batch as one message: what fits in none never comes."""
    rollouts, max_tokens, size = config.rollouts, config.sampling.max_tokens, config.rollouts.group_size
    for key, value, limit in (
        ("rollouts.group_size", size, MAX_GROUP_ROLLOUTS),
        ("rollouts.block_rollouts", rollouts.block_rollouts, MAX_BLOCK_ROLLOUTS),
        ("sampling.max_tokens", max_tokens, MAX_ROLLOUT_TOKENS),
    ):
        yield value <= limit, f"{key} = {value}: at most {limit}"
    if size < 1 or size > MAX_GROUP_ROLLOUTS:
        return
    envs, proofs = [env.label for env in config.envs], config.verify.proofs != "none"
    groups, members = most_lease_groups(size, max(1, max_tokens), proofs, envs), most_batch_groups(size)
    what = f"rollouts.group_size = {size}: one group of max_tokens = {max_tokens} does not fit into a submission"
    yield groups >= 1, f"{what}: lower it, or sampling.max_tokens"
    what = (
        f"rollouts.block_rollouts = {rollouts.block_rollouts}: at max_tokens = {max_tokens} one block does not fit into"
    )
    most = f"at most {groups * size}, or lower sampling.max_tokens"
    # guard: block-fits-messages
    yield rollouts.block_rollouts <= groups * size, f"{what} a submission and its verdict: {most}"
    what = f"rollouts.batch_groups = {rollouts.batch_groups}: a batch of groups of {size} does not fit into one message"
    # guard: batch-fits-message
    yield rollouts.batch_groups <= members, f"{what}: at most {members}, or lower rollouts.group_size"


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches an address; a name other than localhost may be anyone's."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address == "localhost"


def _at_least(least: int, keys: Iterable[str], config: RunConfig) -> Iterator[tuple[bool, str]]:
    for key in keys:
        value = operator.attrgetter(key)(config)
        yield value >= least, f"{key} = {value}: must be at least {least}"


def _bounds_fit(config: RunConfig) -> Iterator[tuple[bool, str]]:
    """The run's validators replay in the run's dtype, so that pair must be there; and each pair's numbers must fit."""
    table, own = config.verify.bounds, f"{config.sampled_dtype}/{config.sampled_dtype}"
    yield own in table, f'[verify.bounds."{own}"] is missing: `shoal calibrate RUN_FILE --write` measures and adds it'
    for pair, bounds in table.items():
        key = f'verify.bounds."{pair}"'
        known = len(pair.split("/")) == 2 and {*pair.split("/")} <= {"float32", "bfloat16", "int8"}
        yield known, f'{key}: name it by the dtypes that sample and replay, such as "bfloat16/float32"'
        yield 0 < bounds.gap < math.inf, f"{key}.gap = {bounds.gap}: must be above 0"
        yield 0 < bounds.logprob < math.inf, f"{key}.logprob = {bounds.logprob}: must be above 0"
        yield 0 < bounds.flipped < 1, f"{key}.flipped = {bounds.flipped}: must be between 0 and 1, a share of tokens"
        within = 0 < bounds.mean_gap < bounds.gap
        yield within, f"{key}.mean_gap = {bounds.mean_gap}: must be between 0 and gap = {bounds.gap}"


def _convert(tree: dict[str, Any], overrides: list[str], kind: type[T], path: Path) -> T:
    for override in overrides:
        set_key(tree, override)
    return from_tree(tree, kind, str(path))


def unsafe_changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Changed keys that are not in SAFE_TO_CHANGE: with these a run must not be resumed."""
    return [
        key
        for key in changed_keys(before, after)
        if not any(key == safe or key.startswith(safe + ".") for safe in SAFE_TO_CHANGE)
    ]


# --- the process environment: nowhere else ---


def node_home() -> Path:
    """Where this machine's node key is kept: $SHOAL_HOME, or ~/.shoal."""
    return Path(os.environ.get("SHOAL_HOME", "") or Path.home() / ".shoal")


def child_environment(threads: int) -> dict[str, str]:
    """Environment of a role's process: threads pinned, OpenMP waiting without spinning, one heap.

    A role computes in one thread beside the event loop's; a heap for each would keep the freed tensors of both.
    """
    pinned = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return os.environ | pinned | {"OMP_WAIT_POLICY": "PASSIVE", "MALLOC_ARENA_MAX": "1", "PYTHONUNBUFFERED": "1"}
