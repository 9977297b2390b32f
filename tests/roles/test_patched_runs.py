"""Runs that publish versions as patches: the same weights, small downloads, and anchors that stay as long as needed."""

import asyncio
import shutil
import time

import msgspec
import pytest

from shoal.errors import PeerError
from shoal.protocol.encoding import digest
from shoal.protocol.messages import FileEntry, Manifest, Patch
from shoal.roles.coordinator.blob_retention import SLOWEST_LINE_BYTES_PER_S, versions_to_keep
from shoal.roles.coordinator.main import open_run
from shoal.roles.node.session import Session
from shoal.run_folder import RunFolder
from shoal.runs import log_source
from shoal.step_metrics import read_metrics
from shoal.weights.fetch.version_directory import follow
from shoal.weights.manifest import chunks_of, is_whole, weights_root
from shoal.weights.publish import FolderSink
from tests.roles.testbed import RunTestbed, tiny_run

SLOW = {"train": {"lr": 1e-6}, "policy": {"dtype": "bfloat16"}, "steps": 5}
"""Steps that leave most values as they were."""


def lived(root, **changes) -> RunTestbed:
    testbed = RunTestbed(root, tiny_run(**{**SLOW, **changes}))
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("worker-0")))
    assert testbed.audit().findings == []
    return testbed


def whole(testbed: RunTestbed) -> list[bool]:
    return [is_whole(testbed.coordinator.kept.manifests[version]) for version in range(6)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A finished run of whole versions, and the versions that its nodes rebuilt from patches."""
    followed = []

    def noted(base, partial, target, manifest, steps, aside):
        followed.append(manifest.version)
        follow(base, partial, target, manifest, steps, aside)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.weights.fetch.fetch.follow", noted)
        patch.setattr("shoal.weights.fetch.fetch.take_from_stock", lambda *_: False)  # as on another machine
        return lived(tmp_path_factory.mktemp("plain") / "run"), followed


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """A finished run of which every third version is whole."""
    return lived(tmp_path_factory.mktemp("patched") / "run", storage={"anchor_every": 3})


def test_a_run_with_anchors_ends_with_the_weights_of_one_without(plain, patched):
    plain, _ = plain
    assert whole(plain) == [True] * 6 and whole(patched) == [True, False, False] * 2
    assert patched.weights() == plain.weights()
    assert patched.coordinator.blobs.size_bytes < 0.6 * plain.coordinator.blobs.size_bytes


def test_nodes_of_a_bfloat16_run_fetch_patches_also_beside_whole_versions(plain):
    testbed, followed = plain
    manifests = testbed.coordinator.kept.manifests
    patch_bytes = [manifests[version].patches[0].file.size for version in range(1, 6)]
    assert max(patch_bytes) < sum(file.size for file in manifests[0].files) / 10
    assert set(followed) == {1, 2, 3, 4} and len(followed) >= 8, "the worker and the validator, and the trainer"


def test_an_auditor_rebuilds_a_version_that_was_published_as_a_patch(patched, tmp_path):
    run, state = log_source.FolderRun(patched.folder.root), patched.coordinator.state
    found = asyncio.run(log_source.fetch_weights(run, state, 5, tmp_path / "audit"))
    assert weights_root(found) == state.main.versions[5].root
    blobs, before = patched.coordinator.blobs, state.main.versions[4].manifest
    manifest = blobs.get(before)
    blobs.delete(before)
    with pytest.raises(log_source.Unavailable, match="gone"):
        asyncio.run(log_source.fetch_weights(run, state, 5, tmp_path / "again"))
    blobs.put(manifest)


def test_an_auditor_takes_no_more_disk_for_what_a_patch_begins_at(patched, tmp_path, monkeypatch):
    run, state = log_source.FolderRun(patched.folder.root), patched.coordinator.state
    manifests = patched.coordinator.kept.manifests
    anchor, patch_only = (sum(file.size for file in manifests[version].files) for version in (3, 4))
    for room in (patch_only + manifests[4].patches[0].file.size, anchor - 1):
        assert patch_only < room
        monkeypatch.setattr(log_source, "room_for_version", lambda folder, keep, room=room: room)
        with pytest.raises(log_source.Unavailable, match=f"only {room} may be used"):
            asyncio.run(log_source.fetch_weights(run, state, 4, tmp_path / "audit"))
        assert not list((tmp_path / "audit").rglob("*.safetensors"))
    monkeypatch.setattr(log_source, "room_for_version", lambda folder, keep: anchor)
    asyncio.run(log_source.fetch_weights(run, state, 4, tmp_path / "audit"))


def test_a_trainer_that_was_killed_publishes_its_next_version_whole(plain, tmp_path):
    testbed = RunTestbed(tmp_path / "run", tiny_run(**SLOW | {"storage": {"anchor_every": 9}}))

    async def scenario():
        for until in (3, 5):
            trainer = asyncio.create_task(testbed.trainer().run())
            others = [asyncio.create_task(role.run()) for role in (testbed.validator(), testbed.worker("worker-0"))]
            ticking = asyncio.create_task(testbed._tick())
            while testbed.coordinator.state.main.version < until and not trainer.done():
                await asyncio.sleep(0.01)
            if until < 5:
                trainer.cancel()
                for task in (trainer, *others, ticking):
                    task.cancel()
                await asyncio.gather(trainer, *others, ticking, return_exceptions=True)
            else:
                await asyncio.gather(trainer, *others)
                ticking.cancel()

    asyncio.run(scenario())
    assert testbed.coordinator.state.phase == "ended" and testbed.audit().findings == []
    assert whole(testbed)[0] and 2 <= sum(whole(testbed)) <= 3
    assert testbed.weights() == plain[0].weights()


def test_a_step_goes_on_while_the_version_before_is_published(tmp_path, monkeypatch):
    """Version 1 is held back until the step after it is done: the run is one step stale, so that step's batch is there."""
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=3, rollouts={"max_staleness": 1}))
    trainer, order = testbed.trainer(), []
    step, publish = trainer.learner.step, trainer.publisher.publish

    def noted_step(rows, version):
        metrics = step(rows, version)
        order.append(("stepped", version))
        return metrics

    async def held_publish(policy, version, record=None):
        order.append(("begin", version))
        while version == 1 and ("stepped", 1) not in order:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3 if version == 1 else 0.0)
        await publish(policy, version)
        order.append(("end", version))

    monkeypatch.setattr(trainer.learner, "step", noted_step)
    monkeypatch.setattr(trainer.publisher, "publish", held_publish)
    asyncio.run(testbed.live(trainer, testbed.validator(), testbed.worker("worker-0")))
    # a kill must never find a state that is two versions ahead of what is published
    assert order.index(("stepped", 1)) < order.index(("end", 1)) < order.index(("begin", 2)), order
    assert all("publish_wait_s" in line for line in read_metrics(testbed.folder.metrics))


