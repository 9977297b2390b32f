"""What decides the worth of rollouts and tokens beside their rewards, and what it does not go together with: a critic, a
teacher, a reward model, continuations, rewards of turns or steps.

Called by `algorithms` for every run file. It has no formula.
"""

import math
from collections.abc import Iterator

from shoal.config.critic import CriticConfig
from shoal.config.sections import RunConfig
from shoal.protocol import compositions as c
from shoal.protocol.algorithms import (
    Algorithm,
    credits_tokens,
    judge_named,
    needs_critic,
    step_credit_of,
    vine_of,
)
from shoal.protocol.constants import COMPLETIONS, CONTINUATIONS, EPISODES, MAX_GROUP_ROLLOUTS, MAX_ROLLOUT_STEPS
from shoal.protocol.sizes import most_batch_groups, most_lease_groups

WHERE = "train.algorithm"

Demand = tuple[bool, str]
"""Whether something holds, and what to say if it does not."""


def credit_fits(config: RunConfig) -> Iterator[Demand]:
    """What must hold, each with what to say if it does not."""
    algorithm = config.train.algorithm
    yield from _models_fit(config, algorithm)
    yield from _critic_fits(config, algorithm)
    yield from _judge_fits(config, algorithm)
    yield from _vine_fits(config, algorithm)
    yield from _steps_fit(config, algorithm)
    by_row = isinstance(algorithm.loss, c.Gspo) and not algorithm.loss.by_token
    credit = algorithm.credit
    named = f'credit.name = "{credit.__struct_config__.tag}"' if credit else ""
    what = named or f'advantage = "{algorithm.advantage}"'
    yield (
        not (by_row and credits_tokens(algorithm)),  # guard: gspo-of-credited-tokens
        f"{WHERE}.{what} gives the tokens of a row different advantages: set {WHERE}.loss.by_token = true",
    )


def _models_fit(config: RunConfig, algorithm: Algorithm) -> Iterator[Demand]:
    """Whether the models that the run file has settings for are those that the algorithm asks for."""
    yield (
        needs_critic(algorithm) or config.train.critic == CriticConfig(),
        f'train.critic does nothing without a critic: set {WHERE}.advantage = "gae", or leave train.critic out',
    )
    for key in ("teacher", "reward_model"):
        given, asked = bool(getattr(config.train, key)), judge_named(algorithm) == key
        yield given or not asked, f'{WHERE}.advantage = "{key}": name the directory of the model in train.{key}'
        useless = f'train.{key} does nothing: set {WHERE}.advantage = "{key}", or leave it out'
        yield asked or not given, useless


def _critic_fits(config: RunConfig, algorithm: c.Composition) -> Iterator[Demand]:
    if not needs_critic(algorithm):
        return
    critic, where = config.train.critic, f'{WHERE}.advantage = "gae"'
    yield 0 <= critic.lr < math.inf, f"train.critic.lr = {critic.lr}: must be at least 0, and finite"
    yield 0 < critic.gamma <= 1, f"train.critic.gamma = {critic.gamma}: must be above 0 and at most 1"
    yield 0 <= critic.lam <= 1, f"train.critic.lam = {critic.lam}: must be between 0 and 1"
    yield 0 <= critic.clip < math.inf, f"train.critic.clip = {critic.clip}: must be at least 0, and finite"
    yield critic.warmup_steps >= 0, f"train.critic.warmup_steps = {critic.warmup_steps}: must be at least 0"
    yield (
        config.train.processes == 1,  # guard: critic-of-one-process
        f"{where} with train.processes = {config.train.processes}: one process keeps the critic whole. Leave one of them "
        "out",
    )
    yield (
        not config.policy.adapter.rank,  # guard: no-critic-beside-an-adapter
        f"{where} with policy.adapter: the critic learns all of its weights, and would take the memory that an adapter "
        "saves. Leave one of them out",
    )
    yield (
        not config.policy.implementation,  # guard: critic-of-our-own-layers
        f"{where} with policy.implementation: a critic has the layers of Llama, Mistral, Qwen2 or Qwen3. Leave one of them "
        "out",
    )


def _judge_fits(config: RunConfig, algorithm: c.Composition) -> Iterator[Demand]:
    yield (
        not judge_named(algorithm) or config.train.processes == 1,  # guard: judge-of-one-process
        f'{WHERE}.advantage = "{algorithm.advantage}" with train.processes = {config.train.processes}: one process keeps '
        "that model whole. Leave one of them out",
    )


