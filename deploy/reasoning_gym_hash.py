"""Which tasks of reasoning_gym depend on the hash seed: each is generated and scored in processes with different seeds.

    python deploy/reasoning_gym_hash.py write      in an interpreter with reasoning_gym

writes shoal/envs/adapters/reasoning_gym_hash.json, which the adapter reads. The last line printed is the summary.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "shoal/envs/adapters/reasoning_gym_hash.json"
SEEDS = ("0", "1", "2", "3")
SIZE = 40
"""Questions of each task in each process."""


def fingerprints() -> dict[str, list[str]]:
    """Hashes of the questions, answers and scores of each task, in this process."""
    import random

    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    found = {}
    for name in sorted(DATASETS):
        if name == "composite":
            continue  # made of the others
        random.seed(0)
        try:
            dataset = reasoning_gym.create_dataset(name, seed=1, size=SIZE)
            questions, answers, scores = [], [], []
            for index in range(SIZE):
                entry = dataset[index]
                questions.append(entry["question"])
                answers.append(str(entry["answer"]))
                scores.append([dataset.score_answer(answer=text, entry=entry) for text in (str(entry["answer"]), "7")])
        except Exception as fault:  # noqa: BLE001  a task that needs a download, say: it is listed by its fault
            found[name] = [f"{type(fault).__name__}"] * 3
            continue
        found[name] = [hashlib.sha256(repr(part).encode()).hexdigest()[:16] for part in (questions, answers, scores)]
    return found


def main() -> None:
    if sys.argv[1:] == ["one"]:
        with contextlib.redirect_stdout(sys.stderr):  # some tasks print
            found = fingerprints()
        print("\n" + json.dumps(found))
        return
    runs = []
    for seed in SEEDS:
        command = [sys.executable, str(Path(__file__)), "one"]
        out = subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        runs.append(json.loads(out.stdout.splitlines()[-1]))
    depends, fails = {}, []
    for name in runs[0]:
        if all(len(part) < 16 for part in runs[0][name]):
            fails.append(name)
        differ = [
            what for at, what in enumerate(("questions", "answers", "scores")) if len({r[name][at] for r in runs}) > 1
        ]
        if differ:
            depends[name] = ", ".join(differ)
    version = importlib.metadata.version("reasoning-gym")
    summary = {"reasoning_gym": version, "hash_seeds": list(SEEDS), "questions_per_task": SIZE, "tasks": depends}
    if sys.argv[1:] == ["write"]:
        command = "python deploy/reasoning_gym_hash.py write"
        TARGET.write_text(json.dumps({"made_by": command, **summary}, indent=2) + "\n")
    print(json.dumps({**summary, "num_tasks": len(runs[0]), "fail": fails}))


if __name__ == "__main__":
    main()
