"""Tasks of reasoning_gym, in an interpreter that has it."""

from collections.abc import Callable
from typing import Any

import pytest

from shoal.envs.adapters.reasoning_gym import hash_dependent

Make = Callable[..., Any]


@pytest.mark.parametrize("task", ["basic_arithmetic", "maze", "countdown"])
def test_a_task_is_generated_asked_and_scored(distant: Make, task: str) -> None:
    gym = distant("reasoning_gym", task=task, tasks=20, heldout=8)
    assert gym.about["name"] == f"reasoning_gym/{task}" and gym.about["reproducible"]
    assert (gym.about["num_tasks"], gym.about["num_heldout"]) == (20, 8)
    played = gym.play(3, "<think>hm</think>no idea")
    assert [message["role"] for message in played["told"][0]] == ["system", "user"]
    assert played["done"] and played["scores"][-1][1] == {"formatted": 0.0}
    findings = {finding[0]: finding for finding in gym.ask("check")}
    assert [finding for finding in findings.values() if finding[1] == "failed"] == []
    assert findings["right player"][1] == findings["heldout"][1] == "passed"


def test_an_answer_that_a_task_cannot_read_is_wrong(distant: Make) -> None:
    primes = distant("reasoning_gym", task="prime_factorization", tasks=20, heldout=8)
    assert primes.play(0, "<answer>two</answer>")["scores"][-1] == [{"answer": 0.0}, {"formatted": 1.0}]


def test_a_task_without_answers_has_no_right_player(distant: Make) -> None:
    findings = distant("reasoning_gym", task="graph_color", tasks=20, heldout=8).ask("check")
    assert next(finding for finding in findings if finding[0] == "right player")[1] == "skipped"


def test_an_unknown_task_is_refused(distant: Make) -> None:
    assert "cannot make task basic_arithmetik" in distant("reasoning_gym", task="basic_arithmetik").about["refused"]


def test_a_task_that_depends_on_the_hash_seed_stays_with_the_host(distant: Make) -> None:
    assert "word_ladder" in hash_dependent() and len(hash_dependent()) == 7
    free = distant("reasoning_gym", hash_seed="random", task="isomorphic_strings", tasks=30)
    assert free.about["reproducible"] is False
    fixed = distant("reasoning_gym", task="isomorphic_strings", tasks=30)
    assert fixed.about["reproducible"] is True
    other = distant("reasoning_gym", hash_seed="1", task="isomorphic_strings", tasks=30)
    assert fixed.ask("tasks", count=30) != other.ask("tasks", count=30)


def test_another_task_is_the_same_under_every_hash_seed(distant: Make) -> None:
    tasks = [distant("reasoning_gym", hash_seed=seed, task="caesar_cipher", tasks=20, heldout=8) for seed in "01"]
    assert tasks[0].ask("tasks", count=20) == tasks[1].ask("tasks", count=20)
    assert tasks[0].ask("tasks", count=8, heldout=True) == tasks[1].ask("tasks", count=8, heldout=True)
