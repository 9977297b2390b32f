"""Unmodified tasksets of verifiers v1, in an interpreter that has verifiers 0.4.0."""

from collections.abc import Callable
from typing import Any

from tests.envs.adapters.conftest import call

Make = Callable[..., Any]


def test_tools_hooks_rewards_and_metrics_are_the_tasksets_own(distant: Make) -> None:
    library = distant("verifiers_v1", id="v1-library", heldout=1)
    about = library.about
    assert (about["num_tasks"], about["num_heldout"], about["reward_bounds"]) == (3, 1, [0.0, 2.0])
    assert [tool["function"]["name"] for tool in about["tools"]] == ["shelf_look"]
    assert about["heavy"] == []
    played = library.play(1, call("shelf_look", word="byron"), "It is on shelf 5.")
    opening, results, last = played["told"]
    assert [message["content"] for message in opening] == ["A library.", "Where is byron?"]
    assert results[0]["content"] == "byron is on shelf 5" and results[0]["name"] == "shelf_look"
    assert last is None and played["done"]
    assert played["scores"][-1] == [{"right": 2.0}, {"looked": 1.0, "truncated": 0.0}]
    assert played["scores"][0] == [{"right": 0.0}, {"looked": 1.0, "truncated": 1.0}]


def test_a_stop_condition_ends_the_episode(distant: Make) -> None:
    library = distant("verifiers_v1", id="v1-library", heldout=1)
    played = library.play(0, *[call("shelf_look", word="x")] * 3)
    assert played["done"] and played["scores"][-1][1] == {"looked": 3.0, "truncated": 0.0}


def test_faults_of_a_tool_call_are_told_to_the_policy(distant: Make) -> None:
    library = distant("verifiers_v1", id="v1-library", heldout=1)
    told = library.play(0, call("shelf_look"), call("steal"))["told"]
    assert "Field required" in told[1][0]["content"]
    assert told[2][0]["content"] == "error: unknown tool 'steal'"


def test_arguments_reach_the_configuration(distant: Make) -> None:
    library = distant("verifiers_v1", id="v1-library", args={"taskset": {"words": ["one", "two", "six"]}}, tasks=2)
    assert library.about["num_tasks"] == 2
    assert library.play(0)["told"][0][1]["content"] == "Where is one?"


def test_the_policy_plays_one_agent_and_an_opponent_the_other(distant: Make) -> None:
    duel = distant("verifiers_v1", id="v1-duel", tasks=8, heldout=2, reward_bounds=[-1, 1])
    assert (duel.about["num_tasks"], duel.about["num_heldout"]) == (8, 2)
    rewards = {index: duel.play(index, "[3]", "[3]")["scores"][-1][0]["win"] for index in range(8)}
    assert min(rewards.values()) >= 0 and max(rewards.values()) == 1
    assert rewards == {index: duel.play(index, "[3]", "[3]")["scores"][-1][0]["win"] for index in range(8)}
    scripted = distant("verifiers_v1", id="v1-duel", tasks=2, opponent=["[1]", "[2]"], reward_bounds=[-1, 1])
    for index, seat in enumerate(("left", "right")):
        texts = [m[-1]["content"] for m in scripted.play(index, "[2]")["told"]]
        assert [text.split(".")[0] for text in texts] == ["Turn 1", "Turn 2"], seat
        assert scripted.play(index, "[2]", "[2]")["scores"][-1][0] == {"win": 1.0}
        assert scripted.play(index, "[1]", "[1]")["scores"][-1][0] == {"win": -1.0}
        assert scripted.play(index, "[1]", "[2]")["scores"][-1][0] == {"win": 0.0}


def test_an_agent_that_is_not_trained_is_the_opponents(distant: Make) -> None:
    duel = distant("verifiers_v1", id="v1-duel", tasks=4, args={"trains": "right"}, opponent=["[2]"])
    assert [len(duel.play(index, "[2]", "[2]")["told"]) for index in range(2)] == [3, 3]
    assert all(duel.play(index, "[3]", "[3]")["scores"][-1][0] == {"win": 1.0} for index in range(2))


def test_a_check_passes_them(distant: Make) -> None:
    for args in ({"id": "v1-library", "heldout": 1}, {"id": "v1-duel", "tasks": 8, "heldout": 2}):
        bounds = {"reward_bounds": [-1, 1]} if args["id"] == "v1-duel" else {}
        findings = distant("verifiers_v1", **args, **bounds).ask("check")
        assert [finding for finding in findings if finding[1] == "failed"] == []


def test_what_the_adapter_does_not_support_is_refused_by_name(distant: Make) -> None:
    assert "endless tasks" in distant("verifiers_v1", id="v1-duel").about["refused"]
    assert "no agent centre" in distant("verifiers_v1", id="v1-duel", tasks=3, seat="centre").about["refused"]
    assert "opponent = 'clever'" in distant("verifiers_v1", id="v1-duel", tasks=3, opponent="clever").about["refused"]
    untrained = distant("verifiers_v1", id="v1-duel", tasks=3, args={"trains": ""}).play(0)
    assert "does not train any agent" in untrained["raised"]
    harness = {"left": {"harness": {"id": "codex"}}}
    assert "in the harness codex" in distant("verifiers_v1", id="v1-duel", tasks=3, args=harness).about["refused"]
