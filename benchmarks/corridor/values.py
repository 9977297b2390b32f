"""The true value of every beginning of a walk under a policy, by counting all walks: what a critic should say.

Used by comparisons of credit on the corridor. No sampling: the policy's probabilities of the two letters after each
beginning give the chance that the door is opened. Any other token earns nothing, so it needs no branch.

Axes: W walks of one length, V vocabulary.
"""

from collections.abc import Sequence

import torch

from benchmarks.corridor.environment import MOST_STEPS, opens
from shoal.models.interface import PolicyModel

AT_ONCE = 512
"""Walks of a forward pass."""


@torch.no_grad()
def true_values(
    model: PolicyModel, task: tuple[int, ...], opening: Sequence[int], letters: dict[str, int], temperature: float = 1.0,
    most_steps: int = MOST_STEPS,
) -> dict[str, float]:  # fmt: skip
    """The chance that the door is opened, by what was written: "" is the state before the first letter. A walk that has
    opened the door is worth 1 and goes on nowhere; so does one of `most_steps` letters."""
    chances: dict[str, dict[str, float]] = {}
    alive = [""]
    for _ in range(most_steps):
        alive = [walk for walk in alive if not opens(task, walk)]
        for begin in range(0, len(alive), AT_ONCE):
            some = alive[begin : begin + AT_ONCE]
            chances |= zip(some, _chances(model, some, opening, letters, temperature), strict=True)
        alive = [walk + letter for walk in alive for letter in letters]
    values: dict[str, float] = {}

    def value(walk: str) -> float:
        if walk not in chances:
            values[walk] = float(opens(task, walk))
        else:
            values[walk] = sum(chance * value(walk + letter) for letter, chance in chances[walk].items())
        return values[walk]

    value("")
    return values


def _chances(
    model: PolicyModel, walks: Sequence[str], opening: Sequence[int], letters: dict[str, int], temperature: float
) -> list[dict[str, float]]:
    """The probability of each letter after each of these walks, which have one length."""
    tokens_WT = torch.tensor([[*opening, *(letters[letter] for letter in walk)] for walk in walks])
    logits_WV = model.logits(model.hidden(tokens_WT)[:, -1])
    p_WV = torch.softmax(logits_WV.double() / temperature, -1)
    return [{letter: p_V[index].item() for letter, index in letters.items()} for p_V in p_WV]
