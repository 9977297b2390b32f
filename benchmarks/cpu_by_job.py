"""`shoal` with the CPU time of its three heavy jobs counted: python benchmarks/cpu_by_job.py run RECIPE ...

Started by `whole_system.py` in the place of `python -m shoal`, to learn how much CPU a run takes beside generating,
scoring and training. It puts a stopwatch around `LocalEngine.extend`, `LocalEngine.score` and `Learner.step` in every
role that has them, and has the launcher start the roles through this file too. Each process keeps its sums in the
folder $SHOAL_CPU_BY_JOB, in a file named by its process id. The product itself is not changed.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.cli import main as cli

WITH_MODEL = ("trainer", "validator", "worker")


def main() -> None:
    """Run the command line of shoal, or a role by the command that the launcher writes: -m shoal role ROLE ..."""
    folder = Path(os.environ["SHOAL_CPU_BY_JOB"])
    if sys.argv[1:3] == ["-m", "shoal.cli.main"]:
        del sys.argv[1:3]
        if sys.argv[2] in WITH_MODEL:  # shoal role ROLE
            _watch(folder / f"{os.getpid()}.json")
    else:
        _start_roles_by(folder / "python")
    sys.exit(cli.main())


def _start_roles_by(python: Path) -> None:
    """Give the launcher, for an interpreter, a script that runs this file for roles, and is plain Python for the rest."""
    counted, plain = f'exec "{sys.executable}" "{Path(__file__).resolve()}" "$@"', f'exec "{sys.executable}" "$@"'
    python.write_text(f'#!/bin/sh\n[ "$1 $2 $3" = "-m shoal.cli.main role" ] && {counted}\n{plain}\n')
    python.chmod(0o755)
    sys.executable = str(python)


def _watch(file: Path) -> None:
    """Count the CPU-seconds of the calling thread in the three jobs; with one thread that is all of theirs."""
    from shoal.engine.native import LocalEngine
    from shoal.train.learner import Learner

    sums = {"generate": 0.0, "score": 0.0, "train": 0.0}
    file.write_text(json.dumps(sums))

    def timed(job: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                sums[job] += time.thread_time() - began
                scratch = file.with_suffix(".new")
                scratch.write_text(json.dumps(sums))
                scratch.replace(file)

        return call

    LocalEngine.extend = timed("generate", LocalEngine.extend)  # type: ignore[method-assign]
    LocalEngine.score = timed("score", LocalEngine.score)  # type: ignore[method-assign]
    Learner.step = timed("train", Learner.step)  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
