"""Rules of the tables `algorithm`, `credit` and `train` of a run file, and the defaults that an algorithm brings."""

from collections.abc import Iterator
from typing import Any, Literal

from shoal.config.run_config import PRESET_LR, CriticConfig, RunConfig
from shoal.protocol import algorithm_config as c
from shoal.protocol.algorithm_config import (
    DEFAULT,
    Algorithm,
    credits_tokens,
    defaults_of,
    judge_named,
    needs_critic,
    step_credit_of,
    vine_of,
)
from shoal.protocol.constants import COMPLETIONS, CONTINUATIONS, EPISODES, MAX_GROUP_ROLLOUTS
from shoal.protocol.message_sizes import most_batch_groups, most_lease_groups
from shoal.typed_toml import merge, to_tree

WHERE = "train.algorithm"

Demand = tuple[bool, str]
"""Whether something holds, and what to say if it does not."""


def filled(tree: dict[str, Any]) -> dict[str, Any]:
    """A run file's tables with the defaults of its named algorithm under the keys that it gives.

    Without this, `loss.eps_low = 0.1` below the name dapo would take DAPO's other bound back to that of the plain clip. A
    loss with another name replaces the whole loss.
    """
    train, policy = tree.get("train", {}), tree.get("policy")
    given = train.get("algorithm", {}) if isinstance(train, dict) else None
    if not isinstance(given, dict):
        return tree
    name = given.get("name", DEFAULT)
    default = defaults_of(name)
    under = to_tree(default) if default is not None else {"name": DEFAULT}
    loss, own = given.get("loss", {}), default.loss.__struct_config__.tag if default is not None else None
    if isinstance(loss, dict) and loss.get("name", own) != own:
        under.pop("loss", None)
    elif isinstance(loss, dict) and name == DEFAULT:
        if isinstance(policy, dict) and policy.get("dtype") == "int8" and not given.keys() & _QUANTISED.keys():
            under |= _QUANTISED
        meant = {key: given[short] for short, keys in _SHORT.items() if short in given for key in keys}
        given = {key: value for key, value in given.items() if key not in _SHORT} | {"loss": meant | loss}
    return tree | {"train": train | {"algorithm": merge(under, given)}}


_QUANTISED = {"ratio_to": "old", "corrections": [to_tree(c.Truncate())]}
"""What grpo takes where int8 is published, so that the policy that samples is not the one that learns."""

_SHORT = {"epsilon": ("eps_low", "eps_high"), "delta": ("delta",)}
"""Keys of grpo that are short for keys of its loss."""


def algorithm_fits(config: RunConfig) -> Iterator[Demand]:
    """What must hold, each with what to say if it does not."""
    algorithm = config.train.algorithm
    yield from _models_fit(config, algorithm)
    yield from _critic_fits(config, algorithm)
    yield from _vine_fits(config, algorithm)
    yield from _steps_fit(config, algorithm)
    yield from _loss_fits(config, algorithm)
    yield from _average_fits(config, algorithm)
    yield from _corrections_fit(algorithm)
    yield from _kl_fits(config, algorithm)
    target = algorithm.entropy_target
    fits = not target or algorithm.entropy_bonus > 0
    yield fits, f"{WHERE}.entropy_target = {target}: it controls the bonus, so set entropy_bonus above 0, such as 0.02"


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
    yield (
        not judge_named(algorithm) or config.train.processes == 1,  # guard: judge-of-one-process
        f'{WHERE}.advantage = "{algorithm.advantage}" with train.processes = {config.train.processes}: one process keeps '
        "that model whole. Leave one of them out",
    )


def _critic_fits(config: RunConfig, algorithm: c.Composition) -> Iterator[Demand]:
    if not needs_critic(algorithm):
        return
    where = f'{WHERE}.advantage = "gae"'
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


def largest_block(config: RunConfig, size: int, kind: str = EPISODES, steps: int = 0) -> int:
    """Groups of so many rollouts of the largest block that fits into a submission and its verdict."""
    proofs, labels = config.verify.proofs != "none", [env.label for env in config.envs]
    return most_lease_groups(size, config.sampling.all_tokens, proofs, labels, kind, steps)


