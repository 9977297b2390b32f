"""Runs that publish versions as patches: the same weights, small downloads, and anchors that stay as long as needed."""

import asyncio
import time

import msgspec
import pytest

from shoal.config import check_run
from shoal.errors import ConfigError, PeerError
from shoal.metrics import read_metrics
from shoal.protocol.encoding import digest
from shoal.protocol.messages import FileEntry, Manifest, Patch
from shoal.roles.coordinator.retention import SLOWEST_LINE_BYTES_PER_S, versions_to_keep
from shoal.roles.node.session import Session
from shoal.runs import public_run
from shoal.weights.fetch.version_directory import follow
from shoal.weights.manifest import chunks_of, is_whole, weights_root
from shoal.weights.publish import FolderSink
from tests.roles.in_memory_run import Town, tiny_run

SLOW = {"train": {"lr": 1e-6}, "policy": {"dtype": "bfloat16"}, "steps": 5}
"""Steps that leave most values as they were."""


def lived(root, **changes) -> Town:
    town = Town(root, tiny_run(**{**SLOW, **changes}))
    asyncio.run(town.live(town.trainer(), town.validator(), town.worker("worker-0")))
    assert town.audit().findings == []
    return town


def whole(town: Town) -> list[bool]:
    return [is_whole(town.desk.kept.manifests[version]) for version in range(6)]


def test_a_run_with_anchors_ends_with_the_weights_of_one_without(tmp_path):
    plain, patched = lived(tmp_path / "plain"), lived(tmp_path / "patched", storage={"anchor_every": 3})
    assert whole(plain) == [True] * 6 and whole(patched) == [True, False, False] * 2
    assert patched.weights() == plain.weights()
    assert patched.desk.blobs.size_bytes < 0.6 * plain.desk.blobs.size_bytes


def test_nodes_of_a_bfloat16_run_fetch_patches_also_beside_whole_versions(tmp_path, monkeypatch):
    followed = []

    def noted(base, partial, target, manifest, steps, aside):
        followed.append(manifest.version)
        follow(base, partial, target, manifest, steps, aside)

    monkeypatch.setattr("shoal.weights.fetch.fetch.follow", noted)
    monkeypatch.setattr("shoal.weights.fetch.fetch.take_from_stock", lambda *_: False)  # as on another machine
    town = lived(tmp_path / "run")
    manifests = town.desk.kept.manifests
    patch_bytes = [manifests[version].patches[0].file.size for version in range(1, 6)]
    assert max(patch_bytes) < sum(file.size for file in manifests[0].files) / 10
    assert set(followed) == {1, 2, 3, 4} and len(followed) >= 8, "the worker and the validator, and the trainer"


def test_the_float32_demo_publishes_whole_versions(tmp_path):
    town = lived(tmp_path / "run", policy={"dtype": "float32"}, storage={"anchor_every": 3})
    assert whole(town) == [True] * 6
    assert not any(manifest.patches for manifest in town.desk.kept.manifests.values())


@pytest.mark.parametrize("every", [0, 33])
def test_anchors_are_not_further_apart_than_a_chain_may_be_long(every):
    with pytest.raises(ConfigError, match=rf"storage\.anchor_every = {every}: must be from 1 to 32$"):
        check_run(tiny_run(storage={"anchor_every": every}))


def test_an_auditor_rebuilds_a_version_that_was_published_as_a_patch(tmp_path):
    town = lived(tmp_path / "run", storage={"anchor_every": 3})
    run, state = public_run.FolderRun(town.folder.root), town.desk.state
    found = asyncio.run(public_run.fetch_weights(run, state, 5, tmp_path / "audit"))
    assert weights_root(found) == state.main.versions[5].root
    town.desk.blobs.delete(state.main.versions[4].manifest)
    with pytest.raises(public_run.Unavailable, match="gone"):
        asyncio.run(public_run.fetch_weights(run, state, 5, tmp_path / "again"))


