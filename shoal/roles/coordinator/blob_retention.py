"""Retention of blobs and weights: what the coordinator keeps, deletes and lets others read.

An *anchor* is a version that is published whole. A node that has no version fetches the newest anchor and all patches after
it; slow ones may still be fetching earlier anchors.
"""

import contextlib
import itertools
import logging
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from shoal.config import HostConfig, StorageConfig
from shoal.errors import NothingYet, StateError, cause_of
from shoal.ledger.errors import Refused
from shoal.ledger.log.writer import LogWriter
from shoal.ledger.state import State
from shoal.ledger.verdict_decisions import is_final, is_open
from shoal.net.blobs import FolderBlobs, Upload, path_of
from shoal.net.server_address import port_of_living
from shoal.protocol import messages as t
from shoal.protocol.constants import MAX_PATCH_CHAIN
from shoal.protocol.continuations import is_continued, parent_slot
from shoal.protocol.encoding import from_json
from shoal.protocol.messages import Manifest
from shoal.runs.retention_rule import deletable, oldest_kept
from shoal.weights.manifest import chunks_of, content_of, is_whole

SLOWEST_LINE_BYTES_PER_S = 6_250_000
"""Of a node that the run waits for: 50 Mb/s, 37 minutes for a policy of 7B parameters in bfloat16."""


def versions_to_keep(manifests: Mapping[int, Manifest], used: Iterable[int], now: float) -> set[int]:
    """The versions whose weights must stay, if those in `used` must be loadable.

    These are the versions themselves with what their patches begin at, back to whole ones; the newest anchor with all after
    it; and each earlier anchor with all after it, until the slowest node that began with it has fetched it and the patches
    that lead to the newest version. An anchor from which no chain of patches leads there is of no use to such a node.
    """
    stay = set[int]()
    waiting = [version for version in used if version in manifests]
    while waiting:
        version = waiting.pop()
        if version not in stay:
            stay.add(version)
            bases = [] if is_whole(manifests[version]) else [patch.base for patch in manifests[version].patches]
            waiting += [base for base in bases if base in manifests]
    anchors = [version for version in sorted(manifests) if is_whole(manifests[version])]
    if anchors:
        first = anchors[-1]
        for anchor, following in itertools.pairwise(anchors):
            last_began, chain_bytes = manifests[following].issued, _chain_bytes(manifests, anchor)
            if chain_bytes is not None and now < last_began + chain_bytes / SLOWEST_LINE_BYTES_PER_S:
                first = min(first, anchor)
        stay |= {version for version in manifests if version >= first}  # guard: anchors-stay
    return stay


def _chain_bytes(manifests: Mapping[int, Manifest], anchor: int) -> float | None:
    """The bytes of an anchor and of the patches from it to the newest version; None if no chain leads there."""
    newest = max(manifests)
    size_bytes = {anchor: (sum(file.size for file in manifests[anchor].files), 0)}
    for version in range(anchor + 1, newest + 1):
        patches = manifests[version].patches if version in manifests else ()
        ways = [
            (before + patch.file.size, steps + 1)
            for patch in patches
            for before, steps in [size_bytes.get(patch.base, (0, MAX_PATCH_CHAIN))]
            if steps < MAX_PATCH_CHAIN
        ]
        if ways:
            size_bytes[version] = min(ways)
    return size_bytes[newest][0] if newest in size_bytes else None


# --- what the coordinator keeps on disk beside its log ---


log = logging.getLogger("coordinator")


