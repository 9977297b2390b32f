"""Whether a run can use its first policy at all: asked before any role starts, so that the host reads why not.

Called by `local`. Light: it reads JSON files, and loads neither torch nor the policy.
"""

import importlib.util
from pathlib import Path

from shoal.config import RunConfig
from shoal.errors import StateError
from shoal.policy.kinds import needs_transformers
from shoal.policy.spec import PolicySpec


def demand_computable(directory: Path, config: RunConfig) -> None:
    """Raise `StateError` if the run's first policy is of an architecture that its run file does not allow or cannot use."""
    if not needs_transformers(directory, config.policy.implementation):
        PolicySpec.from_directory(directory)
        return
    if importlib.util.find_spec("transformers") is None:
        raise StateError(
            f"the policy in {directory} needs transformers, which is not installed: pip install -c constraints.txt "
            "'.[torch,hf]'"
        )
    for key, value in (("sampling.dtype", config.sampled_dtype), ("train.packing", config.train.packing)):
        if value in ("int8", "flat"):
            raise StateError(
                f'{key} = "{value}" needs a policy that shoal itself computes, and {directory} needs transformers: leave '
                f"{key} out"
            )
