"""What a run file may not say: values out of range, keys that contradict each other, and changes on resume.

It knows nothing of TOML, and nothing of what is in the run's folder.
"""

import ipaddress
import itertools
import math
import operator
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from shoal.config.alarm_limits import monitors_fit
from shoal.config.curriculum import difficulty_fits
from shoal.config.env_settings import EnvConfig
from shoal.config.policy import AdapterConfig
from shoal.config.run_file import RETAINED, HostConfig, RunConfig, SamplingConfig, StorageConfig, VerifyConfig
from shoal.config.validate_algorithm import algorithm_fits, optimiser_fits
from shoal.errors import ConfigError
from shoal.protocol.algorithm_config import narrowest_bound
from shoal.protocol.constants import (
    CHAIN_LENGTH,
    MAX_ADAPTER_RANK,
    MAX_BLOCK_ROLLOUTS,
    MAX_FACT_CHARS,
    MAX_GROUP_ROLLOUTS,
    MAX_PATCH_CHAIN,
    MAX_ROLLOUT_TOKENS,
)
from shoal.protocol.message_sizes import most_batch_groups, most_lease_groups
from shoal.protocol.messages import fact
from shoal.protocol.package_reference import EXAMPLE, hub_ref, is_hub
from shoal.protocol.tolerances import claims_bend_ratios, dtypes_of
from shoal.tree import changed_keys

AT_LEAST_0 = (
    "workers.count", "workers.cheating", "validators.count", "eval.episodes", "eval.samples", "eval.rows",
    "rollouts.max_flat_groups", "rollouts.max_staleness", "train.microbatch_tokens",
)  # fmt: skip
AT_LEAST_1 = (
    "steps", "train.threads", "train.processes", "workers.threads", "validators.threads",
    "train.updates_per_batch", "train.minibatches",
    "storage.checkpoint_every", "storage.quota_mb", "storage.anchor_every", "storage.state_every",
    "rollouts.batch_groups",
)  # fmt: skip


def check_run(config: RunConfig) -> None:
    """Raise `ConfigError` where keys contradict each other."""
    rollouts, sampling, verify = config.rollouts, config.sampling, config.verify
    positions = config.policy.tiny.max_positions
    demands = [
        *_at_least(0, AT_LEAST_0, config),
        *_at_least(1, AT_LEAST_1, config),
        *_at_least(-1, ("rollouts.paid_tokens",), config),
        *_names_fit(config.name, config.logging.project),
        (
            config.steps < CHAIN_LENGTH,
            f"steps = {config.steps}: must be below {CHAIN_LENGTH}, the number of secrets of a run",
        ),
        *_bounds_fit(config),
        (
            config.validators.count != 2,  # guard: two-validators-are-no-majority
            "validators.count = 2: a slash needs two validators that agree, so if one of two lies, forging costs nothing. "
            "Use 1, or 3 and more",
        ),
        (
            0 <= verify.activation_error < 1,
            f"verify.activation_error = {verify.activation_error}: must be at least 0 and below 1",
        ),
        (bool(config.envs), "envs: at least one [[envs]] section is needed"),
        *(
            (0 < env.weight < math.inf, f"envs.weight = {env.weight}: must be above 0, and finite")
            for env in config.envs
        ),
        *_limits_fit(config.envs, config.sampling),
        *_labels_fit(config.envs),
        *_plays_fit(config.envs),
        (
            rollouts.group_size >= 2,
            f"rollouts.group_size = {rollouts.group_size}: must be at least 2, because a group of one has no signal",
        ),
        (
            rollouts.block_rollouts > 0 and rollouts.block_rollouts % max(1, rollouts.group_size) == 0,
            f"rollouts.block_rollouts = {rollouts.block_rollouts}: must be a multiple of group_size = "
            f"{rollouts.group_size}",
        ),
        (rollouts.lease_s > 0, f"rollouts.lease_s = {rollouts.lease_s}: must be above 0"),
        (
            0 < sampling.temperature < math.inf,
            f"sampling.temperature = {sampling.temperature}: must be above 0, and finite",
        ),
        (
            bool(config.policy.path) or sampling.max_tokens <= positions,
            f"sampling.max_tokens = {sampling.max_tokens}: must be at most policy.tiny.max_positions = {positions}",
        ),
        (
            0 < sampling.max_turn_tokens <= sampling.max_tokens,
            f"sampling.max_turn_tokens = {sampling.max_turn_tokens}: must be between 1 and sampling.max_tokens = "
            f"{sampling.max_tokens}",
        ),
        (
            not sampling.max_rollout_tokens or sampling.max_rollout_tokens >= sampling.max_tokens,
            f"sampling.max_rollout_tokens = {sampling.max_rollout_tokens}: must be 0, or at least sampling.max_tokens = "
            f"{sampling.max_tokens}",
        ),
        *_audits_fit(verify, rollouts.max_staleness),
        *_learning_fits(config),
        *_ports_fit(config.host),
        *_addresses_are_read(config.host.trusted_proxies),
        *_messages_fit(config),
    ]
    for holds, message in (*demands, *monitors_fit(config.monitors)):
        if not holds:
            raise ConfigError(message)