class BlobRetention:
    """The blobs of a run, sorted by what they are."""

    def __init__(self, blobs: FolderBlobs, log_writer: LogWriter, storage: StorageConfig, public: Path) -> None:
        """`public` is the folder of what anyone may read."""
        self._blobs, self._log_writer, self._storage = blobs, log_writer, storage
        self.public = PublicBlobs(public, blobs)
        self.manifests: dict[int, t.Manifest] = {}
        """Manifests of the versions whose chunks are kept."""
        self._contents: dict[int, str] = {}
        """Their digests without dates."""
        self.coming = set[str]()
        """Chunks that the trainer sent since the last version was published: the next manifest names them. After a start,
        also all other blobs that no event names: a kill left them, and some may be such chunks."""
        self.published_at = 0
        """When the trainer signed the last version that was published since the start, seconds since the epoch."""
        for version in log_writer.state.main.versions:
            try:
                self.remember(version)
            except StateError:
                if version >= self._oldest_fresh():
                    raise
                log.warning("the manifest of version=%d is damaged: its weights are not kept", version)
        self.public.hide_others()
        self.bodies = {
            name: log_writer.state.leases[submission.lease].version
            for name, submission in log_writer.state.submissions.items()
            if blobs.has(name)
        }
        """Submissions whose bodies are kept, with their version."""
        self.projections = {
            blob: name
            for name, submission in log_writer.state.submissions.items()
            for blob in submission.projections.values()
        }
        """Blobs of validators' projections, with their submission."""
        self.records = {
            submission.record: name for name, submission in log_writer.state.submissions.items() if submission.record
        }
        """The host's records of submissions, with their submission."""
        self.coming |= {path.name for path in blobs.paths()} - self._named()  # guard: left-by-a-kill
        self._told_early = False
        """Whether the host was told that weights go early."""
        self._uploading = set[str]()
        """Leases whose bodies are being uploaded."""

    @property
    def state(self) -> State:
        return self._log_writer.state

    def _named(self) -> set[str]:
        """Blobs of the log that are kept."""
        bodies = {blob for name in self.bodies for blob in self._with(name)}
        return bodies | _chunks(self.manifests.values()) | {v.manifest for v in self.state.main.versions.values()}

    def _with(self, name: str) -> list[str]:
        """A submission's blobs: its body, the host's record of it, and the projections of those who judged it."""
        submission = self.state.submissions[name]
        return [blob for blob in (name, submission.record, *submission.projections.values()) if blob]

    def expect(self, name: str) -> None:
        """A blob will be booked now, so it does not go with those that no event names."""
        self.coming.discard(name)  # guard: resent-after-a-kill

    def stored(self, chunk: str) -> None:
        """The trainer's chunk was stored, perhaps in the place of a damaged one."""
        self.coming.add(chunk)
        self.public.again(chunk)  # guard: repaired-for-all

    def remember(self, version: int) -> None:
        """Remember a published version's manifest, if its blob is here."""
        name = self.state.main.versions[version].manifest
        if self._blobs.has(name):
            signed = from_json(self._blobs.get(name), t.SignedManifest)
            self.manifests[version] = from_json(signed.body, t.Manifest)
            self._contents[version] = content_of(self.manifests[version])
            self.public.show({name, *_chunks([self.manifests[version]])})

    def published(self, created: int) -> None:
        """A version was published, so no chunk is coming. Delete what no version names: no event will."""
        for chunk in self.coming - _chunks(self.manifests.values()):  # guard: unnamed-chunks
            self._blobs.delete(chunk)
        self.coming.clear()
        self.published_at = created

    def content(self, version: int) -> str:
        """Digest of a version's manifest without its dates; empty if the manifest is not kept, or damaged."""
        if version not in self._contents:
            with contextlib.suppress(NothingYet, StateError):
                self.remember(version)  # it was booked a moment ago
        return self._contents.get(version, "")

    def may_read(self, name: str, key: str) -> bool:
        """Whether a key may read a blob. Anyone may read chunks, manifests, and submissions whose result is
        final.

        Only validators that were not removed may read other submissions, and the trainer those that are decided.
        Projections stay private until all validators have judged, so that no validator can copy another's.
        """
        if name in self.public:
            return True
        if name in self.projections:
            judged = self.projections[name]
            # guard: projections-are-private
            return judged not in self.state.pending and judged not in self.state.rechecks
        submission = self.state.submissions.get(self.records.get(name, name))
        if submission is None:
            return False
        judges = self.state.panel()  # guard: removed-judges-read-nothing
        known = key in judges or (submission.decided and key == self.state.trainer_key)
        return known or is_final(self.state, submission)  # guard: pending-is-private

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
        """Delete old bodies and weights that `storage.retain` does not keep."""
        if (oldest := oldest_kept(self.state, self._storage)) <= 0:
            return
        for name in self._deletable({name: version for name, version in self.bodies.items() if version < oldest}):
            self._forget_body(name)
        self._forget_weights([version for version in self._spare_versions(self.state.time) if version < oldest])

    def make_room(self, quota: int) -> bool:
        """Whether blobs fit into the quota. If not, delete what the run can do without, until what is stored fits.

        Bodies that are still being uploaded count, but nothing is deleted for them: they may be garbage.

        Space must be freed here too: without room there are no leases, so no version is published, and nothing else would
        call `forget_old`. Refused bodies go first, then weights and accepted bodies inside the window, oldest first.
        """
        for forget in itertools.chain([self.forget_old], self._spare()):
            if self._blobs.stored_bytes <= quota:  # guard: uploads-drive-nothing-out
                break
            forget()
        return self._blobs.size_bytes <= quota

    def _spare(self) -> Iterator[Callable[[], None]]:
        """Ways to free space one by one, those that are missed least first."""
        accepted = {slot.submission for version in self.state.main.versions.values() for slot in version.slots.values()}
        for name in [name for name in self.bodies if name not in accepted]:
            if not is_open(self.state, self.state.submissions[name]):
                yield partial(self._forget_body, name)  # guard: garbage-makes-room
        if self._storage.retain == "all":
            return
        for version in self._spare_versions(math.inf):
            yield partial(self._forget_early, version)  # guard: old-weights-make-room
        for name in sorted(self._deletable(self.bodies), key=self.bodies.__getitem__):
            if not self._is_to_train_on(name):  # guard: accepted-bodies-stay
                yield partial(self._forget_body, name)

    def _spare_versions(self, now: float) -> list[int]:
        """Versions whose weights no node needs any more, oldest first: nothing can be submitted for them or is judged, and
        no patch leads from them to a version that is needed."""
        fresh, at_work = self._oldest_fresh(), self._versions_at_work()
        used = [
            version for version in self.manifests if version >= fresh or version in at_work
        ]  # guard: fresh-weights-stay
        stay = versions_to_keep(self.manifests, used, now)
        return [version for version in sorted(self.manifests) if version not in stay]

    def _oldest_fresh(self) -> int:
        """The oldest version for which something may still be submitted."""
        return self.state.main.version - self.state.rules.max_staleness

    def _forget_early(self, version: int) -> None:
        """Delete the weights of a version for which there is no room, even if a slow node is fetching them."""
        if not self._told_early and version not in self._spare_versions(self.state.time):
            self._told_early = True
            log.warning(
                "the weights of version=%d go before a node with 50 Mb/s could fetch them and the patches after them: "
                "storage.quota_mb is full. Raise it, or publish fewer whole versions (storage.anchor_every)", version,
            )  # fmt: skip
        self._forget_weights([version])

    def _forget_weights(self, versions: Sequence[int]) -> None:
        dropped = [self.manifests.pop(version) for version in versions]
        for version in versions:
            self._contents.pop(version, None)
        versions_to_keep = _chunks(self.manifests.values()) | self.coming  # guard: coming-chunks-stay
        for chunk in _chunks(dropped) - versions_to_keep:
            self._delete_public(chunk)
        for version in versions:
            self._delete_public(self.state.main.versions[version].manifest)

    def _delete_public(self, blob: str) -> None:
        self.public.hide(blob)
        self._blobs.delete(blob)

    def public_piece(self, rng: random.Random, most_bytes: int) -> tuple[str, int, bytes] | None:
        """A random piece of a chunk of a fresh version: hash, offset and bytes. None if there is none."""
        fresh = [manifest for version, manifest in self.manifests.items() if version >= self._oldest_fresh()]
        chunks = sorted(_chunks(fresh))
        if not chunks:
            return None
        name = rng.choice(chunks)
        try:
            data = self._blobs.get(name)  # guard: judged-by-sound-chunks
        except (NothingYet, StateError) as error:
            log.warning("no relay is judged by it: %s", error)
            return None
        start = rng.randrange(max(1, len(data) - most_bytes + 1))
        return name, start, data[start : start + most_bytes]

    def forget_unbooked(self, blob: str, booked: Iterable[str]) -> None:
        """Delete a manifest or projections that no event names, if `booked` does not have them. Nobody could read them."""
        if blob and blob not in booked:
            self.projections.pop(blob, None)
            self._delete_public(blob)

    def _forget_body(self, name: str) -> None:
        del self.bodies[name]
        for blob in self._with(name):
            self.records.pop(blob, None)
            self.projections.pop(blob, None)
            self._blobs.delete(blob)

    def _deletable(self, bodies: Mapping[str, int]) -> list[str]:
        """Of these submissions, each with its version, those whose bodies nobody needs as long as the run lasts."""
        continued = self._continued()
        return [name for name in deletable(self.state, self._storage, bodies) if name not in continued]

    def _continued(self) -> set[str]:
        """Bodies that hold groups which somebody continues, or which a validator may need to judge that."""
        state = self.state
        judged = [state.submissions[name].lease for name in (*state.pending, *state.rechecks)]
        leases = [state.leases[name] for name in (*state.open_leases, *judged)]
        size, found = state.rules.block_groups, set[str]()
        for lease in (lease for lease in leases if is_continued(lease.blocks[0])):
            slots = state.stream_of(lease).versions[lease.version].slots
            found |= {slots[parent_slot(slot, size)].submission for slot in state.slots_of(lease)}
        return found  # guard: continued-bodies-stay

    def _is_to_train_on(self, name: str) -> bool:
        """Whether the trainer may still need a body for a batch."""
        stream = self.state.main
        if self.bodies[name] < self._oldest_fresh():
            return False
        slots = stream.versions[self.bodies[name]].slots.values()
        return any(
            slot.submission == name and slot.status == "signal" and not 0 <= slot.step < stream.version
            for slot in slots
        )

    def _versions_at_work(self) -> set[int]:
        """Versions that a validator may still have to fetch to judge a submission, however old they are."""
        state = self.state
        judged = [state.submissions[name].lease for name in (*state.pending, *state.rechecks)]
        return {state.leases[lease].version for lease in judged}  # guard: judged-weights-stay


