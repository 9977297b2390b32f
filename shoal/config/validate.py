"""What a run file may not say beside values out of range: keys that contradict each other, and changes on resume."""

import ipaddress
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from datetime import date, datetime, time
from typing import Any, get_args

import msgspec

from shoal.config.alarm_limits import monitors_fit
from shoal.config.run_config import AdapterConfig, Retain, RunConfig, StorageConfig
from shoal.config.validate_algorithm import Demand, algorithm_fits, largest_block, lr_fits
from shoal.errors import ConfigError
from shoal.protocol.algorithm_config import narrowest_bound
from shoal.protocol.constants import MAX_FACT_CHARS
from shoal.protocol.hub_reference import EXAMPLE, hub_ref, is_hub
from shoal.protocol.message_sizes import most_batch_groups
from shoal.protocol.messages import fact
from shoal.protocol.task_draws import Difficulty
from shoal.protocol.tolerances import claims_bend_ratios, dtypes_of
from shoal.typed_toml import from_tree


def check_run(config: RunConfig) -> None:
    """Raise `ConfigError` where a value is out of range, or keys contradict each other."""
    from_tree(msgspec.to_builtins(config), RunConfig, "")
    rules = (_rollouts_fit, _envs_fit, _verify_fits, _difficulty_fits, algorithm_fits, _train_fits, _processes_fit)
    others = (_policy_fits, judge_fits, _host_fits, _messages_fit, can_be_kept)
    for holds, message in itertools.chain(*(fits(config) for fits in rules + others), monitors_fit(config.monitors)):
        if not holds:
            raise ConfigError(message)


def _rollouts_fit(config: RunConfig) -> Iterator[Demand]:
    rollouts, sampling, positions = config.rollouts, config.sampling, config.policy.tiny.max_positions
    most = sampling.max_tokens
    yield (
        rollouts.block_rollouts % rollouts.group_size == 0,
        f"rollouts.block_rollouts = {rollouts.block_rollouts}: must be a multiple of group_size = {rollouts.group_size}",
    )
    yield (
        bool(config.policy.path) or most <= positions,
        f"sampling.max_tokens = {most}: must be at most policy.tiny.max_positions = {positions}",
    )
    yield (
        sampling.max_turn_tokens <= most,
        f"sampling.max_turn_tokens = {sampling.max_turn_tokens}: must be at most sampling.max_tokens = {most}",
    )
    yield (
        not sampling.max_rollout_tokens or sampling.max_rollout_tokens >= most,
        f"sampling.max_rollout_tokens = {sampling.max_rollout_tokens}: must be 0, or at least sampling.max_tokens = {most}",
    )


def _envs_fit(config: RunConfig) -> Iterator[Demand]:
    """Slots, groups and metrics name an environment by its label. Validators repeat what workers play, so only the host can
    play what nobody can repeat. What holds for the run bounds the sizes of leases, so no environment exceeds it."""
    yield bool(config.envs), "envs: at least one [[envs]] section is needed"
    for env in config.envs:
        for name in ("max_turn_tokens", "max_tokens"):
            own, most = getattr(env, name), getattr(config.sampling, name)
            yield 0 <= own <= most, f"envs.{name} = {own}: must be at least 0 and at most sampling.{name} = {most}"
        fits = bool(env.label) and env.label == fact(env.label) == env.label.strip()
        say = f"must have 1 to {MAX_FACT_CHARS} printable characters, without a space at either end"
        yield fits, f"envs.label = {env.label!r}: {say}"
        yield (
            env.reproducible or env.kind != "episodes",
            f"envs.reproducible = false ({env.label}): others could not repeat what workers play. Leave envs.kind = "
            '"episodes" out',
        )
    for label, count in Counter(env.label for env in config.envs).items():
        yield count == 1, f'{count} [[envs]] are labelled {label}: give each its own, such as label = "{label}-2"'


