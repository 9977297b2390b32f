"""Fixtures of this room: a small checkpoint, and an honest source in memory."""

from pathlib import Path

import pytest

from tests.weights.checkpoints import Chunks, make_checkpoint


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return make_checkpoint(tmp_path / "checkpoint")


@pytest.fixture
def origin() -> Chunks:
    return Chunks()
