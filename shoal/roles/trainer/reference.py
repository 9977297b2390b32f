"""The reference policy of a run, opened from the run's folder: the same bytes at every start.

Called by `role`, in runs whose algorithm has a KL penalty. It is made from the folder's copy of the first policy,
whose weights root is written beside the trainer's states at the first start and compared at every later one: another
reference would teach something else. It does not compute.

    trainer/reference.root    weights root of the reference, hex
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from shoal.config import RunConfig
from shoal.errors import StateError, cause_of
from shoal.folder import RunFolder, write_atomically
from shoal.policy.base import PolicyModel
from shoal.policy.kinds import open_policy
from shoal.protocol.algorithms import needs_reference
from shoal.train.masters import module_dtype
from shoal.train.reference import Reference, reference_of
from shoal.weights.manifest import weights_root

ROOT = "reference.root"


def open_reference(folder: RunFolder, config: RunConfig, learned: PolicyModel, device: str) -> Reference | None:
    """What computes log-probs under the run's first policy; None if the run needs none. Raises `StateError`."""
    if not needs_reference(config.train.algorithm):
        return None
    demand_same(folder.policy, folder.trainer / ROOT, f"the policy in {folder.policy}", "its KL penalty needs")
    load: Callable[[], PolicyModel] = partial(_load, folder.policy, config, device)
    return reference_of(learned, load, config.sampling.temperature, config.train.microbatch_tokens)


def demand_same(directory: Path, kept: Path, what: str, need: str) -> None:
    """Raise `StateError` if the model in a directory is another than at the first call, whose weights root is kept. `what`
    it is and what has `need` of it is said then."""
    root = weights_root(directory)
    try:
        if not kept.exists():
            write_atomically(kept, root.encode())
        before = kept.read_text()
    except OSError as error:
        raise StateError(f"cannot keep {kept}: {cause_of(error)}. Make the folder writable and start again") from None
    if before != root:  # guard: same-reference
        raise StateError(
            f"{what} is not the one that this run began with ({root[:12]} instead of {before[:12]}), and {need} that one: "
            "put it back from a copy, or start a new run"
        )


def _load(directory: Path, config: RunConfig, device: str) -> PolicyModel:
    return open_policy(directory, module_dtype(config.train), config.policy.implementation).to(device)
