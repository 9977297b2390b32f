"""A run at one moment, and one that has ended, for the tests of what is shown."""

from pathlib import Path

import pytest

from shoal.config import EnvConfig
from shoal.evaluation_files import Evaluation, Transcript
from shoal.protocol.messages import NodeState, Status
from shoal.runs.run_status import RunStatus
from shoal.views.terminal.end_screen import RunEnd


@pytest.fixture
def snapshot() -> RunStatus:
    refusal = "gap of token 7 is 2.31 nats, bound 0.001: it was not sampled with the leased seed"
    return RunStatus(
        name="wordle",
        out="runs/wordle",
        steps=90,
        status=Status(
            "wordle", "running", 37, 90, 611, {"sampling": 40}, 12, 2, "workers: 9 of 16 groups for the next step", 8.0
        ),
        url="http://127.0.0.1:8470",
        elapsed_s=123.0,
        metrics=tuple(
            {
                "step": step,
                "reward_all_mean": 0.3 + 0.005 * step,
                "entropy_nats": 0.61,
                "policy_tokens": 4000,
                "step_s": 2.0,
                "staleness_rollouts": {"0": 60, "1": 40},
            }
            for step in range(37)
        ),
        nodes=(
            NodeState("aa" * 32, "worker", "cheater-0", "quarantined", 0, 0, 40, 1, {"sampling": 40}, refusal),
            NodeState("cc" * 32, "validator", "validator-0", "good", 0, 0, 0, 0, {}, ""),
            NodeState("bb" * 32, "worker", "worker-0", "good", 81234, 611, 0, 0, {}, ""),
        ),
        cheaters=frozenset({"aa" * 32}),
        heldout=(("before", Evaluation(0.29, 0.25, 0.33, 512)), ("v25", Evaluation(0.41, 0.33, 0.5, 128))),
        restarts={"trainer": 1},
    )


@pytest.fixture
def end(snapshot: RunStatus) -> RunEnd:
    turns = ("user", "wordle"), ("assistant", "crane"), ("user", "c=r+a+n-e+"), ("assistant", "cater")
    game = Transcript("cater", turns, 1.0, True, "done", 9)
    summary = {
        "heldout": {
            "before": {"mean": 0.29, "low95": 0.25, "high95": 0.33, "episodes": 512},
            "after": {"mean": 0.71, "low95": 0.67, "high95": 0.75, "episodes": 512},
        },
        "steps": 90,
        "tokens": 81234,
        "accepted": 611,
        "refused": {"sampling": 40},
        "credits": {"cheater-0": {"credits": 0, "role": "cheating"}, "worker-0": {"credits": 81234, "role": "honest"}},
        "influence": {"cheater-0": 0.0, "worker-0": 1.0},
        "staleness": {"0": 60, "1": 40},
        "wall_s": 400.0,
    }
    return RunEnd(
        summary,
        Path("runs/wordle"),
        snapshot,
        (EnvConfig("wordle", args={"num_words": 64}),),
        (("wordle", game),),
        {"aa" * 32: "cheater-0", "bb" * 32: "worker-0"},
    )
