"""Packages in a real run over HTTP: strangers play what they agreed to, in their sandbox, and nothing else."""

import os
import subprocess
from pathlib import Path

import pytest

from shoal.env_packages.installed import PackageStore
from shoal.env_packages.publish import Pushed, push
from shoal.env_packages.registry import FolderRegistry
from shoal.env_packages.signed_catalog import Release
from shoal.net.key_files import save_key
from shoal.protocol.signing import Key
from tests.env_packages.author import attest
from tests.env_packages.wheels import lock_of, make_wheel
from tests.launch.test_join import SHOAL, begin, said
from tests.launch.test_supervisor import RUN_FILE
from tests.sandbox.needs import needs_bubblewrap

pytestmark = needs_bubblewrap

NAME = "ann/letters"

CODE = """
import os
from tinydep import VERSION
from shoal.env import Env, Step, require_index

assert not os.path.exists(os.path.expanduser("~/.shoal")) and "SHOAL_HOME" not in os.environ


class Letters(Env):
    name, num_tasks, num_heldout = "letters", 100, 10

    def task(self, index, heldout=False):
        require_index(index, self.num_heldout if heldout else self.num_tasks)
        return index + 1000 * heldout

    def reset(self, task):
        return "", [{"role": "user", "content": f"{task}: {VERSION}"}]

    def step(self, state, action):
        return Step(str(action), None, True)

    def score(self, state):
        return min(4, sum(letter.isalpha() for letter in state)) / 4

environment = Letters
"""

VALUES = ("steps=3", "eval.episodes=0", "workers.cheating=0", "rollouts.max_staleness=0")


class Place:
    """A host's folder: Ann's package with a wheel as dependency in the registry of its run, and installed by the host."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ann = folder, Key.generate()
        wheel = make_wheel(folder / "wheels")
        package = folder / "letters"
        package.mkdir()
        (package / "environment.toml").write_text(
            f'name = "{NAME}"\nversion = "0.1.0"\nlicence = "MIT"\nlock = "lock.txt"\n'
        )
        (package / "environment.py").write_text(CODE)
        (package / "lock.txt").write_text(lock_of(wheel))
        hub = folder / "runs" / "small" / "hub"
        hub.mkdir(parents=True)
        self.registry = FolderRegistry(hub)
        self.pushed: Pushed = push(package, self.registry, self.ann, folder / "ann-home")
        save_key(folder / "ann-home" / "author.key", self.ann)
        self.install("host")

    def install(self, who: str) -> None:
        words = ["env", "install", NAME, "--registry", self.registry.place, "--yes", "--wheels", "wheels"]
        done = subprocess.run(
            [*SHOAL, *words], cwd=self.folder, capture_output=True, text=True, check=False,
            env=os.environ | {"SHOAL_HOME": str(self.folder / f"{who}-home")},
        )  # fmt: skip
        assert done.returncode == 0 and "tried inside the sandbox: loads" in done.stdout, done.stdout + done.stderr

    def attest(self, keys: int) -> Release:
        for _ in range(keys):
            attest(self.registry, NAME, self.pushed.release, Key.generate())
        return self.pushed.release

    def policy(self, who: str, text: str) -> None:
        (self.folder / f"{who}-home").mkdir(exist_ok=True)
        (self.folder / f"{who}-home" / "install.toml").write_text(text)

    def host(self, kind: str) -> tuple["subprocess.Popen[bytes]", str]:
        spec = f'name = "{NAME}@0.1.0"' + (f'\nkind = "{kind}"' if kind else "")
        text = RUN_FILE.replace('name = "arithmetic"', spec).replace('args = { digits = 1, operations = "+" }', "")
        (self.folder / "small.toml").write_text(text)
        words = [word for value in VALUES for word in ("--set", value)]
        host = begin(self.folder, "host", "host", "small.toml", *words)
        return host, said(self.folder, "host", r"shoal join (http://127\.0\.0\.1:\d+)\n")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return Place(tmp_path)


def test_a_stranger_installs_by_policy_and_plays_a_package_in_the_sandbox(place: Place) -> None:
    release = place.attest(2)
    place.policy("worker", f'authors = ["{place.ann.public}"]\nchecks = 2\n')
    host, url = place.host("episodes")
    worker = begin(place.folder, "worker", "join", url, "--threads", "1", "--name", "worker")
    try:
        assert host.wait(timeout=120) == 0, said(place.folder, "host", "(?s).*")
        assert worker.wait(timeout=60) == 0, said(place.folder, "worker", "(?s).*")
        said(place.folder, "worker", rf"installed package={NAME}@0\.1\.0 digest={release.digest[:16]}")
        said(place.folder, "worker", r"left credits=[1-9]\d* accepted=[1-9]\d* refused=0")
        [package] = PackageStore(place.folder / "worker-home" / "envs").all()
        assert package.digest == release.digest and package.dependencies == {"tinydep": "1.0"}
        home = os.environ | {"SHOAL_HOME": str(place.folder / "host-home")}
        audit = subprocess.run(
            [*SHOAL, "audit", "runs/small", "--all"], cwd=place.folder, capture_output=True, text=True, env=home
        )
        assert audit.returncode == 0 and "the log agrees with what was recomputed" in audit.stdout, audit.stdout
    finally:
        for process in (worker, host):
            process.kill()
            process.wait()


@pytest.mark.slow
def test_strangers_who_agreed_to_nothing_serve_completions_of_the_package(place: Place) -> None:
    host, url = place.host("")
    worker = begin(place.folder, "worker", "join", url, "--threads", "1", "--name", "worker")
    try:
        assert host.wait(timeout=120) == 0, said(place.folder, "host", "(?s).*")
        assert worker.wait(timeout=60) == 0, said(place.folder, "worker", "(?s).*")
        said(place.folder, "worker", r"left credits=[1-9]\d* accepted=[1-9]\d* refused=0")
        assert not (place.folder / "worker-home" / "envs").exists()
    finally:
        for process in (worker, host):
            process.kill()
            process.wait()


@pytest.mark.slow
def test_a_stranger_who_does_not_play_a_package_is_told_why_in_one_line(place: Place) -> None:
    host, url = place.host("episodes")

    def refused(who: str) -> str:
        worker = begin(place.folder, who, "join", url, "--threads", "1")
        assert worker.wait(timeout=60) == 2, said(place.folder, who, "(?s).*")
        text = (place.folder / f"{who}.txt").read_text()
        assert (
            "Traceback" not in text
            and not (place.folder / f"{who}-home" / "envs" / place.pushed.release.digest).exists()
        )
        return text.splitlines()[-1]

    try:
        place.policy("one", f'authors = ["{place.ann.public}"]\n')
        assert "0 keys other than the author's attest" in (line := refused("one")) and "completions" in line
        attest(place.registry, NAME, place.pushed.release, place.ann)
        place.attest(1)
        assert "1 keys other" in refused("one")
        place.attest(1)
        assert "nobody can be asked" in refused("two")
        place.policy("three", f'authors = ["{"a" * 64}"]\n')
        assert "the policy file names neither this key nor the package" in refused("three")
    finally:
        host.kill()
        host.wait()
