"""The registry that a coordinator serves: packages of the run's folder, and no other file."""

import asyncio

import httpx
import pytest

from shoal.env_packages.registry import FolderRegistry, archive_path, catalogue_path
from shoal.net.client import Client
from tests.env_packages.author import Author
from tests.roles.in_memory_run import URL, Town, tiny_run


@pytest.fixture
def town(tmp_path):
    return Town(tmp_path / "run", tiny_run())


def fetch(town: Town, path: str) -> httpx.Response:
    async def whole() -> httpx.Response:
        client: Client = town.client(town.folder.root / "stranger.key")
        async with client:
            return await client._http.get(f"{URL}/v1/hub/{path}")

    return asyncio.run(whole())


def test_a_coordinator_serves_the_registry_of_its_run(town, tmp_path) -> None:
    town.folder.hub.mkdir()
    registry = FolderRegistry(town.folder.hub)
    release = Author(tmp_path / "ann").push(registry).release
    for path in (catalogue_path("ann/parrot"), archive_path(release.digest), "names.json"):
        answered = fetch(town, path)
        assert (answered.status_code, answered.content) == (200, (town.folder.hub / path).read_bytes())


@pytest.mark.parametrize("path", [
    "../secret.seed", "..%2Fsecret.seed", "%2e%2e/secret.seed", "names/../../secret.seed", "packages/../../keys/run.key",
    ".lock", "notes.txt", "packages/" + "a" * 64, "names/ann", "", "//etc/passwd",
])  # fmt: skip
def test_no_other_file_is_served(town, path: str) -> None:
    (town.folder.hub / "names" / "ann").mkdir(parents=True)
    for name in (".lock", "notes.txt"):
        (town.folder.hub / name).write_text("private")
    answered = fetch(town, path)
    assert answered.status_code == 404 and b"private" not in answered.content
