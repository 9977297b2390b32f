"""Environments of foreign packages, each in a process of the virtual environment that has the package."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
DATA = ROOT / "tests/data/adapters"
ORIGINALS = os.environ.get("SHOAL_VERIFIERS", "")
"""A folder with two checkouts of the repository of verifiers, v0.1.14 and v0.4.0."""
RELEASES = {"v0": "v0.1.14", "v1": "v0.4.0"}
VERSION_OF = {"verifiers_v0": "v0", "reasoning_gym": "v0", "verifiers_v1": "v1", "textarena": "v1"}
"""Which virtual environment has the package of an adapter."""


def interpreter(version: str) -> Path:
    """The Python that has the packages of tests/envs/adapters/VERSION.txt, or skip."""
    path = Path(os.environ.get("SHOAL_FOREIGN", ROOT)) / f".venv-{version}/bin/python"
    if not path.exists():
        pytest.skip(f"there is no {path}: make foreign")
    return path


def originals(version: str) -> list[str]:
    """Folders of the environments in a checkout; none if there is none."""
    folder = Path(ORIGINALS) / RELEASES[version] / "environments"
    return [str(path) for path in sorted(folder.glob("*")) if path.is_dir()] if ORIGINALS else []


class Interpreter:
    """A process of a virtual environment with foreign packages, which holds environments."""

    def __init__(self, version: str, hash_seed: str) -> None:
        environment = {
            "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed, "TZ": "UTC",
            "LANG": "C.UTF-8", "HOME": os.environ.get("HOME", "/"), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        program = [str(interpreter(version)), str(Path(__file__).with_name("inside.py"))]
        self._process = subprocess.Popen(
            [*program, str(DATA), *originals(version)], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def ask(self, question: str, **arguments: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps({"ask": question, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process ended without an answer"
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(30)


class Distant:
    """An environment in another process."""

    def __init__(self, process: Interpreter, key: str, module: str, args: dict[str, Any]) -> None:
        self._process, self._key = process, key
        self.about: dict[str, Any] = process.ask("make", key=key, module=module, args=args)

    def ask(self, question: str, **arguments: Any) -> Any:
        return self._process.ask(question, key=self._key, **arguments)

    def play(self, index: int, *actions: str, **more: Any) -> Any:
        return self.ask("play", index=index, actions=actions, **more)


@pytest.fixture(scope="session")
def distant() -> Iterator[Callable[..., Distant]]:
    """Make an environment in another process, once for the same arguments."""
    processes: dict[tuple[str, str], Interpreter] = {}
    made: dict[str, Distant] = {}

    def make(module: str, hash_seed: str = "0", **args: Any) -> Distant:
        key = json.dumps([module, hash_seed, args], sort_keys=True)
        where = VERSION_OF[module], hash_seed
        if where not in processes:
            processes[where] = Interpreter(*where)
        if key not in made:
            made[key] = Distant(processes[where], key, module, args)
        return made[key]

    yield make
    for process in processes.values():
        process.close()


def call(name: str, **arguments: Any) -> str:
    """A turn that calls a tool."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
