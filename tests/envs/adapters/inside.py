"""Runs in the interpreter of foreign packages: makes environments and answers questions about them, in lines of JSON.

python inside.py FOLDER ...: folders to import from.
"""

import importlib
import json
import os
import random
import sys
from typing import Any


class Inside:
    """The environments of this process, by the key under which the test made them."""

    def __init__(self) -> None:
        self.envs: dict[str, Any] = {}

    def make(self, key: str, module: str, args: dict[str, Any]) -> Any:
        from shoal.errors import ShoalError

        try:
            env = importlib.import_module(f"shoal.envs.adapters.{module}").environment(**args)
        except ShoalError as refusal:
            return {"refused": str(refusal)}
        self.envs[key] = env
        about = {name: getattr(env, name) for name in ("name", "num_tasks", "num_heldout", "reward_bounds")}
        about |= {"weights": getattr(env, "weights", {}), "tools": getattr(env, "tools", [])}
        heavy = [name for name in ("torch", "transformers") if name in sys.modules]
        return {**about, "reproducible": env.reproducible, "heavy": heavy}

    def play(self, key: str, index: int, actions: list[str], heldout: bool = False) -> Any:
        """The opening, each reply, whether the episode ended, and the score after each turn, asked for at the end."""
        from shoal.env import Action

        env = self.envs[key]
        state, opening = env.reset(env.task(index, heldout))
        told, states, done = [opening], [state], False
        for action in actions:
            state, reply, done = env.step(state, Action(action, "hermes", tools=getattr(env, "tools", [])))[:3]
            told.append(reply)
            states.append(state)
        # A run scores no episode in which the policy wrote nothing, and reward functions need not expect one.
        return {"told": told, "done": done, "scores": [env.score(state) for state in states[1:] or states]}

    def check(self, key: str) -> Any:
        from shoal.envs.lint import check_env

        return [tuple(finding) for finding in check_env(self.envs[key], tasks=4)]

    def tasks(self, key: str, count: int, heldout: bool = False) -> Any:
        return [repr(self.envs[key].task(index, heldout)) for index in range(count)]

    def leaves_alone(self, key: str, index: int, actions: list[str]) -> bool:
        """Whether an episode leaves the global random generators of this process as they were."""
        import numpy

        random.seed(5)
        numpy.random.seed(5)
        before = random.getstate(), numpy.random.get_state()[1].tolist()
        self.play(key, index, actions)
        return before == (random.getstate(), numpy.random.get_state()[1].tolist())


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a package prints is not an answer
    sys.path += sys.argv[1:]
    inside = Inside()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(inside, request.pop("ask"))(**request)
        except Exception as fault:  # noqa: BLE001  the test looks at it
            from shoal.envs.interface import describe_fault, source_of

            answer = {"raised": describe_fault(fault, source_of(inside.envs[request["key"]]))}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
