"""Rewards for form and length, against numbers worked by hand."""

import pytest

from shoal.env import Action
from shoal.graders.format import (
    calls_well_formed,
    cosine,
    near_length,
    overlong,
    repeated,
    shorter_than_siblings,
    tags_once,
    thought_first,
)


def test_a_closed_thought_before_an_answer_has_the_format() -> None:
    assert thought_first("<think>hm</think> 4") == 1.0
    for text in (
        "4",
        "<think>hm",
        "<think>hm</think>",
        "so <think>hm</think>4",
        "<think>a<think>b</think>c",
        "<think>a</think>b</think>c",
    ):
        assert thought_first(text) == 0.0
    assert tags_once("<a>x</a><a>", ["<a>", "</a>", "<b>"]) == pytest.approx(1 / 3) and tags_once("", []) == 1.0


def test_length_rewards_are_those_of_their_papers() -> None:
    assert [overlong(length, 100, 20) for length in (0, 80, 90, 100, 200)] == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert [cosine(True, length, 100) for length in (0, 50, 100)] == pytest.approx([2.0, 1.5, -10.0])
    assert [cosine(False, length, 100) for length in (0, 50)] == pytest.approx([-10.0, -5.0])
    assert near_length(90, 100, 0.01) == pytest.approx(-0.1)
    assert shorter_than_siblings([10, 20, 30], [True, False, True]) == [0.5, 0.0, -0.5]
    assert shorter_than_siblings([10, 20, 30], [False] * 3) == [0.0, 0.0, -0.5]
    assert shorter_than_siblings([7, 7], [True, False]) == [0.0, 0.0]


def test_repetition_and_malformed_calls_are_shares() -> None:
    assert repeated("a b c d e", 2) == 0.0 and repeated("a b a b a b", 2) == pytest.approx(1 - 2 / 5)
    assert repeated("a", 2) == 0.0
    good, bad = '<tool_call>{"name": "f"}</tool_call>', "<tool_call>?</tool_call>"
    assert [calls_well_formed(Action(text, "hermes")) for text in ("", good, good + bad, bad)] == [1.0, 1.0, 0.5, 0.0]