def test_a_publication_that_fails_ends_the_trainer(tmp_path, monkeypatch):
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    trainer = testbed.trainer()
    publish = trainer.publisher.publish

    async def failing(policy, version, record=None):
        if version == 2:
            raise PeerError("the disk is full")
        await publish(policy, version)

    monkeypatch.setattr(trainer.publisher, "publish", failing)
    monkeypatch.setattr("shoal.roles.coordinator.routes.LONG_POLL_S", 0.2)
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(testbed.live(trainer, testbed.validator(), testbed.worker("worker-0")))
    assert "the disk is full" in str(raised.value.exceptions[0].exceptions[0])


def test_a_worker_fetches_the_next_version_while_it_plays(tmp_path, monkeypatch):
    """Each version is fetched once, also if it came ahead of its lease's turn, or could not be fetched ahead."""
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=5, rollouts={"max_staleness": 1, "block_rollouts": 8}))
    worker, order, failed = testbed.worker("worker-0"), [], []
    play, fetched, bring = worker._play, Session._fetch, Session.bring

    def slow_play(lease, parents):
        order.append(("begin", lease.version))
        time.sleep(0.1)
        groups = play(lease, parents)
        order.append(("end", lease.version))
        return groups

    async def noted_fetch(seat, version, *args):
        brought = await fetched(seat, version, *args)
        if seat is worker.session:
            order.append(("fetched", version))
        return brought

    async def failing_once(seat, version, **options):
        if not failed and seat is worker.session and "keep" not in options:  # loading says what to keep
            failed.append(version)
            raise PeerError("the source went away")
        return await bring(seat, version, **options)

    worker._play = slow_play
    monkeypatch.setattr(Session, "_fetch", noted_fetch)
    monkeypatch.setattr(Session, "bring", failing_once)
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), worker))
    versions = [version for what, version in order if what == "fetched"]
    assert failed and len(versions) == len(set(versions)) >= 4
    ahead = [
        version
        for index, (what, version) in enumerate(order)
        if what == "fetched" and order[:index] and order[index - 1][0] == "begin" and order[index - 1][1] != version
    ]
    assert ahead, order
    assert testbed.audit().findings == []


# --- chunks in the run's folder ---


def test_the_coordinator_takes_the_trainers_chunks_from_the_run_folder(patched):
    blobs, kept = patched.coordinator.blobs, patched.coordinator.kept
    assert not list(patched.folder.outgoing.iterdir())
    assert all(blobs.has(chunk) for manifest in kept.manifests.values() for chunk in chunks_of(manifest))
    assert blobs.stored_bytes == sum(path.stat().st_size for path in blobs.paths())


