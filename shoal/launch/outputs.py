"""What a finished stage leaves in its folder, and the digests that say whether it is still that.

Called by `launch/stages`, and by `launch/jobs` for what a stage takes. It knows files and no work.
"""

import hashlib
from pathlib import Path

from shoal.errors import ShoalError, StateError
from shoal.protocol.wire import digest, to_json

POLICY, RUN, EVALUATION, EXAMPLES, TASKS, RATES, REWARD_MODEL = (
    "policy", "run", "eval.json", "examples.msgpack", "tasks.json", "rates.json", "reward-model"
)  # fmt: skip
"""Outputs in a job's folder."""

OUTPUTS = {
    "sft": {"policy": POLICY},
    "rl": {"policy": f"{RUN}/checkpoints/final"},
    "merge": {"policy": POLICY},
    "eval": {"evaluation": EVALUATION},
    "reject": {"examples": EXAMPLES},
    "dpo": {"policy": POLICY},
    "reward_model": {"reward_model": REWARD_MODEL},
    "filter": {"tasks": TASKS, "rates": RATES},
}
"""What a finished job of each kind has, and where: files and folders whose digests `done.json` holds."""


def digest_below(place: Path) -> str:
    """SHA-256, hex, over a file, or over all files below a folder with their names."""
    return digest(to_json(files_of(place)))


def files_of(place: Path) -> dict[str, str]:
    """SHA-256 of a file (named ""), or of each file below a folder, by name. Raises `StateError` if nothing is there."""
    files = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
    if not files:
        raise StateError(f"{place} is missing or empty")
    return {"" if path == place else path.relative_to(place).as_posix(): _digest_of(path) for path in files}


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def demand_whole(job_folder: Path, outputs: dict[str, dict[str, str]], kind: str, name: str) -> None:
    """Raise `StateError` if an output of a finished job is not what the job wrote."""
    for what, place in OUTPUTS[kind].items():
        try:
            found = files_of(job_folder / place)
        except (ShoalError, OSError):
            found = {}
        wrong = sorted(
            file for file in outputs[what].keys() | found.keys() if outputs[what].get(file) != found.get(file)
        )
        if wrong:
            raise StateError(
                f"stage {name}: {job_folder / place / wrong[0]} is not what the stage wrote. Restore it from a copy, or "
                f"delete {job_folder}, and the same command does the stage again"
            )
