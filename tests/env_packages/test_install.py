"""Installing: what is verified, asked and refused, what a kill leaves, and that no code runs outside `start`."""

import hashlib
import io
import os
import random
import signal
import stat
import struct
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from shoal.env_packages import install as installing
from shoal.env_packages import signed_catalog as words
from shoal.env_packages.install import Result, by_pip, install
from shoal.env_packages.install_policy import InstallDecision, InstallPolicy, read_policy
from shoal.env_packages.installed import PackageStore
from shoal.env_packages.lock import download, read_lock, unpack_wheels, verified
from shoal.env_packages.package_reference import PackageReference, read_reference
from shoal.env_packages.publish import push
from shoal.env_packages.registry import FolderRegistry, catalogue_path
from shoal.env_packages.signed_catalog import Catalogue, PinnedKeys, sign
from shoal.errors import ConfigError, PeerError, ShoalError, StateError
from shoal.protocol.encoding import to_json
from tests.env_packages.author import Author
from tests.env_packages.wheels import lock_of, make_wheel

NAME = "ann/parrot"
YES = InstallDecision(None, lambda _: True)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "bob"


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    return tmp_path / "wheels"


def pip(wheels: Path):
    return by_pip("--no-index", "--find-links", str(wheels))


def push_with(author: Author, registry: FolderRegistry, lock: str, **other: str) -> None:
    folder = author.folder(more='lock = "lock.txt"', **other)
    (folder / "lock.txt").write_text(lock)
    push(folder, registry, author.key, author.home)


def get(registry: FolderRegistry, home: Path, text: str = NAME, consent: InstallDecision = YES, **other) -> Result:
    return install(read_reference(text), registry, home, consent, **other)


def nothing_installed(home: Path) -> bool:
    return [path.name for path in (home / "envs").glob("*")] in ([], [".lock"])


# --- what works ---


def test_a_package_is_installed_once_and_found(author: Author, registry: FolderRegistry, home: Path) -> None:
    pushed = author.push(registry)
    first, second = get(registry, home), get(registry, home)
    assert (first.is_new, second.is_new) == (True, False) and first.package == second.package
    assert first.package.digest == pushed.release.digest and (first.folder / "words.txt").read_text() == "a b c"
    store = PackageStore(home / "envs")
    assert (
        store.find(PackageReference(NAME, "0.1.0"))
        == store.find(read_reference(f"pkg:{pushed.release.digest}"))
        == first.package
    )
    assert store.demand_unchanged(first.package) == first.folder
    assert [path.name for path in (home / "envs").iterdir() if path.name != ".lock"] == [pushed.release.digest]


def test_dependencies_come_by_hash_into_a_folder_of_their_own(
    author: Author, registry: FolderRegistry, home: Path, wheels: Path
) -> None:
    push_with(author, registry, lock_of(make_wheel(wheels)))
    result = get(registry, home, downloader=pip(wheels))
    assert result.package.dependencies == {"tinydep": "1.0"} and result.package.num_wheel_files == 4
    dependencies = PackageStore(home / "envs").paths_of(result.package.digest)[1]
    assert (dependencies / "tinydep.py").read_text() == "VERSION = '1.0'\n"
    assert sorted(path.name for path in dependencies.parent.iterdir()) == ["dependencies", "installed.json", "package"]


def test_code_that_does_not_load_is_not_installed(author: Author, registry: FolderRegistry, home: Path) -> None:
    def start(code: str, paths: Sequence[Path], timeout_s: float) -> str:
        raise ShoalError("ImportError: no module named nothing")

    author.push(registry)
    with pytest.raises(PeerError, match=r"ann/parrot 0\.1\.0 does not load inside the sandbox: ImportError"):
        get(registry, home, start=start)
    assert nothing_installed(home)


def test_nothing_of_a_package_runs_while_it_is_installed(
    author: Author, registry: FolderRegistry, home: Path, wheels: Path, tmp_path: Path
) -> None:
    """Neither its code, nor `.pth` files of its dependencies, which each start of an interpreter would run."""
    mark = tmp_path / "ran"
    touch = f"import pathlib; pathlib.Path({str(mark)!r}).touch()\n"
    wheel = make_wheel(
        wheels, files={"evil.pth": touch, "tinydep.py": touch, "sitecustomize.py": touch, "setup.py": touch}
    )
    folder = author.folder(more='lock = "lock.txt"')
    (folder / "lock.txt").write_text(lock_of(wheel))
    for name in ("setup.py", "conftest.py", "sitecustomize.py", "pip.py", "resource.py"):
        (folder / name).write_text(touch)
    push(folder, registry, author.key, author.home)
    assert get(registry, home, downloader=pip(wheels)).is_new and not mark.exists()


