"""Which packages of somebody's run a volunteer's node installs and plays."""

import asyncio
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from shoal.config import EnvConfig
from shoal.env_packages.install import install
from shoal.env_packages.install_policy import InstallDecision, InstallPolicy
from shoal.env_packages.installed import PackageStore
from shoal.env_packages.package_reference import read_reference
from shoal.env_packages.registry import FolderRegistry
from shoal.envs.isolated.connection import LIMITS
from shoal.envs.isolated.environment import ContainedEnv
from shoal.envs.isolated.pool import MAX_PROCESSES, Processes
from shoal.envs.load import load_run_envs
from shoal.errors import ConfigError, PeerError
from shoal.protocol.messages import EnvSpec
from shoal.protocol.signing import Key
from shoal.roles.coordinator.main import env_specs
from shoal.roles.env_server.env_child import _load
from shoal.roles.node.package_consent import ConsentedPackages, NoPackages, room_of
from shoal.weights import memory_limit
from shoal.weights.memory_limit import Memory
from tests.env_packages.author import Author, attest
from tests.envs.isolated.place import line_of
from tests.roles.testbed import RunTestbed, stranger, tiny_run
from tests.sandbox.needs import needs_bubblewrap

pytestmark = needs_bubblewrap

NAME = "ann/parrot@0.1.0"


class Place:
    """Ann's package in a registry, and a volunteer's home."""

    def __init__(self, folder: Path) -> None:
        self.author = Author(folder / "ann")
        (folder / "hub").mkdir()
        self.registry = FolderRegistry(folder / "hub")
        self.release = self.author.push(self.registry).release
        self.home = folder / "home"
        self.spec = EnvSpec(NAME, self.release.digest, 3, 1.0, {})

    def attest(self, *keys: Key) -> None:
        for key in keys:
            attest(self.registry, "ann/parrot", self.release, key)

    def packages(self, consent: InstallDecision | None = None) -> ConsentedPackages:
        agreed = InstallDecision(InstallPolicy(authors=(self.author.key.public,)), None)
        return ConsentedPackages(self.registry.place, lambda: consent or agreed)

    @property
    def installed(self) -> list[str]:
        return [package.digest for package in PackageStore(self.home / "envs").all()]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    return Place(tmp_path)


def test_a_package_that_two_others_checked_is_installed_and_opened_in_the_sandbox(place: Place) -> None:
    place.attest(Key.generate(), Key.generate())
    packages = place.packages()
    packages.demand([place.spec])
    assert place.installed == [place.release.digest]
    env = load_run_envs([place.spec], own_files=False, opener=packages.open(Processes()))[NAME]
    assert isinstance(env, ContainedEnv) and env.num_tasks == 3


def test_a_user_is_asked_once(place: Place) -> None:
    place.attest(Key.generate(), Key.generate())
    asked: list[str] = []
    packages = place.packages(InstallDecision(None, lambda question: not asked.append(question)))
    packages.demand([place.spec, place.spec])
    packages.demand([place.spec])
    assert len(asked) == 1 and place.author.key.public in asked[0] and "passed by 2 keys" in asked[0]
    with pytest.raises(ConfigError, match="was not installed, as you said"):
        PackageStore(place.home / "envs").remove(place.release.digest)
        place.packages(InstallDecision(None, lambda _: False)).demand([place.spec])


def test_a_package_needs_two_witnesses_besides_its_author(place: Place) -> None:
    place.attest(place.author.key, one := Key.generate(), one)
    with pytest.raises(ConfigError, match=r"1 keys other than the author's.*2 are needed.*only runs whose host"):
        place.packages().demand([place.spec])
    assert place.installed == []


def test_the_registry_cannot_give_another_package_than_the_runs(place: Place) -> None:
    place.attest(Key.generate(), Key.generate())
    with pytest.raises(PeerError, match=r"in the run's registry is another package .* than the run's \(b{16}…\)"):
        place.packages().demand([msgspec.structs.replace(place.spec, digest="b" * 64)])
    assert place.installed == []