def test_an_auditor_takes_no_more_disk_for_what_a_patch_begins_at(tmp_path, monkeypatch):
    town = lived(tmp_path / "run", storage={"anchor_every": 3})
    run, state, manifests = public_run.FolderRun(town.folder.root), town.desk.state, town.desk.kept.manifests
    anchor, patched = (sum(file.size for file in manifests[version].files) for version in (3, 4))
    patch = manifests[4].patches[0].file.size
    for room in (patched + patch, anchor - 1):
        assert patched < room
        monkeypatch.setattr(public_run, "room_for_version", lambda folder, keep, room=room: room)
        with pytest.raises(public_run.Unavailable, match=f"only {room} may be used"):
            asyncio.run(public_run.fetch_weights(run, state, 4, tmp_path / "audit"))
        assert not list((tmp_path / "audit").rglob("*.safetensors"))
    monkeypatch.setattr(public_run, "room_for_version", lambda folder, keep: anchor)
    asyncio.run(public_run.fetch_weights(run, state, 4, tmp_path / "audit"))


def test_a_trainer_that_was_killed_publishes_its_next_version_whole(tmp_path):
    town = Town(tmp_path / "run", tiny_run(**SLOW | {"storage": {"anchor_every": 9}}))

    async def story():
        for until in (3, 5):
            trainer = asyncio.create_task(town.trainer().run())
            others = [asyncio.create_task(role.run()) for role in (town.validator(), town.worker("worker-0"))]
            ticking = asyncio.create_task(town._tick())
            while town.desk.state.main.version < until and not trainer.done():
                await asyncio.sleep(0.01)
            if until < 5:
                trainer.cancel()
                for task in (trainer, *others, ticking):
                    task.cancel()
                await asyncio.gather(trainer, *others, ticking, return_exceptions=True)
            else:
                await asyncio.gather(trainer, *others)
                ticking.cancel()

    asyncio.run(story())
    assert town.desk.state.phase == "ended" and town.audit().findings == []
    assert whole(town)[0] and 2 <= sum(whole(town)) <= 3
    assert town.weights() == lived(tmp_path / "plain").weights()


def test_a_step_goes_on_while_the_version_before_is_published(tmp_path, monkeypatch):
    """Version 1 is held back until the step after it is done: the run is one step stale, so that step's batch is there."""
    town = Town(tmp_path / "run", tiny_run(steps=3, rollouts={"max_staleness": 1}))
    trainer, order = town.trainer(), []
    step, publish = trainer.learner.step, trainer.publisher.publish

    def noted_step(rows, version):
        metrics = step(rows, version)
        order.append(("stepped", version))
        return metrics

    async def held_publish(policy, version, record=None):
        order.append(("begin", version))
        while version == 1 and ("stepped", 1) not in order:
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.0 if version == 1 else 0.0)
        await publish(policy, version)
        order.append(("end", version))

    monkeypatch.setattr(trainer.learner, "step", noted_step)
    monkeypatch.setattr(trainer.publisher, "publish", held_publish)
    asyncio.run(town.live(trainer, town.validator(), town.worker("worker-0")))
    # a kill must never find a state that is two versions ahead of what is published
    assert order.index(("stepped", 1)) < order.index(("end", 1)) < order.index(("begin", 2)), order
    assert all("publish_wait_s" in line for line in read_metrics(town.folder.metrics))


def test_a_publication_that_fails_ends_the_trainer(tmp_path, monkeypatch):
    town = Town(tmp_path / "run", tiny_run())
    trainer = town.trainer()
    publish = trainer.publisher.publish

    async def failing(policy, version, record=None):
        if version == 2:
            raise PeerError("the disk is full")
        await publish(policy, version)

    monkeypatch.setattr(trainer.publisher, "publish", failing)

    async def story():
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            people = [town.validator(), town.worker("worker-0")]
            tasks = [group.create_task(one.run()) for one in people] + [group.create_task(town._tick())]
            with pytest.raises(PeerError, match="the disk is full"):
                await trainer.run()
            for task in tasks:
                task.cancel()

    monkeypatch.setattr("shoal.roles.coordinator.calls.LONG_POLL_S", 0.2)
    asyncio.run(story())


