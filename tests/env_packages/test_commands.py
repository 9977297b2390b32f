"""`shoal env init, check, push, attest, show, list, install`: what an author and a user type, from start to end."""

import os
from pathlib import Path

import pytest

from shoal.cli import main

NAME = "ann/backwards"


@pytest.fixture
def shoal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Types a command and gives its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "ann"))

    def run(*words: str) -> tuple[int, str]:
        code = main.main(["env", *words])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def test_a_new_package_passes_its_check_and_is_shared(shoal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = shoal("init", NAME)
    assert code == 0 and "shoal env check ./backwards" in said
    assert len((tmp_path / "backwards" / "environment.py").read_text().splitlines()) <= 36
    code, said = shoal("check", "./backwards")
    assert code == 0 and "failed" not in said and "skipped" not in said, said
    code, said = shoal("push", "backwards", "--registry", "hub")
    assert code == 0 and "published ann/backwards 0.1.0" in said and (tmp_path / "ann" / "author.key").exists()
    assert "already published" in shoal("push", "backwards", "--registry", "hub")[1]

    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "bob"))
    assert shoal("attest", f"{NAME}@0.1.0", "--registry", "hub", "--folder", "backwards")[0] == 0
    code, said = shoal("show", NAME, "--registry", "hub")
    assert code == 0 and "0.1.0 " in said and "  passed " in said
    assert shoal("list", "--registry", "hub") == (0, "ann/backwards\n")
    code, said = shoal("install", NAME, "--registry", "hub")
    assert code == 2 and "nobody can be asked" in said
    code, said = shoal("install", NAME, "--registry", "hub", "--yes")
    assert code == 0 and 'name = "ann/backwards@0.1.0"' in said
    assert "already installed" in shoal("install", NAME, "--registry", "hub", "--yes")[1]
    assert f"{NAME}@0.1.0" in shoal("list")[1]
    assert shoal("attest", f"{NAME}@0.1.0", "--registry", "hub")[0] == 0
    code, said = shoal("check", f"{NAME}@0.1.0")
    assert code == 0 and "failed" not in said, said


def test_an_attestation_is_sent_as_a_file_to_the_owner_of_the_registry(
    shoal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shoal("init", NAME)
    shoal("push", "backwards", "--registry", "hub")
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "bob"))
    to_file = ("--registry", "hub", "--folder", "backwards", "--out", "passed.json")
    code, said = shoal("attest", f"{NAME}@0.1.0", *to_file)
    assert code == 0 and "send it to the owner of the registry" in said
    assert shoal("show", NAME, "--registry", "hub")[1].endswith("attestations of 0.1.0:\n  none\n")
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "ann"))
    code, said = shoal("add-attestation", "passed.json", "--registry", "hub")
    assert code == 0 and said.startswith("ann/backwards 0.1.0, key ") and ": passed " in said
    assert "(key " in shoal("show", NAME, "--registry", "hub")[1]

    (tmp_path / "forged.json").write_text(
        (tmp_path / "passed.json").read_text().replace('"signature":"', '"signature":"0')
    )
    (tmp_path / "words.json").write_text("[]")
    (tmp_path / "backwards" / "words.txt").write_text("other words " * 8)
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "carl"))
    shoal("push", "backwards", "--registry", "other")
    for file, registry, why in (
        ("forged.json", "hub", "does not verify"), ("words.json", "hub", "this is not an attestation"),
        ("none.json", "hub", "cannot read none.json"), ("passed.json", "none", "there is no registry"),
        ("passed.json", "other", "of another package than ann/backwards 0.1.0"),
    ):  # fmt: skip
        code, said = shoal("add-attestation", file, "--registry", registry)
        assert code == 2 and why in said and said.count("\n") == 1, said


def test_what_fails_its_check_is_not_attested(shoal, tmp_path: Path) -> None:
    shoal("init", NAME)
    code = tmp_path / "backwards" / "environment.py"
    code.write_text(code.read_text() + "\nimport random\n\nrandom.seed(0)\n")
    assert "failed" in shoal("check", "./backwards")[1]
    shoal("push", "backwards", "--registry", "hub")
    code, said = shoal("attest", f"{NAME}@0.1.0", "--registry", "hub", "--folder", "backwards")
    assert code == 2 and "nothing is attested, because" in said and said.count("\n") == 1
    assert shoal("show", NAME, "--registry", "hub")[1].endswith("  none\n")


