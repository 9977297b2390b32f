"""Sums with all-or-nothing rewards, as verifiers of answers give them: what `benchmarks/curriculum.py` trains on.

The tasks are those of the built-in `arithmetic`. Only the exact answer earns anything, so groups that are all right or all
wrong teach nothing.
"""

from typing import Any

from shoal.envs.arithmetic import Arithmetic, ArithmeticArgs, ArithmeticState
from shoal.tree import from_tree


def environment(**args: Any) -> "ExactSums":
    """Make the environment from the arguments of the built-in one."""
    return ExactSums(from_tree(args, ArithmeticArgs, "environment exact_sums"))


class ExactSums(Arithmetic):
    """The environment."""

    name = "exact_sums"

    def score(self, state: ArithmeticState) -> float:
        """1 for the exact answer."""
        return float(self.success(state))
