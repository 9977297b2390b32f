"""How much of a text repeats itself: the share of its n-grams that occurred before.

Called by `envs/shaping` on token ids, and through `graders/format` on words. Pure.

    symbol   meaning                                                        argument
    n        length of a sequence                                           n
    m        sequences of that length in all turns, repeats counted         the sum of the counts
    d        different ones among them                                      the number of counts
    share    1 - d / m;  0 without repetition, near 1 for a loop            the result

The measure of the repetition penalty of "Demystifying Long Chain-of-Thought Reasoning" (arXiv:2502.03373, section 4.3):
there, a length reward led policies to fill their answers with repeats.

Changed from the paper: it gives each token of a repeat a penalty of its own, discounted on its own; here the share is one
number for the rollout, because a rollout has one reward. No sequence reaches over the border of two turns.
"""

from collections import Counter
from collections.abc import Hashable, Sequence


def repeated_share(turns: Sequence[Sequence[Hashable]], n: int) -> float:
    """The share, from 0 to 1; 0 if no turn has n items."""
    found = Counter(tuple(turn[i : i + n]) for turn in turns for i in range(len(turn) - n + 1))
    return 1.0 - len(found) / found.total() if found else 0.0