def _verify_fits(config: RunConfig) -> Iterator[Demand]:
    """Validators and bounds. The run's validators replay in the run's dtype, so that pair must be there."""
    yield (
        config.validators.count != 2,  # guard: two-validators-are-no-majority
        "validators.count = 2: a slash needs two validators that agree, so if one of two lies, forging costs nothing. "
        "Use 1, or 3 and more",
    )
    for key, why in (
        ("audit_rate", "everything is audited then"),
        ("worker_share", "a batch then takes groups by slot number"),
    ):
        value = getattr(config.verify, key)
        fits = config.rollouts.max_staleness > 0 or value == 1.0
        yield fits, f"verify.{key} = {value}: must be 1 if rollouts.max_staleness is 0, because {why}"
    table, own = config.verify.bounds, f"{config.sampled_dtype}/{config.sampled_dtype}"
    yield own in table, f'[verify.bounds."{own}"] is missing: `shoal calibrate RUN_FILE --write` measures and adds it'
    for pair, bounds in table.items():
        key, dtypes = f'verify.bounds."{pair}"', dtypes_of(pair)
        name = '"bfloat16/float32", or "KIND:bfloat16/float32" for another kind of engine than the embedded one'
        yield dtypes is not None, f"{key}: name it by the dtypes that sample and recompute, such as {name}"
        plain = "/".join(dtypes or ())
        yield plain in table, f'{key}: it only tightens verify.bounds."{plain}", which is missing: add that one too'
        fits = bounds.mean_gap < bounds.gap
        yield fits, f"{key}.mean_gap = {bounds.mean_gap}: must be below gap = {bounds.gap}"


def _difficulty_fits(config: RunConfig) -> Iterator[Demand]:
    given, usual = config.difficulty, Difficulty()
    of_pools = ("easy", "hard", "easy_weight", "hard_weight", "retire_after")
    for switch, keys in (("curriculum", ("floor", "window_groups")), ("pools", of_pools)):
        for key in keys:
            unused = not getattr(given, switch) and getattr(given, key) != getattr(usual, key)
            where = f"difficulty.{key} = {getattr(given, key)}"
            yield not unused, f"{where} has no effect without difficulty.{switch} = true: add that, or leave it out"
    yield (
        not given.curriculum or len(config.envs) > 1,
        "difficulty.curriculum = true: it weighs environments against each other, but there is one [[envs]]. Add others, "
        "such as the same with harder args, or use difficulty.pools",
    )
    fits = given.hard < given.easy
    yield fits, f"difficulty.hard = {given.hard}: hard must be below easy, and difficulty.easy = {given.easy}"


def _train_fits(config: RunConfig) -> Iterator[Demand]:
    train, groups = config.train, config.rollouts.batch_groups
    yield lr_fits(train.lr, "train.")
    yield (
        train.minibatches <= groups,
        f"train.minibatches = {train.minibatches}: a batch is cut between groups, so it must be at most "
        f"rollouts.batch_groups = {groups}",
    )
    yield (
        train.dtype in ("", config.policy.kept_dtype),
        f'train.dtype = "{train.dtype}": the trainer computes with what it keeps, so policy.dtype must be the same, and is '
        f'"{config.policy.dtype}"',
    )


def _processes_fit(config: RunConfig) -> Iterator[Demand]:
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


def _policy_fits(config: RunConfig) -> Iterator[Demand]:
    """The model, its dtypes and its adapter. Whether a hub has the model is asked when the run starts."""
    policy, adapter = config.policy, config.policy.adapter
    yield (
        not is_hub(policy.path) or hub_ref(policy.path) is not None,
        f"policy.path = {policy.path!r}: a model on a hub is hf:OWNER/NAME@REVISION, such as {EXAMPLE}",
    )
    yield (
        bool(policy.path) or not policy.implementation,
        "policy.implementation says how the model in policy.path is computed: set policy.path, or leave it out",
    )
    yield (
        config.sampled_dtype == "int8" or policy.dtype != "int8",
        f'sampling.dtype = "{config.sampling.dtype}": policy.dtype = "int8" publishes what is sampled in int8; leave '
        "sampling.dtype out",
    )
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
        not adapter.rank or policy.dtype != "int8",
        'policy.dtype = "int8" rounds what was learned when it is published, and versions of policy.adapter are float32, '
        "so that nothing small is lost: leave one of them out",
    )
    yield (
        not adapter.rank or config.sampled_dtype != "int8",
        'sampling.dtype = "int8" rounds whole matrices, and policy.adapter adds to them in float32: leave one of them out',
    )


