"""Unmodified environments of verifiers v0, in an interpreter that has verifiers 0.1.14."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.envs.adapters.conftest import call

Make = Callable[..., Any]


def test_rows_tools_weights_and_bounds_are_the_environments_own(distant: Make) -> None:
    about = distant("verifiers_v0", id="v0-shop", heldout=2).about
    assert (about["num_tasks"], about["num_heldout"]) == (4, 2)
    assert about["weights"] == {"correct": 1.0, "polite": 0.25}
    assert about["reward_bounds"] == [0.0, 1.25]
    assert [tool["function"]["name"] for tool in about["tools"]] == ["price", "discount"]
    assert about["tools"][0]["function"]["parameters"]["required"] == ["item"]
    assert about["heavy"] == []


def test_a_tool_environment_plays_its_own_loop_and_rubric(distant: Make) -> None:
    shop = distant("verifiers_v0", id="v0-shop", heldout=2)
    played = shop.play(0, call("price", item="apple") + call("price", item="brick"), "please <answer>3</answer>")
    opening, results, last = played["told"]
    assert [message["role"] for message in opening] == ["system", "user"]
    assert [(m["role"], m["content"], m["name"]) for m in results] == [
        ("tool", "3", "price"), ("tool", "'brick'", "price")
    ]  # fmt: skip
    assert last is None and played["done"]
    parts, metrics = played["scores"][-1]
    assert parts == {"correct": 1.0, "polite": 1.0}
    assert metrics["asked"] == 1.0 and metrics["price_calls"] == 2.0 and metrics["truncated"] == 0.0


def test_an_episode_that_a_token_limit_cuts_is_scored_as_truncated(distant: Make) -> None:
    shop = distant("verifiers_v0", id="v0-shop", heldout=2)
    scores = shop.play(1, call("price", item="bread"), "<answer>5</answer>")["scores"]
    assert [score[1]["truncated"] for score in scores] == [1.0, 0.0]
    assert [score[0]["correct"] for score in scores] == [0.0, 1.0]


def test_global_random_numbers_belong_to_the_episode(distant: Make) -> None:
    """A tool draws from `random`: the same episode draws the same, another one draws otherwise, and ours are untouched."""
    shop = distant("verifiers_v0", id="v0-shop", heldout=2)
    draws = [shop.play(index, *[call("discount")] * 3)["told"][1:4] for index in (0, 1, 0)]
    texts = [[messages[0]["content"] for messages in told] for told in draws]
    assert texts[0] == texts[2] != texts[1]
    assert shop.ask("leaves_alone", index=0, actions=[call("discount")]) is True


def test_a_game_over_several_turns_ends_with_its_own_word(distant: Make) -> None:
    guess = distant("verifiers_v0", id="v0-guess")
    assert (guess.about["num_tasks"], guess.about["num_heldout"]) == (4, 3), "one evaluation row is a training row"
    played = guess.play(2, "<think>low</think>0", "<think>high</think>9", "<think>so</think>2")
    assert [m[0]["content"] for m in played["told"][:3]] == ["0-9?", "higher", "lower"]
    assert played["done"] and played["scores"][-1][0] == {"found": 1.0}
    wrong = guess.play(0, *["<think>so</think>5"] * 5, heldout=True)
    assert wrong["done"] and wrong["scores"][-1][0] == {"found": 0.0} and wrong["scores"][-1][1]["num_turns"] == 5.0


def test_check_passes_an_unmodified_environment(distant: Make) -> None:
    for name in ("v0-shop", "v0-guess"):
        findings = distant("verifiers_v0", id=name, **({"heldout": 2} if name == "v0-shop" else {})).ask("check")
        assert [finding for finding in findings if finding[1] == "failed"] == []


def test_what_the_adapter_does_not_support_is_refused_by_name(distant: Make) -> None:
    group = distant("verifiers_v0", id="v0-guess", args={"fault": "group"}).about
    assert "compares the answers of a group" in group["refused"]
    forgets = distant("verifiers_v0", id="v0-guess", args={"fault": "forgets"}).play(1, "5")
    assert "rewrites the conversation: message 0 was" in forgets["raised"]
    broken = distant("verifiers_v0", id="v0-guess", args={"fault": "error"}).play(1, "5")
    assert "v0_guess.py line" in broken["raised"] and "InfraError: the server is down" in broken["raised"]
    assert "heldout = 9" in distant("verifiers_v0", id="v0-shop", heldout=9).about["refused"]


def test_replies_that_differ_are_found_when_turns_are_played_again(distant: Make) -> None:
    clock = distant("verifiers_v0", id="v0-guess", args={"fault": "clock"})
    assert "is not deterministic: to the same turns it answered" in clock.play(1, "5", "6")["raised"]
    assert next(finding for finding in clock.ask("check") if finding[0] == "replay")[1] == "failed"


@pytest.mark.parametrize("grouped", [False, True])
def test_a_reward_function_that_fails_is_a_fault_and_no_reward_of_0(distant: Make, grouped: bool) -> None:
    """verifiers only logs it. A function without weight is a metric, and may fail."""
    brittle = distant("verifiers_v0", id="v0-brittle", args={"grouped": grouped})
    assert "v0_brittle.py line 11: ValueError" in brittle.play(1, "two")["raised"]
    assert "TypeError" in brittle.play(1, "nothing")["raised"]
    assert "TimeoutError: the judge did not answer" in brittle.play(1, "7")["raised"]
    assert [score[0]["brittle"] for score in brittle.play(1, "2")["scores"]][-1] == 1.0
    assert [score[0]["brittle"] for score in brittle.play(1, "3")["scores"]][-1] == 0.0
    hostile = next(finding for finding in brittle.ask("check") if finding[0] == "hostile actions")
    assert hostile[1] == "failed" and "ValueError" in hostile[2] and "Correct that line" in hostile[2]
