"""A very small policy and rows for it."""

import numpy as np
import pytest
import torch

from shoal.config import TinyPolicy
from shoal.models.random_model import tiny_spec
from shoal.models.transformer import Transformer
from shoal.train.rows import TrainingRow


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_model():
    def make(seed: int = 0, width: int = 32, layers: int = 2, tied: bool = False, mlp_width: int = 48) -> Transformer:
        tiny = TinyPolicy(
            width=width, layers=layers, heads=2, kv_heads=1, mlp_width=mlp_width, max_positions=64, tied=tied
        )
        model = Transformer(tiny_spec(tiny))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2, generator=generator)
        return model

    return make


@pytest.fixture
def make_rows():
    def make(count: int = 12, seed: int = 0, version: int = 0) -> list[TrainingRow]:
        """Rows of one or two policy turns, of differing lengths."""
        rng = np.random.default_rng(seed)
        rows = []
        for _ in range(count):
            length = int(rng.integers(6, 24))
            author_T = np.zeros(length, dtype=np.uint8)
            author_T[3:5] = 1
            author_T[int(rng.integers(5, length)) :] = 1
            positions_P = np.flatnonzero(author_T)
            P = len(positions_P)
            rows.append(
                TrainingRow(
                    tokens_T=rng.integers(0, 64, length),
                    positions_P=positions_P,
                    behaviour_logp_P=rng.normal(-4.2, 0.5, P).astype(np.float32),
                    advantage_P=np.full(P, rng.normal(), dtype=np.float32),
                    weight_P=np.ones(P, dtype=np.float32),
                    reward=float(rng.normal()),
                    version=version,
                )
            )
        return rows

    return make
