"""What a claim that is tested by runs consists of: its task, its arms, and the runs that these make.

Called by the grids, which fill it in, and by `part` and `findings`. It makes no run and knows no claim.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from benchmarks.claims.curves.kept import Run
from shoal.tree import merge

Tree = dict[str, Any]

TINY = {"width": 48, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_width": 128, "max_positions": 64}
"""57,000 parameters."""


class Task(NamedTuple):
    """What the runs of a claim learn."""

    name: str
    """Names the policy that they begin with."""
    start: Tree
    """The recipe of that policy."""
    tree: Tree
    """The run file."""


@dataclass(frozen=True)
class Arm:
    """One side of a claim."""

    name: str
    over: Tree
    """What it changes in the task's run file."""
    beside: Tree = field(default_factory=dict)
    """What it changes in the claim's `beside`."""
    lrs: tuple[float, ...] = ()
    """Its learning rates, if they are not the claim's."""


@dataclass(frozen=True)
class Claim:
    """A claim and all its runs."""

    name: str
    statement: str
    source: str
    task: Task
    arms: tuple[Arm, ...]
    lrs: tuple[float, ...]
    """Learning rates; three for every arm."""
    measure: str
    reproduced: str
    """What must be found for the claim to count as reproduced."""
    over: Tree = field(default_factory=dict)
    """What all arms change in the task's run file."""
    start_over: Tree = field(default_factory=dict)
    """What it changes in the recipe of the policy that its runs begin with."""
    beside: Tree = field(default_factory=dict)
    """What its runs have beside their run files: see `Beside`."""
    lags: dict[int, int] = field(default_factory=lambda: {0: 0})
    """Staleness of the reporting runs, in versions, each with that of the tuning runs that decide its learning rate."""
    tuning: tuple[int, ...] = (11, 12)
    """Seeds; none, if there is one learning rate."""
    reporting: tuple[int, ...] = (21, 22, 23, 24, 25)
    """Seeds; none of them is for tuning."""

    remark: str = ""
    """What a reader must know of the verdict."""
    controls: tuple[str, ...] = ()
    """Claims that give all arms one learning rate. They decide if tuning chose different ones."""
    runs_of: str = ""
    """The claim whose runs these are, too: equal runs are made once."""

    def run(self, arm: Arm, lag: int, lr: float, seed: int) -> Run:
        """One run."""
        own = {
            "name": f"{self.runs_of or self.name}-{arm.name}-lag{lag}-lr{lr:g}-seed{seed}",
            "seed": seed,
            "rollouts": {"max_staleness": lag},
            "train": {"lr": lr},
        }
        tree = self.task.tree
        for over in (self.over, arm.over, own):
            tree = merge(tree, over)
        return Run(self.task.name, merge(self.task.start, self.start_over), tree, merge(self.beside, arm.beside))

    def lrs_of(self, arm: Arm) -> tuple[float, ...]:
        """The learning rates of an arm."""
        return arm.lrs or self.lrs

    def tuned(self) -> list[int]:
        """Staleness of the tuning runs."""
        return sorted(set(self.lags.values()))
