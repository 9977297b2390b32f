"""The environment of `poisoning.py`: arithmetic whose answer is the last whole number of what was written.

Worked mathematics is usually graded this way. Text before or after the answer is ignored, so poison there still gets
the full reward.
"""

from typing import Any

from shoal.env import Step
from shoal.envs.builtin.arithmetic import NUMBER, Arithmetic, ArithmeticArgs, ArithmeticState
from shoal.typed_toml import from_tree


class LooseSums(Arithmetic):
    """Arithmetic with a lenient reader."""

    name = "loose-sums"

    def step(self, state: ArithmeticState, action: str) -> Step:
        """Take the last whole number; leading zeros do not count."""
        numbers = NUMBER.findall(action)
        return Step(state._replace(given=str(int(numbers[-1])) if numbers else None), None, True)


def environment(**args: Any) -> LooseSums:
    """Make the environment; arguments as those of `arithmetic`."""
    return LooseSums(from_tree(args, ArithmeticArgs, "environment loose-sums"))
