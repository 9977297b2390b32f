"""Descriptions and locks: what a package may say about itself, and one line for everything else."""

import sys
import sysconfig
import time

import pytest

from shoal.env_packages.archive import index_folder
from shoal.env_packages.lock import Requirement, heavy, read_lock, write_lock
from shoal.env_packages.metadata import MAX_ABOUT_BYTES, read_about, read_package, unfit
from shoal.env_packages.package_reference import is_name, is_version, names_one_package, order_of, read_reference
from shoal.errors import ConfigError

GOOD = 'name = "ann/guess"\nversion = "0.1.0"\nlicence = "MIT"\n'
A, B = "a" * 64, "b" * 64


@pytest.mark.parametrize(("line", "key"), [
    ('name = "Ann/guess"', "name"), ('name = "ann"', "name"), ('name = "ann/../x"', "name"),
    ('name = "ann/g\u00fc"', "name"),
    ('version = "1.0"', "version"), ('version = "01.0.0"', "version"), ('version = "1.0.0-rc1"', "version"),
    ('licence = ""', "licence"), ('entry = "environment"', "entry"), ('entry = "os:system"', "entry"),
    ('entry = "../x.py:f"', "path"), ('python = "3"', "python"), ('python = ">=2.7"', "python"),
    ('platforms = ["a b"]', "platforms"), ('kind = "shoal"', "kind"), ('data = ["/etc/passwd"]', "path"),
    ('lock = "../lock.txt"', "path"), ('summary = "\\u001b[2J"', "summary"), ('licens = "MIT"', "licens"),
    ("x = " + "[" * 9000, "not valid TOML"), ("x = 1" + "0" * 5000, "not valid TOML"), ("x = 1\n" * 12000, "limit 16384"),
    ("x" * 9000 + " = 1", "unknown key x"),
])  # fmt: skip
def test_a_wrong_description_is_one_line_that_names_the_key(line: str, key: str) -> None:
    text = "".join(kept + "\n" for kept in GOOD.splitlines() if kept.split()[0] != line.split()[0]) + line
    with pytest.raises(ConfigError, match=key) as refused:
        read_about(text.encode())
    assert "\n" not in str(refused.value) and "\x1b" not in str(refused.value) and len(str(refused.value)) <= 400


def test_a_description_is_read_in_seconds() -> None:
    """`tomllib` took 21 s for a key in 32,000 parts."""
    began = time.process_time()
    with pytest.raises(ConfigError, match="unknown key a"):
        read_about((GOOD + ".".join("a" * ((MAX_ABOUT_BYTES - len(GOOD)) // 2 - 4)) + "=1").encode())
    assert time.process_time() - began < 8


def test_a_good_description_is_read() -> None:
    about = read_about(GOOD.encode())
    assert (about.entry_file, about.function, about.reproducible, unfit(about)) == (
        "environment.py",
        "environment",
        True,
        "",
    )


@pytest.mark.parametrize(("line", "why"), [
    (f'python = ">=3.11,<3.{sys.version_info[1]}"', "needs Python"), ('python = "==3.999"', "needs Python"),
    ('platforms = ["plan9-vax"]', "runs on plan9-vax"),
    (f'python = ">=3.{sys.version_info[1]}"\nplatforms = ["{sysconfig.get_platform()}"]', ""),
])  # fmt: skip
def test_a_machine_that_a_package_does_not_fit_is_named(line: str, why: str) -> None:
    found = unfit(read_about((GOOD + line).encode()))
    assert why in found and bool(why) == bool(found)


@pytest.mark.parametrize("key", ['data = ["words.txt"]', 'lock = "lock.txt"', 'entry = "main.py:environment"'])
def test_what_a_description_names_must_be_in_the_package(key: str, tmp_path) -> None:
    (tmp_path / "environment.py").write_text("")
    (tmp_path / "environment.toml").write_text(GOOD)
    assert read_package(tmp_path, index_folder(tmp_path)).requirements == ()
    (tmp_path / "environment.toml").write_text(GOOD + key)
    with pytest.raises(ConfigError, match="which is not in the package"):
        read_package(tmp_path, index_folder(tmp_path))


def test_names_versions_and_digests_are_read() -> None:
    assert is_name("ann/guess-number") and not is_name("ann/guess_number") and not is_name("a" * 40 + "/b")
    assert is_version("0.10.2") and not is_version("1.2.3\n") and not is_version("\u0661.0.0")
    assert order_of("1.10.0") > order_of("1.9.9")
    assert read_reference("ann/guess") == ("ann/guess", "", "") and read_reference(f"pkg:{A}").digest == A
    assert names_one_package("ann/guess@1.0.0") and not names_one_package("ann/guess")
    assert not names_one_package("ann/guess.py") and not names_one_package("./ann/guess@1.0.0")


def test_a_lock_of_pip_is_read_and_written_in_our_words() -> None:
    text = f"""# made by pip-compile
Flask[async]==3.0.0 \\
    --hash=sha256:{A} \\
    --hash=sha256:{B}
    # via nobody
my.pkg == 1.0 --hash=sha256:{B}  # a comment
"""
    read = read_lock(text)
    assert read == (Requirement("flask", "3.0.0", (A, B)), Requirement("my-pkg", "1.0", (B,)))
    assert read_lock(write_lock(read)) == read


@pytest.mark.parametrize("line", [
    "flask==3.0", "flask", f"flask>=3 --hash=sha256:{A}", f"flask==3.* --hash=sha256:{A}", "--index-url https://evil.example",
    "-e .", "-r other.txt", "git+https://evil.example/x.git", f"x @ https://evil.example/x.whl --hash=sha256:{A}",
    f"./x-1.0.tar.gz --hash=sha256:{A}", f"x==1 --hash=md5:{A[:32]}", f'x==1; sys_platform=="win32" --hash=sha256:{A}',
    f"x==1 --hash=sha256:{A} --config-settings=a=b", f"x==1 --hash=sha256:{A} \\", f"x==1 --hash=sha256:{A}\rpip==1",
    f"--only-binary :none:\nx==1 --hash=sha256:{A}", "${HOME}==1",
])  # fmt: skip
def test_a_lock_that_leaves_pip_a_decision_is_refused(line: str) -> None:
    text = line if not line.endswith("\\") else f"{line}\nevil"
    with pytest.raises(ConfigError, match=r"lock.txt line \d+"):
        read_lock(text)


def test_a_dependency_that_is_locked_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="a-b is locked twice"):
        read_lock(f"a.b==1 --hash=sha256:{A}\nA_b==2 --hash=sha256:{A}")


def test_heavy_dependencies_are_named() -> None:
    lock = read_lock("".join(f"{name}==1 --hash=sha256:{A}\n" for name in ("Torch", "numpy", "nvidia_cublas.cu12")))
    assert heavy(lock) == ("torch", "nvidia-cublas-cu12")
