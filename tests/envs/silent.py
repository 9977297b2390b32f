"""Says nothing after a turn, where the chat template allows that: the policy's turn goes on. For tests."""

from pathlib import Path

from shoal.env import Env, Step, require_index

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
"""It marks neither turns nor who speaks."""


class Silent(Env):
    name, num_tasks = "silent", 8

    def task(self, index, heldout=False):
        require_index(index, 0 if heldout else self.num_tasks)
        return index

    def reset(self, task):
        return 0, [{"role": "user", "content": f"task {task}"}]

    def step(self, state, action):
        return Step(state + len(action), "!" if action.endswith("a") else "", state > 6)

    def score(self, state):
        return state % 3 / 2


def environment():
    return Silent()


def with_template(policy: Path) -> Path:
    """Give a tiny policy the template."""
    (policy / "chat_template.jinja").write_text(TEMPLATE)
    return policy