def _vine_fits(config: RunConfig, algorithm: c.Composition) -> Iterator[Demand]:
    """What continuations need of a run, and what they do not go with."""
    vine, where, rollouts, size = vine_of(algorithm), f"{WHERE}.credit", config.rollouts, config.rollouts.group_size
    if vine is None:
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
    fits = num <= MAX_GROUP_ROLLOUTS and per_block <= largest_block(config, num, CONTINUATIONS)
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
    allowed = ("mean", "gae") if by_turn else ("mean", "mean_std", "gae")
    yield (
        algorithm.advantage in allowed,  # guard: credit-makes-the-advantages
        f'{where}.name = "{credit.__struct_config__.tag}" makes the advantages itself, or leaves them to a critic: '
        f'{WHERE}.advantage = "{algorithm.advantage}" must be one of {", ".join(allowed)}',
    )
    if isinstance(credit, c.Turns):
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
    per_block = rollouts.block_rollouts // size
    yield (
        per_block <= largest_block(config, size, steps=credit.most),  # guard: steps-fit-verdicts
        f"{where}.most = {credit.most}: a verdict on a block of {per_block} groups of {size} rollouts, with so many steps "
        "each, does not fit into one message: lower most, or rollouts.block_rollouts",
    )
    groups = most_batch_groups(size, steps=credit.most)
    yield (
        rollouts.batch_groups <= groups,  # guard: batch-of-steps-fits
        f"{where}.most = {credit.most}: a batch of {rollouts.batch_groups} groups of {size} rollouts, with so many steps "
        f"each, does not fit into one message: at most {groups} groups, or lower most",
    )


def _loss_fits(config: RunConfig, algorithm: c.Composition) -> Iterator[Demand]:
    """The clip, and what a loss with one ratio a row or without a ratio cannot learn from."""
    train, loss, credit = config.train, algorithm.loss, algorithm.credit
    if isinstance(loss, c.Clip):
        fits, least = loss.delta == 0 or loss.delta > 1 + loss.eps_high, 1 + loss.eps_high
        yield fits, f"{WHERE}.loss.delta = {loss.delta}: must be 0, or above 1 + eps_high = {least}"
    named = f'credit.name = "{credit.__struct_config__.tag}"' if credit else f'advantage = "{algorithm.advantage}"'
    yield (
        not isinstance(loss, c.Gspo)
        or loss.by_token
        or not credits_tokens(algorithm),  # guard: gspo-of-credited-tokens
        f"{WHERE}.{named} gives the tokens of a row different advantages: set {WHERE}.loss.by_token = true",
    )
    if not isinstance(loss, c.Reinforce):
        return
    yield (
        train.updates_per_batch == train.minibatches == 1,  # guard: reinforce-learns-once
        f"train.updates_per_batch = {train.updates_per_batch}, train.minibatches = {train.minibatches}: "
        "after the first update, the policy that learns did not "
        'sample these tokens, and loss.name = "reinforce" has no ratio. Take "cispo", or set both to 1',
    )
    yield (
        algorithm.ratio_to == "behaviour",
        f'{WHERE}.ratio_to = "old": loss.name = "reinforce" has no ratio. Leave ratio_to out',
    )
    weighed = _is_weighed(algorithm)
    exact = config.rollouts.max_staleness == 0 and config.sampled_dtype == "float32"
    yield (
        weighed or exact,  # guard: reinforce-of-another-policy
        f'{WHERE}.loss.name = "reinforce" has no ratio, and an older or rounded policy samples some tokens: add '
        'corrections = [{name = "truncate"}], take "cispo", or set rollouts.max_staleness = 0',
    )


def _average_fits(config: RunConfig, algorithm: c.Composition) -> Iterator[Demand]:
    divisor = algorithm.divisor_tokens
    yield (
        not divisor or algorithm.average == "constant",
        f'{WHERE}.divisor_tokens = {divisor}: average = "{algorithm.average}" divides by what it counts. Set average = '
        '"constant", or leave divisor_tokens out',
    )
    yield (
        not (algorithm.batch_std and algorithm.advantage == "mean_std"),
        f'{WHERE}.batch_std divides advantages by a deviation, and advantage = "mean_std" did so already: take "mean", or '
        "leave batch_std out",
    )
    shaped = next((env.label for env in config.envs if env.shaping is not None), "")
    yield (
        algorithm.advantage != "maxrl" or not shaped,  # guard: maxrl-of-no-penalties
        f'{WHERE}.advantage = "maxrl" divides by the mean reward of a group, which the penalties of shaping may bring near '
        f'0 (environment {shaped}): take "mean_std", or leave shaping out',
    )
    yield (
        not (algorithm.batch_std and algorithm.advantage == "reward"),
        f"{WHERE}.batch_std divides by a deviation, which is 0 if all rewards of a batch are 1, because advantage = "
        '"reward" has no baseline: take "mean", or leave batch_std out',
    )


def _corrections_fit(algorithm: c.Composition) -> Iterator[Demand]:
    weighing = [part for part in algorithm.corrections if isinstance(part, c.Truncate | c.IcePop)]
    yield (
        len(weighing) < 2,  # guard: weighed-once
        f"{WHERE}.corrections weigh each token twice: keep one of truncate and icepop; masks go with either",
    )
    yield (
        not weighing or algorithm.ratio_to == "old" or isinstance(algorithm.loss, c.Reinforce),  # guard: one-ratio
        f'{WHERE}.corrections weigh tokens by what the ratio has already, because ratio_to = "behaviour": set ratio_to = '
        '"old", or leave truncate and icepop out',
    )
    kinds = [type(part) for part in algorithm.corrections]
    yield len(set(kinds)) == len(kinds), f"{WHERE}.corrections name the same correction twice"