def _audits_fit(verify: VerifyConfig, max_staleness: int) -> tuple[tuple[bool, str], ...]:
    """Shares and rates are possible, and fit how old a group may be."""
    return (
        (0.0 <= verify.audit_rate <= 1.0, f"verify.audit_rate = {verify.audit_rate}: must be between 0 and 1"),
        (
            0.0 <= verify.quarantine_s < math.inf,
            f"verify.quarantine_s = {verify.quarantine_s}: must be at least 0, and finite",
        ),
        (
            max_staleness > 0 or verify.audit_rate == 1.0,
            f"verify.audit_rate = {verify.audit_rate}: must be 1 if rollouts.max_staleness is 0, because everything is "
            "audited then",
        ),
        (0 < verify.worker_share <= 1, f"verify.worker_share = {verify.worker_share}: must be above 0 and at most 1"),
        (
            max_staleness > 0 or verify.worker_share == 1.0,
            f"verify.worker_share = {verify.worker_share}: must be 1 if rollouts.max_staleness is 0, because a batch then "
            "takes groups by slot number",
        ),
    )


def _names_fit(name: str, project: str) -> Iterator[tuple[bool, str]]:
    """They are parts of the names of files, and a project's also of a URL."""
    fits = re.fullmatch(r"[\w.-]*\w", name) is not None
    yield fits, f"name = {name!r}: use only letters, digits, - _ and . and do not end with - or ."
    fits = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", project) is not None
    yield fits, f"logging.project = {project!r}: use 1 to 100 letters, digits, - and _, with a letter or digit first"


def _limits_fit(envs: Sequence[EnvConfig], run: SamplingConfig) -> Iterator[tuple[bool, str]]:
    """What holds for the run bounds the sizes of leases, so no environment exceeds it."""
    for env in envs:
        for name in ("max_turn_tokens", "max_tokens"):
            own, most = getattr(env, name), getattr(run, name)
            yield 0 <= own <= most, f"envs.{name} = {own}: at least 0 and at most sampling.{name} = {most}"


def _labels_fit(envs: Sequence[EnvConfig]) -> Iterator[tuple[bool, str]]:
    """Slots, groups and metrics name an environment by its label."""
    for label in [env.label for env in envs]:
        fits = bool(label) and label == fact(label) == label.strip()
        yield fits, f"envs.label = {label!r}: 1 to {MAX_FACT_CHARS} printable characters, without a space at either end"
    for label, count in Counter(env.label for env in envs).items():
        yield count == 1, f'{count} [[envs]] are labelled {label}: give each its own, such as label = "{label}-2"'