# --- consent ---


def test_the_user_reads_author_size_and_dependencies_before_the_answer(
    author: Author, registry: FolderRegistry, home: Path, wheels: Path
) -> None:
    push_with(author, registry, lock_of(make_wheel(wheels)))
    asked: list[str] = []

    def ask(question: str) -> bool:
        asked.append(question)
        return False

    with pytest.raises(ConfigError, match="was not installed, as you said"):
        get(registry, home, consent=InstallDecision(None, ask))
    assert author.key.public in asked[0] and "seen here for the first time" in asked[0] and "tinydep 1.0" in asked[0]
    assert nothing_installed(home) and PinnedKeys(home / "authors.json").known().keys == {}
    with pytest.raises(ConfigError, match="nobody can be asked"):
        get(registry, home, consent=InstallDecision(None, None))


def test_a_policy_file_decides_alone(author: Author, registry: FolderRegistry, home: Path, tmp_path: Path) -> None:
    digest = author.push(registry).release.digest
    file = tmp_path / "install.toml"
    for text, why in (
        ("", "names neither this key nor the package"),
        (f'authors = ["{"a" * 64}"]', "names neither"),
        (f'authors = ["{author.key.public}"]\nmax_mb = 0', r"limit 0"),
        (
            f'authors = ["{author.key.public}"]\nchecks = 2',
            "by 0 keys other than its author's, and the policy file wants 2",
        ),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=why):
            get(registry, home, consent=InstallDecision(read_policy(file), None))
    assert nothing_installed(home)
    file.write_text(f'digests = ["{digest}"]\nchecks = 2')
    assert get(registry, home, consent=InstallDecision(read_policy(file), None), checks=lambda *_: 2).is_new


def test_a_wrong_policy_file_names_the_key(tmp_path: Path) -> None:
    file = tmp_path / "install.toml"
    for text, key in (('authors = ["ann"]', "authors"), ("max = 3", "max_mb"), ('checks = "two"', "checks")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=key):
            read_policy(file)


def test_heavy_dependencies_stay_with_the_host(
    author: Author, registry: FolderRegistry, home: Path, wheels: Path
) -> None:
    push_with(author, registry, lock_of(make_wheel(wheels, "torch", "2.0")))
    with pytest.raises(ConfigError, match="needs torch: environments with such dependencies stay with the host"):
        get(registry, home, downloader=pip(wheels))
    assert nothing_installed(home)
    assert get(registry, home, consent=InstallDecision(None, lambda _: True, heavy=True), downloader=pip(wheels)).is_new


def test_a_policy_limits_dependencies(author: Author, registry: FolderRegistry, home: Path, wheels: Path) -> None:
    push_with(author, registry, lock_of(make_wheel(wheels)))
    policy = InstallPolicy(authors=(author.key.public,), max_dependencies=0)
    with pytest.raises(ConfigError, match="1 dependencies, limit 0"):
        get(registry, home, consent=InstallDecision(policy, None), downloader=pip(wheels))


# --- hostile registries, authors and wheels ---


def test_a_package_that_gives_itself_another_name_is_refused(
    author: Author, registry: FolderRegistry, home: Path
) -> None:
    release = author.push(registry, name="ann/other").release
    registry.write(catalogue_path(NAME), to_json(sign(Catalogue(NAME, 1, 1, (release,)), author.key, words.CATALOGUE)))
    with pytest.raises(PeerError, match=r"calls itself ann/other 0\.1\.0"):
        get(registry, home)


def test_a_wheel_that_the_lock_does_not_name_is_refused(
    author: Author, registry: FolderRegistry, home: Path, wheels: Path
) -> None:
    push_with(author, registry, lock_of(make_wheel(wheels)))
    make_wheel(wheels, files={"tinydep.py": "VERSION = 'evil'\n"})  # the index now serves another one
    with pytest.raises(PeerError, match=r"pip cannot download the dependencies: .*(HASH|hash)"):
        get(registry, home, downloader=pip(wheels))
    assert nothing_installed(home)


