"""The auditor's part with evidence: what nodes kept is compared with the log, and with each other.

A finding accuses the host, so each rests on a signature of the run key or of the trainer key, both of which the log's first
event names. The folders come from strangers: what is not signed by these keys proves nothing and is only counted.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from shoal.errors import ConfigError, NothingYet, PeerError, StateError, cause_of
from shoal.ledger.errors import FAULTS
from shoal.ledger.log.check import Audit, receipt_findings
from shoal.ledger.slot_draws import lease_of
from shoal.ledger.state import State
from shoal.ledger.state_records import LeaseRecord
from shoal.ledger.versions import CheckpointPublished
from shoal.protocol import messages as t
from shoal.protocol.constants import MAX_JSON_BYTES, MAX_MANIFEST_BYTES, MAX_SUBMISSION_BYTES
from shoal.protocol.encoding import WireError, digest, from_json
from shoal.protocol.host_signatures import is_promised, terms_of
from shoal.roles.node.evidence_store import Kind, kept_in
from shoal.runs.log_source import PublicRun, UrlRun, verified
from shoal.runs.retention_rule import Expiry
from shoal.weights.manifest import ManifestTrust, content_of, open_manifest

P = TypeVar("P", t.Grant, t.Receipt)

CAPS: dict[Kind, int] = {
    "manifest": MAX_MANIFEST_BYTES, "grant": 2 * MAX_JSON_BYTES, "submission": MAX_SUBMISSION_BYTES,
    "receipt": MAX_JSON_BYTES,
}  # fmt: skip
"""Largest file of each kind that is read."""

UNHASHED_S = 600.0
"""For so long, a coordinator may vouch for a state that lacks its newest events."""


class TrainerManifest(NamedTuple):
    """A manifest that the trainer key signed."""

    file: str
    digest: str
    """Of the signed bytes, as the log names them."""
    manifest: t.Manifest


@dataclass
class EvidenceSet:
    """What nodes kept of one run, with the name of each file."""

    manifests: list[TrainerManifest] = field(default_factory=list)
    grants: list[tuple[str, t.Grant]] = field(default_factory=list)
    receipts: list[tuple[str, t.Receipt]] = field(default_factory=list)
    bodies: dict[str, Path] = field(default_factory=dict)
    """Files of submissions by digest."""
    notes: Counter[str] = field(default_factory=Counter)
    """Numbers of files that prove nothing, or that could not be compared in full, by what they are and why."""

    @property
    def num_signed(self) -> int:
        return len(self.manifests) + len(self.grants) + len(self.receipts)

    def contents(self) -> list[str]:
        """What there is, as lines."""
        signed = f"{len(self.manifests)} manifests, {len(self.grants)} leases and {len(self.receipts)} receipts"
        lines = [f"evidence: {signed} that the run's keys signed, {len(self.bodies)} submissions"]
        return lines + [f"evidence: {count} {why}" for why, count in sorted(self.notes.items())]


def read_evidence(folders: Iterable[Path], state: State) -> EvidenceSet:
    """All evidence of a run in these folders: homes of nodes, or what nodes handed over. Raises `ConfigError`."""
    pile = EvidenceSet()
    for folder in folders:
        files = kept_in(folder, state.run)
        if not files:
            raise ConfigError(f"{folder} holds no evidence of run {state.run}: give a node's home, such as ~/.shoal, or "
                              "the folder of this run in its folder `evidence`")  # fmt: skip
        for kind, path in files:
            _take(pile, kind, path, state)
    return pile


def _take(pile: EvidenceSet, kind: Kind, path: Path, state: State) -> None:
    """Add a file to the pile if the run's keys signed what it holds. Raises `ConfigError` if it cannot be read."""
    try:
        data = path.read_bytes() if path.stat().st_size <= CAPS[kind] else b""
    except OSError as error:
        raise ConfigError(f"cannot read evidence {path}: {cause_of(error)}") from None
    try:
        if kind == "manifest":
            manifest = open_manifest(data, ManifestTrust(state.run, state.publishers), now=None)
            pile.manifests.append(TrainerManifest(str(path), digest(data), manifest))
        elif kind == "grant":
            pile.grants.append((str(path), _promise(data, t.Grant, state)))
        elif kind == "receipt":
            pile.receipts.append((str(path), _promise(data, t.Receipt, state)))
        else:
            pile.bodies[digest(data)] = path
    except (PeerError, WireError):
        pile.notes[f"{kind}s prove nothing: of another run, or not signed by this run's keys"] += 1


