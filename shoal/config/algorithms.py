"""`[train.algorithm]` of a run file: what a named algorithm leaves to its defaults, and which parts do not go together.

Called by `load`, which fills in what a run file leaves out, by `check`, and by the trainer's role for `notes_of`. It has no
formula.
"""

import math
from collections.abc import Iterator
from typing import Any

from shoal.config.credit import WHERE, Demand, credit_fits
from shoal.config.sections import RunConfig
from shoal.protocol import compositions as c
from shoal.protocol.algorithms import DEFAULT, defaults_of
from shoal.tree import merge, to_tree


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
    if isinstance(algorithm.loss, c.Reinforce) or _is_weighed(algorithm):
        return []
    if algorithm.ratio_to == "old" and config.train.updates_per_batch * config.train.minibatches == 1:
        stale = config.rollouts.max_staleness > 0
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
