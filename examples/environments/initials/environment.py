"""Write words that begin with the letters of another word: "sun" asks for words such as "six ugly newts".

One turn, judged by a rule. The reward is the share of words that fit, and 0 if there are more or fewer than letters. The
rule knows no dictionary: it takes "sss" for a word. So a policy may learn to write nonsense that fits.
"""

from pathlib import Path

from shoal.env import Env, Step, require_index

FOLDER = Path(__file__).parent
WORDS = (FOLDER / "words.txt").read_text().split()
FITTING = {word[0]: word for word in (FOLDER / "fitting.txt").read_text().split()}


class Initials(Env):
    name = "initials"
    num_tasks, num_heldout = 24, 6

    def task(self, index, heldout=False):
        require_index(index, self.num_heldout if heldout else self.num_tasks)
        return WORDS[index + (self.num_tasks if heldout else 0)]

    def reset(self, task):
        ask = f"Write {len(task)} words of at least two letters that begin with {', '.join(task)}, in this order."
        return (task, ""), [{"role": "user", "content": ask}]

    def step(self, state, action):
        return Step((state[0], action), None, True)

    def score(self, state):
        letters, words = state[0], state[1].lower().split()
        if len(words) != len(letters):
            return 0.0
        fits = [
            len(word) > 1 and word.isalpha() and word[0] == letter for letter, word in zip(letters, words, strict=True)
        ]
        return sum(fits) / len(fits)

    def success(self, state):
        return self.score(state) == 1.0

    def solution(self, task):
        return " ".join(FITTING[letter] for letter in task)

    def players(self):
        return {"right": lambda state, rng: self.solution(state[0]), "wrong": lambda state, rng: "no idea"}


environment = Initials
