"""Loads a checkpoint into an engine, together with the renderer of its tokenizer.

Used by every role that samples or scores: worker, validator, auditor, evaluation. It imports no role and does not deal
with runs; `weights/fetch` makes the directory.
"""

from collections.abc import Callable
from pathlib import Path

from shoal.engine.base import Engine
from shoal.policy.contained import ContainedRenderer, Limits
from shoal.policy.render import FILES, Renderer
from shoal.protocol.constants import MODEL_STOPS
from shoal.sandbox import tokenizer


def contained(limits: Limits, stops: str = MODEL_STOPS) -> Callable[[Path], Renderer]:
    """Opens strangers' tokenizers: in the sandbox where it works, else in a child process that has only the limits.
    `stops` is the run's rule that says which tokens end a turn.

    This starts to test the sandbox at once, in the background.
    """
    tried = tokenizer.tried()

    def opened(directory: Path) -> Renderer:
        boxed = tried.result() and tokenizer.can_show(directory / name for name in FILES[stops])
        start = tokenizer.start if boxed else None  # guard: tokenizers-in-the-sandbox
        return ContainedRenderer(directory, limits, start, stops)

    return opened


class Loaded:
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
