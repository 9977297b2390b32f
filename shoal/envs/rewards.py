"""Rewards for the form and the length of an answer: pure functions that an environment may use as parts of its score.

Each docstring names the paper. A length may count characters, words or turns. They know nothing about tasks or tokens.
"""

import re
from collections import Counter
from collections.abc import Sequence
from math import cos, pi

from shoal.envs.action import Action

_WORD = re.compile(r"\w+", re.ASCII)


def thought_first(text: str) -> float:
    """1 if a text is one closed thought, <think>...</think>, followed by an answer; otherwise 0.

    The format reward of DeepSeek-R1 (arXiv:2501.12948, section 2.2.2).
    """
    opening, thought, rest = text.strip().partition("<think>")
    inner, closed, answer = rest.partition("</think>")
    marks = inner.count("<think>") + answer.count("<think>") + answer.count("</think>")
    return float(not opening and bool(thought and closed and answer.strip()) and not marks)


def tags_once(text: str, tags: Sequence[str]) -> float:
    """Share of the tags that occur exactly once: partial credit for a format.

    Open R1's reward for counting tags (github.com/huggingface/open-r1), for any tags.
    """
    return sum(text.count(tag) == 1 for tag in tags) / len(tags) if tags else 1.0


def calls_well_formed(action: Action) -> float:
    """Share of an action's tool calls that are well-formed; 1 if it makes none."""
    good, bad = len(action.tool_calls), len(action.problems)
    return good / (good + bad) if good + bad else 1.0


def overlong(length: float, limit: float, buffer: float) -> float:
    """0 up to limit - buffer, then falling linearly to -1 at the limit, and -1 above it.

    Soft overlong punishment of DAPO (arXiv:2503.14476, equation 13).
    """
    if length <= limit - buffer:
        return 0.0
    return max(-1.0, (limit - buffer - length) / buffer) if buffer > 0 else -1.0


def cosine(
    right: bool,
    length: float,
    limit: float,
    right_short: float = 2.0,
    right_long: float = 1.0,
    wrong_short: float = -10.0,
    wrong_long: float = 0.0,
    beyond: float = -10.0,
) -> float:
    """A reward that prefers short right answers and long wrong ones, along half a cosine up to the limit.

    Cosine reward of "Demystifying Long Chain-of-Thought Reasoning" (arXiv:2502.03373, section 4.2), with its defaults.
    """
    if length >= limit:
        return beyond
    short, long = (right_short, right_long) if right else (wrong_short, wrong_long)
    return long + 0.5 * (short - long) * (1.0 + cos(length * pi / limit))


def near_length(length: float, wanted: float, alpha: float = 0.0003) -> float:
    """-alpha times the distance to the wanted length: the penalty of L1-Exact (arXiv:2503.04697, equation 1)."""
    return -alpha * abs(wanted - length)


def shorter_than_siblings(lengths: Sequence[float], right: Sequence[bool]) -> list[float]:
    """For each answer of a group, from 0.5 for the shortest to -0.5 for the longest. A wrong answer gets at most 0.

    Length reward of Kimi k1.5 (arXiv:2501.12599, section 2.3.3), for use in `group_scores`.
    """
    low, high = min(lengths), max(lengths)
    if low == high:
        return [0.0] * len(lengths)
    rewards = [0.5 - (length - low) / (high - low) for length in lengths]
    return [reward if good else min(0.0, reward) for reward, good in zip(rewards, right, strict=True)]


def repeated(text: str, size: int = 4) -> float:
    """Share of the sequences of `size` words that occurred before: 0 without repetition, near 1 for a loop.

    The repetition penalty of arXiv:2502.03373 (section 4.3) uses this measure. Give it a negative weight.
    """
    words = _WORD.findall(text.lower())
    runs = Counter(tuple(words[i : i + size]) for i in range(len(words) - size + 1))
    return 1.0 - len(runs) / runs.total() if runs else 0.0
