"""An author with a key, a home and a package in a folder, for tests of registries."""

from dataclasses import dataclass, field
from pathlib import Path

from shoal.env_packages.attestations import make_attestation, put_attestation
from shoal.env_packages.install import install
from shoal.env_packages.install_policy import InstallDecision
from shoal.env_packages.package_reference import read_reference
from shoal.env_packages.publish import Pushed, push
from shoal.env_packages.registry import FolderRegistry
from shoal.env_packages.signed_catalog import Release
from shoal.protocol.signing import Key

CODE = """
from pathlib import Path
from shoal.env import Env, Step

WORDS = (Path(__file__).parent / "words.txt").read_text().split()


class Parrot(Env):
    name = "parrot"
    num_tasks = 3

    def task(self, index, heldout=False):
        return WORDS[index]

    def reset(self, task):
        return task, [{"role": "user", "content": task}]

    def step(self, state, action):
        return Step(action, None, True)

    def score(self, state):
        return 1.0


def environment():
    return Parrot()
"""


@dataclass
class Author:
    """Publishes small packages."""

    root: Path
    key: Key = field(default_factory=Key.generate)

    @property
    def home(self) -> Path:
        return self.root / "home"

    def folder(self, name: str = "ann/parrot", version: str = "0.1.0", more: str = "", words: str = "a b c") -> Path:
        """A folder with a package."""
        place = self.root / "packages" / f"{name.replace('/', '-')}-{version}"
        place.mkdir(parents=True, exist_ok=True)
        (place / "environment.toml").write_text(
            f'name = "{name}"\nversion = "{version}"\nlicence = "MIT"\ndata = ["words.txt"]\n{more}\n'
        )
        (place / "environment.py").write_text(CODE)
        (place / "words.txt").write_text(words)
        return place

    def push(self, registry: FolderRegistry, name: str = "ann/parrot", version: str = "0.1.0", **other: str) -> Pushed:
        return push(self.folder(name, version, **other), registry, self.key, self.home, clock=lambda: 1_700_000_000.0)

    def share(self, registry: FolderRegistry, folder: Path, home: Path | None = None) -> str:
        """Publish the package in a folder, and install it, here or in another home. Returns what a run file calls it."""
        about = push(folder, registry, self.key, self.home).about
        reference = read_reference(f"{about.name}@{about.version}")
        install(reference, registry, home or self.home, InstallDecision(None, lambda _: True))
        return f"{about.name}@{about.version}"


def attest(
    registry: FolderRegistry, name: str, release: Release, key: Key, machine: str = "Linux", created: float = 1.0
) -> None:
    """Sign that a version passes its check, and put that into a registry."""
    put_attestation(registry, name, release, make_attestation(name, release, machine, 9, key, created))
