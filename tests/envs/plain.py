"""An environment of which tests change one thing each."""

from typing import Any

from shoal.env import Env, Message, Scored, Step, require_index


class Plain(Env):
    """Takes any text, and ends with the first. The state is what was said so far."""

    name, num_tasks = "plain", 4

    def task(self, index: int, heldout: bool = False) -> Any:
        require_index(index, self.num_heldout if heldout else self.num_tasks)
        return index + 100 * heldout

    def reset(self, task: Any) -> tuple[Any, list[Message]]:
        return (), [{"role": "user", "content": f"task {task}"}]

    def step(self, state: Any, action: str) -> Step:
        return Step((*state, str(action)), "again", True)

    def score(self, state: Any) -> Scored:
        return 0.5
