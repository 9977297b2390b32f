"""What a run file may not say: keys that contradict each other, and keys that a resumed run may not change.

Called by `load` for every run file, and by `shoal.folder` when a run is resumed. It knows nothing of TOML, and
nothing of what is in the run's folder.
"""

import ipaddress
import math
import operator
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from shoal.config.sections import EnvConfig, RunConfig
from shoal.errors import ConfigError
from shoal.protocol.algorithms import Algorithm
from shoal.protocol.constants import (
    CHAIN_LENGTH,
    MAX_BLOCK_ROLLOUTS,
    MAX_FACT_CHARS,
    MAX_GROUP_ROLLOUTS,
    MAX_ROLLOUT_TOKENS,
)
from shoal.protocol.sizes import most_batch_groups, most_lease_groups
from shoal.protocol.types import fact
from shoal.tree import changed_keys

AT_LEAST_0 = (
    "workers.count", "workers.cheating", "validators.count", "eval.episodes", "eval.samples", "rollouts.max_flat_groups",
)  # fmt: skip
AT_LEAST_1 = (
    "steps", "train.threads", "workers.threads", "validators.threads", "train.microbatch_tokens", "train.updates_per_batch",
    "storage.checkpoint_every", "storage.quota_mb",
)  # fmt: skip


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
        (0.0 <= config.verify.quarantine_s < math.inf, "verify.quarantine_s: at least 0, and finite"),
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
        *_algorithm_fits(config.train.algorithm),
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


def _algorithm_fits(grpo: Algorithm) -> Iterator[tuple[bool, str]]:
    """The log holds these numbers, so they are finite."""
    where, above = "train.algorithm", 1 + grpo.epsilon
    yield 0 < grpo.epsilon < 1, f"{where}.epsilon = {grpo.epsilon}: must be between 0 and 1"
    fits = above < grpo.delta < math.inf
    yield fits, f"{where}.delta = {grpo.delta}: must be above 1 + epsilon = {above}, and finite"
    yield math.isfinite(grpo.entropy_bonus), f"{where}.entropy_bonus = {grpo.entropy_bonus}: must be finite"


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


SAFE_TO_CHANGE = (
    "steps", "workers", "validators", "host", "eval", "storage", "train.threads", "verify.quarantine_s",
    "rollouts.lease_s", "rollouts.max_flat_groups",
)  # fmt: skip
"""Keys (or whole sections) of a run file that may differ when a run is resumed."""


def unsafe_changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Changed keys that are not in SAFE_TO_CHANGE: with these a run must not be resumed."""
    return [
        key
        for key in changed_keys(before, after)
        if not any(key == safe or key.startswith(safe + ".") for safe in SAFE_TO_CHANGE)
    ]
