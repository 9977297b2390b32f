"""A run that learns from preferences whose truth is known: by DPO, or by RL with a reward model or with the truth itself.

Called by `kept`. The first policy writes pairs of answers, and each is labelled as Bradley and Terry say, by the true
utilities of `benchmarks/envs/liked_letters.py`. All ways want the same: the mean utility less beta times the KL to the
first policy. There are few enough answers to count them, so what a policy is worth is exact, and so is the most that any
policy could be worth. A fifth of the answers of the right form is in no pair.

All answers of another form count as one in the KL.

Axes: X prompts, Y answers of the right form, R texts.
"""

import itertools
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.claims.curves.beside import Beside, Tree
from benchmarks.claims.curves.harness import Column, Curve, TrainedRun, config_of
from benchmarks.claims.curves.ranks import spearman
from benchmarks.envs.liked_letters import ANSWERS, PROMPTS, WORST, utility
from shoal.chat.renderer import Renderer
from shoal.models.checkpoint import load_policy, save_policy
from shoal.models.interface import PolicyModel
from shoal.models.value_head import TransformerWithValueHead, begin_valued, save_valued
from shoal.protocol.messages import ENVIRONMENT, POLICY
from shoal.train.frozen_models import scores_of
from shoal.train.packing_padded import MicroBatch, collate
from shoal.train.preference_training import PairSettings, Score, TokenPair, answer_logps, prefer_policy, prefer_scores
from shoal.train.rows import TrainingRow, example_row
from shoal.tree import merge
from shoal.weights.manifest import weights_root

UNSEEN = 5
"""One answer in this many is in no pair."""

WRITTEN = 512
"""Answers that the first policy writes at a time, for pairs."""

UTILITY_XY = np.array([[utility(prompt, answer) for answer in ANSWERS] for prompt in PROMPTS])


class Worth(NamedTuple):
    """What a policy is worth, means over prompts."""

    utility: float
    kl_nats: float
    objective: float
    """Utility less beta times KL."""


def preferred(
    tree: Tree, start: Path, beside: Beside, teacher: Path | None = None, *, key: str = "", begun: str = ""
) -> Curve:  # fmt: skip
    """Make one run. Its tests are of the first policy and of the last one; the reward is the share of what could be gained
    in the objective."""
    torch.set_num_threads(1)
    before, asked = time.process_time(), beside.preferences
    assert asked is not None, "a run with preferences"
    texts = _Texts(Renderer.from_directory(start))
    seed, first_XY = int(tree["seed"]), texts.chances(load_policy(start, torch.float32))
    unseen_Y = _unseen(seed)
    count = 0 if asked.way == "truth" else asked.pairs
    pairs = list(itertools.islice(_pairs(tree, start, unseen_Y), count))
    settings = PairSettings(
        asked.steps, asked.batch, tree["train"]["lr"] if asked.way == "dpo" else asked.scores_lr, 5, 1.0, seed
    )
    probed: Column = {"pairs": [float(len(pairs))]}
    with tempfile.TemporaryDirectory(prefix="shoal-shelf-") as scratch:
        published, judge = Path(scratch) / "published", Path(scratch) / "reward-model"
        generated = 0
        if asked.way == "dpo":
            model = load_policy(start, torch.float32)
            prefer_policy(model, pairs, pairs[:1], asked.beta, settings)
            save_policy(model, published, "float32", tokenizer_from=start)
        else:
            models = {}
            if asked.way == "reward_model":
                scorer = begin_valued(start)
                prefer_scores(dict(scorer.trainable()), _scores(scorer), pairs, pairs[:1], settings)
                save_valued(scorer, judge, "float32", tokenizer_from=start)
                probed |= _correlations(scorer, texts, unseen_Y)
                models = {"reward_model": judge}
            run = TrainedRun(config_of(tree, start, models), start, published, Beside(), None)
            run.train()
            model, generated = run.model, run.spent
        weights = weights_root(published)
    last_XY = texts.chances(model)
    first, last = (worth(chance_XY, first_XY, asked.beta) for chance_XY in (first_XY, last_XY))
    most = best(first_XY, asked.beta)
    probed |= {
        "utility": [first.utility, last.utility], "best_utility": [float(UTILITY_XY.max(1).mean())],
        "kl_nats": [first.kl_nats, last.kl_nats], "objective": [first.objective, last.objective, most],
        "valid": [float(first_XY.sum(1).mean()), float(last_XY.sum(1).mean())],
    }  # fmt: skip
    share = (last.objective - first.objective) / (most - first.objective)
    zero = [0.0, 0.0]
    tested = {"reward": [0.0, share], "entropy_nats": [_entropy(first_XY), _entropy(last_XY)], "length": zero}
    return Curve(
        key, {"start": begun, **tree}, {"tokens": [float(generated)]}, {"updates": [float(tree["steps"])]}, tested, [], [],
        weights, round(time.process_time() - before, 2), probed,
    )  # fmt: skip


