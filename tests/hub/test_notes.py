"""Notes on versions: signed, one for a key and kind, on these very files, bounded, and safe to print."""

import time
from pathlib import Path

import pytest

from shoal.errors import ConfigError, PeerError
from shoal.hub import notes
from shoal.hub.catalogue import Release, sign
from shoal.hub.notes import (
    Checked,
    Issue,
    Note,
    Rated,
    Solved,
    add_note,
    checks_by_others,
    histogram_of,
    lines_of_notes,
    read_notes,
)
from shoal.hub.registry import FolderRegistry, notes_path
from shoal.protocol.identity import Key
from shoal.protocol.wire import to_json

NAME, RELEASE = "ann/parrot", Release("0.1.0", "a" * 64, 100, 1)
PASSED, FAILED = Checked("Linux x86_64 Python 3.11", 9), Checked("Linux", 8, ("replay",))


@pytest.fixture
def registry(tmp_path: Path) -> FolderRegistry:
    return FolderRegistry(tmp_path)


def heard(registry: FolderRegistry):
    return read_notes(registry, NAME, RELEASE)


def test_notes_are_shown_with_who_says_so(registry: FolderRegistry) -> None:
    ann, bob = Key.generate(), Key.generate()
    for key, said in (
        (ann, PASSED), (bob, FAILED), (ann, Rated(True)), (bob, Rated(False)), (bob, Issue("task 3 has no answer")),
        (ann, Solved("tiny-1", 64, 0.25, (6, 0, 0, 0, 0, 0, 0, 0, 0, 2))),
    ):  # fmt: skip
        add_note(registry, NAME, RELEASE, said, key, 1000.0)
    assert lines_of_notes(heard(registry), ann.public) == [
        "checks   passed on 1 of 2 machines",
        "check    passed 9 checks on Linux x86_64 Python 3.11  (the author)",
        f"check    failed replay on Linux  (key {bob.public[:16]}…)",
        "solved   25.0% of 64 episodes by tiny-1  (the author)",
        "         tasks by solve rate, 0 to 100 % in tenths: 6 . . . . . . . . 2",
        "ratings  1 good, 1 bad",
        f"issue    task 3 has no answer  (key {bob.public[:16]}…)",
    ]


def test_tasks_are_sorted_into_tenths_by_their_solve_rate() -> None:
    assert histogram_of([0.0, 0.09, 0.1, 0.55, 0.99, 1.0]) == (2, 1, 0, 0, 0, 1, 0, 0, 0, 2)


def test_the_latest_note_of_a_key_replaces_the_earlier(registry: FolderRegistry) -> None:
    key = Key.generate()
    for created, good in ((1.0, True), (3.0, False), (2.0, True)):
        add_note(registry, NAME, RELEASE, Rated(good), key, created)
    assert [one.note.said for one in heard(registry)] == [Rated(False)]
    for policy in ("a", "b", "a"):
        add_note(registry, NAME, RELEASE, Solved(policy, 1, 1.0, (1,) * 10), key, time.time())
    assert len(heard(registry)) == 3


def test_forged_notes_and_notes_on_other_files_are_left_out(registry: FolderRegistry) -> None:
    key = Key.generate()
    add_note(registry, NAME, RELEASE, Rated(True), key, 1.0)
    [kept] = [one.signed for one in heard(registry)]
    other = sign(Note(NAME, "0.1.0", "b" * 64, 9, Rated(False)), Key.generate(), notes.PURPOSE)
    elsewhere = sign(Note("ann/other", "0.1.0", "a" * 64, 9, Rated(False)), Key.generate(), notes.PURPOSE)
    forged = sign(Note(NAME, "0.1.0", "a" * 64, 9, Rated(False)), Key.generate(), "another purpose")
    registry.write(notes_path(NAME, "0.1.0"), to_json([other, forged, elsewhere, kept]))
    assert [one.note.said for one in heard(registry)] == [Rated(True)]


def test_an_authors_own_note_does_not_count_as_a_check(registry: FolderRegistry) -> None:
    ann = Key.generate()
    others = [Key.generate() for _ in range(3)]
    said = [(ann, PASSED), (others[0], PASSED), (others[1], FAILED), (others[2], PASSED), (others[2], Rated(True))]
    for key, note in said:
        add_note(registry, NAME, RELEASE, note, key, 1.0)
    assert checks_by_others(heard(registry), ann.public) == 2


@pytest.mark.parametrize("said", [
    Issue("x" * 501), Checked("a\x1b[2Jb", 1), Checked("Linux", 1, ("x" * 65,)), Checked("Linux", 1, ("x" * 60,) * 100),
    Solved("p", 1, 2.0, (1,) * 10), Solved("p", 1, 0.5, (1,)),
])  # fmt: skip
def test_a_note_that_nobody_would_read_is_not_written(said, registry: FolderRegistry) -> None:
    with pytest.raises(ConfigError):
        add_note(registry, NAME, RELEASE, said, Key.generate(), 1.0)
    assert heard(registry) == ()


def test_a_long_note_that_somebody_else_wrote_is_left_out(registry: FolderRegistry) -> None:
    flood = Note(NAME, "0.1.0", "a" * 64, 9, Solved("p", 1, 0.5, (1,) * 100_000))
    registry.write(notes_path(NAME, "0.1.0"), to_json([sign(flood, Key.generate(), notes.PURPOSE)]))
    assert heard(registry) == ()


def test_the_number_of_notes_is_limited(registry: FolderRegistry, monkeypatch) -> None:
    monkeypatch.setattr(notes, "MAX_NOTES", 3)
    for _ in range(3):
        add_note(registry, NAME, RELEASE, Rated(True), Key.generate(), 1.0)
    with pytest.raises(ConfigError, match="has 3 notes, the limit"):
        add_note(registry, NAME, RELEASE, Rated(True), Key.generate(), 1.0)


def test_malformed_and_huge_notes_are_refused(registry: FolderRegistry) -> None:
    registry.write(notes_path(NAME, "0.1.0"), b"[" * 100)
    with pytest.raises(PeerError, match="malformed"):
        heard(registry)
    registry.write(notes_path(NAME, "0.1.0"), b" " * (notes.MAX_NOTES_BYTES + 1))
    with pytest.raises(PeerError, match="more than"):
        heard(registry)