def test_what_may_answer_otherwise_elsewhere_stays_with_the_host(place: Place) -> None:
    place.release = place.author.push(place.registry, version="0.2.0", more="reproducible = false").release
    place.attest(Key.generate(), Key.generate())
    spec = EnvSpec("ann/parrot@0.2.0", place.release.digest, 3, 1.0, {})
    with pytest.raises(ConfigError, match="may answer otherwise on another machine"):
        place.packages().demand([spec])
    varied = tiny_run(envs=[to_config(spec.name)])
    with pytest.raises(ConfigError, match='set kind = "completions"'):
        env_specs(varied)


def to_config(name: str) -> dict[str, object]:
    return {"name": name, "label": EnvConfig(name).label}


def test_the_packages_of_a_run_share_a_part_of_the_memory_of_a_node(place: Place) -> None:
    limits, most, reserved_mb = room_of([place.spec, place.spec, EnvSpec("wordle", "a" * 64, 3, 1.0, {})], 4000)
    assert most == 1 and reserved_mb == 1000 == 2 * (limits.memory_mb + 2 * limits.scratch_mb)
    assert limits.address_mb == LIMITS.memory_mb, "libraries take more address space than memory"
    limits, most, reserved_mb = room_of([place.spec], 400)
    assert reserved_mb == 100 and limits.memory_mb == 76
    limits, most, reserved_mb = room_of([place.spec], 16_000)
    assert most == 3 and reserved_mb == 3 * (limits.memory_mb + 2 * limits.scratch_mb) <= 4000
    assert room_of([place.spec], 1 << 20)[0].memory_mb == LIMITS.memory_mb
    for specs in (
        [],
        [EnvSpec("wordle", "a" * 64, 3, 1.0, {})],
        [msgspec.structs.replace(place.spec, kind="completions")],
    ):
        assert room_of(specs, 4000) == (LIMITS, MAX_PROCESSES, 0)


def test_what_packages_may_take_counts_as_memory_of_the_node(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_limit, "taken_mb", lambda: 300)
    place.attest(Key.generate(), Key.generate())
    place.packages().demand([place.spec])
    testbed = RunTestbed(tmp_path / "run", tiny_run(envs=[to_config(NAME)]))
    worker = testbed.worker("one", own_files=False)
    stranger(worker, max_memory_mb=2000)
    worker.node.packages = place.packages()

    async def join() -> Memory | None:
        async with worker.client:
            await worker.join()
            return worker.session.memory

    joined = asyncio.run(join())
    assert joined is not None and joined.base_mb == 300 + 500 + 500, "its own, the tokenizer's process, and the package"
    line = line_of(cast(ContainedEnv, worker.session.envs[str(to_config(NAME)["label"])]))
    assert line._limits.memory_mb + 2 * line._limits.scratch_mb == 500


@pytest.mark.parametrize(("call_s", "wall_s"), [(60.0, 60.0), (3.0, LIMITS.wall_s)])
def test_the_sandbox_on_the_stage_ends_no_sooner_than_a_turn(place: Place, call_s: float, wall_s: float) -> None:
    install(read_reference(NAME), place.registry, place.home, InstallDecision(None, lambda _: True))
    env: Any = _load((place.spec,), call_s)[NAME]
    assert line_of(env)._limits.wall_s == wall_s


def test_only_what_was_agreed_to_is_opened(place: Place) -> None:
    place.attest(Key.generate(), Key.generate())
    place.packages().demand([place.spec])
    for packages, why in ((place.packages(), "was not agreed to"), (NoPackages(), "nobody agreed")):
        with pytest.raises(ConfigError, match=why):
            load_run_envs([place.spec], own_files=False, opener=packages.open(Processes()))


def test_a_run_whose_host_plays_asks_nobody(place: Place) -> None:
    place.packages().demand([msgspec.structs.replace(place.spec, kind="completions")])
    assert place.installed == []


def test_a_package_that_is_named_by_its_digest_must_be_installed(place: Place) -> None:
    spec = msgspec.structs.replace(place.spec, name=f"pkg:{place.release.digest}")
    with pytest.raises(ConfigError, match="ask the host for its name"):
        place.packages().demand([spec])
    place.attest(Key.generate(), Key.generate())
    place.packages().demand([place.spec])
    place.packages().demand([spec])