def _kl_fits(config: RunConfig, algorithm: c.Composition) -> Iterator[Demand]:
    kl, where = algorithm.kl, f"{WHERE}.kl"
    yield (
        kl.beta > 0 or kl == c.Kl(),
        f"{where}: estimator and place do nothing while beta is 0: set beta, such as 0.001, or leave them out",
    )
    if not kl.beta:
        return
    yield (
        kl.place != "loss" or kl.estimator != "k1",  # guard: k1-has-no-gradient
        f'{where}.estimator = "k1" with place = "loss": its gradient is 0 on average, so it only adds noise. Take "k2" or '
        '"k3", or place = "advantage"',
    )
    yield (
        kl.place != "advantage" or kl.estimator == "k1",
        f'{where}.place = "advantage" takes estimator = "k1": sums of the others are not the divergence of a row',
    )
    yield (
        kl.place != "weighted_loss" or not isinstance(algorithm.loss, c.Reinforce),
        f'{where}.place = "weighted_loss": loss.name = "reinforce" has no ratio. Take place = "loss" or "advantage"',
    )
    yield (
        kl.place != "advantage"
        or not isinstance(algorithm.loss, c.Gspo)
        or algorithm.loss.by_token,  # guard: gspo-one-advantage
        f'{where}.place = "advantage" gives the tokens of a row different advantages: set {WHERE}.loss.by_token = true',
    )
    yield (
        config.train.processes == 1,  # guard: reference-of-one-process
        f"{where}.beta = {kl.beta} with train.processes = {config.train.processes}: one process keeps the first policy "
        "whole. Leave one of them out",
    )


def notes_of(config: RunConfig) -> list[str]:
    """What works, and yet may not be what was meant."""
    algorithm = config.train.algorithm
    weighed = _is_weighed(algorithm)
    if isinstance(algorithm.loss, c.Reinforce) or (
        weighed and isinstance(algorithm, c.Grpo)
    ):  # int8 brings the weights
        return []
    if algorithm.ratio_to == "old" and config.train.updates_per_batch * config.train.minibatches == 1:
        stale = config.rollouts.max_staleness > 0 and not weighed
        older = f", and nothing corrects older rollouts (rollouts.max_staleness = {config.rollouts.max_staleness})"
        return [
            f"the ratio is 1 at every token, so no bound of {WHERE}.loss acts{older if stale else ''}: "
            f'{WHERE}.ratio_to = "old" is the policy that the only update of a step begins with. Raise '
            'train.updates_per_batch or train.minibatches, or take the policy that sampled (ratio_to = "behaviour")'
            + (", or set rollouts.max_staleness = 0" if stale else "")
        ]
    return []


def _is_weighed(algorithm: c.Composition) -> bool:
    return any(isinstance(part, c.Truncate | c.IcePop) for part in algorithm.corrections)


# --- the learning rate of a run file that names none ---


MIN_PRESET_LR, MAX_PRESET_LR = 1e-6, 5e-4

MAX_LR_DIVISOR, MAX_LR_FACTOR = 5.0, 3.0
"""Of a preset, to the rates that fit. `recipes/arithmetic.toml` learns with a fifth; far above, the reward falls again."""

MIN_STEP_ROLLOUTS = 128
"""Of a step. With 64, which of them won is mostly luck."""

IMITATION_TIMES, MAX_IMITATION_LR = 10, 3e-3
"""Imitation is told each token, and bears a higher learning rate than RL."""


def preset_lr(parameters: int) -> float:
    """Learning rate of RL for a policy with so many parameters that learn: 500 divided by their number, within limits.

    1e-6 from 500 million on, which is usual for pretrained models; 5e-4 up to one million. An adapter has fewer parameters
    that learn, and so a higher rate.
    """
    return _rounded(min(MAX_PRESET_LR, max(MIN_PRESET_LR, 500 / max(1, parameters))))


def lr_misfit(lr: float, preset: float) -> Literal["", "low", "high"]:
    """How a learning rate of RL does not fit; empty if it does, or if it is 0 or the preset is not known (0)."""
    if 0 < lr < preset / MAX_LR_DIVISOR:
        return "low"
    return "high" if 0 < preset * MAX_LR_FACTOR < lr else ""


def preset_imitation_lr(parameters: int) -> float:
    """The same of supervised fine-tuning: ten times as high, and at most 3e-3."""
    return _rounded(min(MAX_IMITATION_LR, IMITATION_TIMES * max(MIN_PRESET_LR, 500 / max(1, parameters))))


def _rounded(lr: float) -> float:
    return float(f"{lr:.1e}")


def lr_fits(lr: float, table: str = "") -> Demand:
    """Whether a learning rate is one, or the preset. `table` comes before the name of the key."""
    return (
        lr == PRESET_LR or lr >= 0,
        f"{table}lr = {lr}: must be at least 0, or -1 for the preset of the policy's size",
    )
