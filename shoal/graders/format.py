"""Rewards for the form and the length of an answer: pure functions that an environment may use as parts of its score.

Each docstring names the paper. A length may count characters, words or turns. They know nothing about tasks or tokens.
Terms that a run file may add to any environment are in `envs/settings_wrapper`; their formulas, in `algos`, are offered
here, too.
"""

import re
from collections.abc import Sequence
from math import cos, pi

from shoal.algos.reward_shaping import length_penalty as near_length
from shoal.algos.reward_shaping import overlong, repeated_share
from shoal.env import Action

__all__ = [
    "calls_well_formed", "cosine", "near_length", "overlong", "repeated", "shorter_than_siblings", "tags_once",
    "thought_first",
]  # fmt: skip

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
    return repeated_share([_WORD.findall(text.lower())], size)