def _promise(data: bytes, kind: type[P], state: State) -> P:
    promise = from_json(data, kind)
    if promise.run != state.run or not is_promised(promise, state.run_key):  # guard: evidence-is-signed
        raise WireError("the run key did not sign it")
    return promise


class WithEvidence:
    """A run as an auditor reads it; bodies that it does not give come from evidence. Their names are their hashes."""

    def __init__(self, run: PublicRun, pile: EvidenceSet) -> None:
        self.name, self._run, self._pile = run.name, run, pile

    def expiry(self, state: State) -> Expiry | None:
        return None  # evidence is to be compared with all that it names

    async def oldest_served(self, state: State) -> int:
        return 0

    async def rows(self, most: int | None = None) -> list[tuple[bytes, str]]:
        return await self._run.rows(most)

    async def page(self, after: int) -> list[tuple[bytes, str]]:
        return await self._run.page(after)

    async def newer(self, after: int) -> list[tuple[bytes, str]]:
        return await self._run.newer(after)

    async def blob(self, name: str) -> bytes:
        try:
            return await self._run.blob(name)
        except NothingYet:
            if name not in self._pile.bodies:
                raise
            return verified(self._pile.bodies[name].read_bytes(), name)

    async def manifest(self, version: int, name: str) -> bytes:
        return await self._run.manifest(version, name)


async def accusations(pile: EvidenceSet, log: Audit, run: PublicRun) -> list[str]:
    """What the evidence proves against the host, a sentence each."""
    logged = await _logged_manifests(pile, log, run)
    decided = {submission.digest for submission in log.state.submissions.values() if submission.decided}
    if left := pile.bodies.keys() - decided:
        pile.notes["submissions are not recomputed: the log holds no decision on them"] = len(left)
    found = [*_manifests_against(pile, logged, log.state), *_grants_against(pile, logged, log)]
    contents = [((m.version, "the trainer key", "manifests of the version"), content_of(m), file)
                for file, _, m in pile.manifests]  # fmt: skip
    asked = [((g.lease.id, "the run key", "grants of the lease"), _asked(g), file) for file, g in pile.grants]
    found += [*_apart(contents), *_apart(asked), *receipts_apart(pile.receipts)]
    due = [(file, receipt) for file, receipt in pile.receipts
           if not isinstance(run, UrlRun) or is_due(receipt, log, time.time())]  # fmt: skip
    if later := len(pile.receipts) - len(due):
        pile.notes["receipts are newer than the log that was read: ask again in ten minutes"] = later
    return found + [line for file, receipt in due for line in receipt_findings(log, [receipt], file)]


def is_due(receipt: t.Receipt, log: Audit, now: float) -> bool:
    """Whether the log must hold what a receipt is for. A coordinator seldom hashes a long state, so the log that it vouches
    for may end before the newest receipts of a live run. What is signed for a far future is due, too."""
    return receipt.seq < len(log.entries) or abs(now - receipt.time) > UNHASHED_S  # guard: lost-tail-is-found


def receipts_apart(receipts: Iterable[tuple[str, t.Receipt]]) -> list[str]:
    """Receipts that contradict each other: of one event with two heads, or of one lease with two submissions. They prove
    two histories without any log."""
    said = list(receipts)
    heads = [((r.seq, "the run key", "heads at event"), r.head, file) for file, r in said]
    filled = [((r.lease, "the run key", "submissions for lease"), r.digest, file) for file, r in said]
    return [*_apart(heads), *_apart(filled)]


def _apart(said: Iterable[tuple[tuple[object, str, str], object, str]]) -> Iterator[str]:
    """Where the same key signed two different versions of one thing. Each item is ((name, key, what), value, file)."""
    firsts: dict[tuple[object, str, str], tuple[object, str]] = {}
    for about, value, file in said:
        first, first_file = firsts.setdefault(about, (value, file))
        if first != value:  # guard: signed-twice
            name, key, what = about
            yield f"{key} signed two different {what} {name} ({first_file}; {file})"


