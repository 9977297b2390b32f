"""Notes on a version of a package: results of its check, solve rates by policy, ratings and known issues.

Signed by anyone, put into a registry by its owner, shown by `shoal env show`. The signature says who says so, and proves
nothing more, because keys are free. One key has one note of each kind on a version, the latest; a version has at most
MAX_NOTES.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from shoal.errors import ConfigError, NothingYet, PeerError
from shoal.folder import held
from shoal.hub.catalogue import Count, Release, Signed, open_signed, sign
from shoal.hub.names import Reference
from shoal.hub.publish import read_catalogue
from shoal.hub.registry import FolderRegistry, Registry, notes_path
from shoal.hub.trust import Trust
from shoal.protocol.identity import Key
from shoal.protocol.types.message import Fact, Message
from shoal.protocol.wire import WireError, from_json, to_json

PURPOSE = "hub note"
MAX_NOTES = 1000
MAX_NOTES_BYTES = 4 << 20
MAX_NOTE_BYTES = 4096
NUM_BINS = 10
"""Of a histogram of solve rates: the first holds the tasks solved in less than a tenth of the attempts."""

Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class Checked(Message, frozen=True, tag="check"):
    """What `shoal env check` said on a machine."""

    machine: Fact
    """System, processor and version of Python."""
    passed: Count
    failed: tuple[Fact, ...] = ()
    """Names of the checks that failed."""


class Solved(Message, frozen=True, tag="solved"):
    """How often a policy solves its tasks."""

    policy: Fact
    episodes: Count
    mean: Share
    histogram: tuple[Count, ...]
    """Tasks by the share of their attempts that were solved, in NUM_BINS bins."""


class Rated(Message, frozen=True, tag="rating"):
    """Whether somebody recommends it."""

    good: bool


class Issue(Message, frozen=True, tag="issue"):
    """A known issue, such as wrong gold answers."""

    text: Annotated[str, msgspec.Meta(max_length=500)]


class Note(Message, frozen=True):
    """What is signed: on which package, when, and what."""

    name: str
    version: str
    digest: str
    created: Count
    said: Checked | Solved | Rated | Issue

    @property
    def kind(self) -> str:
        """Notes of one key with equal kinds replace each other."""
        policy = self.said.policy if isinstance(self.said, Solved) else ""
        return f"{type(self.said).__name__} {policy}"


class Heard(NamedTuple):
    """A note whose signature holds."""

    key: str
    note: Note
    signed: Signed


def read_notes(registry: Registry, name: str, release: Release) -> tuple[Heard, ...]:
    """The notes on a version, the latest of each key and kind. Those that are wrong, or on other files, are left out."""
    try:
        data = registry.read(notes_path(name, release.version), MAX_NOTES_BYTES)
        signed = from_json(data, tuple[Signed, ...])
    except NothingYet:
        return ()
    except WireError as error:
        raise PeerError(
            f"the notes on {name} {release.version} are malformed ({error}): use another registry"
        ) from None
    return tuple(_latest(_sound(signed[:MAX_NOTES], name, release)))


def _sound(signed: Sequence[Signed], name: str, release: Release) -> Iterator[Heard]:
    for one in signed:
        if len(one.body) > MAX_NOTE_BYTES:  # guard: short-notes
            continue
        try:
            note = open_signed(one, Note, PURPOSE, "a note")
        except PeerError:
            continue  # one stranger's note must not hide the others
        if (note.name, note.version, note.digest) == (
            name,
            release.version,
            release.digest,
        ):  # guard: notes-on-these-files
            yield Heard(one.key, note, one)


def _latest(heard: Iterator[Heard]) -> Iterator[Heard]:
    latest: dict[tuple[str, str], Heard] = {}
    for one in heard:
        known = latest.get((one.key, one.note.kind))
        if known is None or known.note.created < one.note.created:  # guard: one-note-for-a-key
            latest[one.key, one.note.kind] = one
    yield from latest.values()


def add_note(
    registry: FolderRegistry, name: str, release: Release, said: Checked | Solved | Rated | Issue, key: Key, now: float
) -> None:
    """Sign a note and put it into a registry. Raises `ConfigError` if it is too long, or the registry has too many."""
    put_note(registry, name, release, make_note(name, release, said, key, now))


def make_note(name: str, release: Release, said: Checked | Solved | Rated | Issue, key: Key, now: float) -> Signed:
    """A signed note. Raises `ConfigError` if it is too long."""
    if isinstance(said, Solved) and len(said.histogram) != NUM_BINS:
        raise ConfigError(f"the histogram has {len(said.histogram)} bins: give {NUM_BINS}")
    signed = sign(Note(name, release.version, release.digest, int(now), said), key, PURPOSE)
    try:
        open_signed(signed, Note, PURPOSE, "the note")
    except PeerError as error:
        raise ConfigError(f"{error}: shorten it, in printable characters") from None
    if len(signed.body) > MAX_NOTE_BYTES:
        raise ConfigError(f"the note has {len(signed.body)} bytes, limit {MAX_NOTE_BYTES}: shorten it")
    return signed


def read_note(data: bytes) -> tuple[Signed, Note]:
    """A note that somebody sent as a file. Raises `PeerError` if its form or its signature is wrong."""
    try:
        signed = from_json(data[: 4 * MAX_NOTE_BYTES], Signed)
    except WireError as error:
        raise PeerError(f"this is not a note ({error}): `shoal env note --out FILE` writes one") from None
    return signed, open_signed(signed, Note, PURPOSE, "the note")


def put_note(registry: FolderRegistry, name: str, release: Release, signed: Signed) -> None:
    """Put a note on a version into a registry. Raises `ConfigError` if it is on other files, or if there are too many."""
    if not any(_sound([signed], name, release)):  # guard: notes-of-this-registry
        raise ConfigError(
            f"the note is too long, or on another package than {name} {release.version} in {registry.place}"
        )
    with held(registry.folder / ".lock"):
        kept = [one.signed for one in read_notes(registry, name, release)]
        kept = [one.signed for one in _latest(_sound([*kept, signed], name, release))]
        if len(kept) > MAX_NOTES:
            raise ConfigError(
                f"{name} {release.version} has {MAX_NOTES} notes, the limit: delete some of them from the registry"
            )
        registry.write(notes_path(name, release.version), to_json(kept))


def find_release(registry: Registry, reference: Reference, home: Path) -> Release:
    """The release of a registry that notes are written on. Raises `ConfigError` if it has no such version."""
    catalogue = read_catalogue(registry, reference.name, Trust(home / "authors.json"), pin=False).opened.catalogue
    if not reference.version:
        raise ConfigError(f"say which version: {reference.name}@VERSION, as `shoal env show` lists them")
    release = catalogue.release(reference.version)
    if release is None:
        raise ConfigError(catalogue.lacks(reference.version))
    return release


def histogram_of(rates: Sequence[float]) -> tuple[int, ...]:
    """Tasks by their solve rates, in NUM_BINS bins."""
    bins = [0] * NUM_BINS
    for rate in rates:
        bins[min(NUM_BINS - 1, int(rate * NUM_BINS))] += 1
    return tuple(bins)


def checks_by_others(heard: Sequence[Heard], author: str) -> int:
    """Keys other than the author's that noted that a version passes its check."""
    passed = [one for one in heard if isinstance(one.note.said, Checked) and not one.note.said.failed]
    return len({one.key for one in passed} - {author})  # guard: author-is-no-witness


