"""Rules of the tables `algorithm`, `credit` and `train` of a run file, and the defaults that an algorithm brings."""

import math
from collections.abc import Iterator
from typing import Any, Literal

from shoal.config.run_file import PRESET_LR, CriticConfig, RunConfig, SftConfig, TrainConfig
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
from shoal.protocol.constants import COMPLETIONS, CONTINUATIONS, EPISODES, MAX_GROUP_ROLLOUTS, MAX_ROLLOUT_STEPS
from shoal.protocol.message_sizes import most_batch_groups, most_lease_groups
from shoal.tree import merge, to_tree

# --- What decides the worth of rollouts and tokens beside their rewards, and what it does not go together with ---
#
# A critic, a teacher, a reward model, continuations, rewards of turns or steps.


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


# --- `[train.algorithm]` of a run file ---
#
# What a named algorithm leaves to its defaults, and which parts do not go together.


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
    """What must hold, each with what to say if it does not. These numbers go into the log, so they must be finite."""
    algorithm = config.train.algorithm
    finite = math.isfinite(algorithm.entropy_bonus)
    yield finite, f"{WHERE}.entropy_bonus = {algorithm.entropy_bonus}: must be finite"
    yield from credit_fits(config)
    yield from _loss_fits(algorithm.loss)
    yield from _average_fits(config, algorithm)
    yield from _corrections_fit(algorithm)
    yield from _sampling_fits(config, algorithm)
    yield from _kl_fits(config, algorithm)
    target = algorithm.entropy_target
    yield 0 <= target < math.inf, f"{WHERE}.entropy_target = {target}: must be at least 0, and finite"
    fits = not target or algorithm.entropy_bonus > 0
    yield fits, f"{WHERE}.entropy_target = {target}: it controls the bonus, so set entropy_bonus above 0, such as 0.02"
    fits = 0 <= algorithm.squared_ratio < math.inf
    yield fits, f"{WHERE}.squared_ratio = {algorithm.squared_ratio}: must be at least 0, and finite"


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
    """Whether corrections weigh tokens by the ratio to the policy that sampled them."""
    return any(isinstance(part, c.Truncate | c.IcePop) for part in algorithm.corrections)


def _loss_fits(loss: c.Loss) -> Iterator[Demand]:
    where = f"{WHERE}.loss"
    match loss:
        case c.Clip(eps_low, eps_high, delta):
            yield from _range_fits(where, eps_low, eps_high)
            fits = delta == 0 or 1 + eps_high < delta < math.inf
            yield fits, f"{where}.delta = {delta}: must be 0, or above 1 + eps_high = {1 + eps_high} and finite"
        case c.Gspo(eps_low, eps_high):
            yield from _range_fits(where, eps_low, eps_high)
        case c.Cispo(least, most):
            yield from _band_fits(where, least, most)
        case c.Dppo(bound):
            yield 0 < bound < 1, f"{where}.bound = {bound}: must be between 0 and 1, a difference of probabilities"
        case c.Reinforce():
            pass


def _range_fits(where: str, eps_low: float, eps_high: float) -> Iterator[Demand]:
    yield 0 < eps_low < 1, f"{where}.eps_low = {eps_low}: must be between 0 and 1"
    yield 0 < eps_high < math.inf, f"{where}.eps_high = {eps_high}: must be above 0, and finite"


def _band_fits(where: str, least: float, most: float) -> Iterator[Demand]:
    yield 0 <= least < 1, f"{where}.least = {least}: must be at least 0 and below 1"
    yield 1 < most < math.inf, f"{where}.most = {most}: must be above 1, and finite"


def _average_fits(config: RunConfig, algorithm: c.Composition) -> Iterator[Demand]:
    divisor = algorithm.divisor_tokens
    yield 0 <= divisor < math.inf, f"{WHERE}.divisor_tokens = {divisor}: must be at least 0, and finite"
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
    for part in algorithm.corrections:
        where = f"{WHERE}.corrections, {part.__struct_config__.tag}"
        if isinstance(part, c.Truncate):
            yield 1 <= part.most < math.inf, f"{where}.most = {part.most}: must be at least 1, and finite"
        else:
            yield from _band_fits(where, part.least, part.most)


def _kl_fits(config: RunConfig, algorithm: c.Composition) -> Iterator[Demand]:
    kl, where = algorithm.kl, f"{WHERE}.kl"
    yield 0 <= kl.beta < math.inf, f"{where}.beta = {kl.beta}: must be at least 0, and finite"
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


def _sampling_fits(config: RunConfig, algorithm: c.Composition) -> Iterator[Demand]:
    """What a loss without a ratio cannot learn from, and what another setting does already."""
    train = config.train
    if not isinstance(algorithm.loss, c.Reinforce):
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


# --- The learning rate of a run file that names none, and what a run file or a recipe may not say about the optimiser
# ---
#
# A negative limit on the gradient would turn it around, and what is no number would become every weight.


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


def optimiser_fits(config: TrainConfig | SftConfig, table: str = "") -> Iterator[tuple[bool, str]]:
    """What must hold, each with what to say if it does not. `table` is what stands before the names of the keys."""
    norm, warmup = config.max_grad_norm, config.warmup_steps
    # guard: gradients-keep-their-sign
    yield norm > 0, f"{table}max_grad_norm = {norm}: must be above 0; inf never scales a gradient down"
    yield warmup >= 0, f"{table}warmup_steps = {warmup}: must be at least 0"
    if isinstance(config, TrainConfig):
        for name in ("beta1", "beta2"):
            value = getattr(config, name)
            yield 0 <= value < 1, f"{table}{name} = {value}: must be at least 0 and below 1"
        decay = config.weight_decay
        yield 0 <= decay < math.inf, f"{table}weight_decay = {decay}: must be at least 0, and finite"
    fits, preset = config.lr == PRESET_LR or 0 <= config.lr < math.inf, "or -1 for the preset of the policy's size"
    yield fits, f"{table}lr = {config.lr}: must be at least 0, and finite; {preset}"
