"""Three turns, each of which the policy begins with a thought.

The chat template leaves out the thoughts of earlier turns, so each turn opens a row. For tests."""

from pathlib import Path

from shoal.env import Env, Step, require_index

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% set text = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last %}{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ text + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
"""It begins the policy's thought, and leaves out those of earlier turns."""


class Musing(Env):
    name, num_tasks, history = "musing", 8, "template"

    def task(self, index, heldout=False):
        require_index(index, 0 if heldout else self.num_tasks)
        return index

    def reset(self, task):
        return (), [{"role": "user", "content": f"task {task}"}]

    def step(self, state, action):
        after = (*state, str(action))
        return Step(after, f"turn {len(after)}", len(after) == 3)

    def score(self, state):
        return sum(len(text) % 2 for text in state) / 3

    def players(self):
        return {
            "right": lambda state, rng: f"hm</think>{len(state)}",
            "wrong": lambda state, rng: rng.choice(["o</think>a", "never ends"]),
        }


def environment():
    return Musing()


def with_template(policy: Path) -> Path:
    """Give a tiny policy the template."""
    (policy / "chat_template.jinja").write_text(TEMPLATE)
    return policy
