"""Names of models on a hub: `hf:OWNER/NAME@REVISION`, in run files and in the manifests of adapters. Pure."""

import re
from dataclasses import dataclass

HUB = "hf:"
"""How such a name begins."""

EXAMPLE = "hf:Qwen/Qwen3-0.6B@main"

_REF = re.compile(r"hf:([A-Za-z0-9][\w.-]{0,95})/([A-Za-z0-9][\w.-]{0,95})@([A-Za-z0-9][\w./-]{0,99})", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubRef:
    """A model on a hub."""

    owner: str
    name: str
    revision: str
    """A branch, a tag or a commit."""

    @property
    def repo(self) -> str:
        return f"{self.owner}/{self.name}"

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, whose files never change."""
        return is_commit(self.revision)

    def __str__(self) -> str:
        return f"{HUB}{self.repo}@{self.revision}"


def is_commit(revision: object) -> bool:
    """Whether a revision is the hash of a commit."""
    return isinstance(revision, str) and _COMMIT.fullmatch(revision) is not None


def is_hub(path: str) -> bool:
    """Whether a run file's `policy.path` is meant to name a model on a hub."""
    return path.startswith(HUB)


def hub_ref(path: str) -> HubRef | None:
    """Read a name; None if it is none."""
    found = _REF.fullmatch(path)
    if found is None or ".." in path:
        return None
    ref = HubRef(*found.groups())
    # huggingface_hub raises at such names, so no node could fetch the model.
    odd = "--" in ref.repo or ref.owner.endswith((".", "-")) or ref.name.endswith((".", "-", ".git"))
    return None if odd else ref