def test_we_compare_hashes_ourselves(author: Author, registry: FolderRegistry, home: Path, wheels: Path) -> None:
    push_with(author, registry, lock_of(make_wheel(wheels)))

    def exchanged(requirements, into: Path, max_bytes: int) -> dict[str, Path]:
        make_wheel(into / "wheels", files={"tinydep.py": "evil\n"})
        return verified(requirements, into / "wheels")

    with pytest.raises(PeerError, match="which the lock does not name"):
        get(registry, home, downloader=exchanged)


def test_a_source_distribution_is_never_built(tmp_path: Path, monkeypatch) -> None:
    """Not even if the user's own settings of pip ask for it."""
    mark, folder = tmp_path / "built", tmp_path / "index"
    folder.mkdir()
    setup = f"import pathlib; pathlib.Path({str(mark)!r}).touch()\nfrom setuptools import setup\nsetup(name='srcdep')"
    with tarfile.open(folder / "srcdep-1.0.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo("srcdep-1.0/setup.py")
        info.size = len(setup)
        archive.addfile(info, io.BytesIO(setup.encode()))
    sha256 = hashlib.sha256((folder / "srcdep-1.0.tar.gz").read_bytes()).hexdigest()
    monkeypatch.setenv("PIP_NO_BINARY", ":all:")
    with pytest.raises(PeerError, match="pip cannot download"):
        download(
            read_lock(f"srcdep==1.0 --hash=sha256:{sha256}"), tmp_path / "out", max_bytes=1 << 20,
            pip_options=("--no-index", "--find-links", str(folder)),
        )  # fmt: skip
    assert not mark.exists()


def test_many_wheels_beyond_the_limit_end_pip(tmp_path: Path, wheels: Path, monkeypatch) -> None:
    """Each is below the limit, together they are not: this is seen while pip works."""
    made = [make_wheel(wheels, f"dep{i}", files={"data.bin": os.urandom(600_000).hex()}) for i in range(6)]
    monkeypatch.setattr("shoal.env_packages.lock.LOOK_S", 0.01)
    with pytest.raises(PeerError, match="env install --max-mb"):
        download(
            read_lock(lock_of(*made)), tmp_path / "out", max_bytes=1 << 20,
            pip_options=("--no-index", "--find-links", str(wheels)),
        )  # fmt: skip


def hostile_wheel(folder: Path, members: list[tuple[zipfile.ZipInfo | str, bytes]]) -> Path:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "x-1-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return folder / "x-1-py3-none-any.whl"


@pytest.mark.parametrize("path", ["../evil.py", "/etc/evil", "a/../../evil", "a//b", "./a", "..\\evil", "a\x1b[2J"])
def test_a_wheel_whose_paths_lead_elsewhere_is_refused(path: str, tmp_path: Path) -> None:
    wheel = hostile_wheel(tmp_path / "wheels", [(path, b"evil"), (f"x-1.data/purelib/{path}", b"evil")])
    with pytest.raises(PeerError, match="leads elsewhere"):
        unpack_wheels([wheel], tmp_path / "out", 1 << 20)
    assert {path.name for path in tmp_path.rglob("*")} <= {"wheels", wheel.name, "out"}


def test_links_bombs_and_torn_wheels_are_refused(tmp_path: Path, monkeypatch) -> None:
    link = zipfile.ZipInfo("link.py")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with pytest.raises(PeerError, match="holds the link"):
        unpack_wheels([hostile_wheel(tmp_path / "a", [(link, b"/etc/passwd")])], tmp_path / "out1", 1 << 20)
    bomb = hostile_wheel(tmp_path / "b", [("bomb.bin", b"\0" * (8 << 20))])
    assert bomb.stat().st_size < 20_000
    with pytest.raises(PeerError, match="unpacks to more than the limit of 1 MB"):
        unpack_wheels([bomb], tmp_path / "out2", 1 << 20)
    many = hostile_wheel(tmp_path / "c", [(f"{i}.py", b"") for i in range(30)])
    monkeypatch.setattr("shoal.env_packages.lock.MAX_WHEEL_FILES", 20)
    with pytest.raises(PeerError, match="20 files"):
        unpack_wheels([many], tmp_path / "out3", 1 << 20)
    torn = tmp_path / "torn-1-py3-none-any.whl"
    torn.write_bytes(bomb.read_bytes()[:-40])
    with pytest.raises(PeerError, match="is damaged"):
        unpack_wheels([torn], tmp_path / "out4", 1 << 24)
    clash = hostile_wheel(tmp_path / "d", [("a", b""), ("a/b", b"")])
    with pytest.raises(PeerError, match="a file where another wheel has a folder"):
        unpack_wheels([clash], tmp_path / "out5", 1 << 20)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_wheel_is_only_deflated(method: int, tmp_path: Path) -> None:
    """`zipfile` unpacks each megabyte of another method in one piece: 16 kB of bzip2 took 40 GB of memory."""
    with zipfile.ZipFile(tmp_path / "x-1-py3-none-any.whl", "w", method) as archive:
        archive.writestr("x.py", "x = 1")
    with pytest.raises(PeerError, match="only deflated"):
        unpack_wheels([tmp_path / "x-1-py3-none-any.whl"], tmp_path / "out", 1 << 20)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_wheel_with_millions_of_entries_is_refused_before_they_are_read(tmp_path: Path) -> None:
    entry = struct.pack("<4s4B4HL2L5H2L", b"PK\1\2", 20, 3, 20, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0) + b"a"
    size = 400_000 * len(entry)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 400_000 % 65536, 400_000 % 65536, size, 0, 0)
    (tmp_path / "x-1-py3-none-any.whl").write_bytes(entry * 400_000 + end)
    with pytest.raises(PeerError, match="list of files has 18800000 bytes, limit 16777216"):
        unpack_wheels([tmp_path / "x-1-py3-none-any.whl"], tmp_path / "out", 1 << 20)


