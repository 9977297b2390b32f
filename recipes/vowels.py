"""Write vowels: the reward is their share of the letters that were written.

What a policy with random weights learns in a run with `--random-policy`. It has no idea of any task, but this one gives
each of its rollouts another reward.
"""

from shoal.env import Env, Step, require_index

VOWELS = set("aeiou")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Vowels(Env):
    name = "vowels"
    num_tasks, num_heldout = 256, 32

    def task(self, index, heldout=False):
        require_index(index, self.num_heldout if heldout else self.num_tasks)
        return index + (self.num_tasks if heldout else 0)

    def reset(self, task):
        return "", [{"role": "user", "content": f"Text number {task}: write vowels."}]

    def step(self, state, action):
        return Step(action, None, True)

    def score(self, state):
        letters = [character for character in state.lower() if character.isalpha()]
        return sum(character in VOWELS for character in letters) / max(1, len(letters))

    def solution(self, task):
        return "aeiou"

    def players(self):
        """typist: six letters without a thought, of which about one in five is a vowel."""
        return {
            "right": lambda state, rng: "aeiou",
            "wrong": lambda state, rng: "xyz",
            "typist": lambda state, rng: "".join(rng.choice(LETTERS) for _ in range(6)),
        }


environment = Vowels
