"""What the coordinator keeps on disk beside its log: submissions, projections, manifests and chunks of weights.

Called by the desk and the files that use it. It decides who may read a blob, and deletes blobs that are no longer needed
and that the run file's `storage.retain` does not keep. The log still has the hashes of what was deleted.
"""

import contextlib
from collections.abc import Iterable, Iterator

from shoal.config import StorageConfig
from shoal.ledger.answers import Refused
from shoal.ledger.log.book import Book
from shoal.ledger.rules.verdicts import is_open
from shoal.ledger.state import State, SubmissionRecord
from shoal.net.blobs import FolderBlobs, Upload
from shoal.protocol import types as t
from shoal.protocol.wire import from_json


class Kept:
    """The blobs of a run, sorted by what they are."""

    def __init__(self, blobs: FolderBlobs, book: Book, storage: StorageConfig) -> None:
        self._blobs, self._book, self._storage = blobs, book, storage
        self.manifests: dict[int, t.Manifest] = {}
        """Manifests of the versions whose chunks are kept."""
        self._public_chunks = set[str]()
        for version in book.state.main.versions:
            self.remember(version)
        self.bodies = {
            name: book.state.leases[submission.lease].version
            for name, submission in book.state.submissions.items()
            if blobs.has(name)
        }
        """Submissions whose bodies are kept, with their version."""
        self.projections = {
            blob: name
            for name, submission in book.state.submissions.items()
            for blob in submission.projections.values()
        }
        """Blobs of validators' projections, with their submission."""
        self._uploading = set[str]()
        """Leases whose bodies are being uploaded."""

    @property
    def state(self) -> State:
        return self._book.state

    def remember(self, version: int) -> None:
        """Remember a published version's manifest, if its blob is here."""
        name = self.state.main.versions[version].manifest
        if self._blobs.has(name):
            signed = from_json(self._blobs.get(name), t.SignedManifest)
            self.manifests[version] = from_json(signed.body, t.Manifest)
            self._public_chunks |= _chunks([self.manifests[version]])

    def may_read(self, name: str, key: str) -> bool:
        """Whether a key may read a blob. Anyone may read chunks, and submissions whose result is final.

        Only validators may read other submissions, and the trainer those that are decided. Projections stay private
        until all validators have judged, so that no validator can copy another's.
        """
        if name in self._public_chunks:
            return True
        if name in self.projections:
            judged = self.projections[name]
            # guard: projections-are-private
            return judged not in self.state.pending and judged not in self.state.rechecks
        submission = self.state.submissions.get(name)
        if submission is None:
            return False
        known = key in self.state.validators or (submission.decided and key == self.state.trainer_key)
        return known or self._is_final(submission)  # guard: pending-is-private

    def _is_final(self, submission: SubmissionRecord) -> bool:
        """Whether nobody can still be paid for its groups: its slots are final, or their version is retired.

        A refused block is leased again with the same seeds, so a worker that could read its honest groups would copy them.
        """
        state, lease = self.state, self.state.leases[submission.lease]
        version = state.main.versions[lease.version]
        done = all(version.blocks[block].status == "done" for block in lease.blocks)
        return submission.decided and (done or version.revealed or state.phase == "ended")  # guard: refused-is-private

    @contextlib.contextmanager
    def upload(self, lease: str) -> Iterator[Upload]:
        """A file for the body of a lease. One at a time for each lease, so that leases bound the bytes being uploaded."""
        if lease in self._uploading:  # guard: one-upload-a-lease
            raise Refused("busy", f"a body for lease {lease} is being uploaded: send again when that upload has ended")
        self._uploading.add(lease)
        try:
            with self._blobs.upload() as upload:
                yield upload
        finally:
            self._uploading.remove(lease)

    def forget_old(self) -> None:
        """Delete old bodies and chunks that `storage.retain` does not keep."""
        storage, state = self._storage, self.state
        if storage.retain == "all":
            return
        oldest = state.main.version - max(storage.window_steps, state.rules.max_staleness + 1)
        for name in [name for name, version in self.bodies.items() if version < oldest]:
            if not is_open(state, state.submissions[name]) and not (
                storage.retain == "batches" and self._was_used(name)
            ):
                self._forget_body(name)
        at_work = self._versions_at_work()
        kept = {v: m for v, m in self.manifests.items() if v >= oldest or v in at_work}
        dropped, self.manifests = [m for v, m in self.manifests.items() if v not in kept], kept
        for chunk in _chunks(dropped) - _chunks(kept.values()):
            self._public_chunks.discard(chunk)
            self._blobs.delete(chunk)

    def make_room(self, quota: int) -> bool:
        """Whether blobs fit into the quota, after deleting refused bodies if need be. So garbage cannot stop the run."""
        if self._blobs.size_bytes <= quota:
            return True
        accepted = {slot.submission for version in self.state.main.versions.values() for slot in version.slots.values()}
        for name in [name for name in self.bodies if name not in accepted]:  # guard: accepted-bodies-stay
            if not is_open(self.state, self.state.submissions[name]):
                self._forget_body(name)  # guard: garbage-makes-room
            if self._blobs.size_bytes <= quota:
                return True
        return False

    def _forget_body(self, name: str) -> None:
        del self.bodies[name]
        for blob in (name, *self.state.submissions[name].projections.values()):
            self.projections.pop(blob, None)
            self._blobs.delete(blob)

    def _versions_at_work(self) -> set[int]:
        """Versions that a validator may still have to fetch to judge a submission, however old they are."""
        state = self.state
        judged = [state.submissions[name].lease for name in (*state.pending, *state.rechecks)]
        return {state.leases[lease].version for lease in judged}  # guard: judged-weights-stay

    def _was_used(self, submission: str) -> bool:
        lease = self.state.leases[self.state.submissions[submission].lease]
        slots = self.state.main.versions[lease.version].slots.values()
        return any(slot.submission == submission and slot.step >= 0 for slot in slots)


def _chunks(manifests: Iterable[t.Manifest]) -> set[str]:
    return {chunk for manifest in manifests for file in manifest.files for chunk in file.chunks}
