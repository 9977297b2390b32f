"""An error's message is never empty and never `None`, whatever the system leaves out."""

import errno
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import httpx
import pytest

from shoal import errors
from shoal.errors import cause_of, how_to_install

PACKAGE = Path(__file__).parent.parent / "shoal"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "a/file"), "No space left on device"),
        (OSError("half a page written"), "half a page written"),
        (OSError(), "OSError"),
        (TimeoutError(), "TimeoutError"),
        (httpx.ReadTimeout(""), "ReadTimeout"),
        (
            shutil.Error([("a", "b", "[Errno 28] No space left on device: 'b'")]),
            "[Errno 28] No space left on device: 'b'",
        ),
    ],
    ids=repr,
)
def test_cause_of_an_error_is_never_empty(error: Exception, cause: str) -> None:
    assert cause_of(error) == cause


def test_no_message_is_made_from_a_strerror_that_may_be_none() -> None:
    bare = re.compile(r"\{\w+\.strerror\}")
    found = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if bare.search(path.read_text())]
    assert found == [], "use errors.cause_of"


def test_what_installs_an_extra_works_from_a_clone_and_beside_a_wheel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = PACKAGE.parent
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pip").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "pip").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(root)
    assert how_to_install("torch", "plot") == "pip install -c constraints.txt -e '.[torch,plot]'"
    monkeypatch.chdir(tmp_path)
    words = shlex.split(how_to_install("plot"))
    assert words == ["pip", "install", "-c", str(root / "constraints.txt"), "-e", f"{root}[plot]"]
    monkeypatch.setenv("PATH", "/nowhere")
    assert how_to_install("plot").endswith(f" (with the pip of {tmp_path / 'bin'})"), "another pip installs elsewhere"
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "site-packages" / "shoal" / "errors.py"))
    packages = shlex.split(how_to_install("plot", "answers"))[2:]
    assert sorted(re.split(r"[<>=]", word)[0] for word in packages) == ["google-re2", "jsonschema-rs", "matplotlib"]


def test_no_text_tells_anyone_to_install_shoal_from_pypi() -> None:
    root = PACKAGE.parent
    texts = [*PACKAGE.rglob("*.py"), *(root / "docs").rglob("*.md"), *(root / "docs").rglob("*.ipynb"), root / "README.md",
             *(root / "recipes").rglob("*.toml"), *(root / "examples" / "environments").rglob("*.md")]  # fmt: skip
    wrong = re.compile(r"\bshoal\[|pip install (-\S+ )*['\"]?shoal(?![\w-])")
    assert [str(path) for path in texts if wrong.search(path.read_text())] == []


def test_the_licence_is_the_whole_apache_licence_and_the_wheel_says_so() -> None:
    text = (PACKAGE.parent / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text and len(text) > 11_000
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0" and project["license-files"] == ["LICENSE"]


def test_the_demo_installs_what_the_commands_of_the_readme_need() -> None:
    """`shoal plot` and `shoal report` follow `make demo` there."""
    makefile = (PACKAGE.parent / "Makefile").read_text()
    recipe = makefile.partition("\n$(VENV)/.runs:")[2].partition("\n\n")[0]
    assert re.search(r"-e '\.\[torch,plot\]'", recipe)
