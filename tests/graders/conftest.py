"""A server that speaks OpenAI's format, in a separate process."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.graders.llm_judge import Endpoint


@pytest.fixture(scope="session")
def openai() -> Iterator[Callable[..., Endpoint]]:
    """Makes endpoints by the model's name."""
    command = [sys.executable, str(Path(__file__).parent / "openai_server.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        yield lambda model, **more: Endpoint(f"http://127.0.0.1:{port}/v1", model, **{"sleep": lambda s: None, **more})
        process.kill()