def worth(chance_XY: NDArray[np.float64], first_XY: NDArray[np.float64], beta: float) -> Worth:
    """The exact worth of a policy with these chances of each answer."""
    rest_X, first_rest_X = (np.clip(1 - one.sum(1), 1e-12, None) for one in (chance_XY, first_XY))
    utility_X = (chance_XY * UTILITY_XY).sum(1) + rest_X * WORST
    kl_X = (chance_XY * np.log(chance_XY / first_XY)).sum(1) + rest_X * np.log(rest_X / first_rest_X)
    mean, kl = float(utility_X.mean()), float(kl_X.mean())
    return Worth(mean, kl, mean - beta * kl)


def best(first_XY: NDArray[np.float64], beta: float) -> float:
    """The highest objective of any policy: that of the first policy's chances times exp(utility / beta), normalised."""
    rest_X = np.clip(1 - first_XY.sum(1), 1e-12, None)
    terms_XY = np.concatenate(
        [np.log(first_XY) + UTILITY_XY / beta, (np.log(rest_X) + WORST / beta)[:, None]], axis=1
    )  # fmt: skip
    return float(beta * np.logaddexp.reduce(terms_XY, axis=1).mean())


class _Texts:
    """Every prompt with every answer, as rows."""

    def __init__(self, renderer: Renderer) -> None:
        self.rows_X_Y = [
            [_row(renderer, prompt, answer) for answer in ANSWERS] for prompt in PROMPTS
        ]  # fmt: skip

    @torch.no_grad()
    def chances(self, model: PolicyModel) -> NDArray[np.float64]:
        """The probability of each answer."""
        score = answer_logps(model)
        logp = [score(collate(rows), rows).double().numpy() for rows in self.rows_X_Y]
        return np.exp(np.stack(logp))


def _row(renderer: Renderer, prompt: str, answer: str) -> TrainingRow:
    opening = renderer.start([{"role": "user", "content": prompt}])
    written = [*renderer.encode(answer), renderer.eos_id]
    return example_row([*opening, *written], [ENVIRONMENT] * len(opening) + [POLICY] * len(written))


def _unseen(seed: int) -> NDArray[np.bool_]:
    """Which answers are in no pair."""
    unseen_Y = np.zeros(len(ANSWERS), dtype=bool)
    unseen_Y[np.random.default_rng(seed).permutation(len(ANSWERS))[: len(ANSWERS) // UNSEEN]] = True
    return unseen_Y


def _pairs(tree: Tree, start: Path, unseen_Y: NDArray[np.bool_]) -> Iterator[TokenPair]:
    """Pairs of different answers that the first policy wrote, the preferred one first. Answers of another form are among
    them."""
    config = config_of(merge(tree | {"train": {}}, {"rollouts": {"block_rollouts": WRITTEN}}), start)
    writer = TrainedRun(config, start, start, Beside(), None)
    writer.engine.load(start, 0)
    rng, unseen = np.random.default_rng(config.seed), {ANSWERS[y] for y in np.flatnonzero(unseen_Y)}
    for step in itertools.count():
        talks = writer.written("pairs", step, WRITTEN // 2, 2)
        for a, b in zip(talks[::2], talks[1::2], strict=True):
            if a.tokens == b.tokens or {a.state.given, b.state.given} & unseen:
                continue
            prefers_a = rng.random() < 1 / (1 + math.exp(b.reward - a.reward))
            chosen, rejected = (a, b) if prefers_a else (b, a)
            yield TokenPair(*(example_row(talk.tokens, talk.author) for talk in (chosen, rejected)))


def _scores(model: TransformerWithValueHead) -> Score:
    """The score of each row: that at its last token."""

    def score(batch: MicroBatch, rows: Sequence[TrainingRow]) -> Tensor:
        width = max(len(row.tokens_T) for row in rows)
        tokens_BT = torch.zeros(len(rows), width, dtype=torch.int64)
        for b, row in enumerate(rows):
            tokens_BT[b, : len(row.tokens_T)] = torch.from_numpy(row.tokens_T)
        return model.scores(tokens_BT, torch.tensor([len(row.tokens_T) - 1 for row in rows]))

    return score


def _correlations(model: TransformerWithValueHead, texts: _Texts, unseen_Y: NDArray[np.bool_]) -> Column:
    """Rank correlation of scores with utilities, mean over prompts: of unseen answers, and of the others."""
    scores_XY = np.stack([scores_of(model, [row.tokens_T for row in rows], 4096) for rows in texts.rows_X_Y])
    found = {
        name: float(np.mean([spearman(s_Y[which], u_Y[which]) for s_Y, u_Y in zip(scores_XY, UTILITY_XY, strict=True)]))
        for name, which in (("spearman_unseen", unseen_Y), ("spearman_seen", ~unseen_Y))
    }
    return {name: [value] for name, value in found.items()}


def _entropy(chance_XY: NDArray[np.float64]) -> float:
    return float(-(chance_XY * np.log(chance_XY)).sum(1).mean())