def _vine_fits(config: RunConfig, algorithm: c.Composition) -> Iterator[Demand]:
    """What continuations need of a run, and what they do not go with."""
    vine, where, rollouts, size = vine_of(algorithm), f"{WHERE}.credit", config.rollouts, config.rollouts.group_size
    if vine is None:
        return
    for name in ("continuations", "every", "most"):
        value = getattr(vine, name)
        yield value >= 1, f"{where}.{name} = {value}: must be at least 1"
    if min(vine.continuations, vine.every, vine.most, size) < 1:
        return
    yield (
        algorithm.advantage == "mean",
        f'{where}.name = "vine" makes the advantages itself: leave {WHERE}.advantage = "{algorithm.advantage}" out',
    )
    yield (
        all(env.kind in ("", EPISODES) for env in config.envs),  # guard: continuations-are-played-by-workers
        f'{where}.name = "vine": a worker must play on from within a rollout, and where the host plays ({COMPLETIONS}), it '
        "cannot. Leave envs.kind out",
    )
    num, tokens = size * vine.most * vine.continuations, config.sampling.all_tokens
    per_block, groups = rollouts.block_rollouts // size, rollouts.batch_groups
    proofs, labels = config.verify.proofs != "none", [env.label for env in config.envs]
    fits = num <= MAX_GROUP_ROLLOUTS and per_block <= most_lease_groups(
        num, max(1, tokens), proofs, labels, CONTINUATIONS
    )
    yield (
        fits,  # guard: continuations-fit-messages
        f"{where}: up to {num} continuations of a group of {size}, each of up to {tokens} tokens, do not fit into a "
        f"submission of a block of {per_block} groups, or are more than {MAX_GROUP_ROLLOUTS}: lower most or continuations",
    )
    if num > MAX_GROUP_ROLLOUTS:
        return  # nobody could write the largest batch
    most = most_batch_groups(size, num)
    yield (
        groups <= most,  # guard: batch-of-continuations-fits
        f"{where}: a batch of {groups} groups with up to {num} continuations each does not fit into one message: at most "
        f"{most}, or lower most or continuations",
    )


def _steps_fit(config: RunConfig, algorithm: c.Composition) -> Iterator[Demand]:
    """What rewards of turns or steps need of a run, and what they do not go with."""
    credit, rollouts, size = step_credit_of(algorithm), config.rollouts, config.rollouts.group_size
    if credit is None:
        return
    where, by_turn = f"{WHERE}.credit", isinstance(credit, c.Turns)
    fits = 1 <= credit.most <= MAX_ROLLOUT_STEPS
    yield fits, f"{where}.most = {credit.most}: must be 1 to {MAX_ROLLOUT_STEPS}"
    allowed = ("mean", "gae") if by_turn else ("mean", "mean_std", "gae")
    yield (
        algorithm.advantage in allowed,  # guard: credit-makes-the-advantages
        f'{where}.name = "{credit.__struct_config__.tag}" makes the advantages itself, or leaves them to a critic: '
        f'{WHERE}.advantage = "{algorithm.advantage}" must be one of {", ".join(allowed)}',
    )
    if isinstance(credit, c.Turns):
        yield 0 < credit.discount <= 1, f"{where}.discount = {credit.discount}: must be above 0 and at most 1"
        yield (
            not needs_critic(algorithm) or credit.discount == 1,
            f'{where}.discount = {credit.discount} with {WHERE}.advantage = "gae": train.critic.gamma discounts. Leave '
            "discount out",
        )
    yield (
        all(env.kind in ("", EPISODES) for env in config.envs),  # guard: steps-are-replayed
        f"{where}: validators recompute what a turn or step earns, and where the host plays ({COMPLETIONS}), its record "
        "has only rewards of rollouts. Leave envs.kind out",
    )
    if not 1 <= credit.most <= MAX_ROLLOUT_STEPS or not 1 <= size <= MAX_GROUP_ROLLOUTS:
        return
    tokens, labels = max(1, config.sampling.all_tokens), [env.label for env in config.envs]
    per_block, proofs = rollouts.block_rollouts // size, config.verify.proofs != "none"
    fits = per_block <= most_lease_groups(size, tokens, proofs, labels, steps=credit.most)
    yield (
        fits,  # guard: steps-fit-verdicts
        f"{where}.most = {credit.most}: a verdict on a block of {per_block} groups of {size} rollouts, with so many steps "
        "each, does not fit into one message: lower most, or rollouts.block_rollouts",
    )
    groups = most_batch_groups(size, steps=credit.most)
    yield (
        rollouts.batch_groups <= groups,  # guard: batch-of-steps-fits
        f"{where}.most = {credit.most}: a batch of {rollouts.batch_groups} groups of {size} rollouts, with so many steps "
        f"each, does not fit into one message: at most {groups} groups, or lower most",
    )
