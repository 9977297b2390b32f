"""A real tiny tokenizer, and engines without a model: one writes at random, one answers by a function."""

import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from shoal.chat.renderer import Renderer
from shoal.config import TinyPolicy
from shoal.engine.interface import Continuation, EngineRequest, PolicyScore, ScoreRequest
from shoal.env_packages.registry import FolderRegistry
from shoal.models.random_model import make_tiny
from shoal.protocol.messages import EngineFacts, Sampling
from tests.env_packages.author import Author


class FakeEngine:
    """What both have in common: it records which conversations it was told to forget."""

    facts = EngineFacts("fake", "float32", "none")
    version = 7

    def __init__(self) -> None:
        self.calls: list[list[EngineRequest]] = []
        self.forgotten: list[str] = []

    def load(self, directory: Path, version: int) -> None:
        self.version = version

    def forget(self, rollouts: Iterable[str]) -> None:
        self.forgotten += rollouts

    def score(self, requests: Sequence[ScoreRequest], temperature: float, hidden: bool = False) -> list[PolicyScore]:
        raise NotImplementedError

    def extend(self, requests: Sequence[EngineRequest], temperature: float) -> list[Continuation]:
        self.calls.append([request._replace(token_ids=list(request.token_ids)) for request in requests])
        turns = [self.write(request)[: request.max_new] for request in requests]
        return [Continuation(turn, [-float(len(turn))] * len(turn)) for turn in turns]

    def write(self, request: EngineRequest) -> list[int]:
        raise NotImplementedError


class RandomEngine(FakeEngine):
    """Writes one of some texts, or random tokens, decided by the sample seed and the position alone."""

    def __init__(self, renderer: Renderer, texts: Sequence[str] = ()) -> None:
        super().__init__()
        self.renderer, self.texts = renderer, texts

    def write(self, request: EngineRequest) -> list[int]:
        rng = random.Random(request.seed + len(request.token_ids).to_bytes(4, "big"))
        if self.texts and rng.random() < 0.8:
            return [*self.renderer.encode(rng.choice(self.texts)), self.renderer.eos_id]
        turn = []
        while len(turn) < request.max_new:
            turn.append(rng.randrange(self.renderer.vocabulary))
            if turn[-1] in request.stop_ids:
                break
        return turn


class AnsweringEngine(FakeEngine):
    """Writes what a function makes of the conversation's text."""

    def __init__(self, renderer: Renderer, answer: Callable[[str], str]) -> None:
        super().__init__()
        self.renderer, self.answer = renderer, answer

    def write(self, request: EngineRequest) -> list[int]:
        return [*self.renderer.encode(self.answer(self.renderer.decode(request.token_ids))), self.renderer.eos_id]


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """The tiny policy's."""
    directory = tmp_path_factory.mktemp("tiny") / "policy"
    make_tiny(TinyPolicy(width=16, layers=1, heads=1, kv_heads=1, mlp_width=16), directory, 0, "float32")
    return Renderer.from_directory(directory)


@pytest.fixture
def random_engine(renderer: Renderer) -> Callable[..., RandomEngine]:
    """Makes an engine that writes some texts, or at random."""
    return lambda texts=(): RandomEngine(renderer, texts)


@pytest.fixture
def answering_engine(renderer: Renderer) -> Callable[[Callable[[str], str]], AnsweringEngine]:
    """Makes an engine that answers a conversation's text."""
    return lambda answer: AnsweringEngine(renderer, answer)


@pytest.fixture
def sampling() -> Sampling:
    return Sampling(temperature=1.0, max_turn_tokens=16, max_tokens=200)


@pytest.fixture
def author(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Author:
    """Ann, in whose home this process is."""
    author = Author(tmp_path / "ann")
    monkeypatch.setenv("SHOAL_HOME", str(author.home))
    return author


@pytest.fixture
def registry(tmp_path: Path) -> FolderRegistry:
    (tmp_path / "registry").mkdir()
    return FolderRegistry(tmp_path / "registry")