def _plays_fit(envs: Sequence[EnvConfig]) -> Iterator[tuple[bool, str]]:
    """Validators repeat what workers play, so only the host can play what nobody can repeat."""
    for env in envs:
        yield (
            env.reproducible or env.kind != "episodes",
            (
                f"envs.reproducible = false ({env.label}): others could not repeat what workers play. Leave envs.kind = "
                '"episodes" out'
            ),
        )
        yield env.eval_episodes >= -1, f"envs.eval_episodes = {env.eval_episodes}: must be at least -1"
        yield 0 < env.call_s < math.inf, f"envs.call_s = {env.call_s}: must be above 0, and finite"


def _judge_fits(config: RunConfig) -> Iterator[tuple[bool, str]]:
    """A judge is of use only if it judges something, and is not what the policy learns to please."""
    judge = config.eval.judge
    if not judge.name:
        return
    judged = [env for env in config.envs if config.eval_episodes(env) > 0]
    yield bool(judged), "eval.judge has nothing to judge: set eval.episodes, or leave it out"
    yield (
        len(judged) < 2,
        f"eval.judge judges one environment, and {len(judged)} are evaluated: set envs.eval_episodes = 0 for the others",
    )
    yield (
        all((env.name, env.args) != (judge.name, judge.args) for env in config.envs),  # guard: judge-is-held-out
        f"eval.judge = {judge.name} with these arguments is what the run trains on, and sees no mistake of its reward: "
        "name another environment, or other arguments",
    )


def _learning_fits(config: RunConfig) -> Iterator[tuple[bool, str]]:
    yield from difficulty_fits(config.difficulty, [env.solved for env in config.envs])
    yield from algorithm_fits(config)
    yield from _judge_fits(config)
    yield from optimiser_fits(config.train, "train.")
    parts, groups = config.train.minibatches, config.rollouts.batch_groups
    fits = parts <= max(1, groups)
    yield fits, f"train.minibatches = {parts}: a batch is cut between groups, and has rollouts.batch_groups = {groups}"
    yield from _processes_fit(config)
    yield from _adapter_fits(config)
    fits = bool(config.policy.path) or not config.policy.implementation
    named = not is_hub(config.policy.path) or hub_ref(config.policy.path) is not None
    # Whether there is such a model is asked when the run starts.
    yield named, f"policy.path = {config.policy.path!r}: a model on a hub is hf:OWNER/NAME@REVISION, such as {EXAMPLE}"
    yield fits, "policy.implementation says how the model in policy.path is computed: set policy.path, or leave it out"
    yield (
        config.sampled_dtype == "int8" or config.policy.dtype != "int8",
        f'sampling.dtype = "{config.sampling.dtype}": policy.dtype = "int8" publishes what is sampled in int8; leave '
        "sampling.dtype out",
    )
    yield (
        config.train.dtype in ("", config.policy.kept_dtype),
        f'train.dtype = "{config.train.dtype}": the trainer computes with what it keeps, so policy.dtype must be the '
        f'same, and is "{config.policy.dtype}"',
    )


def _processes_fit(config: RunConfig) -> Iterator[tuple[bool, str]]:
    """What a trainer with a part of the policy in each process cannot do."""
    if config.train.processes < 2:
        return
    where, alone = f"train.processes = {config.train.processes}", "or leave train.processes out"
    yield (
        config.train.moments != "8bit",
        f'{where} with train.moments = "8bit": their blocks would be cut where the processes divide a tensor. Take '
        f'"float32", of which each process has a part, {alone}',
    )
    yield (
        config.train.moments != "offloaded",
        f'{where} with train.moments = "offloaded": each process keeps its part where it computes. Take "float32", {alone}',
    )
    yield (
        config.policy.dtype != "int8",
        f'{where} with policy.dtype = "int8": the host keeps checkpoints in float32, and several processes write only what '
        f'is published. Take "bfloat16" or "float32", {alone}',
    )
    if config.sampled_dtype == "int8":
        bound = max(0.0, narrowest_bound(config.train.algorithm))
        remedy = (
            "Keep its logprob below a tenth of ln(1 + epsilon)" if bound
            else 'Take an algorithm that bounds what a claim counts, such as "grpo" or "cispo"'
        )  # fmt: skip
        yield (
            not claims_bend_ratios(config.verify.bounds, "int8", bound),  # guard: int8-denominators-of-one-process
            f'{where} with sampling.dtype = "int8" and the loose verify.bounds."int8/int8": one process would load the '
            f"whole policy for the ratio's denominators. {remedy}, {alone}",
        )
    yield (
        not config.policy.implementation,
        f"{where} with policy.implementation: only shoal's own models are divided. Take one of those, {alone}",
    )
    yield (
        config.train.device != "mps",
        f'{where} with train.device = "mps": a Mac has one GPU, and torch does not share it. Take "cpu", {alone}',
    )
    yield (
        not config.policy.adapter.rank,
        f"{where} with policy.adapter: an adapter is learned by one process. Leave the adapter out, {alone}",
    )


