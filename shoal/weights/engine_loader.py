"""Engines of a node: they are opened, loaded with a version of the policy, and unloaded."""

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from shoal.chat import isolated_tokenizer
from shoal.chat.isolated import ContainedRenderer, RendererLimits
from shoal.chat.renderer import FILES, Renderer
from shoal.engine.interface import Engine
from shoal.errors import PeerError
from shoal.net.server_address import Stopping
from shoal.protocol.constants import MODEL_STOPS, VLLM
from shoal.protocol.messages import RunInfo
from shoal.protocol.tolerances import ADAPTERS, CODED_BASE, engine_kind, unmeasured

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


# --- A checkpoint in an engine, together with the renderer of its tokenizer ---


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


class LoadedEngine:
    """An engine with one version of a policy in it, and the renderer of that policy's tokenizer."""

    def __init__(self, engine: Engine, open_renderer: Callable[[Path], Renderer] = Renderer.from_directory) -> None:
        """`open_renderer` opens the tokenizer: `ContainedRenderer` if the files are a stranger's."""
        self.engine, self._open_renderer = engine, open_renderer
        self._renderer: Renderer | None = None

    @property
    def renderer(self) -> Renderer:
        """Of the first version loaded: the versions of a run differ in their weights only."""
        assert self._renderer is not None, "load a policy before using its renderer"
        return self._renderer

    def load(self, directory: Path, version: int) -> None:
        """Load the policy in a checkpoint directory. Raises `StateError`."""
        self._renderer = self._renderer or self._open_renderer(directory)
        if isinstance(self._renderer, ContainedRenderer):
            self._renderer.directory = directory  # older versions are deleted, and a new child must find its files
        self.engine.load(directory, version)