def test_a_worker_fetches_the_next_version_while_it_plays(tmp_path, monkeypatch):
    """Each version is fetched once, also if it came ahead of its lease's turn."""
    town = Town(tmp_path / "run", tiny_run(steps=5, rollouts={"max_staleness": 1, "block_rollouts": 8}))
    worker, order = town.worker("worker-0"), []
    play, fetched = worker._play, Session._fetch

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

    worker._play = slow_play
    monkeypatch.setattr(Session, "_fetch", noted_fetch)
    asyncio.run(town.live(town.trainer(), town.validator(), worker))
    versions = [version for what, version in order if what == "fetched"]
    assert len(versions) == len(set(versions)) >= 4
    ahead = [
        version
        for index, (what, version) in enumerate(order)
        if what == "fetched" and order[:index] and order[index - 1][0] == "begin" and order[index - 1][1] != version
    ]
    assert ahead, order
    assert town.audit().findings == []


def test_a_version_that_could_not_be_fetched_ahead_is_fetched_when_it_is_loaded(tmp_path, monkeypatch):
    town = Town(tmp_path / "run", tiny_run(steps=4, rollouts={"max_staleness": 1, "block_rollouts": 8}))
    worker, bring, failed = town.worker("worker-0"), Session.bring, []

    async def failing(seat, version, **options):
        if seat is worker.session and "keep" not in options:  # loading says what to keep
            failed.append(version)
            raise PeerError("the source went away")
        return await bring(seat, version, **options)

    monkeypatch.setattr(Session, "bring", failing)
    asyncio.run(town.live(town.trainer(), town.validator(), worker))
    assert failed and town.desk.state.phase == "ended" and town.audit().findings == []


# --- chunks in the run's folder ---


def test_the_coordinator_takes_the_trainers_chunks_from_the_run_folder(tmp_path):
    town = lived(tmp_path / "run", steps=2)
    blobs, kept = town.desk.blobs, town.desk.kept
    assert not list(town.folder.outgoing.iterdir())
    assert all(blobs.has(chunk) for manifest in kept.manifests.values() for chunk in chunks_of(manifest))
    assert blobs.stored_bytes == sum(path.stat().st_size for path in blobs.paths())


def test_a_trainer_whose_folder_the_coordinator_does_not_see_sends_its_chunks(tmp_path):
    town = Town(tmp_path / "run", tiny_run(steps=2))
    town.desk.outgoing = tmp_path / "elsewhere"
    asyncio.run(town.live(town.trainer(), town.validator(), town.worker("worker-0")))
    assert town.desk.state.phase == "ended" and town.audit().findings == []


def test_a_chunk_with_other_bytes_in_the_trainers_folder_is_not_taken(tmp_path, monkeypatch):
    town = Town(tmp_path / "run", tiny_run(steps=1))
    put, spoilt = FolderSink.put_span, []

    async def spoiling(sink, name, span):
        await put(sink, name, span)
        spoilt.append(name)
        file = town.folder.outgoing / name
        chunk = file.read_bytes()
        file.unlink()  # it may be another name of the checkpoint's file
        file.write_bytes(b"x" + chunk[1:] if len(spoilt) % 2 else b"")

    monkeypatch.setattr(FolderSink, "put_span", spoiling)
    asyncio.run(town.live(town.trainer(), town.validator(), town.worker("worker-0")))
    assert spoilt and town.audit().findings == []
    assert all(digest(path.read_bytes()) == path.name for path in town.desk.blobs.paths())


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


def test_the_newest_anchor_stays_with_all_patches_after_it():
    manifests = line_of(20, 8)
    assert versions_to_keep(manifests, [19], now=1e9) == set(range(16, 20))


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


def test_where_all_versions_are_whole_only_those_in_use_and_the_newest_stay():
    assert versions_to_keep(line_of(20, 1), [18, 19], now=1e9) == {18, 19}


def test_a_coordinator_keeps_the_way_to_its_newest_version_and_drops_what_no_way_needs(tmp_path):
    town = lived(tmp_path / "run", steps=5, storage={"anchor_every": 3, "window_steps": 1})
    kept = town.desk.kept
    town.desk.state.pending.clear()
    town.desk.state.rechecks.clear()
    kept.make_room(0)
    assert set(kept.manifests) == {3, 4, 5}
    for version in (3, 4, 5):
        assert town.desk.blobs.has(town.desk.state.main.versions[version].manifest)