def test_mistakes_are_one_line(shoal, tmp_path: Path) -> None:
    shoal("init", NAME)
    for words, said in (
        (("init", NAME), "exists already"),
        (("init", "Ann/B"), "cannot be the name of a package"),
        (("push", "none", "--registry", "hub"), "cannot read none"),
        (("install", NAME, "--registry", "none"), "there is no registry at none"),
        (("show", "ann", "--registry", "backwards"), "is not the name of a package"),
        (("show", NAME, "--registry", "backwards"), "has no package ann/backwards: `shoal env list"),
        (("push", "backwards", "--registry", "http://hub.example"), "is written in its folder, not over HTTP"),
        (("push", "backwards", "--registry", "hub", "--withdraw", ""), "there is no registry at hub"),
        (("attest", f"{NAME}@0.1.0", "--registry", "hub"), "there is no registry at hub"),
        (("attest", "pkg:" + "a" * 64, "--registry", "backwards"), "owner/name here, not by its digest"),
        (("show", "pkg:" + "a" * 64, "--registry", "backwards"), "owner/name here, not by its digest"),
        (("install", "pkg:" + "a" * 64, "--registry", "backwards"), f"pkg:{'a' * 64} is not installed"),
    ):
        code, text = shoal(*words)
        assert code == 2 and said in text and text.count("\n") == 1, text
    assert not (tmp_path / "hub").exists() and not (tmp_path / "http:").exists()


def test_a_mistyped_key_or_policy_is_named(shoal, tmp_path: Path) -> None:
    shoal("init", NAME)
    code, text = shoal("push", "backwards", "--registry", "hub", "--key", "autor.key")
    assert code == 2 and "cannot read the key autor.key" in text and not (tmp_path / "autor.key").exists()
    shoal("push", "backwards", "--registry", "hub")
    code, text = shoal("push", "backwards", "--registry", "hub", "--withdraw", " ")
    assert code == 2 and "--withdraw needs a reason" in text
    code, text = shoal("install", NAME, "--registry", "hub", "--policy", "none.toml")
    assert code == 2 and "Give the path of a policy file" in text
    with pytest.raises(SystemExit):
        shoal("install", NAME, "--registry", "hub", "--policy", "none.toml", "--yes")


def test_the_end_of_the_input_is_a_no(shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    shoal("init", NAME)
    shoal("push", "backwards", "--registry", "hub")
    keyboard, terminal = os.openpty()
    os.write(keyboard, b"\x04")  # Ctrl-D
    with open(terminal) as typed:
        monkeypatch.setattr("sys.stdin", typed)
        code, text = shoal("install", NAME, "--registry", "hub")
    os.close(keyboard)
    assert code == 2 and "was not installed, as you said" in text


def test_who_only_looks_leaves_nothing_in_the_home(shoal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shoal("init", NAME)
    shoal("push", "backwards", "--registry", "hub")
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "bob"))
    assert shoal("show", NAME, "--registry", "hub")[0] == 0 and not (tmp_path / "bob").exists()
    (tmp_path / "bob").write_text("")
    code, text = shoal("install", NAME, "--registry", "hub", "--yes")
    assert code == 2 and "is needed as a folder" in text


def test_a_changed_folder_needs_a_new_version_and_a_version_can_be_withdrawn(shoal, tmp_path: Path) -> None:
    shoal("init", NAME)
    shoal("push", "backwards", "--registry", "hub")
    (tmp_path / "backwards" / "words.txt").write_text("other words " * 8)
    code, said = shoal("push", "backwards", "--registry", "hub")
    assert code == 2 and "raise version in environment.toml" in said
    code, said = shoal("attest", f"{NAME}@0.1.0", "--registry", "hub", "--folder", "backwards")
    assert code == 2 and "does not have the files of this version" in said
    assert shoal("push", "backwards", "--registry", "hub", "--withdraw", "too easy")[0] == 0
    code, said = shoal("show", NAME, "--registry", "hub")
    assert code == 0 and "withdrawn: too easy" in said and "attestations of 0.1.0" in said
    code, said = shoal("install", NAME, "--registry", "hub", "--yes")
    assert code == 2 and "withdrew all versions of ann/backwards: name one of 0.1.0" in said
    assert "has no version 0.2.0: it has 0.1.0" in shoal("show", f"{NAME}@0.2.0", "--registry", "hub")[1]


def test_an_author_changes_the_key(shoal, tmp_path: Path) -> None:
    shoal("init", NAME)
    shoal("push", "backwards", "--registry", "hub")
    assert shoal("install", NAME, "--registry", "hub", "--yes")[0] == 0
    code, said = shoal("push", "backwards", "--registry", "hub", "--new-key", "new.key")
    assert code == 0 and "signs with" in said
    code, said = shoal("show", NAME, "--registry", "hub")
    assert code == 0 and "known here" in said
    assert "belongs to the key" in shoal("push", "backwards", "--registry", "hub")[1]
    (tmp_path / "new.key").replace(tmp_path / "ann" / "author.key")
    assert "already published" in shoal("push", "backwards", "--registry", "hub")[1]
