"""A corridor with two keys and a door: walk over both keys, then onto the door. Only the end is rewarded.

The whole walk is one turn of letters, l and r, each a step. A key is taken by walking onto its place. The door is a place,
too: it opens to who has both keys, and is passed otherwise. Any other letter stops the walk. Nothing is random, and there
are so few walks that the worth of every beginning can be counted (`values`).
"""

from itertools import permutations

from shoal.env import Env, Step, require_index

LENGTH, MOST_STEPS = 6, 12
PLACES = list(permutations(range(LENGTH), 4))


def solved(task):
    """The shortest walk; None if it is longer than MOST_STEPS."""
    start, first, second, door = task
    walks = []
    for stops in ((first, second, door), (second, first, door)):
        at, walk = start, ""
        for stop in stops:
            walk += ("r" if stop > at else "l") * abs(stop - at)
            at = stop
        walks.append(walk)
    shortest = min(walks, key=len)
    return shortest if len(shortest) <= MOST_STEPS else None


TASKS = [task for task in PLACES if task[1] < task[2] and solved(task)]
TRAINING, HELDOUT = TASKS[::2], TASKS[1::2]


def environment():
    return Corridor()


class Corridor(Env):
    name = "corridor"
    num_tasks, num_heldout = len(TRAINING), len(HELDOUT)

    def task(self, index, heldout=False):
        tasks = HELDOUT if heldout else TRAINING
        require_index(index, len(tasks))
        return tasks[index]

    def reset(self, task):
        start, first, second, door = task
        text = f"you {start}, keys {first} {second}, door {door}"
        return (task, ""), [{"role": "user", "content": text}]

    def step(self, state, action):
        return Step((state[0], action), None, True)

    def score(self, state):
        return float(opens(*state))

    success = score

    def solution(self, task):
        return [solved(task)]

    def players(self):
        return {
            "right": lambda state, rng: solved(state[0]),
            "wrong": lambda state, rng: "lr",
            "lost": walk_lost,
            "guide": walk_guided,
        }


def walk_lost(state, rng):
    """The shortest walk once in four times, and else nine steps at random."""
    return solved(state[0]) if rng.random() < 0.25 else "".join(rng.choice("lr") for _ in range(9))


def walk_guided(state, rng):
    """Step by step the shortest way from here, but for one step in seven, which is random; nine steps at most."""
    at, first, second, door = state[0]
    left, walk = {first, second}, ""
    while (left or at != door) and len(walk) < 9:
        ways = [sum(map(_far, (at, *keys), (*keys, door))) for keys in permutations(left)]
        keys = list(permutations(left))[ways.index(min(ways))]
        letter = "r" if (*keys, door)[0] > at else "l"
        walk += rng.choice("lr") if rng.random() < 1 / 7 or (*keys, door)[0] == at else letter
        at = min(max(at + (1 if walk[-1] == "r" else -1), 0), LENGTH - 1)
        left.discard(at)
    return walk


def _far(one, other):
    return abs(one - other)


def opens(task, walk):
    """Whether this walk, or a beginning of it, opens the door."""
    at, first, second, door = task
    left = {first, second}
    for letter in walk[:MOST_STEPS]:
        if letter not in "lr":
            return False
        at = min(max(at + (1 if letter == "r" else -1), 0), LENGTH - 1)
        left.discard(at)
        if at == door and not left:
            return True
    return False