def checks_noted(registry: Registry, name: str, release: Release, author: str) -> int:
    """As `checks_by_others`, from a registry."""
    return checks_by_others(read_notes(registry, name, release), author)


def lines_of_notes(heard: Sequence[Heard], author: str = "") -> list[str]:
    """What people read about a version. `author` is the key that signed it: its notes are marked."""
    lines, said = [], [(_who(one.key, author), one.note.said) for one in heard]
    checks = [(who, checked) for who, checked in said if isinstance(checked, Checked)]
    if checks:
        lines.append(f"checks   passed on {sum(not one.failed for _, one in checks)} of {len(checks)} machines")
    for who, checked in checks:
        result = f"failed {', '.join(checked.failed)}" if checked.failed else f"passed {checked.passed} checks"
        lines.append(f"check    {result} on {checked.machine}  ({who})")
    for who, solved in said:
        if isinstance(solved, Solved):
            lines.append(f"solved   {solved.mean:.1%} of {solved.episodes} episodes by {solved.policy}  ({who})")
            lines.append(f"         tasks by solve rate, 0 to 100 % in tenths: {_bars(solved.histogram)}")
    ratings = Counter(rated.good for _, rated in said if isinstance(rated, Rated))
    if ratings:
        lines.append(f"ratings  {ratings[True]} good, {ratings[False]} bad")
    lines += [f"issue    {issue.text}  ({who})" for who, issue in said if isinstance(issue, Issue)]
    return lines


def _who(key: str, author: str) -> str:
    return "the author" if key == author else f"key {key[:16]}…"


def _bars(counts: Sequence[int]) -> str:
    """Such as 12 3 . . 1: a dot for none."""
    return " ".join(str(count) if count else "." for count in counts)
