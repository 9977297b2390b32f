"""The registry that a coordinator serves: packages of the run's folder, and no other file."""

import asyncio

import httpx
import pytest

from shoal.env_packages.registry import FolderRegistry, archive_path, catalogue_path
from shoal.net.client import Client
from tests.env_packages.author import Author
from tests.roles.testbed import URL, RunTestbed, tiny_run


@pytest.fixture(scope="module")
def testbed(tmp_path_factory):
    return RunTestbed(tmp_path_factory.mktemp("hub") / "run", tiny_run())


def fetch(testbed: RunTestbed, path: str) -> httpx.Response:
    async def whole() -> httpx.Response:
        client: Client = testbed.client(testbed.folder.root / "stranger.key")
        async with client:
            return await client._http.get(f"{URL}/v1/hub/{path}")

    return asyncio.run(whole())


def test_a_coordinator_serves_the_registry_of_its_run(testbed, tmp_path) -> None:
    testbed.folder.hub.mkdir(exist_ok=True)
    registry = FolderRegistry(testbed.folder.hub)
    release = Author(tmp_path / "ann").push(registry).release
    for path in (catalogue_path("ann/parrot"), archive_path(release.digest), "names.json"):
        answered = fetch(testbed, path)
        assert (answered.status_code, answered.content) == (200, (testbed.folder.hub / path).read_bytes())


@pytest.mark.parametrize("path", [
    "../secret.seed", "..%2Fsecret.seed", "%2e%2e/secret.seed", "names/../../secret.seed", "packages/../../keys/run.key",
    ".lock", "notes.txt", "packages/" + "a" * 64, "names/ann", "", "//etc/passwd",
])  # fmt: skip
def test_no_other_file_is_served(testbed, path: str) -> None:
    (testbed.folder.hub / "names" / "ann").mkdir(parents=True, exist_ok=True)
    for name in (".lock", "notes.txt"):
        (testbed.folder.hub / name).write_text("private")
    answered = fetch(testbed, path)
    assert answered.status_code == 404 and b"private" not in answered.content
