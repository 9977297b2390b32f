"""The trainer's reward model: it scores each rollout, and the mean of the group is subtracted.

Called by `roles/trainer` and `recipes/one_file.py` once a step, in runs with `advantage = "reward_model"`; other runs load
nothing. `roles/prefer`, which trains such models, takes `row_scores`. Such a model is for what no environment can check, so
the rewards that validators recomputed stay figures. The score is that of a rollout's last token, as the model was trained
(`algos/bradley_terry`); of a rollout with several rows, that of its last one. The advantages are part of the rows, so a
repeated step has the same bits. It is never published.

Axes: B rows of a micro-batch, K those of a micro-batch of pairs, T tokens, R rows.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.policy.parking import Resting
from shoal.policy.valued import Valued
from shoal.train.pack import MicroBatch
from shoal.train.rows import Row


class RewardModel(Resting):
    """The frozen model. Call it with rows."""

    def __init__(self, frozen: Valued, microbatch_tokens: int) -> None:
        super().__init__(frozen)
        self._frozen, self._microbatch_tokens = frozen, microbatch_tokens

    def __call__(
        self, rows: Sequence[Row], student: Callable[[Sequence[Row]], Sequence[np.ndarray]]
    ) -> tuple[list[Row], dict[str, float]]:
        """The rows with advantages by the scores of their rollouts, and the mean score. There must be rows. The student's
        log-probs are not asked for."""
        last = {_rollout_of(row, i): i for i, row in enumerate(rows) if len(row.advantage_P)}
        scores = scores_of(self._frozen, [rows[i].tokens_T for i in last.values()], self._microbatch_tokens)
        score_of = dict(zip(last, scores.tolist(), strict=True))
        groups: dict[Hashable, list[float]] = {}
        for rollout, i in last.items():
            groups.setdefault(_group_of(rows[i], i), []).append(score_of[rollout])
        means = {group: float(np.mean(found)) for group, found in groups.items()}
        judged = []
        for i, row in enumerate(rows):
            if not len(row.advantage_P):
                judged.append(row)
                continue
            A = score_of[_rollout_of(row, i)] - means[_group_of(row, i)]
            judged.append(replace(row, advantage_P=np.full(len(row.advantage_P), A, dtype=np.float32)))
        return judged, {"score_mean": float(scores.mean())}


@torch.no_grad()
def scores_of(model: Valued, tokens_R_T: Sequence[NDArray[np.int64]], budget_tokens: int) -> NDArray[np.float64]:
    """The score of each text, [R], in micro-batches of similar lengths and at most so many tokens, padding included."""
    device = model.score.weight.device
    found = np.zeros(len(tokens_R_T))
    left = sorted(range(len(tokens_R_T)), key=lambda r: -len(tokens_R_T[r]))
    while left:
        count = max(1, budget_tokens // len(tokens_R_T[left[0]]))
        members, left = left[:count], left[count:]
        tokens_BT, last_B = _padded([tokens_R_T[r] for r in members])
        found[members] = model.scores(tokens_BT.to(device), last_B.to(device)).cpu().numpy()
    return found


def row_scores(model: Valued) -> Callable[[MicroBatch, Sequence[Row]], Tensor]:
    """What trains such a model: the score of each row of a micro-batch, float32 [K], with gradients. Every token of a row
    is read, as by `scores_of`; the inputs of the micro-batch lack the last one."""

    def score(batch: MicroBatch, rows: Sequence[Row]) -> Tensor:
        found: Tensor = model.scores(*_padded([row.tokens_T for row in rows]))
        return found

    return score


def _padded(tokens_B_T: Sequence[NDArray[np.int64]]) -> tuple[Tensor, Tensor]:
    """Right-padded texts, [B, T], and the place of each one's last token, [B]."""
    tokens_BT = torch.zeros(len(tokens_B_T), max(map(len, tokens_B_T)), dtype=torch.int64)
    for b, tokens_T in enumerate(tokens_B_T):
        tokens_BT[b, : len(tokens_T)] = torch.from_numpy(tokens_T)
    return tokens_BT, torch.tensor([len(tokens_T) - 1 for tokens_T in tokens_B_T])


def _rollout_of(row: Row, place: int) -> Hashable:
    return place if row.id is None else row.id


def _group_of(row: Row, place: int) -> Hashable:
    return place if row.group is None else row.group