async def _logged_manifests(pile: EvidenceSet, log: Audit, run: PublicRun) -> dict[int, t.Manifest]:
    """By version, a manifest that the log names, if anybody still has it."""
    state = log.state
    names = {(e.body.version, e.body.manifest) for e in log.entries if isinstance(e.body, CheckpointPublished)}
    found = {manifest.version: manifest for _, name, manifest in pile.manifests if (manifest.version, name) in names}
    asked = {manifest.version for _, _, manifest in pile.manifests} | {grant.lease.version for _, grant in pile.grants}
    for version in (asked & state.main.versions.keys()) - found.keys():
        with contextlib.suppress(PeerError, StateError):
            data = await run.manifest(version, state.main.versions[version].manifest)
            found[version] = open_manifest(data, ManifestTrust(state.run, state.publishers), now=None, version=version)
    return found


def _manifests_against(pile: EvidenceSet, logged: dict[int, t.Manifest], state: State) -> Iterator[str]:
    """Signed manifests whose weights, or whose other files, are not those of the version that the log has."""
    for file, _, manifest in pile.manifests:
        record, known = state.main.versions.get(manifest.version), logged.get(manifest.version)
        if record is None:
            continue  # signed, but never published here; receipts reveal a log that was cut off
        if manifest.root != record.root:  # guard: evidence-of-other-weights
            yield (f"version {manifest.version}: the trainer key signed a manifest with weights root "
                   f"{manifest.root[:12]}, the log has {record.root[:12]} ({file})")  # fmt: skip
        elif known is None:
            pile.notes["manifests were compared by their weights only: the log's own are no longer kept"] += 1
        elif content_of(manifest) != content_of(known):  # guard: evidence-of-other-files
            yield (f"version {manifest.version}: the trainer key signed a manifest with other files than the one that the "
                   f"log names ({file})")  # fmt: skip


def _grants_against(pile: EvidenceSet, logged: dict[int, t.Manifest], log: Audit) -> Iterator[str]:
    """Signed leases that are not what the log gives."""
    for file, grant in pile.grants:
        if grant.lease.version not in log.links:
            pile.notes["leases were compared without their seeds and tasks: the links are not revealed"] += 1
        for wrong in _wrong_with(grant, logged.get(grant.lease.version), log):
            yield f"lease {grant.lease.id}: the run key signed it {wrong} ({file})"


def _wrong_with(grant: t.Grant, known: t.Manifest | None, log: Audit) -> Iterator[str]:
    """How a signed lease differs from what the log gives; `known` is the manifest of its version that the log names."""
    state, lease = log.state, grant.lease
    booked, link = state.leases.get(lease.id), log.links.get(lease.version)
    if booked is None:
        yield "but the log does not hold it"
        return
    if (lease.worker, lease.version) != (booked.worker, booked.version):
        yield "for another worker or version than the log has"
        return
    if (lease.issued, lease.deadline) != (booked.issued, booked.deadline):  # guard: grant-of-other-times
        yield "with other times than the log has"
    root = state.main.versions[lease.version].root
    if grant.root != root:  # guard: grant-of-other-weights
        yield f"with weights root {grant.root[:12]}, the log has {root[:12]}"
    elif known is not None and grant.content not in ("", content_of(known)):
        yield "with other files of the version than the log names"
    terms = terms_of(state.envs, state.rules), state.sampling
    if (grant.terms, lease.sampling) != terms:  # guard: grant-of-other-terms
        yield "for other environments, group sizes or sampling than the log has"
    if tuple(block.index for block in lease.blocks) != booked.blocks:
        yield "for other blocks than the log has"
    elif link is not None:
        yield from _drawn_otherwise(lease, state, booked, bytes.fromhex(link.link))


def _drawn_otherwise(lease: t.Lease, state: State, booked: LeaseRecord, link: bytes) -> Iterator[str]:
    try:
        drawn = leased(state, booked, link)
    except StateError as fault:
        yield f"but {fault}"  # guard: grant-of-an-impossible-lease
        return
    if lease.blocks != drawn.blocks:
        yield "with other seeds or tasks than the revealed link gives"  # guard: grant-of-other-seeds


def leased(state: State, booked: LeaseRecord, link: bytes) -> t.Lease:
    """A lease of the log as its worker was given it. Raises `StateError` if the log's rules can draw none: a host may write
    anything into a log."""
    try:
        return lease_of(state, booked, link)
    except FAULTS as fault:
        # guard: impossible-leases-are-told
        raise StateError(
            f"no seed gives what its lease asked for ({type(fault).__name__}). No coordinator granted it"
        ) from None


def _asked(grant: t.Grant) -> object:
    """What a lease asks for. Its dates may change."""
    return grant.lease.worker, grant.lease.version, grant.lease.blocks, grant.lease.sampling, grant.terms, grant.root