def test_any_damage_to_a_wheel_is_the_wheels_fault(tmp_path: Path) -> None:
    """Whatever bytes change, `zipfile` refuses or reads something; no other error comes out, and none blames the disk."""
    good = hostile_wheel(tmp_path / "a", [("é.py", b"x = 1\n" * 99), ("pkg/b.py", bytes(range(256)))]).read_bytes()
    chance = random.Random(1)
    refused = 0
    for number in range(600):
        data = bytearray(good)
        for _ in range(chance.choice((1, 2, 8))):
            data[chance.randrange(len(data))] = chance.choice((0, 1, 127, 128, 255))
        wheel = tmp_path / "x-1-py3-none-any.whl"
        wheel.write_bytes(data)
        try:
            unpack_wheels([wheel], tmp_path / f"out{number}", 1 << 20)
        except PeerError:
            refused += 1
    assert refused > 300


def test_a_description_that_unpacks_to_gigabytes_ends_pip(tmp_path: Path, wheels: Path, monkeypatch) -> None:
    """pip reads it whole: 3 MB of wheel took 23 GB of memory."""
    monkeypatch.setattr("shoal.env_packages.lock.MAX_PIP_BYTES", 400_000_000)
    wheels.mkdir()
    wheel = wheels / "tinydep-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("tinydep-1.0.dist-info/METADATA", "w") as file:
            file.write(b"Metadata-Version: 2.1\nName: tinydep\nVersion: 1.0\n\n")
            for _ in range(200):
                file.write(b"a" * (1 << 20))
        archive.writestr(
            "tinydep-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
    with pytest.raises(PeerError, match="takes pip more than 400 MB of memory"):
        download(
            read_lock(lock_of(wheel)), tmp_path / "out", max_bytes=100 << 20,
            pip_options=("--no-index", "--find-links", str(wheels)),
        )  # fmt: skip


def test_pip_dies_with_the_installation(tmp_path: Path, wheels: Path) -> None:
    """Alone it would go on, and nobody would look at how much it downloads."""
    code = (
        "import sys; from pathlib import Path; from shoal.env_packages import lock as wheels\n"
        "wheels._PIP = wheels._PIP.replace(\"runpy.run_module('pip', run_name='__main__')\", "
        "\"import os, time; print(os.getpid(), flush=True, file=open('/proc/self/fd/2', 'w')); time.sleep(600)\")\n"
        "wheels.download([], Path(sys.argv[1]), max_bytes=1 << 20)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "out")])
    said, until = tmp_path / "out" / "errors", time.monotonic() + 120
    while not (said.exists() and said.read_text().endswith("\n")):
        assert time.monotonic() < until
        time.sleep(0.02)
    process.kill()
    process.wait()
    while Path(f"/proc/{said.read_text().strip()}").exists():
        assert time.monotonic() < until, "pip lives on"
        time.sleep(0.02)


def test_a_wheel_that_lies_about_its_size_unpacks_no_more_than_it_says(tmp_path: Path) -> None:
    wheel = hostile_wheel(tmp_path / "a", [("bomb.bin", b"\0" * (8 << 20))])
    data = wheel.read_bytes().replace((8 << 20).to_bytes(4, "little"), (100).to_bytes(4, "little"))
    wheel.write_bytes(data)
    with pytest.raises(PeerError, match="is damaged"):
        unpack_wheels([wheel], tmp_path / "out", 1 << 20)
    assert sum(path.stat().st_size for path in (tmp_path / "out").rglob("*")) <= 200


def test_scripts_and_data_of_the_system_are_left_out(tmp_path: Path) -> None:
    wheel = hostile_wheel(tmp_path / "a", [
        ("x-1.data/scripts/python", b"evil"), ("x-1.data/data/etc/passwd", b"evil"), ("x-1.data/platlib/lib.py", b"good"),
    ])  # fmt: skip
    unpack_wheels([wheel], tmp_path / "out", 1 << 20)
    assert [path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*")] == ["lib.py"]


# --- disks, kills and other processes ---


def test_a_full_disk_leaves_nothing(author: Author, registry: FolderRegistry, home: Path, monkeypatch) -> None:
    author.push(registry)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(installing, "unpack", full)
    with pytest.raises(StateError, match=r"No space left on device\. Free some space"):
        get(registry, home)
    assert nothing_installed(home)


def test_a_kill_leaves_nothing_installed_and_the_next_try_cleans_up(
    author: Author, registry: FolderRegistry, home: Path
) -> None:
    digest = author.push(registry).release.digest
    code = (
        "import sys, time; from pathlib import Path; from shoal.env_packages.install import install\n"
        "from shoal.env_packages.install_policy import InstallDecision\n"
        "from shoal.env_packages.package_reference import read_reference\n"
        "from shoal.env_packages.registry import FolderRegistry\n"
        "def ask(q): print('asked', flush=True); time.sleep(60)\n"
        f"decision = InstallDecision(None, ask)\n"
        f"install(read_reference('{NAME}'), FolderRegistry(Path(sys.argv[1])), Path(sys.argv[2]), decision)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(registry.folder), str(home)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"asked\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    store = PackageStore(home / "envs")
    assert len(list(store.unfinished())) == 1 and store.get(digest) is None and store.all() == []
    assert get(registry, home).is_new and list(store.unfinished()) == []


def test_a_question_to_one_user_holds_up_no_other(author: Author, registry: FolderRegistry, home: Path) -> None:
    author.push(registry)
    others: list[Result] = []

    def answer_late(_: str) -> bool:
        others.append(get(registry, home))
        return True

    first = get(registry, home, consent=InstallDecision(None, answer_late))
    assert [first.is_new, others[0].is_new] == [False, True]
    assert list(PackageStore(home / "envs").unfinished()) == []


def test_two_installations_at_once_install_once(author: Author, registry: FolderRegistry, home: Path) -> None:
    author.push(registry)
    results: list[Result] = []

    def slowly(_: str) -> bool:
        time.sleep(0.3)
        return True

    def work() -> None:
        results.append(get(registry, home, consent=InstallDecision(None, slowly)))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(result.is_new for result in results) == [False, False, True]


def test_files_that_changed_after_the_installation_are_found(
    author: Author, registry: FolderRegistry, home: Path
) -> None:
    author.push(registry)
    result, store = get(registry, home), PackageStore(home / "envs")
    (result.folder / "words.txt").write_text("x y z")
    with pytest.raises(StateError, match=r"words\.txt of ann/parrot 0\.1\.0 was changed after it was installed"):
        store.demand_unchanged(result.package)
    store.remove(result.package.digest)
    assert store.all() == [] and get(registry, home).is_new


def test_a_record_of_another_package_is_refused(author: Author, registry: FolderRegistry, home: Path) -> None:
    author.push(registry)
    result = get(registry, home)
    other = home / "envs" / ("a" * 64)
    result.folder.parent.rename(other)
    with pytest.raises(StateError, match="describes another package"):
        PackageStore(home / "envs").get("a" * 64)