def _adapter_fits(config: RunConfig) -> Iterator[tuple[bool, str]]:
    adapter = config.policy.adapter
    yield (
        0 <= adapter.rank <= MAX_ADAPTER_RANK,
        f"policy.adapter.rank = {adapter.rank}: must be 0 to {MAX_ADAPTER_RANK}",
    )
    yield 0 < adapter.alpha < math.inf, f"policy.adapter.alpha = {adapter.alpha}: must be above 0, and finite"
    known = AdapterConfig().targets
    for target in adapter.targets:
        yield target in known, f"policy.adapter.targets has {target!r}; known are {', '.join(known)}"
    once = bool(adapter.targets) and len({*adapter.targets}) == len(adapter.targets)
    yield once, "policy.adapter.targets is empty, or names a matrix twice"
    # guard: codes-below-an-adapter
    yield (
        bool(adapter.rank) or not adapter.base,
        f'policy.adapter.base = "{adapter.base}" rounds a model that does not learn, and without policy.adapter.rank it '
        "does: set the rank, or leave the base out",
    )
    yield (
        not adapter.rank or config.policy.dtype != "int8",
        'policy.dtype = "int8" rounds what was learned when it is published, and versions of policy.adapter are float32, '
        "so that nothing small is lost: leave one of them out",
    )
    yield (
        not adapter.rank or config.sampled_dtype != "int8",
        'sampling.dtype = "int8" rounds whole matrices, and policy.adapter adds to them in float32: leave one of them out',
    )


def _ports_fit(host: HostConfig) -> Iterator[tuple[bool, str]]:
    """Each process of the host that serves has a port of its own."""
    named = [(f"host.{key}", getattr(host, key)) for key in ("port", "origin_port", "dashboard_port")]
    for name, port in named:
        yield 0 <= port < 1 << 16, f"{name} = {port}: must be from 0 to 65535; 0 takes a free one"
    for (one, port), (other, same) in itertools.combinations(named, 2):
        yield (
            not port or port != same,
            f"{one} = {port} and {other} = {port}: two processes cannot listen on one port. Change one; "
            "0 takes a free one",
        )


def _addresses_are_read(names: Iterable[str]) -> Iterator[tuple[bool, str]]:
    for name in names:
        try:
            ipaddress.ip_network(name, strict=False)
        except ValueError as error:
            yield False, f"host.trusted_proxies: {error}: write an address or a network, such as 10.0.0.0/8"


