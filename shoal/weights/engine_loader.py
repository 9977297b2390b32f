"""Engines of a node: they are opened, loaded with a version of the policy, and unloaded."""

import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

from shoal.chat import isolated_tokenizer
from shoal.chat.isolated import ContainedRenderer, RendererLimits
from shoal.chat.renderer import FILES, Renderer
from shoal.engine.interface import Engine, is_in_place
from shoal.errors import PeerError, StateError
from shoal.net.server_process import Stopping
from shoal.protocol.constants import MODEL_STOPS, VLLM
from shoal.protocol.messages import RunInfo
from shoal.protocol.tolerances import ADAPTERS, CODED_BASE, engine_kind, unmeasured
from shoal.weights.delta.tensor_codes import coded_directory, cores, root_of
from shoal.weights.fetch.version_directory import root_here

# --- Whether an engine that a user chose may take part in a run ---
#
# Called before a node opens its engine, and when it joins. Such an engine computes in another way than those that replay
# its work, so honest work would be refused where nobody has measured how far they differ. The coordinator refuses such a
# worker, too.


def demand_engine_fits(run: RunInfo, implementation: str) -> None:
    """Raise `PeerError` if a run has no bounds for the pairs of this engine, or asks for what it cannot give."""
    why = unmeasured(run.rules, implementation)
    if why:  # guard: pairs-without-bounds
        raise PeerError(why)
    if engine_kind(implementation) != VLLM:
        return
    if run.rules.proofs != "none":  # guard: vllm-proves-nothing
        raise PeerError("this run asks for proofs of activations, which vllm cannot give: join without --engine")
    if CODED_BASE in run.needs:  # guard: vllm-reads-no-codes
        raise PeerError(
            "the versions of this run are adapters of a model in NF4, which only shoal's own engine reads: join without "
            "--engine"
        )
    if ADAPTERS in run.needs and run.rules.dtype != "float32":  # guard: vllm-adapts-in-float32
        raise PeerError(
            f"the versions of this run are adapters in {run.rules.dtype}, which vllm computes in float32 only here: join "
            "without --engine"
        )


# --- Loads a checkpoint into an engine, together with the renderer of its tokenizer ---
#
# It imports no role and does not deal with runs; `weights/fetch` makes the directory.
#
# If the engine has a version whose files are still here, and few values differ from those of the next, only these are
# changed in the engine's memory.


log = logging.getLogger(__name__)

LOAD_GRACE_S = 20.0
"""A role that is told to stop waits so long for a version. After that a worker returns its lease unplayed, and other
validators judge in a validator's place."""


async def loaded_in_time(load: Coroutine[Any, Any, None], stopping: Stopping) -> bool:
    """Load a version. False if the role was told to stop and the version came too late."""

    async def loaded() -> bool:
        await load
        return True

    return bool(await stopping.unless(loaded(), LOAD_GRACE_S))  # guard: long-fetch-ends-when-told


def contained(limits: RendererLimits, stops: str = MODEL_STOPS) -> Callable[[Path], Renderer]:
    """Opens strangers' tokenizers: in the sandbox where it works, else in a child process that has only the limits.
    `stops` is the run's rule that says which tokens end a turn.

    This starts to test the sandbox at once, in the background.
    """
    tried = isolated_tokenizer.tried()

    def opened(directory: Path) -> Renderer:
        boxed = tried.result() and isolated_tokenizer.can_show(directory / name for name in FILES[stops])
        start = isolated_tokenizer.start if boxed else None  # guard: tokenizers-in-the-sandbox
        return ContainedRenderer(directory, limits, start, stops)

    return opened


class CheckpointRef(NamedTuple):
    """What an engine has: a version's directory and its weights root."""

    directory: Path
    root: str


class LoadedEngine:
    """An engine with one version of a policy in it, and the renderer of that policy's tokenizer."""

    def __init__(self, engine: Engine, open_renderer: Callable[[Path], Renderer] = Renderer.from_directory) -> None:
        """`open_renderer` opens the tokenizer: `ContainedRenderer` if the files are a stranger's."""
        self.engine, self._open_renderer = engine, open_renderer
        self._renderer: Renderer | None = None
        self._held: CheckpointRef | None = None
        """The version in the engine, if its root is known."""

    @property
    def renderer(self) -> Renderer:
        """Of the first version loaded: the versions of a run differ in their weights only."""
        assert self._renderer is not None, "load a policy before using its renderer"
        return self._renderer

    def load(self, directory: Path, version: int, root: str = "") -> None:
        """Load the policy in a checkpoint directory. Raises `StateError`.

        `root` is the weights root of its files, which the caller has verified; without it, nothing is changed in place.
        """
        self._renderer = self._renderer or self._open_renderer(directory)
        if isinstance(self._renderer, ContainedRenderer):
            self._renderer.directory = directory  # older versions are deleted, and a new child must find its files
        held, self._held = self._held, None
        after = CheckpointRef(directory, root)
        if held is None or not root or not self._change(held, after, version):
            self.engine.load(directory, version)
        self._held = after if root else None

    def _change(self, held: CheckpointRef, after: CheckpointRef, version: int) -> bool:
        """Let the engine go from the version that it has to another in place; returns whether it did.

        Raises `StateError` if the files of the other are damaged.
        """
        roots = dict((held, after))
        if not is_in_place(self.engine):
            return False
        try:
            files = {directory: coded_directory(directory) for directory in roots}  # mapped, also if they are deleted
            return self.engine.change(
                held.directory, after.directory, version,
                lambda directory: root_of(files[directory], threads=cores()) == roots[directory],
            )  # fmt: skip
        except (StateError, OSError) as error:
            if root_here(after.directory) != after.root:
                raise StateError(
                    f"{after.directory} was damaged after it was verified: start again, and it is fetched anew"
                ) from None
            log.warning("version=%d in_place=false reason=%r", version, str(error))
            return False