def test_a_trainer_whose_folder_the_coordinator_does_not_see_sends_its_chunks(tmp_path):
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=2, storage={"anchor_every": 3}))
    testbed.coordinator.outgoing = tmp_path / "elsewhere"
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("worker-0")))
    assert testbed.coordinator.state.phase == "ended" and testbed.audit().findings == []
    manifests = testbed.coordinator.kept.manifests.values()
    assert all(is_whole(manifest) and not manifest.patches for manifest in manifests), "of float32"


def test_a_chunk_with_other_bytes_in_the_trainers_folder_is_not_taken(tmp_path, monkeypatch):
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1))
    put, spoilt = FolderSink.put_span, []

    async def spoiling(sink, name, span):
        await put(sink, name, span)
        spoilt.append(name)
        file = testbed.folder.outgoing / name
        chunk = file.read_bytes()
        file.unlink()  # it may be another name of the checkpoint's file
        file.write_bytes(b"x" + chunk[1:] if len(spoilt) % 2 else b"")

    monkeypatch.setattr(FolderSink, "put_span", spoiling)
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("worker-0")))
    assert spoilt and testbed.audit().findings == []
    assert all(digest(path.read_bytes()) == path.name for path in testbed.coordinator.blobs.paths())


# --- what stays ---


def entry(size: int) -> FileEntry:
    return FileEntry("model.safetensors", size, "", ())


def line_of(count: int, anchor_every: int, size: int = 6_250_000_000) -> dict[int, Manifest]:
    """Versions a minute apart; a whole one takes the slowest node 1,000 s."""
    return {
        v: Manifest(
            run="r", stream="policy", version=v, parents=(), dtype="bfloat16", root=f"{v}", chunk_bytes=1,
            files=(entry(size),) if v % anchor_every == 0 else (), issued=60.0 * v, expires=0.0,
            patches=(Patch(v - 1, f"{v - 1}", "gaps-1", entry(size // 100)),) if v else (),
        )
        for v in range(count)
    }  # fmt: skip


def test_the_anchor_before_stays_until_the_slowest_node_has_fetched_it_and_its_patches():
    manifests = line_of(20, 8)
    fetched_s = (6_250_000_000 + 11 * 62_500_000) / SLOWEST_LINE_BYTES_PER_S
    published = 16 * 60.0
    assert versions_to_keep(manifests, [19], now=published + fetched_s - 1) == set(range(8, 20))
    assert versions_to_keep(manifests, [19], now=published + fetched_s + 1) == set(range(16, 20))


def test_an_anchor_stays_however_many_came_after_it_if_the_slowest_node_still_fetches_it():
    """Where a version is published every minute and every fourth one whole, four more come while it fetches one."""
    manifests = line_of(27, 4)
    fetched_s = (6_250_000_000 + 18 * 62_500_000) / SLOWEST_LINE_BYTES_PER_S
    superseded = 12 * 60.0
    assert versions_to_keep(manifests, [26], now=superseded + fetched_s - 1) == set(range(8, 27))
    assert versions_to_keep(manifests, [26], now=superseded + fetched_s + 1) == set(range(12, 27))


def test_an_anchor_from_which_no_chain_leads_to_the_newest_version_goes():
    """A node that begins with it comes nowhere, so it must not fill the host's disk."""
    assert versions_to_keep(line_of(60, 20), [59], now=59 * 60.0) == set(range(40, 60)), (
        "from 20 on, a chain would be too long"
    )
    dense = {v: msgspec.structs.replace(manifest, patches=()) for v, manifest in line_of(20, 1).items()}
    assert versions_to_keep(dense, [18, 19], now=19 * 60.0) == {18, 19}


def test_an_old_version_that_is_still_judged_stays_with_the_way_to_it():
    assert versions_to_keep(line_of(20, 8), [5, 19], now=1e9) == set(range(6)) | set(range(16, 20))


def test_a_coordinator_keeps_the_way_to_its_newest_version_and_drops_what_no_way_needs(patched, tmp_path):
    shutil.copytree(patched.folder.root, tmp_path / "run")
    storage = msgspec.structs.replace(patched.config.storage, window_steps=1)
    coordinator = open_run(RunFolder(tmp_path / "run"), msgspec.structs.replace(patched.config, storage=storage))
    coordinator.state.pending.clear()
    coordinator.state.rechecks.clear()
    coordinator.kept.make_room(0)
    assert set(coordinator.kept.manifests) == {3, 4, 5}
    kept = {coordinator.state.main.versions[version].manifest for version in (3, 4, 5)}
    kept |= {chunk for manifest in coordinator.kept.manifests.values() for chunk in chunks_of(manifest)}
    assert {path.name for path in RunFolder(tmp_path / "run").chunks.glob("??/*")} == kept, "what is public"
