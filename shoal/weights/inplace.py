"""Weights that patches change in place, with a mark that says what they are: one version as a whole, or torn.

For a node that keeps one version in memory or in files and follows a run by patches. Torn weights belong to no version:
nothing may be sampled, scored or published with them, and only a whole version repairs them. The mark is in memory: files
that a killed process was patching are hashed when they are opened again, and then have a root that no manifest names.
"""

import numpy as np

from shoal.errors import PeerError, StateError
from shoal.weights.codes import Weights, root_of
from shoal.weights.patch import apply_patch, open_patch


class InPlace:
    """The tensors of one version after another, in the same memory."""

    def __init__(self, weights: Weights, *, threads: int = 1) -> None:
        """`weights` are whole. They are hashed, and from now on changed only by `step` and `rebuild`."""
        self._weights, self._threads = weights, threads
        self._root = root_of(weights, threads=threads)

    @property
    def torn(self) -> bool:
        """Whether the weights belong to no version."""
        return self._root == ""

    @property
    def root(self) -> str:
        """The weights root of the version that this is. Raises `StateError` if the weights are torn."""
        if self.torn:  # guard: torn-is-no-version
            raise StateError("these weights are torn: a patch failed halfway. Load a whole version before using them")
        return self._root

    def step(self, patch: bytes, *, base: str, result: str, back: bool = False) -> None:
        """Go from the version with the root `base` to the one with the root `result`; with `back`, the other way.

        Both roots come from signed manifests. Raises `StateError` if the weights are torn or another version, and
        `PeerError` if the patch cannot be used; in both cases they stay as they are. Raises `PeerError` if the patch fails
        halfway or leads elsewhere. The weights are then torn.
        """
        start, end = (result, base) if back else (base, result)
        if self.root != start:  # guard: patch-base-root
            raise StateError(
                f"the patch begins at root {start[:16]}…, these weights have {self.root[:16]}…: use another"
            )
        open_patch(self._weights, patch)
        self._root = ""
        apply_patch(self._weights, patch, back=back, threads=self._threads)
        found = root_of(self._weights, threads=self._threads)
        if found != end:  # guard: patch-result-root
            raise PeerError(
                f"patch leads to root {found[:16]}…, the manifest promises {end[:16]}…: fetch the whole version"
            )
        self._root = end

    def rebuild(self, whole: Weights, root: str) -> None:
        """Copy a whole version over these weights, torn or not. Raises `StateError` if it is not what `root` says."""
        mine, theirs = ({n: (t.dtype, t.shape) for n, t in one.items()} for one in (self._weights, whole))
        if mine != theirs:
            raise StateError("the version to load has other tensors than these weights: start again with it")
        self._root = ""
        for name, tensor in self._weights.items():
            np.copyto(tensor.codes, whole[name].codes)
        found = root_of(self._weights, threads=self._threads)
        if found != root:
            raise StateError(f"the version to load has root {found[:16]}…, not {root[:16]}…: fetch it again")
        self._root = found