def _messages_fit(config: RunConfig) -> Iterator[tuple[bool, str]]:
    """A block is sent as one submission and one verdict, a batch as one message. What is too large could never be sent."""
    rollouts, max_tokens, size = config.rollouts, config.sampling.all_tokens, config.rollouts.group_size
    key = "max_rollout_tokens" if config.sampling.max_rollout_tokens else "max_tokens"
    for name, value, limit in (
        ("rollouts.group_size", size, MAX_GROUP_ROLLOUTS),
        ("rollouts.block_rollouts", rollouts.block_rollouts, MAX_BLOCK_ROLLOUTS),
        (f"sampling.{key}", max_tokens, MAX_ROLLOUT_TOKENS),
        ("storage.anchor_every", config.storage.anchor_every, MAX_PATCH_CHAIN),
    ):
        yield value <= limit, f"{name} = {value}: must be at most {limit}"
    if size < 1 or size > MAX_GROUP_ROLLOUTS:
        return
    envs, proofs = [env.label for env in config.envs], config.verify.proofs != "none"
    groups, members = most_lease_groups(size, max(1, max_tokens), proofs, envs), most_batch_groups(size)
    what = f"rollouts.group_size = {size}: one group of {key} = {max_tokens} does not fit into a submission"
    yield groups >= 1, f"{what}: lower it, or sampling.{key}"
    what = f"rollouts.block_rollouts = {rollouts.block_rollouts}: at {key} = {max_tokens} one block does not fit into"
    most = f"at most {groups * size}, or lower sampling.{key}"
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
    """The run's validators replay in the run's dtype, so that pair must be there. The numbers of each pair must fit."""
    table, own = config.verify.bounds, f"{config.sampled_dtype}/{config.sampled_dtype}"
    yield own in table, f'[verify.bounds."{own}"] is missing: `shoal calibrate RUN_FILE --write` measures and adds it'
    for pair, bounds in table.items():
        key = f'verify.bounds."{pair}"'
        dtypes = dtypes_of(pair)
        name = '"bfloat16/float32", or "KIND:bfloat16/float32" for another kind of engine than the embedded one'
        yield dtypes is not None, f"{key}: name it by the dtypes that sample and recompute, such as {name}"
        plain = "/".join(dtypes or ())
        yield plain in table, f'{key}: it only tightens verify.bounds."{plain}", which is missing: add that one too'
        yield 0 < bounds.gap < math.inf, f"{key}.gap = {bounds.gap}: must be above 0, and finite"
        yield 0 < bounds.logprob < math.inf, f"{key}.logprob = {bounds.logprob}: must be above 0, and finite"
        yield 0 < bounds.flipped < 1, f"{key}.flipped = {bounds.flipped}: must be between 0 and 1, a share of tokens"
        for name in ("logprob_mean", "largest_logit"):
            value = getattr(bounds, name)
            yield 0 <= value < math.inf, f"{key}.{name} = {value}: must be at least 0, and finite"
        within = 0 < bounds.mean_gap < bounds.gap
        yield within, f"{key}.mean_gap = {bounds.mean_gap}: must be between 0 and gap = {bounds.gap}"


SAFE_TO_CHANGE = (
    "steps", "workers", "validators", "host", "eval", "storage", "logging", "monitors", "train.threads", "train.processes",
    "train.device", "verify.quarantine_s", "rollouts.lease_s", "rollouts.max_flat_groups", "envs.eval_episodes",
)  # fmt: skip
"""Keys (or whole sections) of a run file that may differ when a run is resumed."""


def unsafe_changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Changed keys that are not in SAFE_TO_CHANGE. A run with such changes must not be resumed."""
    return [
        key
        for key in changed_keys(_compared(before), _compared(after))
        if not any(key == safe or key.startswith(safe + ".") for safe in SAFE_TO_CHANGE)
    ]


def keys_that_keep_less(before: StorageConfig, after: StorageConfig) -> list[str]:
    """Keys with which a resumed run would delete what it kept before."""
    lowered = {
        "storage.retain": RETAINED.index(after.retain) < RETAINED.index(before.retain),
        "storage.window_steps": after.window_steps < before.window_steps and after.retain != "all",
        "storage.quota_mb": after.quota_mb < before.quota_mb,
    }
    return [key for key, is_lower in lowered.items() if is_lower]


def _compared(tree: dict[str, Any]) -> dict[str, Any]:
    """Without keys of environments that may change: a list is compared as a whole."""
    safe = {key.removeprefix("envs.") for key in SAFE_TO_CHANGE if key.startswith("envs.")}
    kept = [{key: value for key, value in env.items() if key not in safe} for env in tree.get("envs", [])]
    return tree | {"envs": kept}