def judge_fits(config: RunConfig) -> Iterator[Demand]:
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


def _host_fits(config: RunConfig) -> Iterator[Demand]:
    """Each process of the host that serves has a port of its own. Addresses can be read."""
    ports = [(f"host.{key}", getattr(config.host, key)) for key in ("port", "origin_port", "dashboard_port")]
    for (one, port), (other, same) in itertools.combinations(ports, 2):
        say = "two processes cannot listen on one port. Change one; 0 takes a free one"
        yield not port or port != same, f"{one} = {port} and {other} = {port}: {say}"
    for name in config.host.trusted_proxies:
        try:
            ipaddress.ip_network(name, strict=False)
        except ValueError as error:
            yield False, f"host.trusted_proxies: {error}: write an address or a network, such as 10.0.0.0/8"


def _messages_fit(config: RunConfig) -> Iterator[Demand]:
    """A block is sent as one submission and one verdict, a batch as one message. What is too large could never be sent."""
    rollouts, max_tokens, size = config.rollouts, config.sampling.all_tokens, config.rollouts.group_size
    key = "max_rollout_tokens" if config.sampling.max_rollout_tokens else "max_tokens"
    groups, members = largest_block(config, size), most_batch_groups(size)
    what = f"rollouts.group_size = {size}: one group of {key} = {max_tokens} does not fit into a submission"
    yield groups >= 1, f"{what}: lower it, or sampling.{key}"
    what = f"rollouts.block_rollouts = {rollouts.block_rollouts}: at {key} = {max_tokens} one block does not fit into"
    most = f"at most {groups * size}, or lower sampling.{key}"
    # guard: block-fits-messages
    yield rollouts.block_rollouts <= groups * size, f"{what} a submission and its verdict: {most}"
    what = f"rollouts.batch_groups = {rollouts.batch_groups}: a batch of groups of {size} does not fit into one message"
    # guard: batch-fits-message
    yield rollouts.batch_groups <= members, f"{what}: at most {members}, or lower rollouts.group_size"


def can_be_kept(config: msgspec.Struct) -> Iterator[Demand]:
    """The run's folder and its log keep the run file as JSON, which has no dates and only finite numbers."""
    for key in _not_in_json("", msgspec.to_builtins(config, builtin_types=(date, datetime, time))):
        yield False, f"{key[1:]}: use a text in quotes, or a finite number: a date, inf or nan cannot be kept"


def _not_in_json(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else ((f"[{i}]", one) for i, one in enumerate(value))
        for name, inner in items:
            yield from _not_in_json(f"{key}{name}" if name[:1] == "[" else f"{key}.{name}", inner)
    elif isinstance(value, date | time) or (isinstance(value, float) and not math.isfinite(value)):
        yield key


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
    kept = get_args(Retain)
    lowered = {
        "storage.retain": kept.index(after.retain) < kept.index(before.retain),
        "storage.window_steps": after.window_steps < before.window_steps and after.retain != "all",
        "storage.quota_mb": after.quota_mb < before.quota_mb,
    }
    return [key for key, is_lower in lowered.items() if is_lower]


def _compared(tree: dict[str, Any]) -> dict[str, Any]:
    """Without keys of environments that may change: a list is compared as a whole."""
    safe = {key.removeprefix("envs.") for key in SAFE_TO_CHANGE if key.startswith("envs.")}
    kept = [{key: value for key, value in env.items() if key not in safe} for env in tree.get("envs", [])]
    return tree | {"envs": kept}


def changed_keys(before: dict[str, Any], after: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys whose values differ between two trees."""
    changed = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            changed += changed_keys(old, new, f"{prefix}{name}.")
        elif old != new:
            changed.append(prefix + name)
    return changed
