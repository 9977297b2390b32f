"""`[difficulty]` of a run file: how draws follow solve rates, what it may not say, and what of it the log holds.

`ledger/task_difficulty` has the rules that these numbers go into.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from shoal.protocol.curriculum_config import Difficulty
from shoal.tree import Section


class DifficultyConfig(Section, frozen=True):
    """How draws follow solve rates. A run without this section draws by `weight`, and all tasks of an environment alike."""

    curriculum: bool = False
    """Draw more from environments whose groups teach more: those of which about half the rollouts are solved. For runs with
    several [[envs]], such as easy and hard ones."""
    floor: float = 0.1
    """Smallest share of its `weight` that the curriculum leaves an environment, so that none is forgotten. The environment
    that teaches most keeps all of its own."""
    window_groups: int = 32
    """Groups of an environment over which the curriculum smooths. Fewer follow the policy faster, but with more noise."""
    pools: bool = False
    """Draw easy and hard tasks less often than others. For environments whose tasks come up again and again."""
    easy: float = 0.8
    """A task is easy if at least this share of its latest group is solved."""
    hard: float = 0.2
    """A task is hard if at most this share of its latest group is solved."""
    easy_weight: float = 0.2
    """How often an easy task is drawn; a task that is neither easy nor hard has 1."""
    hard_weight: float = 0.2
    """How often a hard task is drawn."""
    retire_after: int = 0
    """A task is not drawn any more after this many groups in a row that are solved whole; 0 retires none. Needs `pools`."""


OF_CURRICULUM = ("floor", "window_groups")
OF_POOLS = ("easy", "hard", "easy_weight", "hard_weight", "retire_after")


def difficulty_fits(asked: DifficultyConfig, solved: Sequence[float]) -> Iterator[tuple[bool, str]]:
    """What must hold, each with the sentence for a run file in which it does not. `solved` is each environment's."""
    for value in solved:
        yield math.isfinite(value), f"envs.solved = {value}: must be finite"
    usual = DifficultyConfig()
    for switch, keys in (("curriculum", OF_CURRICULUM), ("pools", OF_POOLS)):
        for key in keys:
            unused = not getattr(asked, switch) and getattr(asked, key) != getattr(usual, key)
            yield (
                not unused,
                f"difficulty.{key} has no effect without difficulty.{switch} = true: add that, or leave it out",
            )
    yield (
        not asked.curriculum or len(solved) > 1,
        "difficulty.curriculum = true: it weighs environments against each other, but there is one [[envs]]. Add others, "
        "such as the same with harder args, or use difficulty.pools",
    )
    yield (
        0 < asked.floor <= 1,
        f"difficulty.floor = {asked.floor}: must be above 0 and at most 1, a share of the weight",
    )
    yield asked.window_groups >= 1, f"difficulty.window_groups = {asked.window_groups}: must be at least 1"
    yield (
        0 <= asked.hard < asked.easy <= 1,
        f"difficulty.hard = {asked.hard} and difficulty.easy = {asked.easy}: hard must be below easy, both from 0 to 1",
    )
    for key in ("easy_weight", "hard_weight"):
        weight = getattr(asked, key)
        yield (
            0 < weight < math.inf,
            f"difficulty.{key} = {weight}: must be above 0, and finite. A task of weight 0 would never be measured again; "
            "difficulty.retire_after is for tasks that need no more work",
        )
    yield asked.retire_after >= 0, f"difficulty.retire_after = {asked.retire_after}: must be at least 0"


def wire_difficulty(asked: DifficultyConfig, solved: Mapping[str, float]) -> Difficulty | None:
    """What the log says of it; None if draws do not follow solve rates. `solved` is each environment's, by label."""
    if not (asked.curriculum or asked.pools):
        return None
    return Difficulty(**msgspec.structs.asdict(asked), solved=dict(solved))