def _chunks(manifests: Iterable[t.Manifest]) -> set[str]:
    return {chunk for manifest in manifests for chunk in chunks_of(manifest)}


# --- chunks and manifests of published versions ---
#
# The folder holds a hard link to each blob, so another process or web server can serve it without asking who may read what.


class PublicBlobs:
    """The names of blobs that anyone may read, each with a link in `folder` if it is here."""

    def __init__(self, folder: Path, blobs: FolderBlobs) -> None:
        self.folder, self._blobs = folder, blobs
        self._names = set[str]()
        self._is_told = False

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def show(self, names: Iterable[str]) -> None:
        """Let anyone read these blobs."""
        for name in set(names) - self._names:
            self._names.add(name)
            self._link(name)

    def again(self, name: str) -> None:
        """A blob was stored again: anyone reads it as it is now. A link would still lead to the bytes before."""
        if name in self._names:
            self._link(name)

    def hide(self, name: str) -> None:
        """Take a blob back before it is deleted."""
        if name in self._names:
            self._names.discard(name)
            path_of(self.folder, name).unlink(missing_ok=True)

    def hide_others(self) -> None:
        """Delete links to what is not public any more: a kill left them."""
        for path in self.folder.glob("[0-9a-f][0-9a-f]/*"):
            if path.name not in self._names:
                path.unlink()  # guard: left-links

    def _link(self, name: str) -> None:
        link, stored = path_of(self.folder, name), self._blobs.path_of(name)
        try:
            if link.exists() and os.path.samefile(link, stored):
                return
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)  # of a blob that was stored again
            os.link(stored, link)
        except FileNotFoundError:
            return  # the blob is not here: the coordinator answers so, too
        except OSError as error:
            if not self._is_told:
                log.warning("the origin lacks blobs, and the coordinator serves them itself: %s", cause_of(error))
            self._is_told = True


def origin_of(host: HostConfig, address: Path) -> str:
    """Where clients fetch chunks: a URL, or ":PORT/PATH" of the host that they call. Empty: from the coordinator.

    `address` is the file in which the origin says where it is. Behind a proxy only the run file can say it.
    """
    if host.origin_url or host.public_url:
        return host.origin_url
    port = port_of_living(address)
    return f":{port}/v1/blobs" if port else ""
