"""Rows in a run of Weights & Biases: offline files, or the service if there is a key for it.

wandb keeps rows in the memory of a process of its own, which ends without writing the newest ones when this one is killed.
So rows since the last orderly end are given again; W&B takes only steps that rise.
"""

from pathlib import Path

import wandb

from shoal.roles.trackers.rows import HELDOUT, Row


class WandB:
    """One run of a project of W&B, which each start resumes."""

    is_durable = False

    def __init__(self, folder: Path, project: str, name: str, run_id: str, config: dict[str, object]) -> None:
        quiet = wandb.Settings(
            console="off", disable_git=True, silent=True, x_disable_meta=True, x_disable_stats=True,
            x_disable_machine_info=True,
        )  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=project, name=name, id=run_id, config=config, dir=str(folder), resume="allow", settings=quiet
        )
        self._next = self._run.step
        """The service has the steps below; offline it is 0."""
        self._run.define_metric(f"{HELDOUT}/*", step_metric=f"{HELDOUT}/version")

    def write(self, row: Row) -> None:
        if row.step >= self._next:  # wandb would ignore it, with a warning
            evaluated = {} if row.evaluation is None else row.evaluation.values
            self._run.log({**row.values, **evaluated, "_timestamp": row.time_s}, step=row.step, commit=True)

    def close(self) -> None:
        self._run.finish()
