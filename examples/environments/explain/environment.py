"""Explain something in two sentences, graded by a language model that knows a good explanation.

The judge is any model behind an OpenAI-compatible endpoint. It is asked once, in `step`, and its grade is kept in the
state: `score` may be called several times. A judge can be fooled and can fail. So long answers are not shown to it, an
answer without a grade earns nothing, and you measure its agreement with people before you train on it.
"""

from typing import NamedTuple

from shoal.env import Env, Step, require_index
from shoal.graders.llm_judge import Endpoint, judged

KNOWN = {
    "the sky is blue": "Air scatters blue light more than red light, so blue reaches us from all sides.",
    "ice floats": "Water expands when it freezes, so ice is lighter than the same amount of water.",
    "we see lightning first": "Light travels much faster than sound, so the thunder reaches us later.",
    "there are seasons": "The axis of the Earth is tilted, so each half gets more sun for a part of the year.",
    "the moon has phases": "The sun lights one half of the moon, and we see a changing part of that half.",
    "metal feels cold": "Metal leads heat away from the skin faster than wood of the same temperature.",
    "leaves are green": "Chlorophyll takes in red and blue light and throws back green light.",
    "bread rises": "Yeast turns sugar into gas, and the bubbles stay in the dough.",
    "iron rusts": "Iron joins with oxygen from air and water, and becomes iron oxide.",
    "ears pop on mountains": "The air pressure outside falls, and the air behind the eardrum escapes with a pop.",
}
RUBRIC = "10: true, complete and clear to a child. 5: true but vague. 0: false, empty, or about something else."
MAX_CHARS = 160


class Explained(NamedTuple):
    topic: str
    grade: float = 0.0


class Explain(Env):
    name = "explain"
    num_tasks, num_heldout = 8, 2
    reproducible = False

    def __init__(self, judge):
        self.judge = judge

    def task(self, index, heldout=False):
        require_index(index, self.num_heldout if heldout else self.num_tasks)
        return list(KNOWN)[index + (self.num_tasks if heldout else 0)]

    def reset(self, task):
        return Explained(task), [{"role": "user", "content": ask(task)}]

    def step(self, state, action):
        if len(action.visible) > MAX_CHARS:
            return Step(state, None, True)
        graded = judged(action.visible, ask(state.topic), RUBRIC, self.judge, known=KNOWN[state.topic])
        return Step(Explained(state.topic, graded.score), None, True)

    def score(self, state):
        return state.grade

    def solution(self, task):
        return KNOWN[task]

    def players(self):
        return {"right": lambda state, rng: KNOWN[state.topic], "wrong": lambda state, rng: "Because it is so."}


def ask(topic):
    return f"Explain in one or two sentences why {topic}."


def environment(url="http://127.0.0.1:8000/v1", model="judge", key_name=""):
    """`key_name` is the environment variable that holds the endpoint's key."""
    return Explain(Endpoint(url, model, key_name, timeout_s=4.0, tries=2))
