"""The judge of a run, opened where the run file says, and with the same bytes at every start.

Called by `role`, in runs with `advantage = "teacher"` or `"reward_model"`. Its weights root is written beside the trainer's
states at the first start and compared at every later one: another model would teach something else. It does not compute.

    trainer/teacher.root, trainer/reward_model.root    weights root of the judge, hex
"""

from pathlib import Path

from shoal.config import RunConfig
from shoal.folder import RunFolder
from shoal.protocol.algorithms import judge_named
from shoal.roles.trainer.reference import demand_same
from shoal.train.judges import Judge, judge_of


def open_judge(folder: RunFolder, config: RunConfig, device: str) -> Judge | None:
    """What gives rows their advantages; None if the run needs no judge. Raises `StateError`."""
    named = judge_named(config.train.algorithm)
    if not named:
        return None
    directory = Path(getattr(config.train, named))
    found = judge_of(config, folder.policy, device)
    demand_same(
        directory, folder.trainer / f"{named}.root", f"the model in train.{named}, {directory},", "its advantages need"
    )
    return found
